"""Sums of x over each group of k, which the 4-bit product multiplies by zero points and minima.

A producer of x (norm, SiLU, attention) can emit them itself; this kernel serves where none did.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from specq_kernels.launch import MAX_ROWS, check_tensor, has_dependent_launch, interpreted, row_bucket, runs_kernel
from specq_kernels.w4_layout import STEP


def group_sums(x: Tensor, group: int) -> Tensor:
    """fp32 `sums_shape(x, group)` of x [rows, K], 0 in groups beyond K; rows beyond x's hold nothing of meaning.

    `group` is 32, 64 or 128; at most 64 rows.
    """
    check_tensor("x", x, shape=(None, None))
    if group not in (32, 64, 128):
        raise ValueError(f"group: {group} is not 32, 64 or 128")
    if not 1 <= x.shape[0] <= MAX_ROWS:
        raise ValueError(f"x: {x.shape[0]} rows, the kernel takes 1 to {MAX_ROWS}")
    if not runs_kernel(x):
        return group_sums_ref(x, group)
    out = torch.empty(sums_shape(x, group), dtype=torch.float32, device=x.device)
    early = has_dependent_launch(x)
    options = {} if interpreted() else {"num_warps": 4, "launch_pdl": early}
    _group_sums_kernel[(x.shape[0], triton.cdiv(out.shape[0] * group, 1024))](
        x, out, x.shape[1], out.shape[0], GROUP=group, STRIDE=out.shape[1], EARLY=early, **options
    )
    return out


def group_sums_ref(x: Tensor, group: int) -> Tensor:
    """The definition."""
    groups, rows = sums_shape(x, group)
    padded = torch.nn.functional.pad(x.float(), (0, groups * group - x.shape[1], 0, rows - x.shape[0]))
    return padded.unflatten(1, (groups, group)).sum(-1).T.contiguous()


def sums_shape(x: Tensor, group: int) -> tuple[int, int]:
    """[groups of K padded to 256, rows padded to 16, 32 or 64]."""
    return triton.cdiv(x.shape[1], STEP) * (STEP // group), row_bucket(x.shape[0])


@triton.jit
def _group_sums_kernel(x_ptr, out_ptr, k, groups, GROUP: tl.constexpr, STRIDE: tl.constexpr, EARLY: tl.constexpr):
    """One row and 1024 columns a program; x [rows, k], out [groups, STRIDE]."""
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0)
    offs = tl.program_id(1) * 1024 + tl.arange(0, 1024)
    x = tl.load(x_ptr + row.to(tl.int64) * k + offs, mask=offs < k, other=0.0).to(tl.float32)
    sums = tl.sum(tl.reshape(x, (1024 // GROUP, GROUP)), 1)
    offs_g = tl.program_id(1) * (1024 // GROUP) + tl.arange(0, 1024 // GROUP)
    tl.store(out_ptr + offs_g * STRIDE + row, sums, mask=offs_g < groups)
