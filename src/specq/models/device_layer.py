"""What a decoder layer on kernels is made of, for a model's step and for an EAGLE head's rows alike."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from specq.models.layers import DecoderLayer
from specq.models.rope import RopeTable
from specq.quant.kernel_linear import DenseKernelLinear, FourBitProduct, KernelGateUp, KernelLinear
from specq.quant.rounding import FULL
from specq_kernels.group_sums import Sides, empty_sides
from specq_kernels.norm_rope import rms_norm, rms_norm_parts, silu_mul

SIDES_HEAD_DIMS = (32, 64, 128)  # attention can emit sides of whole heads of these
NORM_ADDS_FROM = 17
"""Rows from which a norm adds a product's parts in less time than the product does (a norm has one program a row)."""


@dataclass(frozen=True)
class Stream:
    """The residual stream, [rows, hidden]: `x`, plus what a product left in `parts` for the next norm to add."""

    x: Tensor
    parts: Tensor | None = None


def finish_layer(
    layer: DecoderLayer, x: Tensor, attended: Tensor, *, sides: Sides | None, act: str = FULL, in_parts: bool = True
) -> Stream:
    """The stream after attention's output [rows, heads * head_dim] and the MLP, from x before them.

    `sides` are those of `attended` that `attention_sides` made room for; `in_parts` False adds the last product here.
    """
    stream = add_product(x, layer.o, attended, sides=sides, act=act)
    h, x = multiply_normed(stream, layer.gate_up, layer.mlp_norm, eps=layer.eps, act=act)
    sides = None
    if not layer.has_fused_silu:
        group, lanes = wanted_sides(layer.down, h, act)
        h, sides = silu_mul(h, group=group, lanes=lanes)
    if not in_parts:
        return Stream(multiply(layer.down, h, residual=x, sides=sides, act=act))
    return add_product(x, layer.down, h, sides=sides, act=act)


def multiply_normed(
    stream: Stream, module: nn.Module, weight: Tensor, *, eps: float, act: str, in_parts: bool = False
) -> tuple[Tensor, Tensor]:
    """(the module's product of the stream behind an RMSNorm of this weight, the stream in one piece).

    With `in_parts` the product may be one that was `left_in_parts`.
    """
    if act != FULL and isinstance(module, FourBitProduct) and module.multiplies_codes(stream.x):
        return module.of_norm(stream.x, weight, eps=eps, act=act), stream.x  # such products leave nothing in parts
    group, lanes = wanted_sides(module, stream.x, act)
    h, x, sides = norm(stream, weight, eps=eps, group=group, lanes=lanes)
    if in_parts and (parts := left_in_parts(module, h, sides=sides, act=act)) is not None:
        return parts, x
    return multiply(module, h, sides=sides, act=act), x


def add_product(x: Tensor, module: nn.Module, h: Tensor, *, sides: Sides | None = None, act: str = FULL) -> Stream:
    """The stream x with the module's product of h added, by the product itself or by the next norm."""
    parts = left_in_parts(module, h, sides=sides, act=act) if len(h) >= NORM_ADDS_FROM else None
    return Stream(multiply(module, h, residual=x, sides=sides, act=act)) if parts is None else Stream(x, parts)


def left_in_parts(module: nn.Module, h: Tensor, *, sides: Sides | None, act: str) -> Tensor | None:
    """The module's product of h, fp32 [parts, rows, at least N], for the next kernel to add; None if it adds itself."""
    return module.parts(h, sides=sides) if isinstance(module, KernelLinear) and act == FULL else None


def norm(
    stream: Stream, weight: Tensor, *, eps: float, group: int | None = None, lanes: bool = False
) -> tuple[Tensor, Tensor, Sides | None]:
    """(normed, the stream's x, sides) as `rms_norm`."""
    if stream.parts is None:
        return rms_norm(stream.x, weight, eps=eps, group=group, lanes=lanes)
    return rms_norm_parts(stream.parts, stream.x, weight, eps=eps, group=group, lanes=lanes)


def multiply(
    module: nn.Module, x: Tensor, *, residual: Tensor | None = None, sides: Sides | None = None, act: str = FULL
) -> Tensor:
    """[nodes, N]: the module's product plus `residual`; `sides` are x's `wanted_sides`."""
    if isinstance(module, KernelLinear):
        return module.product(x, residual=residual, sides=sides, act=act)
    if isinstance(module, KernelGateUp):
        return module.product(x, sides=sides, act=act)
    if isinstance(module, DenseKernelLinear):
        return module.product(x, residual=residual)
    y: Tensor = module(x, act)
    return y if residual is None else y + residual


def wanted_sides(module: nn.Module, rows: Tensor, act: str = FULL) -> tuple[int | None, bool]:
    """(group, lanes): over which groups the module wants sums of its x from whoever makes x, and whether lane order.

    x has the number, dtype and device of `rows`. (None, False) where none are: of x that is rounded first nobody but
    the module has them.
    """
    if act != FULL or not isinstance(module, FourBitProduct):
        return None, False
    return module.sums_group, module.wants_lanes(rows)


def attention_sides(layer: DecoderLayer, q: Tensor, *, act: str = FULL) -> Sides | None:
    """Room for the sides of the o product's x, which attention of q [nodes, heads, head_dim] writes.

    None where it cannot or none are wanted.
    """
    q = q.flatten(1)  # of the result's shape
    group, lanes = wanted_sides(layer.o, q, act)
    if group is None or q.shape[1] % 256 or layer.head_dim not in SIDES_HEAD_DIMS:
        return None
    return empty_sides(q, group, lanes=lanes)


def rotary_tables(table: RopeTable, positions: int) -> tuple[Tensor, Tensor]:
    """(cos, sin) fp32 [positions, head_dim / 2], the values that prefill turns by."""
    table.grow(positions)
    half = table.cos.shape[1] // 2
    # the second half of the table's sin has the plain sign
    return table.cos[:, :half].float().contiguous(), table.sin[:, half:].float().contiguous()
