"""Paired ratios and the chi-square test as numbers."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from specq.bench.chi_square import DRAWS, REJECTED, SETTINGS, drawn_by_kernel, exact_distribution, sampler_tests
from specq.bench.statistics import bootstrap_interval, chi_square, geometric_mean, summarize_ratios


def test_the_mean_of_ratios_is_geometric() -> None:
    assert geometric_mean([2.0, 0.5]) == pytest.approx(1.0)
    assert geometric_mean([1.0, 2.0, 4.0]) == pytest.approx(2.0)


def test_a_summary_names_the_worst_prompt_and_counts_the_slower() -> None:
    summary = summarize_ratios({"a": 2.0, "b": 0.8, "c": 1.25, "d": 0.9})
    assert summary is not None
    assert (summary.worst, summary.worst_prompt, summary.slower, summary.prompts) == (0.8, "b", 2, 4)
    assert summary.median == pytest.approx((1.25 + 0.9) / 2)
    assert summary.mean == pytest.approx((2.0 * 0.8 * 1.25 * 0.9) ** 0.25)
    assert summary.low < summary.mean < summary.high


def test_one_prompt_has_no_interval_and_none_no_summary() -> None:
    assert summarize_ratios({}) is None
    summary = summarize_ratios({"a": 1.5})
    assert (summary.mean, summary.low, summary.high) == (1.5, None, None)


def test_the_interval_holds_the_true_mean_about_95_times_in_100() -> None:
    draws = np.random.default_rng(5)
    covered = 0
    for _ in range(200):
        low, high = bootstrap_interval(np.exp(draws.normal(0.3, 0.2, size=30)).tolist())
        covered += low <= np.exp(0.3) <= high
    assert 178 <= covered <= 198  # 190 expected, a little less for 30 values; standard deviation 3


def test_equal_ratios_leave_no_doubt_and_the_interval_is_repeatable() -> None:
    assert bootstrap_interval([1.5] * 10) == pytest.approx((1.5, 1.5))
    assert bootstrap_interval([1.0, 2.0, 3.0]) == bootstrap_interval([1.0, 2.0, 3.0])


def test_chi_square_agrees_with_tables() -> None:
    # statistic 10 at 2 degrees of freedom: exp(-5)
    assert chi_square([10, 20, 30], [1 / 3] * 3) == pytest.approx(np.exp(-5), rel=1e-9)
    assert chi_square([25, 25, 25, 25], [0.25] * 4) == pytest.approx(1.0)


def test_chi_square_puts_rare_outcomes_together() -> None:
    probabilities = [0.5, 0.49, *[0.001] * 10]
    # each of the last ten expects 1 of 1000 draws, and they are tested five at a time
    assert chi_square([500, 490, 3, 0, 2, 0, 0, 0, 5, 0, 0, 0], probabilities) == pytest.approx(1.0)
    assert chi_square([480, 470, 50, *[0] * 9], probabilities) < 1e-20


def test_right_draws_over_many_equal_outcomes_give_p_values_all_over() -> None:
    draws = np.random.default_rng(3)
    found = [chi_square(draws.multinomial(400, [1 / 200] * 200).tolist(), [1 / 200] * 200) for _ in range(100)]
    assert 0.35 < np.mean(found) < 0.65  # uniform: 0.5, standard deviation 0.03


def test_an_impossible_outcome_is_rejected_and_a_certain_one_holds() -> None:
    assert chi_square([99, 1], [1.0, 0.0]) == 0.0
    assert chi_square([100, 0], [1.0, 0.0]) == 1.0
    with pytest.raises(ValueError, match="too few"):
        chi_square([1, 1], [0.5, 0.5])


def test_exact_distributions_filter_as_defined() -> None:
    row = torch.tensor([0.4, 0.3, 0.2, 0.1]).log()
    assert exact_distribution(row, temperature=1.0) == pytest.approx([0.4, 0.3, 0.2, 0.1])
    assert exact_distribution(row, temperature=1.0, top_k=2) == pytest.approx([4 / 7, 3 / 7, 0, 0])
    assert exact_distribution(row, temperature=1.0, top_p=0.65) == pytest.approx([4 / 7, 3 / 7, 0, 0])
    assert exact_distribution(row, temperature=0.5)[0] == pytest.approx(0.16 / 0.30)


def test_the_sampler_holds_and_every_control_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specq.bench.chi_square.DRAWS", 40_000)
    monkeypatch.setattr("specq.bench.chi_square.TREE_DRAWS", 600)
    tests = sampler_tests(seed=11)
    assert len(tests) == len(SETTINGS) + 5
    assert [test.name for test in tests if not test.is_passed] == []
    assert all(test.p_value < REJECTED for test in tests if test.is_control)
    assert sum(test.is_control for test in tests) == 2


def test_a_biased_sampler_fails_the_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    """Noise that does not depend on the token's id leaves the argmax: every test but the controls must fail."""
    from specq.spec import sampling

    monkeypatch.setattr("specq.bench.chi_square.DRAWS", 20_000)
    monkeypatch.setattr("specq.bench.chi_square.TREE_DRAWS", 200)
    original = sampling.gumbel_noise
    monkeypatch.setattr(sampling, "gumbel_noise", lambda seed, positions, ids: original(seed, positions, ids * 0))
    assert not any(test.is_passed for test in sampler_tests(seed=11) if not test.is_control)


def test_draws_of_the_kernel_follow_the_exact_distribution(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)  # the definition, which takes no hours
    row = torch.tensor([0.3, -1.0, 2.0, 0.0, 1.1, -0.4, 0.9, -2.0])
    drawn = drawn_by_kernel(row, torch.device("cpu"), seed=7, temperature=0.7)
    assert sum(drawn) == DRAWS
    assert chi_square(drawn, exact_distribution(row, temperature=0.7)) > REJECTED
    assert chi_square(drawn, exact_distribution(row, temperature=0.8)) < REJECTED
