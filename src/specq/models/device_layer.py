"""What a decoder layer on kernels is made of, for a model's step and for an EAGLE head's rows alike."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from specq.models.layers import DecoderLayer
from specq.models.rope import RopeTable
from specq.quant.kernel_linear import DenseKernelLinear, FourBitProduct, KernelGateUp, KernelLinear
from specq.quant.rounding import FULL
from specq_kernels.launch import row_bucket
from specq_kernels.norm_rope import rms_norm, silu_mul

SUMMED_HEAD_DIMS = (32, 64, 128)  # attention can emit group sums of whole heads of these


def finish_layer(layer: DecoderLayer, x: Tensor, attended: Tensor, *, sums: Tensor | None, act: str = FULL) -> Tensor:
    """The residual stream [rows, hidden] after attention's output [rows, heads * head_dim] and the MLP.

    `sums` are those of `attended` that `attention_sums` made room for.
    """
    x = multiply(layer.o, attended, residual=x, sums=sums, act=act)
    h = multiply_normed(layer.gate_up, x, layer.mlp_norm, eps=layer.eps, act=act)
    if layer.has_fused_silu:
        return multiply(layer.down, h, residual=x, act=act)
    h, sums = silu_mul(h, group=sums_group(layer.down, act))
    return multiply(layer.down, h, residual=x, sums=sums, act=act)


def multiply_normed(module: nn.Module, x: Tensor, norm: Tensor, *, eps: float, act: str = FULL) -> Tensor:
    """[rows, N]: the module's product of x behind an RMSNorm, its SiLU included where the module has one."""
    if act != FULL and isinstance(module, FourBitProduct) and module.multiplies_codes(x):
        return module.of_norm(x, norm, eps=eps, act=act)
    h, _, sums = rms_norm(x, norm, eps=eps, group=sums_group(module, act))
    if isinstance(module, KernelGateUp):
        return module.product(h, sums=sums, act=act)
    return multiply(module, h, sums=sums, act=act)


def multiply(
    module: nn.Module, x: Tensor, *, residual: Tensor | None = None, sums: Tensor | None = None, act: str = FULL
) -> Tensor:
    """[nodes, N]: the module's product plus `residual`; `sums` are those `sums_group(module, act)` asks for."""
    if isinstance(module, KernelLinear):
        return module.product(x, residual=residual, sums=sums, act=act)
    if isinstance(module, DenseKernelLinear):
        return module.product(x, residual=residual)
    y: Tensor = module(x, act)
    return y if residual is None else y + residual


def sums_group(module: nn.Module, act: str = FULL) -> int | None:
    """The group over which the module wants sums of its x from whoever makes x, or None: of x that is rounded first
    nobody but the module has them."""
    return module.sums_group if act == FULL and isinstance(module, FourBitProduct) else None


def attention_sums(layer: DecoderLayer, count: int, *, device: torch.device, act: str = FULL) -> Tensor | None:
    """Where attention writes group sums for the o product, None where it cannot or none are wanted."""
    group, columns = sums_group(layer.o, act), layer.heads * layer.head_dim
    if group is None or columns % 256 or layer.head_dim not in SUMMED_HEAD_DIMS:
        return None
    return torch.empty(columns // group, row_bucket(count), dtype=torch.float32, device=device)


def rotary_tables(table: RopeTable, positions: int) -> tuple[Tensor, Tensor]:
    """(cos, sin) fp32 [positions, head_dim / 2], the values that prefill turns by."""
    table.grow(positions)
    half = table.cos.shape[1] // 2
    # the second half of the table's sin has the plain sign
    return table.cos[:, :half].float().contiguous(), table.sin[:, half:].float().contiguous()
