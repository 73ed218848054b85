"""Which forecast of a profile a row is held against."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from tiny_models import make_head, make_model

from specq.bench.contestants import PipelineContestant
from specq.bench.prediction import compare
from specq.bench.report import Figures, RowReport
from specq.recipe import Recipe
from specq.spec.decision import Forecast, Forecasts
from specq.spec.pipelines import HeadSeat, Parts, Seat
from specq.spec.session import Pipeline

FIGURES = Figures(
    answers=1,
    tokens_out=8,
    e2e_tps=40.0,
    decode_tps=50.0,
    ttft_s=0.1,
    accept_len=2.0,
    accept_len_inner=None,
    draft_ms=1.0,
    intermediate_ms=0.0,
    verify_ms=1.0,
    overhead_ms=0.0,
    speedup=None,
    decode_speedup=None,
)


def forecast(bits: int) -> Forecast:
    return Forecast("eagle2", (("drafter.head_bits", bits),), 10.0 * bits, 1.5, 0.1, 2.0, 20.0)


@pytest.mark.parametrize(("asked", "bits"), [(None, 8), (16, 16), (4, 4)])
def test_a_head_that_no_bits_are_asked_of_is_held_against_its_own(
    make_pipeline: Callable[..., Pipeline], asked: int | None, bits: int
) -> None:
    target = make_model()
    head = make_head(target).with_output(None, head_bits=8)
    pipeline = make_pipeline(target)
    seat = Seat(target, target.new_cache(32, features=head.spec.features))
    pipeline.parts = Parts(seat, target_head=HeadSeat(head, head.new_cache(32)))
    recipe = pipeline.recipe.model_copy(deep=True)
    recipe.drafter.head_bits = asked  # type: ignore[assignment]
    row = PipelineContestant("eagle2", pipeline, kind="eagle2", recipe=recipe)
    forecasts = Forecasts((forecast(16), forecast(8), forecast(4)), 64, 128, {}, "2026-01-01")
    found = compare(forecasts, [row], [RowReport("eagle2", FIGURES, {}, None, None, [], None, 0)])
    assert found is not None
    assert [each.settings for each in found.rows] == [(("drafter.head_bits", bits),)]


@pytest.mark.parametrize(("kind", "length"), [("qspec", 3), ("lookup", 5)])
def test_a_length_that_is_not_set_is_the_pipelines_own(
    make_pipeline: Callable[..., Pipeline], kind: str, length: int
) -> None:
    pipeline = make_pipeline(make_model(bits=4))
    row = PipelineContestant(kind, pipeline, kind=kind, recipe=Recipe.model_validate({"target": "tiny"}))
    made = [Forecast(kind, (("pipeline.draft_length", n),), 1.0, 1.2, 0.1, 2.0, 30.0) for n in (3, 5)]
    found = compare(
        Forecasts(tuple(made), 64, 128, {}, "2026-01-01"),
        [row],
        [RowReport(kind, FIGURES, {}, None, None, [], None, 0)],
    )
    assert found is not None
    assert [each.settings for each in found.rows] == [(("pipeline.draft_length", length),)]


def test_an_error_is_told_apart_by_what_was_accepted_and_what_rounds_took(
    make_pipeline: Callable[..., Pipeline],
) -> None:
    pipeline = make_pipeline(make_model())
    row = PipelineContestant("lookup", pipeline, kind="lookup", recipe=pipeline.recipe)
    settings = (("pipeline.draft_length", pipeline.recipe.pipeline.draft_length),)
    made = Forecast("lookup", settings, 1.0, 1.2, 0.1, accept_len=3.0, round_ms=30.0, first_ms=40.0)
    plain = Forecast("plain", (), 1.0, 1.0, 0.0, accept_len=1.0, round_ms=20.0)
    # two answers of 11 tokens in 10 rounds at 40 ms each
    figures = replace(FIGURES, answers=2, tokens_out=22, accept_len=2.0, decode_tps=50.0)
    found = compare(
        Forecasts((made, plain), 64, 128, {"temperature": 0.0}, "2026-01-01"),
        [row],
        [RowReport("lookup", figures, {}, None, None, [], None, 0)],
    )
    assert found is not None
    (each,) = found.rows
    assert each.predicted_round_ms == pytest.approx(30 + 2 * 40 / 10)
    assert each.off_by_time == pytest.approx(40 / 38 - 1)
    rounds = (10 + (3 - 1) / 2) / 3
    assert each.predicted_tps == pytest.approx(1e3 * 10 / (40 + rounds * 30))
    assert (1 + each.off_by_time) * (1 + each.off_by_acceptance) == pytest.approx(1 + each.off)
    assert found.lines({"temperature": 0.0})[0].startswith("the profile of 2026-01-01 is off by ")
    assert found.lines({"temperature": 0.7})[-1].startswith("not comparable: the profile was measured at temperature 0")
