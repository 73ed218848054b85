"""The product with activations of 8 bits, in the interpreter: x's codes, and the product against its definition."""

from __future__ import annotations

import pytest
import torch
from packed_weights import random_packed

from specq.quant.kernel_linear import pack
from specq_kernels.act_codes import norm_codes, norm_codes_ref, round_codes, round_codes_ref
from specq_kernels.w4_layout import W4Weight
from specq_kernels.w4a8 import takes, w4a8, w4a8_ref


def weight_of(n: int, k: int, group: int = 128, *, kind: str = "symmetric", is_gate_up: bool = False) -> W4Weight:
    return pack(random_packed(n, k, group, kind=kind, seed=n + k), is_gate_up=is_gate_up)


@pytest.mark.parametrize("bits", [8, 4])
def test_codes_of_x_are_its_integers_in_the_order_of_the_weight(bits: int) -> None:
    x, weight = torch.randn(5, 1400).half(), weight_of(16, 1400)
    found, expected = round_codes(x, weight.padded[1], bits=bits), round_codes_ref(x, weight.padded[1], bits=bits)
    assert torch.equal(found[0][:5], expected[0])
    for ours, theirs in zip(found[1:], expected[1:], strict=True):
        assert torch.equal(ours[:, :5], theirs)


@pytest.mark.parametrize("rows", [1, 4])
def test_codes_of_a_norm_are_those_of_its_result(rows: int) -> None:
    x, weight = torch.randn(rows, 600).half(), torch.rand(600).half()
    found = norm_codes(x, weight, 768, eps=1e-5, bits=8)
    expected = norm_codes_ref(x, weight, 768, eps=1e-5, bits=8)
    assert int((found[0][:rows].int() - expected[0].int()).abs().max()) <= 1  # a half's rounding of the norm itself
    assert float((found[0][:rows] == expected[0]).double().mean()) > 0.99
    torch.testing.assert_close(found[2][:, :rows], expected[2], rtol=1e-2, atol=2e-2)


def test_codes_of_other_bits_are_refused() -> None:
    with pytest.raises(ValueError, match="bits: 5 is not 8 or 4"):
        norm_codes(torch.randn(1, 600).half(), torch.rand(600).half(), 768, eps=1e-5, bits=5)


@pytest.mark.parametrize("kind", ["symmetric", "zeros", "minima"])
@pytest.mark.parametrize(("rows", "n", "k", "bits"), [(1, 128, 512, 8), (3, 200, 576, 4), (20, 64, 312, 8)])
def test_the_product_is_that_of_rounded_rows(rows: int, n: int, k: int, bits: int, kind: str) -> None:
    weight = weight_of(n, k, kind=kind)
    x, bias, residual = torch.randn(rows, k).half(), torch.randn(n).half(), torch.randn(rows, n).half()
    for terms in ({}, {"bias": bias, "residual": residual}):
        found = w4a8(x, weight, bits=bits, out_dtype=torch.float32, **terms)
        expected = w4a8_ref(x.float(), weight, bits=bits, **{name: t.float() for name, t in terms.items()})
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-3)


def test_gate_and_up_end_in_their_silu() -> None:
    weight, x = weight_of(96, 256, is_gate_up=True), (torch.randn(2, 256) / 8).half()
    torch.testing.assert_close(w4a8(x, weight), w4a8_ref(x, weight), rtol=2e-3, atol=1e-3)


@pytest.mark.parametrize("split", [1, 3])
def test_parts_of_k_add_up(split: int) -> None:
    weight, x = weight_of(128, 1024), torch.randn(4, 1024).half()
    config = {"split": split, "block_n": 64, "warps": 4, "stages": 1}
    found = w4a8(x, weight, out_dtype=torch.float32, config=config)
    torch.testing.assert_close(found, w4a8_ref(x, weight, out_dtype=torch.float32), rtol=1e-4, atol=1e-3)
    assert not weight.counters.any()


def test_errors_name_the_argument() -> None:
    weight, x = weight_of(128, 256), torch.zeros(1, 256).half()
    with pytest.raises(ValueError, match="bits: 5"):
        w4a8(x, weight, bits=5)
    fine = weight_of(128, 256, 32)
    assert takes(weight)
    assert not takes(fine)
    with pytest.raises(ValueError, match="weight: groups of 32"):
        w4a8(x, fine)
    with pytest.raises(ValueError, match="x: 65 rows"):
        w4a8(torch.zeros(65, 256).half(), weight)
