"""Activations rounded to a grid of 8 or 4 bits, one scale for each row and 128 columns: what QSpec's draft reads.

The numbers stay in x's dtype, which holds them exactly, so every product takes them; what a 4-bit product wants beside
them (`Sides`) comes along. The law is that of specq/quant/rounding.py, whose `round_rows` says where fp16 overflows.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from specq_kernels.group_sums import Sides, empty_sides, side_arguments, sides_ref, store_sides
from specq_kernels.launch import MAX_ROWS, check_tensor, has_dependent_launch, interpreted, runs_kernel, wide

GROUP = 128  # columns that share a scale
BLOCK = 1024
MOST = {8: 127, 4: 7}
SCALE_BITS = {8: 1, 4: 5}  # significant bits of a scale: with the integer's 8, what bf16 has
MANTISSA = {torch.float32: (torch.int32, 24), torch.float64: (torch.int64, 53)}


def round_rows(x: Tensor, *, bits: int, group: int | None = None, lanes: bool = False) -> tuple[Tensor, Sides | None]:
    """(y, sides): x [rows, K] on its grid, in x's dtype; `sides(y, group, lanes=lanes)`, None without `group`.

    `bits` is 8 or 4; at most 64 rows. Raises ValueError naming the argument.
    """
    check_tensor("x", x, shape=(None, None))
    if bits not in MOST:
        raise ValueError(f"bits: {bits} is not 8 or 4")
    if group not in (None, 32, 64, 128):
        raise ValueError(f"group: {group} is not 32, 64 or 128")
    if not 1 <= x.shape[0] <= MAX_ROWS:
        raise ValueError(f"x: {x.shape[0]} rows, the kernel takes 1 to {MAX_ROWS}")
    if not runs_kernel(x):
        return round_rows_ref(x, bits=bits, group=group, lanes=lanes)
    y = torch.empty_like(x)
    sides = empty_sides(y, group, lanes=lanes) if group else None
    to, constants = side_arguments(sides, y, group)
    columns = max(x.shape[1], to[2] * constants["GROUP"])
    early = has_dependent_launch(x)
    options = {} if interpreted() else {"num_warps": 4, "launch_pdl": early}
    _round_rows_kernel[(x.shape[0], triton.cdiv(columns, BLOCK))](
        x, y, *to, x.shape[1], MOST=MOST[bits], SCALE_BITS=SCALE_BITS[bits], **constants, BLOCK=BLOCK, EARLY=early,
        **options,
    )  # fmt: skip
    return y, sides


def round_rows_ref(
    x: Tensor, *, bits: int, group: int | None = None, lanes: bool = False
) -> tuple[Tensor, Sides | None]:
    """The definition, in float32 (float64 for a float64 x)."""
    integers, scale = integers_ref(x, bits=bits)
    y = (integers * scale).flatten(1)[:, : x.shape[1]].to(x.dtype)
    return y, sides_ref(y, group, lanes=lanes) if group else None


def integers_ref(x: Tensor, *, bits: int) -> tuple[Tensor, Tensor]:
    """(integers [rows, groups, 128], scales [rows, groups, 1]), both in float32 (float64); K padded with zeros."""
    padded = torch.nn.functional.pad(wide(x), (0, -x.shape[1] % GROUP)).unflatten(1, (-1, GROUP))
    kind, mantissa = MANTISSA[padded.dtype]
    rest = (1 << (mantissa - SCALE_BITS[bits])) - 1
    largest = padded.abs().amax(-1, keepdim=True)
    least = largest / torch.full_like(largest, MOST[bits])  # a GPU multiplies by the inverse of a number
    scale = ((least.view(kind) + rest) & ~rest).view(padded.dtype)
    return (padded / torch.where(scale > 0, scale, 1.0)).round(), scale


@triton.jit
def grid_of(x, MOST: tl.constexpr, SCALE_BITS: tl.constexpr):
    """(integers, scales [groups, 1]) in fp32 of x fp32 [groups, 128]."""
    least = tl.div_rn(tl.max(tl.abs(x), 1), MOST * 1.0)
    rest: tl.constexpr = (1 << (24 - SCALE_BITS)) - 1
    scale = ((least.to(tl.int32, bitcast=True) + rest) & ~rest).to(tl.float32, bitcast=True)[:, None]
    at = tl.div_rn(x, tl.broadcast_to(tl.where(scale > 0, scale, 1.0), x.shape))
    return (at + 12582912.0) - 12582912.0, scale  # 1.5 * 2**23: to the nearest integer, half to even


@triton.jit
def _round_rows_kernel(
    x_ptr, y_ptr, sums_ptr, lanes_ptr, groups, k,
    MOST: tl.constexpr, SCALE_BITS: tl.constexpr, GROUP: tl.constexpr, STRIDE: tl.constexpr, LANES: tl.constexpr,
    BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """BLOCK columns of one row a program; x and y [rows, k]."""
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0)
    block = tl.program_id(1)
    offs = block * BLOCK + tl.arange(0, BLOCK)
    at = row.to(tl.int64) * k + offs
    x = tl.load(x_ptr + at, mask=offs < k, other=0.0).to(tl.float32)
    integers, scale = grid_of(tl.reshape(x, (BLOCK // 128, 128)), MOST, SCALE_BITS)
    y = tl.reshape(integers * scale, (BLOCK,)).to(y_ptr.dtype.element_ty)
    tl.store(y_ptr + at, y, mask=offs < k)
    store_sides(y, sums_ptr, lanes_ptr, groups, row, block, k, GROUP, STRIDE, LANES, BLOCK)
