"""Lane order: x as the lanes of the matrix instruction read it, which a 4-bit product may want beside x's group sums.

The layout, for K a multiple of 256 and M = `lanes_rows(rows)`: [K / 64, M / 8, 2, 8, 4, 4, 2] with indices (chunk c,
row block b, half h, row g, lane t, eight e, pair p) holds x[b * 8 + g, c * 64 + h * 32 + e * 8 + t * 2 + p], flat, in
x's dtype. So what a lane reads at once, eight values, lies together, as do the 32 values of one row and half. Rows
beyond x's hold anything.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from specq_kernels.launch import MAX_ROWS
from specq_kernels.w4_layout import STEP

LANES_ROWS = (8, 16, 32, 64)


def has_lanes(k: int) -> bool:
    """Whether x of k columns is written in lane order at all: where the packed weight pads no columns."""
    return k % STEP == 0


def lanes_rows(rows: int) -> int:
    """M of the layout, the least that holds `rows`. Raises ValueError above 64."""
    if not 1 <= rows <= MAX_ROWS:
        raise ValueError(f"rows: {rows}, lane order has 1 to {MAX_ROWS}")
    return next(most for most in LANES_ROWS if rows <= most)


def lanes_ref(x: Tensor) -> Tensor:
    """The definition: x [rows, K] in lane order, zeros in the rows beyond it. Raises ValueError for other K."""
    rows, k = x.shape
    if not has_lanes(k):
        raise ValueError(f"x: {k} columns are not a multiple of {STEP}")
    padded = torch.nn.functional.pad(x, (0, 0, 0, lanes_rows(rows) - rows))
    pieces = padded.view(-1, 8, k // 64, 2, 4, 4, 2)  # [b, g, c, h, e, t, p]
    return pieces.permute(2, 0, 3, 1, 5, 4, 6).reshape(-1)


@triton.jit
def store_lanes(lanes_ptr, y, row, column, mask, LANES: tl.constexpr, BLOCK: tl.constexpr):
    """y [BLOCK] to lane order of LANES rows, at `row` and `column`, both [BLOCK] or scalar and [BLOCK].

    BLOCK and the first of every 32 columns are multiples of 32; y is turned in registers, so stores are whole.
    """
    turned = tl.reshape(tl.permute(tl.reshape(y, (BLOCK // 32, 4, 4, 2)), (0, 2, 1, 3)), (BLOCK,))
    half = column // 64 * (64 * LANES) + column // 32 % 2 * 256
    tl.store(lanes_ptr + row // 8 * 512 + row % 8 * 32 + half + column % 32, turned, mask=mask)
