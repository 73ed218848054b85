"""`specq bench`: pipelines side by side on prompts."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from specq.cli.console import Console, table
from specq.cli.measuring import Job, Limit, SuiteName
from specq.cli.options import (
    Model,
    OutputOptions,
    PromptOptions,
    SamplingOptions,
    SeveralPipelines,
    VerbCommand,
    flag,
    takes_options,
)
from specq.errors import GateError, UnsupportedError, UsageError
from specq.words import counted

if TYPE_CHECKING:
    from specq.bench.prediction import Comparison
    from specq.bench.report import RowReport
    from specq.bench.run import Run

MEASUREMENT, RESULT = "Measurement", "Output"

app = typer.Typer(rich_markup_mode=None, add_completion=False)


class Baseline(str, Enum):
    transformers = "transformers"


@app.command(cls=VerbCommand)
@takes_options
def bench(
    model: Model = None,
    *,
    suite: SuiteName = "bundled",
    limit: Limit = None,
    repeats: Annotated[
        int, flag("--repeats", metavar="N", min=1, panel=MEASUREMENT, help="Answers to each turn; default 1.")
    ] = 1,
    warmup: Annotated[
        int, flag("--warmup", metavar="N", min=0, panel=MEASUREMENT, help="Answers before the clock runs; default 1.")
    ] = 1,
    forced_length: Annotated[
        bool,
        flag(
            "--forced-length",
            panel=MEASUREMENT,
            help="Every answer has --max-new-tokens tokens, stops ignored; else answers end where they end.",
        ),
    ] = False,
    against: Annotated[
        list[Baseline] | None,
        flag(
            "--against",
            metavar="transformers",
            panel=MEASUREMENT,
            help="Also time transformers' generate on the same weights.",
        ),
    ] = None,
    profiled: Annotated[
        bool,
        flag(
            "--profiled",
            panel=MEASUREMENT,
            help="Each pipeline with the sizes that the stored profile predicts fastest for it.",
        ),
    ] = False,
    min_speedup: Annotated[
        float | None,
        flag(
            "--min-speedup",
            metavar="X",
            panel=MEASUREMENT,
            help="Exit 3 when the lower end of a row's end-to-end interval is below X.",
        ),
    ] = None,
    allow_code_execution: Annotated[
        bool,
        flag(
            "--allow-code-execution",
            panel=MEASUREMENT,
            help="Run the code of HumanEval answers, in a process with limits, to score it.",
        ),
    ] = False,
    csv: Annotated[Path | None, flag("--csv", metavar="FILE", panel=RESULT, help="Also the figures as CSV.")] = None,
    md: Annotated[Path | None, flag("--md", metavar="FILE", panel=RESULT, help="Also the tables as Markdown.")] = None,
    plot: Annotated[
        Path | None, flag("--plot", metavar="FILE", panel=RESULT, help="Also a picture (.png, .svg, .pdf).")
    ] = None,
    pipeline: SeveralPipelines,
    sampling: SamplingOptions,
    prompt: PromptOptions,
    output: OutputOptions,
) -> None:
    """Time pipelines side by side on the same prompts, plain decoding being the baseline.

    The order of the pipelines turns round with every prompt and each starts with empty caches. Speedups are paired
    by prompt: geometric mean with a bootstrap 95 % interval. Later turns follow plain decoding's answers. Answers are
    compared with plain decoding's: exact, a tie (rounding explains it) or a bug, which is exit 3.

    In a list such as --set pipeline.draft_length=4,6,8 each value makes a row of its own; --pipeline auto is the row
    that a profile chose. Where these models have a profile, what it predicted stands beside what was measured. Decoding
    is greedy unless --temperature says otherwise. Prompts that do not fit the context are left out and named.
    """
    with Console(quiet=output.quiet).working() as console:
        from specq.bench.files import require_plot
        from specq.storage import require_writable_file

        if allow_code_execution and sys.platform == "win32":
            raise UnsupportedError("`--allow-code-execution` sets limits that Windows does not have")
        for path in (csv, md, plot):
            if path is not None:
                require_writable_file(path)
        if plot is not None:
            require_plot(plot)
        job = Job(console, model, pipeline=pipeline, sampling=sampling, prompt=prompt, is_profiled=profiled)
        chosen = job.load_suite(suite, limit)
        if min_speedup is not None and len(chosen.prompts) < 2:
            raise UsageError("`--min-speedup` needs at least two prompts", hint="raise --limit")
        job.open(is_forced=forced_length)
        run = job.measure(chosen, repeats=repeats, warmups=warmup, against=bool(against))
        rows, matcher = job.judge(run, allow_code=allow_code_execution)
        facts = {
            "command": shlex.join(["specq", *sys.argv[1:]]),
            "suite": {"name": chosen.name, "prompts": len(chosen.prompts), "digest": chosen.digest},
            "length": "forced" if forced_length else "natural",
            "repeats": repeats,
            **job.facts(matcher),
        }
        forecast = job.predictions(rows)
        if output.as_json:
            console.document(_document(facts, rows, run, forecast))
        else:
            _show(console, rows, run, facts)
            if forecast is not None:
                lines = "\n".join(forecast.lines(facts["sampling"]))
                console.line(f"\n{table(forecast.table(rows))}\n{lines}")
        _write_files(rows, facts, csv=csv, md=md, plot=plot, forecast=forecast)
    _gate(rows, min_speedup)


def _document(
    facts: Mapping[str, Any], rows: Sequence[RowReport], run: Run, forecast: Comparison | None
) -> dict[str, Any]:
    """All of it as one JSON document, raw samples inside."""
    return {
        **facts,
        "baseline": rows[0].name,
        "profile": None if forecast is None else forecast.record(),
        "rows": [row.record() for row in rows],
        "skipped": run.skipped,
        "warmup_s": run.warmup_s,
        "machine": run.machine,
        "samples": [sample.record() for sample in run.samples],
    }


def _show(console: Console, rows: Sequence[RowReport], run: Run, facts: Mapping[str, Any]) -> None:
    from specq.bench.report import all_tables

    console.line("\n\n".join(table(lines) for lines in all_tables(rows)))
    show_differences(console, rows)
    if run.skipped:
        console.note(f"left out, too long for the context: {', '.join(run.skipped)}")
    if throttled := sum(bool(state.get("is_throttled")) for state in run.machine):
        console.note(f"warning: at {throttled} of {len(run.machine)} looks the GPU's clock was throttled")
    suite, environment = facts["suite"], facts["environment"]
    length = "exactly" if facts["length"] == "forced" else "at most"
    console.line()
    console.line(
        f"{counted(suite['prompts'], 'prompt')} ({suite['name']}), {length} {facts['max_new_tokens']} tokens each, "
        f"temperature {facts['sampling']['temperature']:g}, {environment['device']}, torch {environment['torch']}"
    )


def show_differences(console: Console, rows: Sequence[RowReport]) -> None:
    """A line for every answer that is not plain decoding's to the last token."""
    lines = [["differs", "prompt", "verdict", "at token", "margin", "shortfall", "why"]]
    for row in rows:
        for each in row.differences:
            place = f"{each['prompt']}{'' if not each['turn'] else ' turn ' + str(each['turn'] + 1)}"
            numbers = [_number(each.get(key)) for key in ("first_difference", "margin", "shortfall")]
            otherwise = "rounding explains it" if each["kind"] == "tie" else "too little memory to judge it"
            lines.append([row.name, place, each["kind"], *numbers, each.get("reason") or otherwise])
    if len(lines) > 1:
        console.line()
        console.line(table(lines))


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"


def _write_files(
    rows: Sequence[RowReport],
    facts: Mapping[str, Any],
    *,
    csv: Path | None,
    md: Path | None,
    plot: Path | None,
    forecast: Comparison | None,
) -> None:
    from specq.bench import files
    from specq.files import write_text

    if csv is not None:
        write_text(csv, files.csv_text(rows))
    if md is not None:
        more = [] if forecast is None else [forecast.table(rows)]
        closing = [] if forecast is None else forecast.lines(facts["sampling"])
        write_text(md, files.markdown_text(rows, facts, more=more, closing=closing))
    if plot is not None:
        environment = facts["environment"]
        prompts = counted(facts["suite"]["prompts"], "prompt")
        title = f"{', '.join(environment['models'])}\n{environment['device']}, {prompts}"
        files.plot(rows, plot, title=title)


def _gate(rows: Sequence[RowReport], min_speedup: float | None) -> None:
    """Raise GateError for a row that is not lossless or, where it is asked for, not surely fast enough."""
    require_lossless(rows)
    if min_speedup is None:
        return
    for row in rows[1:]:
        speedup = row.overall.speedup
        if row.verdicts is not None and speedup and (speedup.low is None or speedup.low < min_speedup):
            low = "unknown" if speedup.low is None else f"{speedup.low:.3f}"
            raise GateError(
                f"`{row.name}` is {speedup.mean:.3f} times as fast as plain, its interval begins at {low}, "
                f"below `--min-speedup {min_speedup:g}`"
            )


def require_lossless(rows: Sequence[RowReport]) -> None:
    """Raise GateError when an answer of any row is a bug."""
    for row in rows:
        if row.verdicts and row.verdicts["bug"]:
            first = next(each for each in row.differences if each["kind"] == "bug")
            bugs, answers = row.verdicts["bug"], sum(row.verdicts.values())
            raise GateError(
                f"`{row.name}` is not lossless: {bugs} of {answers} answers are bugs, "
                f"the first to prompt `{first['prompt']}`: {first['reason']}"
            )
