"""The products of others that the benchmarks time beside ours, on random weights; humming where it is installed."""

from __future__ import annotations

import copy
import importlib.util
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from specq_kernels.timing import copies_for

Product = Callable[[Tensor], Tensor]
GROUP = 128


def cublas(n: int, k: int) -> list[Product]:
    """bf16 products on unquantised weights [n, k], enough copies to miss the L2."""
    weights = [torch.randn(n, k, device="cuda", dtype=torch.bfloat16) for _ in range(copies_for(2 * n * k))]
    return [_linear(weight) for weight in weights]


def torch_int4(n: int, k: int) -> list[Product]:
    """torch's own CUDA int4 products, groups of 128."""
    return [_int4(n, k) for _ in range(copies_for(n * k // 2))]


def humming(n: int, k: int) -> list[Product]:
    """humming-kernels' W4A16 products (PyPI, compiled when first called), groups of 128; none where it is missing."""
    if not has_humming():
        return []
    from humming.layer import HummingLayer

    layer: Any = HummingLayer(
        shape_n=n, shape_k=k, weight_config={"dtype": "int4", "group_size": GROUP}, torch_dtype=torch.bfloat16
    ).cuda()
    layer.load_from_unquantized(torch.randn(n, k, device="cuda", dtype=torch.bfloat16))
    layer.transform()
    return [layer, *(copy.deepcopy(layer) for _ in range(copies_for(n * k // 2) - 1))]


def has_humming() -> bool:
    """Whether humming-kernels is installed."""
    return importlib.util.find_spec("humming") is not None


PEERS: dict[str, Callable[[int, int], Sequence[Product]]] = {
    "cuBLAS bf16": cublas,
    "torch int4": torch_int4,
    "humming": humming,
}


def _linear(weight: Tensor) -> Product:
    return lambda x: torch.nn.functional.linear(x, weight)


def _int4(n: int, k: int) -> Product:
    codes = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8, device="cuda")
    packed = torch.ops.aten._convert_weight_to_int4pack(codes, 8)
    scales = torch.randn(k // GROUP, n, 2, device="cuda", dtype=torch.bfloat16)
    return lambda x: torch.ops.aten._weight_int4pack_mm(x, packed, GROUP, scales)
