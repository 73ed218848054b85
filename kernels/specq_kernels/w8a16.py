"""Group-wise 8-bit product as one 4-bit product of twice the columns: w = 16 s (h - zh) + s (l - zl).

The high and the low halves of the codes are two 4-bit planes with zero points of their own, and x meets both: all that
w4a16 promises (row independence, a split that repeats, tuned tiles under the doubled K) holds unchanged.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from specq_kernels.launch import MAX_ROWS, check_tensor
from specq_kernels.w4_layout import KERNEL_GROUPS, W4Weight, pack_w4
from specq_kernels.w4_prefill import w4_prefill
from specq_kernels.w4a16 import w4a16


@dataclass(frozen=True)
class W8Weight:
    """An 8-bit matrix [N, K] in two planes of 4 bits, side by side along K; w = scale * (q - zero)."""

    planes: W4Weight  # [N, 2K], the high halves first

    @property
    def shape(self) -> tuple[int, int]:
        return self.planes.shape[0], self.planes.shape[1] // 2

    def num_bytes(self) -> int:
        return self.planes.num_bytes()

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The matrix in `dtype`, [N, K]."""
        high, low = self.planes.dequantize(dtype).chunk(2, dim=1)
        return high + low


def pack_w8(codes: Tensor, scales: Tensor, *, group_size: int, zeros: Tensor | None = None) -> W8Weight:
    """The kernel's form of an 8-bit matrix.

    codes int32 [N, K/4], lowest byte first along K; scales 16-bit [N, G]; group_size 32, 64, a multiple of 128, or K or
    -1 (per channel); zeros uint8 [N, G], 128 without. Raises ValueError on groups that do not divide K, and on fp16
    scales of which 16 times is no longer finite.
    """
    octets = codes.contiguous().view(torch.uint8)  # [N, K]
    k = octets.shape[1]
    group = k if group_size == -1 or group_size >= k else group_size
    if k % group:
        raise ValueError(f"group_size: {group_size} does not divide the {k} columns")
    if group % max(KERNEL_GROUPS):  # a whole row of an odd size is cut into the largest group the kernel runs
        fitting = next((size for size in reversed(KERNEL_GROUPS) if group % size == 0), None)
        if fitting is None or (fitting != group and group != k):
            raise ValueError(f"group_size: {group_size} is not 32, 64, a multiple of 128 or the whole row")
        repeat, group = group // fitting, fitting
        scales = scales.repeat_interleave(repeat, 1)
        zeros = None if zeros is None else zeros.repeat_interleave(repeat, 1)
    high_scales = scales * 16
    if not high_scales.isfinite().all():
        raise ValueError("scales: too large for 16 times of them in 16 bits")
    zeros = torch.full_like(scales, 128, dtype=torch.uint8) if zeros is None else zeros
    return W8Weight(
        pack_w4(
            _nibble_words(torch.cat([octets >> 4, octets & 15], 1)),
            torch.cat([high_scales, scales], 1),
            group_size=group,
            zeros=torch.cat([zeros >> 4, zeros & 15], 1),
        )
    )


def w8a16(
    x: Tensor,
    weight: W8Weight,
    *,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """x @ W.T + bias + residual, as `w4a16` for up to 64 rows; more are dequantised (in x's dtype then)."""
    check_tensor("x", x, shape=(None, weight.shape[1]), device=weight.planes.device)
    twice = torch.cat([x, x], 1)
    if x.shape[0] > MAX_ROWS:
        y = w4_prefill(twice, weight.planes, bias=bias, residual=residual)
        return y if out_dtype is None else y.to(out_dtype)
    return w4a16(twice, weight.planes, bias=bias, residual=residual, out_dtype=out_dtype)


def _nibble_words(values: Tensor) -> Tensor:
    """int32 [N, W / 8] of values below 16, uint8 [N, W], lowest first."""
    pairs = values[:, 0::2] | (values[:, 1::2] << 4)
    return pairs.contiguous().view(torch.int32)
