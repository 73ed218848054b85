"""What the stored profile of these models predicted of each row, beside what was measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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

    `off` are shares of the measured; a speedup is over plain decoding in the same run, so it does not move with what
    makes the whole machine slower.
    """

    row: str
    pipeline: str
    settings: tuple[tuple[str, int], ...]
    predicted_tps: float
    measured_tps: float
    off: float
    predicted_accept_len: float
    measured_accept_len: float
    predicted_round_ms: float
    measured_round_ms: float
    round_off: float
    predicted_speedup: float
    predicted_speedup_error: float
    measured_speedup: float | None
    speedup_off: float | None


@dataclass(frozen=True)
class Comparison:
    """A profile's forecasts and the rows they were for, at least one."""

    forecasts: Forecasts
    rows: tuple[RowPrediction, ...]

    def record(self) -> dict[str, Any]:
        """All of it as JSON takes it."""
        return {
            "measured_at": self.forecasts.measured_at,
            "context": self.forecasts.context,
            "sampling": dict(self.forecasts.sampling),
            "predictions": [asdict(row) | {"settings": dict(row.settings)} for row in self.rows],
        }

    def table(self, reports: Sequence[RowReport]) -> list[list[str]]:
        """Measured against predicted: decode rate, accept length, a round, and the speedup over plain."""
        speedups = {report.name: report.overall.decode_speedup for report in reports}
        lines = [["profile", "decode tok/s", "predicted", "off", "accept", "predicted", "round ms", "predicted", "off"]]
        lines[0] += ["speedup", "predicted"]
        for each in self.rows:
            is_plain = each.row == reports[0].name
            lines.append(
                [
                    each.row,
                    number(each.measured_tps, 1),
                    number(each.predicted_tps, 1),
                    f"{100 * each.off:+.0f} %",
                    number(each.measured_accept_len, 2),
                    number(each.predicted_accept_len, 2),
                    number(each.measured_round_ms, 2),
                    number(each.predicted_round_ms, 2),
                    f"{100 * each.round_off:+.0f} %",
                    "1" if is_plain else interval(speedups[each.row]),
                    "1" if is_plain else f"{each.predicted_speedup:.2f} ± {each.predicted_speedup_error:.2f}",
                ]
            )
        return lines

    def line(self, sampling: Mapping[str, Any]) -> str:
        """How far the profile was off for the fastest rows, and what it was measured at where that differs."""
        once = {(each.pipeline, each.settings): each for each in self.rows[::-1]}  # auto is another row again
        fastest = sorted(once.values(), key=lambda each: -each.measured_tps)[:BEST]
        gains = [abs(each.speedup_off) for each in fastest if each.speedup_off is not None]
        parts = [f"{100 * fmean(abs(each.round_off) for each in fastest):.0f} % in what a round costs"]
        if gains:
            parts.append(f"{100 * fmean(gains):.0f} % in the speedup")
        made = self.forecasts
        error = 100 * fmean(abs(each.off) for each in fastest)
        line = (
            f"the profile of {made.measured_at} is off by {error:.0f} % on average for the fastest {len(fastest)} "
            f"({', '.join(parts)}); it holds for {made.context} tokens of context"
        )
        is_greedy = made.sampling.get("temperature") == sampling.get("temperature") == 0
        names = ("temperature", "repetition_penalty") if is_greedy else made.sampling
        others = [f"{name} {made.sampling[name]:g}" for name in names if made.sampling.get(name) != sampling.get(name)]
        return f"{line} and was measured at {', '.join(others)}" if others else line


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
            found.append(_row(contestant.name, forecast, measured))
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
    value = getattr(getattr(contestant.recipe, section), name)
    if key != "drafter.head_bits" or value is not None:
        return value
    seat = getattr(contestant.pipeline.parts, PIPELINES[contestant.decoded].needs[-1])
    return seat.head.head_bits


def _row(name: str, forecast: Forecast, measured: Figures) -> RowPrediction:
    assert measured.decode_tps is not None
    assert measured.accept_len is not None
    round_ms = 1e3 * measured.accept_len / measured.decode_tps
    speedup = measured.decode_speedup.mean if measured.decode_speedup and forecast.pipeline != "plain" else None
    return RowPrediction(
        row=name,
        pipeline=forecast.pipeline,
        settings=forecast.settings,
        predicted_tps=forecast.tokens_per_s,
        measured_tps=measured.decode_tps,
        off=forecast.tokens_per_s / measured.decode_tps - 1,
        predicted_accept_len=forecast.accept_len,
        measured_accept_len=measured.accept_len,
        predicted_round_ms=forecast.round_ms,
        measured_round_ms=round_ms,
        round_off=forecast.round_ms / round_ms - 1,
        predicted_speedup=forecast.gain,
        predicted_speedup_error=forecast.uncertainty,
        measured_speedup=speedup,
        speedup_off=None if speedup is None else forecast.gain / speedup - 1,
    )
