"""Products of low precision on kernels: they multiply what the law leaves of x, whichever kernel runs."""

from __future__ import annotations

import pytest
import torch
from packed_weights import random_packed

from specq.quant import kernel_linear
from specq.quant.kernel_linear import KernelGateUp, KernelLinear
from specq.quant.rounding import round_rows


@pytest.mark.parametrize("has_codes", [False, True])
@pytest.mark.parametrize("act", ["a8", "a4"])
@pytest.mark.parametrize("is_permuted", [False, True])
def test_a_4_bit_product_rounds_its_x_first(
    act: str, has_codes: bool, is_permuted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernel_linear, "is_faster", lambda x, weight: has_codes)
    weight = random_packed(64, 384, 128, is_permuted=is_permuted, seed=5)
    x, residual = torch.randn(2, 384).half(), torch.randn(2, 64).half()
    linear = KernelLinear(weight, torch.randn(64).half(), out_dtype=torch.float32)
    expected = linear.product(round_rows(x, act), residual=residual)
    torch.testing.assert_close(linear.product(x, residual=residual, act=act), expected, rtol=1e-3, atol=1e-3)
    assert not torch.allclose(linear.product(x, residual=residual), expected, rtol=1e-3, atol=1e-3)
    assert torch.equal(linear(x, act), linear.product(x, act=act))


@pytest.mark.parametrize("has_codes", [False, True])
def test_gate_and_up_round_theirs(has_codes: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_linear, "is_faster", lambda x, weight: has_codes)
    gate_up, x = KernelGateUp(random_packed(64, 256, 128, seed=6)), (torch.randn(1, 256) / 8).half()
    expected = gate_up(round_rows(x, "a4"))
    torch.testing.assert_close(gate_up(x, "a4"), expected, rtol=2e-3, atol=1e-3)
    assert not torch.allclose(gate_up(x), expected, rtol=2e-3, atol=1e-3)


def test_a_prompts_rows_are_rounded_too() -> None:
    linear, x = KernelLinear(random_packed(64, 256, 128, seed=7)), torch.randn(70, 256).half()
    torch.testing.assert_close(linear(x, "a4"), linear(round_rows(x, "a4")), rtol=2e-3, atol=1e-3)
