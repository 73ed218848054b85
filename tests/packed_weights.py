"""Random matrices of 4 or 8 bits, and what it means that two are the same."""

from __future__ import annotations

from dataclasses import fields

import torch
from torch import Tensor

from specq.quant.formats import PackedWeight, TwoLevel
from specq.quant.packed import pack_codes


def random_packed(
    rows: int,
    columns: int,
    group_size: int,
    *,
    kind: str = "symmetric",
    is_permuted: bool = False,
    seed: int = 0,
    bits: int = 4,
) -> PackedWeight:
    """A matrix with offsets of `kind`: symmetric, zeros, minima or two-level."""
    generator = torch.Generator().manual_seed(seed)
    groups = -(-columns // group_size)

    def integers(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=generator, dtype=torch.uint8)

    def halves(*shape: int) -> Tensor:
        return (torch.rand(shape, generator=generator) * 0.02 + 0.001).half()

    parts: dict[str, object] = {}
    if kind == "zeros":
        parts["zeros"] = integers(1, 1 << bits, rows, groups)
        parts["zeros"][0, 0] = 3  # type: ignore[index]
    elif kind == "minima":
        parts["minima"] = -8 * halves(rows, groups)
    elif kind == "two-level":
        codes = integers(0, 64, 2, rows, groups)
        parts["two_level"] = TwoLevel(halves(rows, groups // 8), codes[0], codes[1])
    g_idx = None
    if is_permuted:
        g_idx = (torch.arange(columns) // group_size)[torch.randperm(columns, generator=generator)].to(torch.int32)
    return PackedWeight(
        codes=pack_codes(integers(0, 1 << bits, rows, columns), bits),
        scales=halves(rows, groups // 8 if kind == "two-level" else groups),
        group_size=group_size,
        g_idx=g_idx,
        bits=bits,
        **parts,  # type: ignore[arg-type]
    )


def same(left: object, right: object) -> bool:
    """Whether two matrices, or parts of them, agree in every bit and type."""
    if isinstance(left, PackedWeight | TwoLevel):
        return type(left) is type(right) and all(
            same(getattr(left, field.name), getattr(right, field.name)) for field in fields(left)
        )
    if isinstance(left, Tensor) and isinstance(right, Tensor):
        return left.dtype == right.dtype and torch.equal(left, right)
    return left == right
