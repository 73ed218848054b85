"""The solver on matrices whose inputs are correlated, as those of a model are."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from specq.errors import SpecqError
from specq.quant import gptq
from specq.quant.gptq import Grid, InputMoments, round_to_nearest, solve
from specq.quant.packed import PackedWeight

GRIDS = [
    Grid(32),
    Grid(64),
    Grid(-1),
    Grid(40),
    Grid(32, is_symmetric=False),
    Grid(32, has_stored_order=True),
    Grid(40, is_symmetric=False, has_stored_order=True),
    Grid(32, bits=8),
    Grid(-1, is_symmetric=False, bits=8),
]


def correlated_inputs(columns: int, *, rows: int = 512, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    mixing = torch.randn(columns // 4, columns, generator=generator)
    sizes = torch.logspace(-1, 1, columns)[torch.randperm(columns, generator=generator)]
    independent = torch.randn(rows, columns, generator=generator)
    return (torch.randn(rows, columns // 4, generator=generator) @ mixing + independent) * sizes


def matrix(rows: int, columns: int, *, seed: int = 1) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))


def hessian_of(x: Tensor) -> Tensor:
    moments = InputMoments(x.shape[1], device="cpu")
    moments.add(x)
    return moments.hessian()


def output_error(weight: Tensor, packed: PackedWeight, x: Tensor) -> float:
    return float((x @ (weight - packed.dequantize()).T).square().sum())


def minmax_rounding(weight: Tensor, group_size: int) -> Tensor:
    groups = weight.view(weight.shape[0], -1, group_size)
    scale = (groups.abs().amax(-1, keepdim=True) / 7).half().float()
    return ((groups / scale).round().clamp(-8, 7) * scale).view_as(weight)


def test_moments_are_the_mean_over_all_rows_however_they_come() -> None:
    x = correlated_inputs(16).view(8, 64, 16)
    moments = InputMoments(16, device="cpu")
    for chunk in x.split(3):
        moments.add(chunk)
    torch.testing.assert_close(moments.hessian(), x.view(-1, 16).T @ x.view(-1, 16) / 512, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_gptq_changes_outputs_less_than_rounding(grid: Grid) -> None:
    x, weight = correlated_inputs(160), matrix(24, 160)
    solved = solve(weight, hessian_of(x), grid).weight
    assert output_error(weight, solved, x) < 0.6 * output_error(weight, round_to_nearest(weight, grid), x)


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_codes_and_zeros_are_what_the_format_holds(grid: Grid) -> None:
    weight = matrix(16, 160) + 0.7
    for packed in (solve(weight, hessian_of(correlated_inputs(160)), grid).weight, round_to_nearest(weight, grid)):
        assert packed.scales.dtype == torch.float16
        assert packed.scales.isfinite().all()
        assert packed.num_groups == (1 if grid.group_size == -1 else -(-160 // grid.group_size))
        if packed.zeros is not None:
            assert int(packed.zeros.min()) >= 1
            assert int(packed.zeros.max()) <= grid.largest
        assert packed.bits == grid.bits
        assert int(packed.unpacked().max()) > grid.largest // 2


def test_the_error_reported_is_that_of_the_packed_matrix() -> None:
    x, weight = correlated_inputs(96), matrix(8, 96)
    solution = solve(weight, hessian_of(x), Grid(32))
    expected = (x @ (weight - solution.weight.dequantize()).T).square().mean(0)
    torch.testing.assert_close(solution.errors, expected, rtol=1e-3, atol=1e-6)
    torch.testing.assert_close(solution.energies, (x @ weight.T).square().mean(0), rtol=1e-3, atol=1e-6)


def test_each_column_takes_the_nearest_code_left_to_it() -> None:
    """With independent inputs there is nothing to spread, so GPTQ is rounding with the same scales."""
    weight = matrix(8, 64)
    solved = solve(weight, torch.eye(64), Grid(32)).weight
    rounded = round_to_nearest(weight, Grid(32), importance=torch.ones(64))
    assert torch.equal(solved.codes, rounded.codes)
    assert torch.equal(solved.scales, rounded.scales)


def test_two_columns_are_solved_like_by_trying_all_codes() -> None:
    """Of all code pairs of the second column, GPTQ takes the best for the first column's rounding."""
    weight, x = matrix(6, 8, seed=4), correlated_inputs(8, seed=5)
    hessian = hessian_of(x)
    order = torch.argsort(hessian.diagonal(), descending=True)
    solved = solve(weight, hessian.clone(), Grid(8)).weight
    codes, scale = solved.unpacked().clone(), solved.scales.float()
    last = int(order[-1])
    damped = hessian + gptq.FIRST_DAMPING * hessian.diagonal().mean() * torch.eye(8)
    for row, code in itertools.product(range(6), range(16)):
        tried = codes[row].float()
        tried[last] = code
        difference = weight[row] - (tried - 8) * scale[row]
        kept = weight[row] - (codes[row].float() - 8) * scale[row]
        assert kept @ damped @ kept <= difference @ damped @ difference + 1e-5


def test_searched_scales_beat_the_covering_ones() -> None:
    weight = matrix(32, 128)
    searched = (weight - round_to_nearest(weight, Grid(32)).dequantize()).square().sum()
    assert searched < 0.9 * (weight - minmax_rounding(weight, 32)).square().sum()


@pytest.mark.parametrize("is_symmetric", [True, False])
def test_eight_bits_are_a_sixteenth_of_the_step(is_symmetric: bool) -> None:
    weight = matrix(32, 128)
    errors = [
        (weight - round_to_nearest(weight, Grid(32, is_symmetric, bits=bits)).dequantize()).square().sum()
        for bits in (4, 8)
    ]
    assert 100 < errors[0] / errors[1] < 400  # 256 where no range is clipped


def test_the_longer_end_of_the_range_falls_on_the_larger_numbers() -> None:
    weight = torch.tensor([[8.0, -7.0, 1.0, 0.0, 3.0, -2.0, 5.0, 4.0]])
    packed = round_to_nearest(weight, Grid(8))
    assert float(packed.scales) < 0
    assert (packed.dequantize() - weight).abs().max() < 0.05


def test_a_stored_order_groups_columns_by_the_size_of_their_inputs() -> None:
    x = correlated_inputs(96)
    hessian = hessian_of(x)
    packed = solve(matrix(8, 96), hessian.clone(), Grid(32, has_stored_order=True)).weight
    assert packed.g_idx is not None
    largest = torch.argsort(hessian.diagonal(), descending=True)[:32]
    assert set(packed.g_idx[largest].tolist()) == {0}
    assert packed.g_idx.bincount().tolist() == [32, 32, 32]


def test_columns_without_input_are_rounded_and_counted() -> None:
    x, weight = correlated_inputs(64), matrix(8, 64)
    x[:, [3, 40]] = 0
    solution = solve(weight, hessian_of(x), Grid(32))
    assert solution.dead_columns == 2
    step = solution.weight.scales.float().abs().max()
    assert ((weight - solution.weight.dequantize())[:, [3, 40]].abs() <= step).all()


def test_a_product_that_never_had_input_is_rounded() -> None:
    weight = matrix(8, 64)
    solution = solve(weight, torch.zeros(64, 64), Grid(32))
    assert solution.dead_columns == 64
    assert torch.equal(solution.weight.codes, round_to_nearest(weight, Grid(32)).codes)


def test_damping_is_raised_until_the_hessian_is_positive_definite() -> None:
    x = correlated_inputs(64, rows=8).double()
    hessian = (x.T @ x / 8).float()
    hessian -= 0.05 * hessian.diagonal().mean() * torch.eye(64)  # rank 8 of 64, the rest below zero
    solution = solve(matrix(8, 64), hessian, Grid(32))
    assert solution.damping == pytest.approx(0.1)


def test_a_hessian_that_no_damping_mends_is_an_error() -> None:
    with pytest.raises(SpecqError, match="positive definite"):
        solve(matrix(8, 64), torch.eye(64) - 3 * torch.ones(64, 64), Grid(32))


def test_inputs_that_are_not_finite_are_an_error() -> None:
    hessian = torch.eye(64)
    hessian[3, 4] = torch.inf
    with pytest.raises(SpecqError, match="not finite"):
        solve(matrix(8, 64), hessian, Grid(32))


def test_zero_rows_and_tiny_numbers_keep_a_finite_scale() -> None:
    weight = torch.cat((torch.zeros(8, 64), torch.full((8, 64), 1e-9)))
    for grid in (Grid(32), Grid(32, is_symmetric=False)):
        packed = solve(weight, hessian_of(correlated_inputs(64)), grid).weight
        assert packed.is_finite()
        assert packed.dequantize().abs().max() < 1e-6


def test_a_shortfall_moves_the_outputs_towards_the_original_models() -> None:
    original, weight = correlated_inputs(96), matrix(16, 96)
    x = original + 0.3 * correlated_inputs(96, seed=7)
    moments = InputMoments(96, device="cpu")
    moments.add(x, drift=original - x)
    shortfall = moments.shortfall(weight)
    corrected = solve(weight, moments.hessian(), Grid(32), shortfall=shortfall).weight
    plain = solve(weight, hessian_of(x), Grid(32)).weight

    def distance(packed: PackedWeight) -> float:
        return float((original @ weight.T - x @ packed.dequantize().T).square().sum())

    assert distance(corrected) < 0.9 * distance(plain)


def test_without_drift_there_is_no_shortfall() -> None:
    moments = InputMoments(8, device="cpu")
    moments.add(torch.ones(4, 8))
    assert moments.shortfall(torch.ones(2, 8)) is None


def test_rows_are_solved_alone() -> None:
    x, weight = correlated_inputs(64), matrix(16, 64)
    together = solve(weight, hessian_of(x), Grid(32)).weight
    hessian = hessian_of(x)
    alone = [solve(part, hessian, Grid(32)).weight for part in weight.split(8)]  # a Hessian serves again
    assert torch.equal(together.codes, torch.cat([part.codes for part in alone]))
