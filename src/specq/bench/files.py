"""The numbers of a benchmark as files: CSV, Markdown, a plot."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from specq.bench.report import RowReport, all_tables
from specq.errors import UsageError
from specq.files import named_path, write_atomically

CSV_FIGURES = (
    *("answers", "tokens_out", "e2e_tps", "decode_tps", "ttft_s", "accept_len", "accept_len_inner"),
    *("draft_ms", "intermediate_ms", "verify_ms", "overhead_ms"),
)
CSV_WHOLE = ("peak_memory_bytes", "exact", "tie", "bug", "right", "scored")
"""Columns that only the line of all categories fills."""

CSV_RATIOS = ("mean", "low", "high", "median", "worst", "worst_prompt", "slower", "prompts")


def require_plot(path: Path) -> None:
    """Raise UsageError now when no plot can be drawn into this file: no matplotlib, or no such format."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise UsageError("`--plot` needs the package `matplotlib`", hint='pip install "specq[plot]"') from None
    if path.suffix.removeprefix(".") not in Figure().canvas.get_supported_filetypes():
        raise UsageError(f"`{path}` names no format for a plot", hint="give a name that ends in .png, .svg or .pdf")


def csv_text(rows: Sequence[RowReport]) -> str:
    """A line for each row and category (`all` first), every figure a column."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    ratio_columns = [f"{kind}_{name}" for kind in ("speedup", "decode_speedup") for name in CSV_RATIOS]
    writer.writerow(["row", "category", *CSV_FIGURES, *ratio_columns, *CSV_WHOLE])
    for row in rows:
        for category, figures in {"all": row.overall, **row.categories}.items():
            ratios = [
                "" if each is None else getattr(each, name)
                for each in (figures.speedup, figures.decode_speedup)
                for name in CSV_RATIOS
            ]
            values = [getattr(figures, name) for name in CSV_FIGURES]
            counts = row.verdicts or {}
            matches = [counts.get(kind, "") for kind in ("exact", "tie", "bug")]
            whole = [row.peak_memory_bytes, *matches, row.right, row.scored] if category == "all" else [""] * 6
            writer.writerow([row.name, category, *values, *ratios, *whole])
    return out.getvalue()


def markdown_text(
    rows: Sequence[RowReport],
    facts: Mapping[str, Any],
    *,
    more: Sequence[Sequence[Sequence[str]]] = (),
    closing: Sequence[str] = (),
) -> str:
    """The tables and `more` of them, with the facts a reader needs to repeat the measurement, and closing lines."""
    head = "\n".join(_fact_lines(facts))
    parts = [head, *map(_markdown_table, [*all_tables(rows), *more])]
    return "\n\n".join([*parts, "\n".join(f"- {line}" for line in closing)]).rstrip() + "\n"


def _fact_lines(facts: Mapping[str, Any], indent: str = "") -> Iterator[str]:
    """A list item for each fact, what is inside one below it; what is unknown is left out."""
    for name, value in facts.items():
        title = f"{indent}- {name.replace('_', ' ') if not indent else name}:"
        if name == "models":  # and the revisions that are known
            yield f"{title} {', '.join(f'{model} ({known})' if known else model for model, known in value.items())}"
        elif isinstance(value, Mapping):
            flat = all(not isinstance(each, Mapping) for each in value.values())
            known = {key: each for key, each in value.items() if each is not None}
            if flat:
                yield f"{title} {', '.join(f'{key} {_fact(each)}' for key, each in known.items()) or 'none'}"
            else:
                yield title
                yield from _fact_lines(known, indent + "  ")
        elif value is not None:
            yield f"{title} {f'`{value}`' if name == 'command' else _fact(value)}"


def _fact(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _markdown_table(lines: Sequence[Sequence[str]]) -> str:
    head, *body = ["| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines]
    return "\n".join([head, "|" + "---|" * len(lines[0]), *body])


def plot(rows: Sequence[RowReport], path: Path, *, title: str) -> None:
    """Writes a picture: end-to-end speedup with its interval, a dot for each category; the suffix names the format."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 1.2 + 0.5 * len(rows)), layout="constrained")
    axes = figure.subplots()
    categories = list(dict.fromkeys(name for row in rows for name in row.categories))
    for place, row in enumerate(rows):
        speedup = row.overall.speedup
        if speedup is None:
            continue
        axes.barh(place, speedup.mean, color="#c9d6e4", zorder=1)
        if speedup.low is not None and speedup.high is not None:
            axes.plot([speedup.low, speedup.high], [place, place], color="black", linewidth=1.5, zorder=3)
        for index, category in enumerate(categories):
            found = row.categories.get(category)
            if found and found.speedup:
                label = category if place == 0 else None
                axes.scatter(found.speedup.mean, place, s=18, color=f"C{index % 10}", zorder=2, label=label)
    axes.axvline(1.0, color="grey", linewidth=1)
    axes.set_yticks(range(len(rows)), [row.name for row in rows])
    axes.invert_yaxis()
    axes.set_xlabel("end-to-end speedup over plain decoding, geometric mean with 95 % interval")
    figure.suptitle(title, fontsize=9)
    if categories:
        axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1.0), fontsize=8, frameon=False)
    with write_atomically(named_path(path)) as temporary:
        figure.savefig(temporary, format=path.suffix.removeprefix("."))
