"""Measured steps as step functions, errors, contexts in between."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specq.profile.cost import Cost, StepCurve, Timing, interpolate


def curve(steps: dict[int, float], *, tree: dict[int, float] | None = None, context: int = 100) -> StepCurve:
    def timings(values: dict[int, float]) -> dict[int, dict[int, Timing]]:
        return {context: {n: Timing(ms, ms, ms, 9) for n, ms in values.items()}}

    return StepCurve({"sequence": timings(steps), "tree": timings(tree or {})})


def test_a_count_costs_what_the_next_larger_measured_one_does() -> None:
    steps = curve({1: 10.0, 4: 11.0, 8: 15.0})
    assert [steps.step(n, 100).ms for n in (1, 2, 4, 5, 8)] == [10, 11, 11, 15, 15]
    assert steps.ratio(8, 100) == 1.5


def test_a_count_never_costs_more_than_a_larger_one() -> None:
    steps = curve({1: 10.0, 4: 19.0, 8: 15.0, 16: 20.0})
    assert [steps.step(n, 100).ms for n in (1, 2, 4, 8, 9)] == [10, 15, 15, 15, 20]


def test_counts_past_the_largest_and_forms_never_measured_are_errors() -> None:
    steps = curve({1: 10.0, 8: 15.0})
    with pytest.raises(ValueError, match="sequence of 9 was not measured, only up to 8"):
        steps.step(9, 100)
    with pytest.raises(ValueError, match="tree of 4 was not measured, only up to 0"):
        steps.step(4, 100, form="tree")


def test_between_contexts_costs_lie_on_a_line_and_outside_them_they_stay() -> None:
    points = {100: Cost(10.0), 300: Cost(20.0), 400: Cost(50.0)}
    assert [interpolate(points, at).ms for at in (1, 100, 200, 300, 350, 900)] == [10, 10, 15, 20, 35, 50]


def test_a_context_where_fewer_counts_were_measured_is_left_out_of_larger_ones() -> None:
    short, long = Timing(10.0, 10.0, 10.0, 3), Timing(30.0, 30.0, 30.0, 3)
    steps = StepCurve({"sequence": {10: {1: short, 8: long}, 1000: {1: short}}})
    assert steps.step(8, 1000).ms == 30.0


def test_the_same_cost_repeated_keeps_its_relative_error_and_different_ones_add_in_squares() -> None:
    assert Cost(2.0, 0.3).times(4) == Cost(8.0, 1.2)
    assert (Cost(1.0, 3.0) + Cost(1.0, 4.0)) == Cost(2.0, 5.0)


@given(st.lists(st.floats(0.1, 100.0), min_size=1, max_size=40))
def test_a_timing_lies_within_its_quartiles_and_its_samples(samples: list[float]) -> None:
    timing = Timing.of(samples)
    eps = 1e-9
    assert min(samples) - eps <= timing.low_ms <= timing.median_ms + eps
    assert timing.median_ms <= timing.high_ms + eps
    assert timing.high_ms <= max(samples) + eps
    assert timing.cost.error_ms >= 0
