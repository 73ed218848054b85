"""Kernels on a GPU against float64: the PTX forms, bf16, row independence and determinism, which no CPU test sees."""

from __future__ import annotations

import pytest
import torch

from specq_kernels.w4_layout import W4Weight, pack_w4
from specq_kernels.w4a16 import w4a16, w4a16_ref, w4a16_silu

pytestmark = pytest.mark.gpu

DTYPES = (torch.bfloat16, torch.float16)
TOLERANCE = {torch.bfloat16: 4e-3, torch.float16: 1e-3}  # output rounding 2^-9 and 2^-12 of the value, and slack


def error(y: torch.Tensor, reference: torch.Tensor) -> float:
    return ((y.double() - reference).norm() / reference.norm()).item()


def random_weight(n: int, k: int, group: int, form: str, *, is_gate_up: bool = False) -> W4Weight:
    codes = torch.randint(-(2**31), 2**31 - 1, (n, k // 8), dtype=torch.int32, device="cuda")
    groups = 1 if group == -1 else -(-k // group)
    scales = (torch.rand(n, groups, device="cuda") * 0.02 + 0.01).half()
    if form == "zeros":
        zeros = torch.randint(0, 17, (n, groups), dtype=torch.uint8, device="cuda")
        return pack_w4(codes, scales, group_size=group, zeros=zeros, is_gate_up=is_gate_up)
    if form == "minima":
        minima = (-torch.rand(n, groups, device="cuda") * 0.1).half()
        return pack_w4(codes, scales, group_size=group, minima=minima, is_gate_up=is_gate_up)
    if form == "two-level":
        d, dmin = (torch.rand(2, n, k // 256, device="cuda") * 1e-3).half()
        subs = torch.randint(0, 64, (2, n, k // 32), dtype=torch.uint8, device="cuda")
        return pack_w4(codes, d, group_size=32, minima=dmin, sub_scales=subs[0], sub_minima=subs[1],
                       is_gate_up=is_gate_up)  # fmt: skip
    return pack_w4(codes, scales, group_size=group, is_gate_up=is_gate_up)


CASES = [
    (1024, 2048, 128, "symmetric"),
    (1000, 2048, 128, "zeros"),
    (576, 1536, 64, "symmetric"),
    (1536, 576, 128, "symmetric"),
    (896, 4864, 128, "zeros"),
    (512, 2048, 32, "minima"),
    (512, 2048, 32, "two-level"),
    (512, 2048, 32, "symmetric"),
    (512, 1000, -1, "symmetric"),
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("n", "k", "group", "form"), CASES)
def test_w4a16_equals_the_float64_product_and_rows_do_not_depend_on_their_number(
    n: int, k: int, group: int, form: str, dtype: torch.dtype
) -> None:
    weight = random_weight(n, k, group, form)
    x = torch.randn(64, k, device="cuda", dtype=dtype)
    bias = torch.randn(n, device="cuda", dtype=dtype)
    residual = torch.randn(64, n, device="cuda", dtype=dtype)
    whole = w4a16(x, weight, bias=bias, residual=residual)
    reference = w4a16_ref(x.double(), weight, bias=bias.double(), residual=residual.double())
    assert error(whole, reference) < TOLERANCE[dtype]
    for rows in (1, 2, 7, 15, 16, 17, 31, 32, 33, 60, 63):
        part = w4a16(x[:rows].contiguous(), weight, bias=bias, residual=residual[:rows].contiguous())
        assert torch.equal(part, whole[:rows]), rows
    assert not weight.counters.any()


@pytest.mark.parametrize("dtype", DTYPES)
def test_silu_product_equals_the_float64_one(dtype: torch.dtype) -> None:
    for form, group in (("symmetric", 128), ("zeros", 64)):
        weight = random_weight(1536, 1024, group, form, is_gate_up=True)
        x = torch.randn(20, 1024, device="cuda", dtype=dtype)
        assert error(w4a16_silu(x, weight), w4a16_ref(x.double(), weight)) < TOLERANCE[dtype]


def test_rows_agree_bitwise_across_tile_sizes() -> None:
    weight = random_weight(2048, 4096, 128, "symmetric")
    x = torch.randn(64, 4096, device="cuda", dtype=torch.bfloat16)
    results = []
    tiles = [(16, 64, 4, 3), (16, 128, 8, 3), (16, 256, 8, 3), (32, 128, 4, 3), (32, 128, 8, 2)]
    tiles += [(64, 128, 8, 2), (64, 256, 8, 2), (64, 256, 16, 2)]
    for block_m, block_n, warps, stages in tiles:
        config = {"split": 4, "block_n": block_n, "block_m": block_m, "warps": warps, "stages": stages}
        results.append(w4a16(x[:block_m].contiguous(), weight, config=config)[:16])
    for other in results[1:]:
        assert torch.equal(results[0], other)


def test_split_k_repeats_bitwise() -> None:
    weight = random_weight(512, 8192, 128, "symmetric")
    x = torch.randn(5, 8192, device="cuda", dtype=torch.bfloat16)
    config = {"split": 8, "block_n": 64, "block_m": 16, "warps": 4, "stages": 3, "prefetch": 8}
    first = w4a16(x, weight, config=config)
    for _ in range(200):
        assert torch.equal(first, w4a16(x, weight, config=config))
