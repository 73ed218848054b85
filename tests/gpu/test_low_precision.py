"""Kernels of QSpec's drafts on a GPU: rounded rows bitwise by their law, the product of 8-bit activations."""

from __future__ import annotations

import pytest
import torch

from specq.quant.rounding import round_rows as law
from specq_kernels.act_codes import norm_codes, norm_codes_ref, round_codes, round_codes_ref
from specq_kernels.round_rows import round_rows, round_rows_ref
from specq_kernels.w4_layout import W4Weight, pack_w4
from specq_kernels.w4a8 import w4a8, w4a8_ref
from specq_kernels.w4a16 import w4a16

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
DTYPES = [torch.float16, torch.bfloat16]


def random_weight(n: int, k: int, *, form: str = "symmetric", is_gate_up: bool = False) -> W4Weight:
    codes = torch.randint(-(2**31), 2**31 - 1, (n, k // 8), dtype=torch.int32, device="cuda")
    scales = (torch.rand(n, -(-k // 128), device="cuda") + 0.5).mul_(0.2 / k**0.5).half()
    zeros = torch.randint(1, 16, scales.shape, dtype=torch.uint8, device="cuda") if form == "zeros" else None
    minima = -7 * scales if form == "minima" else None
    return pack_w4(codes, scales, group_size=128, zeros=zeros, minima=minima, is_gate_up=is_gate_up)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize(("rows", "k"), [(1, 4096), (7, 14336), (64, 576)])
def test_rounded_rows_are_bitwise_those_of_the_law(rows: int, k: int, bits: int, dtype: torch.dtype) -> None:
    x = (torch.randn(rows, k, device="cuda") * 3).to(dtype)
    x[0, :128] = 0
    y, sides = round_rows(x, bits=bits, group=128)
    expected, expected_sides = round_rows_ref(x, bits=bits, group=128)
    assert torch.equal(y, expected)
    assert torch.equal(y, law(x, f"a{bits}"))
    assert sides is not None
    assert expected_sides is not None
    torch.testing.assert_close(sides.sums[:, :rows], expected_sides.sums[:, :rows], rtol=1e-5, atol=1e-3)
    weight = random_weight(128, k)
    codes = round_codes(x, weight.padded[1], bits=bits)
    for ours, theirs in zip(codes, round_codes_ref(x, weight.padded[1], bits=bits), strict=True):
        found = ours[:rows] if ours.dtype == torch.int8 else ours[:, :rows]
        torch.testing.assert_close(found, theirs, rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize(("rows", "k"), [(1, 8192), (3, 4096), (1, 576)])
def test_codes_of_a_norm_are_those_of_its_result(rows: int, k: int) -> None:
    """A number that the norm's own rounding moves may move by one integer, and with the largest a whole scale."""
    x, weight = (torch.randn(n, device="cuda", dtype=torch.bfloat16) for n in ((rows, k), (k,)))
    padded = -(-k // 256) * 256
    found = norm_codes(x, weight, padded, eps=1e-5, bits=8)
    expected = norm_codes_ref(x, weight, padded, eps=1e-5, bits=8)
    assert float((found[0][:rows] == expected[0]).double().mean()) > 0.95
    torch.testing.assert_close(found[2][:, :rows], expected[2], rtol=2e-2, atol=0.5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", ["symmetric", "zeros", "minima"])
@pytest.mark.parametrize(("rows", "n", "k"), [(1, 4096, 4096), (5, 1000, 1536), (20, 6144, 4096), (64, 4096, 14336)])
def test_the_product_equals_float64_on_rounded_rows(rows: int, n: int, k: int, form: str, dtype: torch.dtype) -> None:
    weight, x = random_weight(n, k, form=form), torch.randn(rows, k, device="cuda").to(dtype)
    residual = torch.randn(rows, n, device="cuda").to(dtype)
    for bits in (8, 4):
        found = w4a8(x, weight, bits=bits, residual=residual, out_dtype=torch.float32)
        rounded = round_rows_ref(x, bits=bits)[0].double()
        expected = rounded @ weight.dequantize(torch.float64).T + residual.double()
        torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-3)
        assert torch.equal(w4a8(x, weight, bits=bits, residual=residual, out_dtype=torch.float32), found)
    assert not weight.counters.any()


@pytest.mark.parametrize("dtype", DTYPES)
def test_gate_and_up_end_in_their_silu_and_codes_of_4_bit_weights_are_those_of_w4a16(dtype: torch.dtype) -> None:
    weight, x = random_weight(2 * 1536, 576, is_gate_up=True), torch.randn(3, 576, device="cuda").to(dtype)
    torch.testing.assert_close(w4a8(x, weight), w4a8_ref(x, weight), rtol=2e-2, atol=2e-3)
    plain, y = random_weight(1536, 576), torch.randn(3, 576, device="cuda").to(dtype)
    rounded, sides = round_rows(y, bits=8, group=128)
    full = w4a16(rounded, plain, sides=sides, out_dtype=torch.float32)
    torch.testing.assert_close(w4a8(y, plain, out_dtype=torch.float32), full, rtol=1e-3, atol=2e-4)


@pytest.mark.parametrize(("groups", "warps"), [(2, 1), (4, 2), (16, 4), (32, 8)])
@pytest.mark.parametrize("k", [576, 4096])
def test_one_row_is_the_same_for_every_number_of_groups_and_warps(k: int, groups: int, warps: int) -> None:
    weight, x = random_weight(1000, k, form="zeros"), torch.randn(1, k, device="cuda", dtype=torch.bfloat16)
    found = w4a8(x, weight, out_dtype=torch.float32, config={"groups": groups, "warps": warps})
    torch.testing.assert_close(found, w4a8_ref(x.float(), weight), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("config", [(128, 4, 4), (128, 8, 3), (256, 8, 3)])
@pytest.mark.parametrize("rows", [2, 17, 33])
def test_every_tile_gives_the_same_product(rows: int, config: tuple[int, int, int]) -> None:
    weight, x = random_weight(1024, 2048), torch.randn(rows, 2048, device="cuda", dtype=torch.bfloat16)
    block_n, warps, stages = config
    stages = min(stages, 5 - rows // 16)
    expected = w4a8(x, weight, out_dtype=torch.float32)
    for split in (1, 4):
        tiles = {"split": split, "block_n": block_n, "warps": warps, "stages": stages}
        torch.testing.assert_close(
            w4a8(x, weight, out_dtype=torch.float32, config=tiles), expected, rtol=1e-4, atol=1e-4
        )
