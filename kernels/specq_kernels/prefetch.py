"""What a kernel asks into the L2 before the kernel ahead of it has ended (sm_90): bytes that kernel does not write."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def prefetch(address, num_bytes, COUNT: tl.constexpr):
    """Ask `num_bytes` (a multiple of 16; 0 for none) at each of COUNT addresses into the L2, one thread for each."""
    tl.inline_asm_elementwise(
        asm="""{
        .reg .pred p;
        .reg .u32 t;
        mov.u32 t, %tid.x;
        setp.lt.u32 p, t, $3;
        setp.ne.and.u32 p, $2, 0, p;
        @p cp.async.bulk.prefetch.L2.global [$1], $2;
        mov.u32 $0, 0;
        }""",
        constraints="=r,l,r,r", args=[address, num_bytes, COUNT], dtype=tl.int32, is_pure=False, pack=1)  # fmt: skip
