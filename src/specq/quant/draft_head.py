"""The output head that only drafts, in 8 or 4 bits: a smaller copy of the target's, made when a drafter is loaded.

Nothing is stored: rounding takes a second or so. What it costs is acceptance; the target decides with its own head.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from specq.quant.kernel_choice import asks_for_kernels, why_no_kernels
from specq.quant.linear import make_linear
from specq.quant.packed import PackedWeight, pack_codes, pack_nibbles

GROUP_SIZES = (64, 32)
ROWS_AT_ONCE = 8192
"""Rows of the head that are rounded together: the whole of a large one in fp32 would take gigabytes."""

_int8_product = torch.ops.aten._weight_int8pack_mm.default


def make_draft_head(weight: Tensor, *, bits: int, device: torch.device, dtype: torch.dtype) -> nn.Module:
    """A module computing about x @ weight.T for x in `dtype`, from a copy of `weight` [vocab, hidden] in 8 or 4 bits.

    Both run as they are stored on a CPU and where our kernels run, with fp32 results there; elsewhere 4 bits are
    dequantised. Raises ValueError for bits that `draft_head_bits` does not name.
    """
    if bits == 16 or bits not in draft_head_bits(device, dtype):
        raise ValueError(f"bits: no product for a draft head of {bits} bits on {device.type}")
    if runs_kernels(device, dtype):
        from specq.quant.kernel_linear import make_kernel_linear

        packed = pack_ranges(weight) if bits == 4 else pack_rows(weight)
        return make_kernel_linear(packed, None, device=device, dtype=dtype, out_dtype=torch.float32)
    if bits == 8:
        return Int8Linear(weight)
    packed = pack_ranges(weight)
    has_product = device.type == "cpu" and dtype != torch.float64
    return make_linear(packed, device=device, dtype=dtype, product="int4" if has_product else None)


def draft_head_bits(device: torch.device, dtype: torch.dtype) -> tuple[int, ...]:
    """The bits a draft head may have there, 16 first."""
    return (16, 8, 4) if device.type == "cpu" or runs_kernels(device, dtype) else (16, 4)


def runs_kernels(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether a draft head runs on our kernels there."""
    return asks_for_kernels(device) and why_no_kernels(dtype, device) is None


class Int8Linear(nn.Module):
    """torch's int8 product on a CPU: bf16 x, one scale a row. Plain attributes, since `.to` must not move the codes."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.codes, scales = round_rows(weight)
        self.scales = scales.to(torch.bfloat16)

    def forward(self, x: Tensor, act: str = "a16") -> Tensor:
        """[rows, N] in bf16, for x [rows, K] of any dtype."""
        return _int8_product(x.to(torch.bfloat16).contiguous(), self.codes, self.scales)


def round_rows(weight: Tensor) -> tuple[Tensor, Tensor]:
    """(int8 codes [N, K], fp32 scales [N]): every row from -127 to 127 over its largest number."""
    codes = torch.empty(weight.shape, dtype=torch.int8, device=weight.device)
    scales = torch.empty(weight.shape[0], dtype=torch.float32, device=weight.device)
    for first in range(0, weight.shape[0], ROWS_AT_ONCE):
        part = slice(first, first + ROWS_AT_ONCE)
        rows = weight[part].float()
        # The product multiplies by the scale in bf16: codes are made for that one.
        scale = (rows.abs().amax(1) / 127).to(torch.bfloat16).float().clamp_min(torch.finfo(torch.float32).tiny)
        codes[part] = (rows / scale[:, None]).round().clamp(-127, 127).to(torch.int8)
        scales[part] = scale
    return codes, scales


def pack_rows(weight: Tensor) -> PackedWeight:
    """`weight` [N, K] in 8 bits, the codes and scales of `round_rows`."""
    codes, scales = round_rows(weight)
    words = pack_codes((codes.int() + 128).to(torch.uint8), 8)
    return PackedWeight(codes=words, scales=scales.to(torch.bfloat16)[:, None], group_size=weight.shape[1], bits=8)


def pack_ranges(weight: Tensor) -> PackedWeight:
    """`weight` [N, K] in 4 bits over the range of each group of columns; fast, where `round_to_nearest` searches."""
    columns = weight.shape[1]
    size = next((size for size in GROUP_SIZES if columns % size == 0), columns)
    codes, scales, minima = [], [], []
    for rows in weight.split(ROWS_AT_ONCE):
        groups = rows.float().view(rows.shape[0], -1, size)
        low, high = groups.amin(-1), groups.amax(-1)
        scale = ((high - low) / 15).half()
        low = low.half()
        step = scale.float().clamp_min(torch.finfo(torch.float32).tiny)[..., None]
        filled = ((groups - low.float()[..., None]) / step).round().clamp(0, 15)
        codes.append(pack_nibbles(filled.view(rows.shape[0], columns)))
        scales.append(scale)
        minima.append(low)
    return PackedWeight(codes=torch.cat(codes), scales=torch.cat(scales), minima=torch.cat(minima), group_size=size)
