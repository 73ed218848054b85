"""Products on our Triton kernels, in the places of those in linear.py: 4 and 8 bits, gate and up with SiLU, 16 bits.

Up to 64 rows a row's result is bitwise the same for any number of rows; more are a prompt's, where 4-bit matrices are
dequantised in chunks. Matrices no kernel runs fall back on `make_linear`. Used where kernel_choice.py
says so. The packed parts are plain attributes: they belong to the device they were packed on.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specq.quant.linear import DenseLinear, make_linear
from specq.quant.packed import PackedWeight, pack_nibbles
from specq.quant.rounding import FULL
from specq.quant.rounding import round_rows as round_prompt
from specq_kernels.act_codes import norm_codes
from specq_kernels.group_sums import Sides
from specq_kernels.launch import MAX_ROWS
from specq_kernels.round_rows import round_rows
from specq_kernels.w4_layout import W4Weight, pack_w4
from specq_kernels.w4_prefill import w4_prefill
from specq_kernels.w4a8 import is_faster, product_of, w4a8
from specq_kernels.w4a16 import count_parts, reads_lanes, w4a16, w4a16_parts, w4a16_silu
from specq_kernels.w8a16 import pack_w8, w8a16
from specq_kernels.w16a16 import W16Weight, w16a16

W4_DTYPES = (torch.float16, torch.bfloat16)


class FourBitProduct(nn.Module):
    """What products of a packed 4-bit matrix have in common."""

    is_four_bit = True
    order: Tensor | None
    weight: W4Weight

    @property
    def sums_group(self) -> int | None:
        """The group whose sums of x a producer may hand to `product`; None where x is permuted first."""
        return self.weight.group_size if self.order is None else None

    def wants_lanes(self, rows: Tensor) -> bool:
        """Whether `product` also wants x in lane order; x has the number, dtype and device of `rows`."""
        return self.order is None and reads_lanes(rows, self.weight)

    def multiplies_codes(self, x: Tensor) -> bool:
        """Whether x, once rounded, goes through the product of 8-bit activations, which is then the faster one."""
        return self.order is None and is_decoding(x) and is_faster(x, self.weight)

    def of_norm(self, x: Tensor, norm: Tensor, *, eps: float, act: str) -> Tensor:
        """The product of x behind an RMSNorm and rounded to `act`, where it `multiplies_codes`; [rows, N]."""
        codes = norm_codes(x, norm, self.weight.padded[1], eps=eps, bits=int(act[1:]))
        n = self.weight.shape[0] // 2 if self.weight.is_gate_up else self.weight.shape[0]
        out = x.new_empty(x.shape[0], n)
        product_of(codes, self.weight, out, bias=getattr(self, "bias", None))
        return out


class KernelLinear(FourBitProduct):
    """x @ weight.T + bias of a 4-bit matrix `has_kernel` takes, in `out_dtype` (x's when None)."""

    def __init__(
        self, weight: PackedWeight, bias: Tensor | None = None, *, out_dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        self.order = column_order(weight)
        self.weight = pack(weight)
        self.bias = bias
        self.out_dtype = out_dtype

    def forward(self, x: Tensor, act: str = "a16") -> Tensor:
        """[rows, N], for x [rows, K] in fp16 or bf16."""
        return self.product(x, act=act)

    def product(
        self, x: Tensor, *, residual: Tensor | None = None, sides: Sides | None = None, act: str = FULL
    ) -> Tensor:
        """The same plus `residual` [rows, N], rounded once up to 64 rows; `sides` are x's over `sums_group`."""
        if act != FULL:
            if self.multiplies_codes(x):
                bits, out = int(act[1:]), self.out_dtype
                return w4a8(x, self.weight, bits=bits, bias=self.bias, residual=residual, out_dtype=out)
            x, sides = rounded(x, act, group=self.sums_group, lanes=self.wants_lanes(x))
        if self.order is not None:
            x = x[:, self.order]
        if is_decoding(x):
            return w4a16(x, self.weight, bias=self.bias, residual=residual, sides=sides, out_dtype=self.out_dtype)
        y = w4_prefill(x, self.weight, bias=self.bias, residual=residual)
        return y if self.out_dtype is None else y.to(self.out_dtype)

    def parts(self, x: Tensor, *, sides: Sides | None = None) -> Tensor | None:
        """The product of up to 64 rows in parts of K, fp32 [parts, rows, at least N], for whoever adds as he reads.

        None where that is not worth it: a whole product, or one that is changed once more.
        """
        if self.order is not None or self.bias is not None or self.out_dtype is not None:
            return None
        return w4a16_parts(x, self.weight, sides=sides) if count_parts(x, self.weight) > 1 else None


class KernelByteLinear(nn.Module):
    """x @ weight.T + bias of an 8-bit matrix, as KernelLinear."""

    def __init__(
        self, weight: PackedWeight, bias: Tensor | None = None, *, out_dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        self.weight = pack_w8(weight.codes, weight.scales, group_size=weight.group_size, zeros=weight.zeros)
        self.bias = bias
        self.out_dtype = out_dtype

    def forward(self, x: Tensor, act: str = "a16") -> Tensor:
        """[rows, N], for x [rows, K] in fp16 or bf16."""
        return w8a16(x, self.weight, bias=self.bias, out_dtype=self.out_dtype)


class KernelGateUp(FourBitProduct):
    """silu(x @ gate.T) * (x @ up.T) of one 4-bit matrix, gate's rows first. Raises ValueError as KernelLinear."""

    has_fused_silu = True

    def __init__(self, weight: PackedWeight) -> None:
        super().__init__()
        self.order = column_order(weight)
        self.weight = pack(weight, is_gate_up=True)

    def forward(self, x: Tensor, act: str = "a16") -> Tensor:
        """[rows, N / 2] in x's dtype, for x [rows, K] in fp16 or bf16."""
        return self.product(x, act=act)

    def product(self, x: Tensor, *, sides: Sides | None = None, act: str = FULL) -> Tensor:
        """The same; `sides` are x's over `sums_group`."""
        if act != FULL:
            if self.multiplies_codes(x):
                return w4a8(x, self.weight, bits=int(act[1:]))
            x, sides = rounded(x, act, group=self.sums_group, lanes=self.wants_lanes(x))
        if self.order is not None:
            x = x[:, self.order]
        return w4a16_silu(x, self.weight, sides=sides) if is_decoding(x) else w4_prefill(x, self.weight)


class DenseKernelLinear(DenseLinear):
    """x @ weight.T + bias of a 16-bit matrix, in `out_dtype` (x's when None; fp32 for logits)."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None, *, out_dtype: torch.dtype | None = None) -> None:
        super().__init__(weight, bias)
        self.out_dtype = out_dtype
        self.kernel_weight = W16Weight.of(self.weight.data)

    def forward(self, x: Tensor, act: str = "a16") -> Tensor:
        """[..., N]."""
        return self.product(x)

    def product(self, x: Tensor, *, residual: Tensor | None = None) -> Tensor:
        """The same plus `residual` [rows, N], rounded once up to 64 rows."""
        if is_decoding(x):
            return w16a16(x, self.kernel_weight, bias=self.bias, residual=residual, out_dtype=self.out_dtype)
        y = F.linear(x, self.weight, self.bias)
        if residual is not None:
            y = y + residual
        return y if self.out_dtype is None else y.to(self.out_dtype)


def make_kernel_linear(
    weight: Tensor | PackedWeight,
    bias: Tensor | None,
    *,
    device: torch.device,
    dtype: torch.dtype,
    is_gate_up: bool = False,
    out_dtype: torch.dtype | None = None,
) -> nn.Module:
    """A module computing x @ weight.T + bias for x in `dtype` on `device`, on a kernel where one runs the matrix.

    A 4-bit matrix that `is_gate_up` and has no bias is multiplied with its SiLU (`has_fused_silu` says so);
    `out_dtype` is that of the result where a kernel runs (float32 for logits).
    """
    if isinstance(weight, Tensor):
        bias = None if bias is None else bias.to(device, dtype)
        return DenseKernelLinear(weight.to(device, dtype).contiguous(), bias, out_dtype=out_dtype)
    if dtype not in W4_DTYPES or not has_kernel(weight):
        return make_linear(weight, bias, device=device, dtype=dtype)
    if is_gate_up and bias is None and weight.bits == 4 and weight.shape[0] % 16 == 0:
        return KernelGateUp(weight.to(device))
    kind = KernelLinear if weight.bits == 4 else KernelByteLinear
    return kind(weight.to(device), None if bias is None else bias.to(device, dtype), out_dtype=out_dtype)


def is_decoding(x: Tensor) -> bool:
    """Whether the kernels for few rows take x; they have no gradient."""
    return x.ndim == 2 and x.shape[0] <= MAX_ROWS and not x.requires_grad


def rounded(x: Tensor, act: str, *, group: int | None, lanes: bool = False) -> tuple[Tensor, Sides | None]:
    """(x as a product of precision `act` reads it, its sides where a kernel made them)."""
    if not is_decoding(x):
        return round_prompt(x, act), None
    return round_rows(x, bits=int(act[1:]), group=group, lanes=lanes)


def has_kernel(weight: PackedWeight) -> bool:
    """Whether a kernel runs this matrix: its bits, groups, 16-bit scales of one type, columns that fall into groups."""
    if weight.bits == 8:
        return has_byte_kernel(weight)
    level = weight.two_level
    minima = weight.minima if level is None else level.minima
    if weight.scales.dtype == torch.float32 or (minima is not None and minima.dtype != weight.scales.dtype):
        return False
    if weight.num_groups > 1 and weight.group_size not in (32, 64) and weight.group_size % 128:
        return False
    if weight.g_idx is None:
        return True
    by_group = weight.g_idx.sort(stable=True).values
    return torch.equal(by_group.long(), torch.arange(weight.shape[1], device=by_group.device) // weight.group_size)


def has_byte_kernel(weight: PackedWeight) -> bool:
    """Whether the kernel of two planes runs this 8-bit matrix: groups that divide a row, scales that bear times 16."""
    group, columns = weight.group_size, weight.shape[1]
    is_plain = weight.minima is None and weight.two_level is None and weight.g_idx is None
    fits = columns % group == 0 and (group in (32, 64) or group % 128 == 0 or (group == columns and columns % 32 == 0))
    return is_plain and fits and weight.scales.dtype != torch.float32 and bool((weight.scales * 16).isfinite().all())


def column_order(weight: PackedWeight) -> Tensor | None:
    """int64 [K]: the columns of an act-order matrix group by group, None for one that is in order."""
    return None if weight.g_idx is None else torch.argsort(weight.g_idx, stable=True)


def pack(weight: PackedWeight, *, is_gate_up: bool = False) -> W4Weight:
    """The kernels' form of the matrix, its columns in `column_order`."""
    order, level = column_order(weight), weight.two_level
    return pack_w4(
        weight.codes if order is None else pack_nibbles(weight.unpacked()[:, order]),
        weight.scales,
        group_size=weight.group_size,
        zeros=weight.zeros,
        minima=weight.minima if level is None else level.minima,
        sub_scales=None if level is None else level.scale_codes,
        sub_minima=None if level is None else level.minimum_codes,
        is_gate_up=is_gate_up,
    )
