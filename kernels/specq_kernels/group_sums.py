"""What a 4-bit product wants beside its x: sums over each group of k, and x again in lane order.

The product multiplies the sums by zero points and minima. A producer of x (norm, SiLU, attention) can emit both itself,
as `Sides`; the kernel here serves where none did.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from specq_kernels.lane_order import has_lanes, lanes_ref, lanes_rows, store_lanes
from specq_kernels.launch import MAX_ROWS, check_tensor, has_dependent_launch, interpreted, row_bucket, runs_kernel
from specq_kernels.w4_layout import STEP


@dataclass(frozen=True)
class Sides:
    """What lies beside x [rows, K]: `sums` fp32 `sums_shape(x, group)`, and `lanes`, x in lane order, where wanted."""

    sums: Tensor
    lanes: Tensor | None = None


def sides(x: Tensor, group: int, *, lanes: bool = False) -> Sides:
    """Sums of x [rows, K] over each group of k, 0 beyond K, and with `lanes` x in lane order where K has such.

    `group` is 32, 64 or 128; at most 64 rows. What sums and lanes hold of rows beyond x's means nothing.
    """
    _check(x, group)
    if not runs_kernel(x):
        return sides_ref(x, group, lanes=lanes)
    out = empty_sides(x, group, lanes=lanes)
    early = has_dependent_launch(x)
    options = {} if interpreted() else {"num_warps": 4, "launch_pdl": early}
    to, constants = side_arguments(out, x, group)
    _sides_kernel[(x.shape[0], triton.cdiv(out.sums.shape[0] * group, 1024))](
        x, *to, x.shape[1], **constants, EARLY=early, **options
    )
    return out


def sides_ref(x: Tensor, group: int, *, lanes: bool = False) -> Sides:
    """The definition."""
    return Sides(group_sums_ref(x, group), lanes_ref(x) if lanes and has_lanes(x.shape[1]) else None)


def group_sums_ref(x: Tensor, group: int) -> Tensor:
    """The definition."""
    groups, rows = sums_shape(x, group)
    padded = torch.nn.functional.pad(x.float(), (0, groups * group - x.shape[1], 0, rows - x.shape[0]))
    return padded.unflatten(1, (groups, group)).sum(-1).T.contiguous()


def sums_shape(x: Tensor, group: int) -> tuple[int, int]:
    """[groups of K padded to 256, rows padded to 16, 32 or 64]."""
    return triton.cdiv(x.shape[1], STEP) * (STEP // group), row_bucket(x.shape[0])


def empty_sides(x: Tensor, group: int, *, lanes: bool = False) -> Sides:
    """Room for `sides` of a tensor of x's shape [rows, K], dtype and device."""
    sums = torch.empty(sums_shape(x, group), dtype=torch.float32, device=x.device)
    rows, k = x.shape
    return Sides(sums, x.new_empty(lanes_rows(rows) * k) if lanes and has_lanes(k) else None)


def side_arguments(
    sides: Sides | None, y: Tensor, group: int | None
) -> tuple[tuple[Tensor, Tensor, int], dict[str, int]]:
    """((sums_ptr, lanes_ptr, groups), the constants of `store_sides`) for a kernel that emits the sides of y."""
    if sides is None or group is None:
        return (y, y, 0), {"GROUP": 0, "STRIDE": 0, "LANES": 0}
    (groups, stride), lanes = sides.sums.shape, sides.lanes
    constants = {"GROUP": group, "STRIDE": stride, "LANES": 0 if lanes is None else lanes_rows(y.shape[0])}
    return (sides.sums, y if lanes is None else lanes, groups), constants


def _check(x: Tensor, group: int) -> None:
    check_tensor("x", x, shape=(None, None))
    if group not in (32, 64, 128):
        raise ValueError(f"group: {group} is not 32, 64 or 128")
    if not 1 <= x.shape[0] <= MAX_ROWS:
        raise ValueError(f"x: {x.shape[0]} rows, the kernel takes 1 to {MAX_ROWS}")


@triton.jit
def store_sides(
    y, sums_ptr, lanes_ptr, groups, row, block, k,
    GROUP: tl.constexpr, STRIDE: tl.constexpr, LANES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Sums of y [BLOCK], the columns of a row from block * BLOCK on, to sums [groups, STRIDE], and y to lane order.

    y is what is stored as x, 0 beyond column k. GROUP 0 stores nothing, LANES 0 sums alone.
    """
    if GROUP > 0:
        sums = tl.sum(tl.reshape(y.to(tl.float32), (BLOCK // GROUP, GROUP)), 1)
        offs = block * (BLOCK // GROUP) + tl.arange(0, BLOCK // GROUP)
        tl.store(sums_ptr + offs * STRIDE + row, sums, mask=offs < groups)
    if LANES > 0:
        column = block * BLOCK + tl.arange(0, BLOCK)
        store_lanes(lanes_ptr, y, row, column, column < k, LANES, BLOCK)


@triton.jit
def _sides_kernel(
    x_ptr, sums_ptr, lanes_ptr, groups, k,
    GROUP: tl.constexpr, STRIDE: tl.constexpr, LANES: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """One row and 1024 columns a program; x [rows, k]."""
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0)
    block = tl.program_id(1)
    offs = block * 1024 + tl.arange(0, 1024)
    x = tl.load(x_ptr + row.to(tl.int64) * k + offs, mask=offs < k, other=0.0)
    store_sides(x, sums_ptr, lanes_ptr, groups, row, block, k, GROUP, STRIDE, LANES, 1024)
