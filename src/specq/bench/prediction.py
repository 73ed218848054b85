"""What the stored profile of these models predicted of each row, beside what was measured."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any

from specq.bench.contestants import PipelineContestant
from specq.bench.report import Figures, RowReport, interval, number
from specq.spec.decision import Forecast, Forecasts
from specq.spec.pipelines import PIPELINES

BEST = 3
"""Rows whose error counts: those that a person would choose among."""


@dataclass(frozen=True)
class RowPrediction:
    """A row's decode rate, accept length, round and speedup as predicted and as measured.

    The prediction is for answers as long as the measured ones; a round includes its share of what first rounds take
    more. Every `off` is a share of the measured. `off_by_acceptance` is what the rate would be off by if rounds cost
    what they were predicted to, `off_by_time` if as much were accepted as predicted: (1 + off) is the product of both.
    A speedup is over plain decoding in the same run, so it does not move with what makes the whole machine slower.
    """

    row: str
    pipeline: str
    settings: tuple[tuple[str, int], ...]
    predicted_tps: float
    measured_tps: float
    off: float
    off_by_acceptance: float
    off_by_time: float
    predicted_accept_len: float
    measured_accept_len: float
    predicted_round_ms: float
    measured_round_ms: float
    predicted_speedup: float
    predicted_speedup_error: float
    measured_speedup: float | None
    speedup_off: float | None


@dataclass(frozen=True)
class Comparison:
    """A profile's forecasts and the rows they were for, at least one."""

    forecasts: Forecasts
    rows: tuple[RowPrediction, ...]

    @property
    def fastest(self) -> list[RowPrediction]:
        """The rows whose error counts, fastest first."""
        once = {(each.pipeline, each.settings): each for each in self.rows[::-1]}  # auto is another row again
        return sorted(once.values(), key=lambda each: -each.measured_tps)[:BEST]

    def record(self) -> dict[str, Any]:
        """All of it as JSON takes it."""
        return {
            "measured_at": self.forecasts.measured_at,
            "context": self.forecasts.context,
            "answer_tokens": self.forecasts.answer_tokens,
            "sampling": dict(self.forecasts.sampling),
            "predictions": [asdict(row) | {"settings": dict(row.settings)} for row in self.rows],
        }

    def table(self, reports: Sequence[RowReport]) -> list[list[str]]:
        """Measured against predicted: decode rate and what it is off by, accept length, a round, the speedup."""
        speedups = {report.name: report.overall.decode_speedup for report in reports}
        lines = [["profile", "decode tok/s", "predicted", "off", "by acceptance", "by time", "accept", "predicted"]]
        lines[0] += ["round ms", "predicted", "speedup", "predicted"]
        for each in self.rows:
            is_plain = each.row == reports[0].name
            lines.append(
                [
                    each.row,
                    number(each.measured_tps, 1),
                    number(each.predicted_tps, 1),
                    *(f"{100 * off:+.0f} %" for off in (each.off, each.off_by_acceptance, each.off_by_time)),
                    number(each.measured_accept_len, 2),
                    number(each.predicted_accept_len, 2),
                    number(each.measured_round_ms, 2),
                    number(each.predicted_round_ms, 2),
                    "1" if is_plain else interval(speedups[each.row]),
                    "1" if is_plain else f"{each.predicted_speedup:.2f} ± {each.predicted_speedup_error:.2f}",
                ]
            )
        return lines

    def lines(self, sampling: Mapping[str, Any]) -> list[str]:
        """How far the profile was off for the fastest rows and why, and what it was measured at where that differs."""
        fastest, made = self.fastest, self.forecasts
        parts = [
            f"{_mean_off(each.off_by_acceptance for each in fastest)} by what was accepted",
            f"{_mean_off(each.off_by_time for each in fastest)} by what a round costs",
        ]
        gains = [each.speedup_off for each in fastest if each.speedup_off is not None]
        if gains:
            parts.append(f"speedups by {_mean_off(gains)}")
        found = [
            f"the profile of {made.measured_at} is off by {_mean_off(each.off for each in fastest)} on average for the "
            f"fastest{f' {len(fastest)}' if len(fastest) > 1 else ''}: {', '.join(parts)}",
            "its acceptance is that of calibration prompts, which are not these, in answers of up to "
            f"{made.answer_tokens:g} tokens; its times hold for {made.context} tokens of context",
        ]
        is_greedy = made.sampling.get("temperature") == sampling.get("temperature") == 0
        names = ("temperature", "repetition_penalty") if is_greedy else made.sampling
        others = [f"{name} {made.sampling[name]:g}" for name in names if made.sampling.get(name) != sampling.get(name)]
        if others:
            here = [f"{name} {sampling[name]:g}" for name in names if made.sampling.get(name) != sampling.get(name)]
            found.append(
                f"not comparable: the profile was measured at {', '.join(others)}, this run at {', '.join(here)}"
            )
        return found


def _mean_off(values: Iterable[float]) -> str:
    return f"{100 * fmean(abs(value) for value in values):.0f} %"


def compare(
    forecasts: Forecasts, contestants: Sequence[PipelineContestant], reports: Sequence[RowReport]
) -> Comparison | None:
    """The predictions of those rows whose sizes the profile planned, in the order of the reports; None of none."""
    figures = {report.name: report.overall for report in reports}
    found = []
    for contestant in contestants:
        forecast = _forecast(forecasts, contestant)
        measured = figures.get(contestant.name)
        if forecast is not None and measured is not None and measured.decode_tps and measured.accept_len:
            found.append(_row(contestant.name, forecast, forecasts.best("plain"), measured))
    return Comparison(forecasts, tuple(found)) if found else None


def _forecast(forecasts: Forecasts, contestant: PipelineContestant) -> Forecast | None:
    """The forecast for what the contestant runs, None where its sizes were not planned."""
    return next(
        (
            each
            for each in forecasts.candidates
            if each.pipeline == contestant.decoded
            and all(_setting(contestant, key) == value for key, value in each.settings)
        ),
        None,
    )


def _setting(contestant: PipelineContestant, key: str) -> Any:
    """The value that the contestant runs with; where the recipe names no bits a head drafts with its own."""
    section, name = key.split(".")
    if key == "pipeline.draft_length":
        return contestant.recipe.pipeline.length_for(contestant.decoded)
    value = getattr(getattr(contestant.recipe, section), name)
    if key != "drafter.head_bits" or value is not None:
        return value
    seat = getattr(contestant.pipeline.parts, PIPELINES[contestant.decoded].needs[-1])
    return seat.head.head_bits


def _row(name: str, forecast: Forecast, plain: Forecast | None, measured: Figures) -> RowPrediction:
    assert measured.decode_tps is not None
    assert measured.accept_len is not None
    length = measured.tokens_out / measured.answers
    later = measured.tokens_out - measured.answers
    rounds, first_ms = later / measured.accept_len, measured.answers * forecast.first_ms
    tps, gain = forecast.tps(length), forecast.gain
    if plain is not None and forecast.tokens_per_s and plain.tokens_per_s:
        gain *= (tps / forecast.tokens_per_s) / (plain.tps(length) / plain.tokens_per_s)
    round_ms = forecast.round_ms + first_ms / rounds
    as_accepted = 1e3 * measured.accept_len / round_ms
    speedup = measured.decode_speedup.mean if measured.decode_speedup and forecast.pipeline != "plain" else None
    return RowPrediction(
        row=name,
        pipeline=forecast.pipeline,
        settings=forecast.settings,
        predicted_tps=tps,
        measured_tps=measured.decode_tps,
        off=tps / measured.decode_tps - 1,
        off_by_acceptance=tps / as_accepted - 1,
        off_by_time=as_accepted / measured.decode_tps - 1,
        predicted_accept_len=forecast.accept_len,
        measured_accept_len=measured.accept_len,
        predicted_round_ms=round_ms,
        measured_round_ms=1e3 * measured.accept_len / measured.decode_tps,
        predicted_speedup=gain,
        predicted_speedup_error=forecast.uncertainty,
        measured_speedup=speedup,
        speedup_off=None if speedup is None else gain / speedup - 1,
    )
