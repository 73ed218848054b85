"""Products with 4-bit matrices against the dequantised matrix."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from packed_weights import random_packed

from specq.quant.linear import (
    MAX_DECODE_ROWS,
    DenseLinear,
    Int4Linear,
    QuantLinear,
    RescoredLinear,
    choose_product,
    int4_group,
    make_linear,
)
from specq.quant.packed import PackedWeight

CPU = torch.device("cpu")
# Relative to the largest output: bf16 keeps 8 bits of x, of every scale and offset, and of the result.
BF16_TOLERANCE = 1e-2


def _exact(weight: PackedWeight, x: torch.Tensor) -> torch.Tensor:
    return x.double() @ weight.dequantize().double().T


def _error(y: torch.Tensor, exact: torch.Tensor) -> float:
    return float((y.double() - exact).abs().max() / exact.abs().max())


def _input(rows: int, columns: int) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(7)).bfloat16()


@pytest.mark.parametrize("is_permuted", [False, True])
@pytest.mark.parametrize("kind", ["symmetric", "zeros", "minima", "two-level"])
@pytest.mark.parametrize("product", ["dense", "int4", "reference"])
def test_every_product_agrees_with_the_dequantised_matrix(product: str, kind: str, is_permuted: bool) -> None:
    weight = random_packed(48, 512, 32, kind=kind, is_permuted=is_permuted)
    x = _input(3, 512)
    linear = make_linear(weight, device=CPU, dtype=torch.bfloat16, product=product)
    assert _error(linear(x), _exact(weight, x)) < BF16_TOLERANCE


def test_a_wrong_zero_is_outside_the_tolerance() -> None:
    """The control: the tolerance is narrower than one step of the offset."""
    weight = random_packed(48, 512, 32)
    shifted = replace(weight, zeros=torch.full((48, 16), 9, dtype=torch.uint8))
    x = _input(3, 512)
    assert _error(Int4Linear(shifted)(x), _exact(weight, x)) > 5 * BF16_TOLERANCE


@pytest.mark.parametrize(
    ("rows", "columns", "group_size", "group"),
    [
        (64, 576, 64, 64),
        (40, 576, 128, 64),  # the last group is half one
        (20, 1536, 1536, 256),  # per channel
        (100, 96, 96, 32),
        (16, 200, 200, 32),  # no group divides K: x is padded
        (24, 584, 128, 32),
        (8, 40, 40, 32),
    ],
)
def test_the_int4_product_takes_shapes_torch_does_not(rows: int, columns: int, group_size: int, group: int) -> None:
    weight = random_packed(rows, columns, group_size, kind="zeros")
    linear = Int4Linear(weight)
    x = _input(5, columns)
    assert linear.group == group
    assert linear(x).shape == (5, rows)
    assert _error(linear(x), _exact(weight, x)) < BF16_TOLERANCE


@pytest.mark.parametrize("group_size", [16, 48])
def test_groups_torch_cannot_split_fall_back_to_dense(group_size: int) -> None:
    weight = random_packed(16, 96, group_size)
    assert int4_group(weight) is None
    assert choose_product(weight, device=CPU, dtype=torch.bfloat16) == "dense"
    with pytest.raises(ValueError, match=f"groups of {group_size}"):
        Int4Linear(weight)


@pytest.mark.parametrize("product", [None, "dense", "reference"])
def test_eight_bits_are_multiplied_dequantised(product: str | None) -> None:
    weight = random_packed(48, 512, 32, kind="zeros", bits=8)
    assert int4_group(weight) is None
    x = _input(3, 512)
    linear = make_linear(weight, device=CPU, dtype=torch.bfloat16, product=product)
    assert _error(linear(x), _exact(weight, x)) < BF16_TOLERANCE
    with pytest.raises(ValueError, match="int4 product"):
        Int4Linear(weight)


def test_uneven_permuted_groups_fall_back_to_dense() -> None:
    g_idx = torch.zeros(64, dtype=torch.int32)
    g_idx[40:] = 1
    assert int4_group(replace(random_packed(16, 64, 32), g_idx=g_idx)) is None


@pytest.mark.parametrize(("rows", "columns"), [(64, 576), (192, 96), (24, 200)])
def test_an_int4_row_does_not_depend_on_the_number_of_rows(rows: int, columns: int) -> None:
    linear = Int4Linear(random_packed(rows, columns, 32, kind="minima"))
    x = _input(MAX_DECODE_ROWS, columns)
    alone = torch.cat([linear(row[None]) for row in x])
    for count in range(1, MAX_DECODE_ROWS + 1):
        assert torch.equal(linear(x[:count]), alone[:count]), count


def test_a_prompt_goes_through_the_dequantised_matrix() -> None:
    weight = random_packed(48, 96, 32, kind="zeros", is_permuted=True)
    linear = Int4Linear(weight, torch.ones(48))
    x = _input(MAX_DECODE_ROWS + 1, 96)
    assert _error(linear(x) - 1, _exact(weight, x)) < BF16_TOLERANCE
    assert torch.equal(linear._many(x), DenseLinear(weight.dequantize(torch.bfloat16))(x))


@pytest.mark.parametrize("product", ["dense", "int4", "reference"])
def test_bias_shape_and_dtype_are_those_of_the_input(product: str) -> None:
    weight, bias = random_packed(20, 64, 32), torch.linspace(-1, 1, 20)
    linear = make_linear(weight, bias, device=CPU, dtype=torch.float32, product=product)
    x = _input(6, 64).float()
    y = linear(x.view(2, 3, 64))
    assert y.shape == (2, 3, 20)
    assert y.dtype == torch.float32
    assert torch.equal(y.view(6, 20), linear(x))
    assert _error(y.view(6, 20), _exact(weight, x) + bias.double()) < BF16_TOLERANCE


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_wide_types_get_exactly_the_dequantised_matrix(dtype: torch.dtype) -> None:
    weight = random_packed(16, 64, 32, kind="zeros")
    linear = make_linear(weight, device=CPU, dtype=dtype)
    assert isinstance(linear, DenseLinear)
    assert torch.equal(linear.weight, weight.dequantize().to(dtype))
    assert torch.equal(QuantLinear(weight)(_input(2, 64).to(dtype)), linear(_input(2, 64).to(dtype)))


def test_bfloat16_on_a_cpu_gets_the_int4_product_and_float16_the_dense_one() -> None:
    weight = random_packed(16, 64, 32)
    assert isinstance(make_linear(weight, device=CPU, dtype=torch.bfloat16), Int4Linear)
    assert isinstance(make_linear(weight, device=CPU, dtype=torch.float16), DenseLinear)


def test_a_dense_matrix_is_cast_once() -> None:
    weight, bias = torch.randn(4, 8).half(), torch.randn(4).half()
    linear = make_linear(weight, bias, device=CPU, dtype=torch.float64)
    x = torch.randn(2, 8, dtype=torch.float64)
    assert torch.equal(linear(x), torch.nn.functional.linear(x, weight.double(), bias.double()))


def test_an_unknown_product_is_refused() -> None:
    with pytest.raises(ValueError, match="'fast'"):
        make_linear(random_packed(16, 64, 32), device=CPU, dtype=torch.float32, product="fast")


def test_a_rescored_head_finds_the_best_in_fp32_whatever_the_number_of_rows() -> None:
    draws = torch.Generator().manual_seed(0)
    weight = (torch.randn(500, 96, generator=draws) / 10).to(torch.bfloat16)
    x = torch.randn(200, 96, generator=draws)
    exact = x.double() @ weight.double().T
    out = torch.cat([RescoredLinear(weight)(part) for part in x.split(25)])
    best = exact.topk(5).indices
    torch.testing.assert_close(out.double().gather(1, best), exact.gather(1, best), atol=1e-5, rtol=1e-5)
    assert torch.equal(out.argmax(-1), exact.argmax(-1))
    # The control: rounded to bf16 alone, the best is not always found.
    assert not torch.equal((x.to(torch.bfloat16) @ weight.T).float().argmax(-1), exact.argmax(-1))
    alone = torch.cat([RescoredLinear(weight)(row[None]) for row in x[:25]])
    assert torch.equal(alone.argmax(-1), out[:25].argmax(-1))
