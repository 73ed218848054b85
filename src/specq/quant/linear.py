"""Products with a matrix, packed or dense: which one runs where is decided here and nowhere else.

`make_linear` chooses by device, dtype and the matrix's groups:
- "dense": dequantised once at load; exact, the choice for float32 and float64.
- "int4": torch's own int4 product for bfloat16 on a CPU.
- "reference": dequantised at every call; the definition the others are tested against.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specq.quant.packed import SYMMETRIC_ZERO, PackedWeight
from specq.quant.rounding import round_rows

PRODUCTS = ("dense", "int4", "reference")
INT4_GROUPS = (256, 128, 64, 32)
INT4_ROW_MULTIPLE = 16
RESCORED = 64
MAX_DECODE_ROWS = 64
"""More rows than a verification has are a prompt's: there the matrix is dequantised for one dense product."""

_int4_pack = torch.ops.aten._convert_weight_to_int4pack_for_cpu.default
_int4_product = torch.ops.aten._weight_int4pack_mm_for_cpu.default


def has_fast_bfloat16() -> bool:
    """Whether this CPU multiplies bf16 matrices in hardware (AMX, AVX512-BF16); elsewhere fp32 is faster."""
    checks = ("_is_amx_tile_supported", "_is_avx512_bf16_supported")
    return any(getattr(torch.cpu, check, lambda: False)() for check in checks)


class DenseLinear(nn.Module):
    """x @ weight.T + bias, everything in one dtype."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)

    def forward(self, x: Tensor, act: str = "a16") -> Tensor:
        """[..., N] in x's dtype."""
        return F.linear(x, self.weight, self.bias)


class DequantizedLinear(DenseLinear):
    """A 4-bit matrix dequantised at load; like every 4-bit product it rounds x to `act` first."""

    is_four_bit = True

    def forward(self, x: Tensor, act: str = "a16") -> Tensor:
        """[..., N] in x's dtype."""
        return super().forward(round_rows(x, act))


class RescoredLinear(DenseLinear):
    """An output head in bf16 whose best logits of every row are worked out again in fp32.

    A bf16 logit alone ties with its neighbour at the top of 4 % of the positions of prose (SmolLM2-135M). For up to 32
    rows the bf16 product takes the time of one and a row does not depend on the others; a dense fp32 one takes 3 to 4
    times as long at 8 rows (AMX, 576 x 49152).
    """

    def forward(self, x: Tensor, act: str = "a16") -> Tensor:
        """float32 [rows, N] for x [rows, K] of any dtype."""
        rough = F.linear(x.to(torch.bfloat16), self.weight).float()
        best = rough.topk(min(RESCORED, rough.shape[1]), dim=-1, sorted=False).indices
        exact = (self.weight[best].float() * x.float()[:, None]).sum(-1)
        return rough.scatter_(1, best, exact)


class QuantLinear(nn.Module):
    """The reference product: the packed matrix dequantised at every call, in fp32 (float64 for a float64 x)."""

    def __init__(self, weight: PackedWeight, bias: Tensor | None = None) -> None:
        super().__init__()
        self.packed = weight
        self.bias = bias
        self.is_four_bit = weight.bits == 4

    def forward(self, x: Tensor, act: str = "a16") -> Tensor:
        """[..., N] in x's dtype."""
        x = round_rows(x, act) if self.is_four_bit else x
        wide = torch.float64 if x.dtype == torch.float64 else torch.float32
        bias = None if self.bias is None else self.bias.to(wide)
        return F.linear(x.to(wide), self.packed.dequantize(wide), bias).to(x.dtype)


class Int4Linear(nn.Module):
    """torch's int4 product on a CPU: bf16 x, codes in torch's layout, scale and offset rounded to bf16.

    Up to MAX_DECODE_ROWS a row's result is bitwise the same for any number of rows. Beyond, the matrix is dequantised
    to bf16 first: its time does not grow with the rows (K 576, N 1536, 512 rows, one AMX core: 2.1 against 14 ms).
    The parts are plain attributes: the layout belongs to this processor, so `.to` must not move them.
    Raises ValueError when `int4_group` finds no group size for the matrix.
    """

    is_four_bit = True

    def __init__(self, weight: PackedWeight, bias: Tensor | None = None) -> None:
        super().__init__()
        group = int4_group(weight)
        if group is None:
            raise ValueError(f"torch's int4 product takes no groups of {weight.group_size}")
        self.out_features, self.in_features = weight.shape
        self.weight = weight
        self.group = group
        self.order = None if weight.g_idx is None else torch.argsort(weight.g_idx, stable=True)
        self.column_padding = -self.in_features % group
        self.row_padding = -self.out_features % INT4_ROW_MULTIPLE
        self.packed = self._pack_codes(weight)
        self.scale_offset = self._pack_scales(weight)
        self.bias = None if bias is None else bias.to(torch.bfloat16)

    def _pack_codes(self, weight: PackedWeight) -> Tensor:
        codes = weight.unpacked()
        if self.order is not None:
            codes = codes[:, self.order]
        padded = F.pad(codes, (0, self.column_padding, 0, self.row_padding))
        return _int4_pack(padded.to(torch.int32), 1)

    def _pack_scales(self, weight: PackedWeight) -> Tensor:
        """bf16 [K/group, N, 2]: the law is scale * (q - 8) + offset there."""
        scale, offset = weight.scale_offset()
        pair = torch.stack((scale, offset + SYMMETRIC_ZERO * scale), dim=-1)  # [N, G, 2]
        first_columns = torch.arange(0, self.in_features + self.column_padding, self.group)
        spread = pair[:, (first_columns // weight.group_size).clamp(max=pair.shape[1] - 1)]
        padded = F.pad(spread, (0, 0, 0, 0, 0, self.row_padding))
        return padded.transpose(0, 1).to(torch.bfloat16).contiguous()

    def forward(self, x: Tensor, act: str = "a16") -> Tensor:
        """[..., N] in x's dtype."""
        rows = x if x.ndim == 2 else x.reshape(-1, self.in_features)
        if rows.dtype != torch.bfloat16:
            rows = rows.to(torch.bfloat16)
        rows = round_rows(rows, act)
        y = self._few(rows) if rows.shape[0] <= MAX_DECODE_ROWS else self._many(rows)
        if self.bias is not None:
            y = y + self.bias
        if x.ndim != 2:
            y = y.view(*x.shape[:-1], self.out_features)
        return y if x.dtype == torch.bfloat16 else y.to(x.dtype)

    def _few(self, rows: Tensor) -> Tensor:
        if self.order is not None:
            rows = rows[:, self.order]
        if self.column_padding:
            rows = F.pad(rows, (0, self.column_padding))
        y = _int4_product(rows.contiguous(), self.packed, self.group, self.scale_offset)
        return y[:, : self.out_features] if self.row_padding else y

    def _many(self, rows: Tensor) -> Tensor:
        return F.linear(rows, self.weight.dequantize(torch.bfloat16))


def int4_group(weight: PackedWeight) -> int | None:
    """The largest group size torch's int4 product can run the matrix with, None when there is none.

    Groups are split to fit; columns are padded only where no group divides them.
    """
    if weight.bits != 4:
        return None
    size, columns = weight.group_size, weight.shape[1]
    if weight.g_idx is not None:
        by_group = weight.g_idx.sort(stable=True).values
        if not torch.equal(by_group.long(), torch.arange(columns) // size):
            return None
    fitting = [group for group in INT4_GROUPS if size % group == 0 or weight.num_groups == 1]
    whole = [group for group in fitting if columns % group == 0]
    return next(iter(whole + fitting[::-1]), None)


def make_linear(
    weight: Tensor | PackedWeight,
    bias: Tensor | None = None,
    *,
    device: torch.device | str,
    dtype: torch.dtype,
    product: str | None = None,
) -> nn.Module:
    """A module computing x @ weight.T + bias for x in `dtype` on `device`.

    `product` names one of PRODUCTS instead of the choice made here; ValueError when it cannot run the matrix.
    """
    device = torch.device(device)
    bias = None if bias is None else bias.to(device, dtype)
    if isinstance(weight, Tensor):
        return DenseLinear(weight.to(device, dtype), bias)
    chosen = product or choose_product(weight, device=device, dtype=dtype)
    if chosen == "dense":
        kind = DequantizedLinear if weight.bits == 4 else DenseLinear
        return kind(weight.to(device).dequantize(dtype), bias)
    if chosen == "int4":
        return Int4Linear(weight.to(device), bias)
    if chosen == "reference":
        return QuantLinear(weight.to(device), bias)
    raise ValueError(f"product must be one of {', '.join(PRODUCTS)}, got {chosen!r}")


def choose_product(weight: PackedWeight, *, device: torch.device, dtype: torch.dtype) -> str:
    """The name of the fastest product that is right for this matrix, device and dtype.

    Measured on one AVX512 core (torch 2.13, K 576, N 1536, M 1, us): fp32 259, bf16 237, int4 with bf16 x 44,
    int4 with fp16 x 2200; so int4 serves bf16 only.
    """
    if device.type == "cpu" and dtype == torch.bfloat16 and int4_group(weight) is not None:
        return "int4"
    return "dense"
