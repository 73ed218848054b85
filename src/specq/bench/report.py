"""From raw samples to the numbers of a benchmark, and the numbers as tables.

Rates are pooled: all tokens over all seconds. A speedup pairs prompts: for each the ratio of its rate to the
baseline's (medians of the repeats, geometric mean of its turns), then the geometric mean of these over prompts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from specq.bench.run import Sample
from specq.bench.statistics import Ratios, geometric_mean, summarize_ratios
from specq.spec.lossless import Verdict
from specq.spec.session import Generation, pooled_accept_length

Rate = Callable[[Generation], float | None]


@dataclass(frozen=True)
class Figures:
    """What is known of one row over some prompts; rates in tokens a second, times in ms a token."""

    answers: int
    tokens_out: int
    e2e_tps: float | None
    decode_tps: float | None
    ttft_s: float | None
    accept_len: float | None
    accept_len_inner: float | None
    draft_ms: float
    intermediate_ms: float
    verify_ms: float
    overhead_ms: float
    speedup: Ratios | None
    decode_speedup: Ratios | None


@dataclass(frozen=True)
class RowReport:
    """One row of the benchmark: overall and by category, its peak memory, verdicts and right answers."""

    name: str
    overall: Figures
    categories: dict[str, Figures]
    peak_memory_bytes: int | None
    verdicts: dict[str, int] | None
    differences: list[dict[str, Any]]
    right: int | None
    scored: int

    def record(self) -> dict[str, Any]:
        """The row as JSON takes it."""
        return {
            "row": self.name,
            **asdict(self.overall),
            "peak_memory_bytes": self.peak_memory_bytes,
            "match": self.verdicts,
            "differences": self.differences,
            "accuracy": None if self.right is None else {"right": self.right, "of": self.scored},
            "categories": {name: asdict(figures) for name, figures in self.categories.items()},
        }


def report_rows(
    names: Sequence[str],
    samples: Sequence[Sample],
    *,
    verdicts: dict[int, Verdict | None],
    right: dict[int, bool],
) -> list[RowReport]:
    """A report for every contestant, in the order of `names`; the first is the baseline.

    `verdicts` (None: differs, not judged) and `right` are by a sample's `order`; contestants that are not judged have
    none.
    """
    base = [sample for sample in samples if sample.contestant == names[0]]
    return [_row(name, [s for s in samples if s.contestant == name], base, verdicts, right) for name in names]


def _row(
    name: str,
    own: Sequence[Sample],
    base: Sequence[Sample],
    verdicts: dict[int, Verdict | None],
    right: dict[int, bool],
) -> RowReport:
    categories = list(dict.fromkeys(sample.prompt.category for sample in own))
    judged = [(sample, verdicts[sample.order]) for sample in own if sample.order in verdicts]
    peaks = [sample.answer.peak_bytes for sample in own if sample.answer.peak_bytes is not None]
    scored = [right[sample.order] for sample in own if sample.order in right]
    return RowReport(
        name=name,
        overall=figures(own, base),
        categories={category: figures(_of(own, category), _of(base, category)) for category in categories},
        peak_memory_bytes=max(peaks, default=None),
        verdicts=count_verdicts(verdict for _, verdict in judged) if judged else None,
        differences=[
            {"prompt": sample.prompt.id, "turn": sample.turn, "repeat": sample.repeat}
            | (verdict.record() if verdict else {"kind": "unjudged"})
            for sample, verdict in judged
            if verdict is None or verdict.kind != "exact"
        ],
        right=sum(scored) if scored else None,
        scored=len(scored),
    )


def _of(samples: Sequence[Sample], category: str) -> list[Sample]:
    return [sample for sample in samples if sample.prompt.category == category]


def count_verdicts(verdicts: Iterable[Verdict | None]) -> dict[str, int]:
    """How many are exact, tie, bug, and unjudged where that occurs."""
    counts = {"exact": 0, "tie": 0, "bug": 0}
    for verdict in verdicts:
        kind = "unjudged" if verdict is None else verdict.kind
        counts[kind] = counts.get(kind, 0) + 1
    return counts


def figures(own: Sequence[Sample], base: Sequence[Sample]) -> Figures:
    """The figures of these samples, paired with the baseline's of the same prompts."""
    runs = [sample.generation for sample in own]
    tokens = sum(run.tokens_out for run in runs)
    later = sum(run.tokens_out - 1 for run in runs)
    inner = [run.accept_len_inner for run in runs if run.accept_len_inner is not None]
    waits = [run.ttft_s for run in runs if run.ttft_s is not None]
    return Figures(
        answers=len(runs),
        tokens_out=tokens,
        e2e_tps=_pooled((run.tokens_out, run.e2e_tps) for run in runs),
        decode_tps=_pooled((run.tokens_out - 1, run.decode_tps) for run in runs),
        ttft_s=median(waits) if waits else None,
        accept_len=pooled_accept_length(runs),
        accept_len_inner=sum(inner) / len(inner) if inner else None,
        draft_ms=sum(run.draft_ms for run in runs) / max(later, 1),
        intermediate_ms=sum(run.intermediate_ms for run in runs) / max(later, 1),
        verify_ms=sum(run.verify_ms for run in runs) / max(later, 1),
        overhead_ms=sum(run.overhead_ms for run in runs) / max(later, 1),
        speedup=summarize_ratios(paired_ratios(own, base, lambda run: run.e2e_tps)),
        decode_speedup=summarize_ratios(paired_ratios(own, base, lambda run: run.decode_tps)),
    )


def _pooled(pairs: Iterable[tuple[int, float | None]]) -> float | None:
    """All tokens over all seconds of (tokens, rate) pairs."""
    known = [(tokens, rate) for tokens, rate in pairs if rate]
    seconds = sum(tokens / rate for tokens, rate in known)
    return sum(tokens for tokens, _ in known) / seconds if seconds else None


def paired_ratios(own: Sequence[Sample], base: Sequence[Sample], rate: Rate) -> dict[str, float]:
    """Rate over the baseline's by prompt: medians of the repeats, geometric mean of the turns."""
    ours, theirs = _rates(own, rate), _rates(base, rate)
    by_prompt: dict[str, list[float]] = {}
    for key in ours.keys() & theirs.keys():
        by_prompt.setdefault(key[0], []).append(median(ours[key]) / median(theirs[key]))
    order = dict.fromkeys(sample.prompt.id for sample in own)
    return {prompt: geometric_mean(by_prompt[prompt]) for prompt in order if prompt in by_prompt}


def _rates(samples: Sequence[Sample], rate: Rate) -> dict[tuple[str, int], list[float]]:
    found: dict[tuple[str, int], list[float]] = {}
    for sample in samples:
        value = rate(sample.generation)
        if value:
            found.setdefault((sample.prompt.id, sample.turn), []).append(value)
    return found


def speed_table(rows: Sequence[RowReport]) -> list[list[str]]:
    """Pooled rates, accept lengths (the target's own token included), memory and matches, a line for each row."""
    lines = [["", "end-to-end tok/s", "decode tok/s", "ttft ms", "accept", "inner", "peak memory", "against plain"]]
    for row in rows:
        all_ = row.overall
        lines.append(
            [
                row.name,
                number(all_.e2e_tps, 1),
                number(all_.decode_tps, 1),
                number(None if all_.ttft_s is None else all_.ttft_s * 1e3, 0),
                number(all_.accept_len, 2),
                number(all_.accept_len_inner, 2),
                "-" if row.peak_memory_bytes is None else f"{row.peak_memory_bytes / 1e6:.0f} MB",
                match_text(row.verdicts),
            ]
        )
    return lines


def speedup_table(rows: Sequence[RowReport]) -> list[list[str]]:
    """Speedups over the baseline (the first row) with their intervals; median, worst and slower are end to end."""
    lines = [["speedup", "end to end [95 %]", "decode [95 %]", "median", "slower", "worst"]]
    for row in rows[1:]:
        speedup = row.overall.speedup
        if speedup is not None:
            middle = [number(speedup.median, 2), f"{speedup.slower} of {speedup.prompts}"]
            worst = f"{speedup.worst:.2f} {speedup.worst_prompt}"
            lines.append([row.name, interval(speedup), interval(row.overall.decode_speedup), *middle, worst])
    return lines if len(lines) > 1 else []


def category_table(rows: Sequence[RowReport]) -> list[list[str]]:
    """End-to-end speedup and accept length of each row by category."""
    categories = list(dict.fromkeys(name for row in rows for name in row.categories))
    lines = [["end to end (accept)", *categories]]
    for row in rows[1:]:
        found = (row.categories.get(name) for name in categories)
        lines.append([row.name, *("-" if each is None else _short(each) for each in found)])
    return lines if len(lines) > 1 else []


def all_tables(rows: Sequence[RowReport]) -> list[list[list[str]]]:
    """Every table that has something to say, the most important first."""
    tables = (speed_table(rows), speedup_table(rows), category_table(rows), time_table(rows), accuracy_table(rows))
    return [lines for lines in tables if lines]


def time_table(rows: Sequence[RowReport]) -> list[list[str]]:
    """Where a row's decode time goes, in ms for each token."""
    lines = [["ms a token", "draft", "intermediate", "verify", "overhead"]]
    for row in rows:
        all_ = row.overall
        if all_.accept_len is not None:
            parts = (all_.draft_ms, all_.intermediate_ms, all_.verify_ms, all_.overhead_ms)
            lines.append([row.name, *(f"{value:.2f}" for value in parts)])
    return lines if len(lines) > 1 else []


def accuracy_table(rows: Sequence[RowReport]) -> list[list[str]]:
    """Right answers of each row; empty when nothing was scored."""
    lines = [[row.name, f"{row.right} of {row.scored}"] for row in rows if row.right is not None]
    return [["right answers", ""], *lines] if lines else []


def _short(figures: Figures) -> str:
    accept = "" if figures.accept_len is None else f" ({figures.accept_len:.2f})"
    return "-" if figures.speedup is None else f"{figures.speedup.mean:.2f}{accept}"


def interval(ratios: Ratios | None) -> str:
    """`1.52 [1.40, 1.66]`, the interval left out where there is none."""
    if ratios is None:
        return "-"
    bounds = "" if ratios.low is None else f" [{ratios.low:.2f}, {ratios.high:.2f}]"
    return f"{ratios.mean:.2f}{bounds}"


def match_text(counts: dict[str, int] | None) -> str:
    """`12 exact, 1 tie`; a dash where nothing was compared."""
    if counts is None:
        return "-"
    return ", ".join(f"{count} {kind}" for kind, count in counts.items() if count) or "-"


def number(value: float | None, digits: int) -> str:
    """The value with so many digits after the point, or a dash."""
    return "-" if value is None else f"{value:.{digits}f}"
