"""`specq verify`: whether pipelines give plain decoding's text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from specq.cli.bench import require_lossless, show_differences
from specq.cli.console import Console, table
from specq.cli.measuring import Job, Limit, SuiteName, working
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
from specq.errors import GateError

if TYPE_CHECKING:
    import torch

    from specq.bench.chi_square import SamplerTest
    from specq.bench.report import RowReport

CHECKS = "Checks"
DEFAULT_LIMIT = 14

app = typer.Typer(rich_markup_mode=None, add_completion=False)


@app.command(cls=VerbCommand)
@takes_options
def verify(
    model: Model = None,
    *,
    suite: SuiteName = "bundled",
    limit: Limit = DEFAULT_LIMIT,
    statistics: Annotated[
        bool,
        flag(
            "--statistics",
            panel=CHECKS,
            help="Also test draws of the sampler, alone and through drafts, against the exact distribution.",
        ),
    ] = False,
    pipeline: SeveralPipelines,
    sampling: SamplingOptions,
    prompt: PromptOptions,
    output: OutputOptions,
) -> None:
    """Compare pipelines with plain decoding, token by token: exact, tie or bug.

    Where tokens differ, every token of the answer is judged by the target in higher precision: within what rounding
    moves a score it is a tie, else a bug, which is exit 3. On a CPU the default is float32, where ties are rare.
    Decoding is greedy unless --temperature says otherwise; then every answer is sampled twice with its seed. Without
    --limit 14 prompts of all categories are asked.
    """
    with Console(quiet=output.quiet).working() as console:
        job = Job(console, model, pipeline=pipeline, sampling=sampling, prompt=prompt, exact_on_cpu=True)
        chosen = job.load_suite(suite, limit)
        job.open()
        is_sampled = bool(job.decoding.sampling.temperature)
        run = job.measure(chosen, repeats=2 if is_sampled else 1, warmups=0)
        rows, matcher = job.judge(run, allow_code=False)
        facts = {"suite": {"name": chosen.name, "prompts": len(chosen.prompts), "digest": chosen.digest}}
        facts |= job.facts(matcher)
        seed, device = job.decoding.sampling.seed or 0, job.pipeline.target.device
        tests = _test_sampler(console, seed, device) if statistics else []
        if output.as_json:
            console.document(_document(facts, rows, tests))
        else:
            _show(console, rows, tests, facts)
    require_lossless(rows)
    failed = next((test for test in tests if not test.is_passed), None)
    if failed is not None:
        raise GateError(f"the sampler's test `{failed.name}` went wrong: p = {failed.p_value:.3g}")


def _test_sampler(console: Console, seed: int, device: torch.device) -> list[SamplerTest]:
    from specq.bench.chi_square import sampler_tests

    with working(console) as say:
        return sampler_tests(seed=seed, device=device, say=say)


def _document(facts: Mapping[str, Any], rows: Sequence[RowReport], tests: Sequence[SamplerTest]) -> dict[str, Any]:
    return {
        **facts,
        "rows": [
            {
                "row": row.name,
                "match": row.verdicts,
                "tokens_out": row.overall.tokens_out,
                "accept_len": row.overall.accept_len,
                "differences": row.differences,
            }
            for row in rows
        ],
        "statistics": [test.record() for test in tests],
    }


def _show(console: Console, rows: Sequence[RowReport], tests: Sequence[SamplerTest], facts: Mapping[str, Any]) -> None:
    lines = [["", "answers", "tokens", "exact", "tie", "bug", "accept"]]
    for row in rows:
        counts = row.verdicts or {}
        accept = "-" if row.overall.accept_len is None else f"{row.overall.accept_len:.2f}"
        found = [str(counts.get(kind, 0)) for kind in ("exact", "tie", "bug")]
        lines.append([row.name, str(row.overall.answers), str(row.overall.tokens_out), *found, accept])
    console.line(table(lines))
    show_differences(console, rows)
    if tests:
        console.line()
        console.line(table([["sampler", "draws", "p", "expected", ""], *(_test_line(test) for test in tests)]))
    precision = facts["precision"]
    tolerance = precision["tolerance_logits"]
    judged = "no scores were needed" if tolerance is None else f"ties are within {tolerance:.2g} logits"
    console.line()
    console.line(f"decoded in {precision['decoding']}, judged in {precision['judging']}: {judged}")


def _test_line(test: SamplerTest) -> list[str]:
    expected = "to be rejected" if test.is_control else "to hold"
    return [test.name, str(test.draws), f"{test.p_value:.2g}", expected, "ok" if test.is_passed else "WRONG"]
