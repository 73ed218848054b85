"""Rounding of activations: the grid and its scale, that 16 bits hold it, and that every 4-bit product reads it."""

from __future__ import annotations

import pytest
import torch
from packed_weights import random_packed

from specq.quant.linear import DequantizedLinear, Int4Linear, QuantLinear, make_linear
from specq.quant.rounding import MOST, low_act, round_rows, round_up

CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("act", MOST)
def test_a_rounded_row_is_integers_times_one_scale_a_group(act: str, dtype: torch.dtype) -> None:
    x = torch.randn(5, 300, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).to(dtype)
    x[1, 128:256] = 0
    x[2, 3] = 900.0
    y = round_rows(x, act)
    assert y.dtype == dtype
    for first in (0, 128, 256):  # the last group is shorter
        part, found = (t[:, first : first + 128].double() for t in (x, y))
        largest = part.abs().amax(1, keepdim=True)
        scale = round_up(largest.to(torch.promote_types(dtype, torch.float32)) / MOST[act], 1 if act == "a8" else 5)
        assert bool((scale >= largest / MOST[act] * (1 - 1e-6)).all())
        integers = found / scale.double().where(scale > 0, torch.ones_like(largest))
        assert torch.equal(integers, integers.round())
        assert float(integers.abs().max()) <= MOST[act]
        assert bool(((found - part).abs() <= scale.double() * 0.50001).all())


@pytest.mark.parametrize(("act", "most"), [("a8", 65024.0), ("a4", 64512.0)])
def test_fp16_overflows_only_past_its_last_grid(act: str, most: float) -> None:
    every = torch.arange(2**15 - 2**10, dtype=torch.int16).view(torch.float16)  # all finite x >= 0
    alone = torch.zeros(len(every), 128, dtype=torch.float16)
    alone[:, 0] = every
    finite = round_rows(alone, act).isfinite().all(1)
    assert torch.equal(finite, every <= most)


def test_a_scale_is_the_next_number_of_few_bits() -> None:
    x = torch.tensor([0.0, 1.0, 1.01, 2.0, 3.0, 0.3])
    assert round_up(x, 1).tolist() == [0.0, 1.0, 2.0, 2.0, 4.0, 0.5]
    assert round_up(x.double(), 5).tolist() == [0.0, 1.0, 1.0625, 2.0, 3.0, 0.3125]


def test_precisions_have_names() -> None:
    assert (low_act(8), low_act(4)) == ("a8", "a4")
    with pytest.raises(ValueError, match="bits: 16"):
        low_act(16)
    with pytest.raises(ValueError, match="act: `a7`"):
        round_rows(torch.zeros(1, 4), "a7")


@pytest.mark.parametrize(
    ("product", "kind", "dtype"),
    [
        ("dense", DequantizedLinear, torch.float32),
        ("reference", QuantLinear, torch.float32),
        ("int4", Int4Linear, torch.bfloat16),
    ],
)
def test_every_4_bit_product_rounds_its_x(product: str, kind: type, dtype: torch.dtype) -> None:
    weight = random_packed(48, 256, 128, seed=3)
    linear = make_linear(weight, device=CPU, dtype=dtype, product=product)
    assert isinstance(linear, kind)
    x = torch.randn(3, 256).to(dtype)
    for act in MOST:
        assert torch.equal(linear(x, act), linear(round_rows(x, act)))
        assert not torch.equal(linear(x, act), linear(x))
    assert torch.equal(linear(x, "a16"), linear(x))


def test_8_and_16_bit_products_leave_x_alone() -> None:
    x = torch.randn(3, 256)
    for weight in (torch.randn(8, 256), random_packed(8, 256, 128, bits=8)):
        for product in (None, "reference") if not isinstance(weight, torch.Tensor) else (None,):
            linear = make_linear(weight, device=CPU, dtype=torch.float32, product=product)
            assert torch.equal(linear(x, "a4"), linear(x))
