"""What bench and verify have in common: which rows run, the models in memory, answers and their verdicts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

from specq.cli.console import Console
from specq.cli.options import MAX_NEW_TOKENS, Overflow, PromptOptions, SamplingOptions, SeveralPipelines, Thinking, flag
from specq.errors import NotEnoughMemoryError, UsageError

if TYPE_CHECKING:
    from specq.bench.contestants import Decoding
    from specq.bench.match import Asked, Matcher
    from specq.bench.prediction import Comparison
    from specq.bench.prompts import Suite
    from specq.bench.report import RowReport
    from specq.bench.run import Asking, Run, Sample
    from specq.bench.session import Loading, Plan
    from specq.recipe import Recipe
    from specq.spec.lossless import Verdict

PROMPTS = "Prompts"
RECIPE_KEYS = {"target", "intermediate", "drafter", "pipeline", "context"}
"""The sections of a recipe that a measurement depends on."""


SuiteName = Annotated[
    str,
    flag(
        "--suite",
        metavar="bundled|FILE|hub:FILE",
        panel=PROMPTS,
        help="specq's own prompts (default); a Spec-Bench, MT-bench, HumanEval or GSM8K file, also of a Hub dataset.",
    ),
]
Limit = Annotated[
    int | None, flag("--limit", metavar="N", min=1, panel=PROMPTS, help="At most N prompts, in turn of every category.")
]


@contextmanager
def working(console: Console) -> Iterator[Callable[[str], None]]:
    """Something to say progress with; its line is gone when the block ends."""
    progress = console.progress()
    try:
        yield progress
    finally:
        progress.clear()


class Job:
    """A measurement in the making, shared by bench and verify; `open` loads the models."""

    def __init__(
        self,
        console: Console,
        model: str | None,
        *,
        pipeline: SeveralPipelines,
        sampling: SamplingOptions,
        prompt: PromptOptions,
        exact_on_cpu: bool = False,
        is_profiled: bool = False,
    ) -> None:
        """With `exact_on_cpu` the number format is float32 on a CPU unless the flags say otherwise.

        `is_profiled` takes the sizes of every pipeline from the stored profile.
        """
        from specq.bench.session import Loading, plan_rows, profiled_rows
        from specq.bench.sweep import split_sweeps
        from specq.recipe import resolve
        from specq.spec.load import choose_device

        self.console, self.prompt, self._template = console, prompt, prompt.template()
        self.max_new_tokens = sampling.max_new_tokens or MAX_NEW_TOKENS
        fixed, swept = split_sweeps(pipeline.set or [])
        overrides = [*replace(pipeline, set=fixed).overrides(), *sampling.overrides()]

        def with_more(more: Sequence[str]) -> Recipe:
            return resolve(model, overrides=[*overrides, *more])

        dtype = pipeline.dtype.value
        if exact_on_cpu and dtype == "auto" and choose_device(pipeline.device) == "cpu":
            dtype = "float32"
        self.loading: Loading = Loading(
            pipeline.device, dtype, pipeline.threads, pipeline.offline or None, not pipeline.no_graphs
        )
        with working(console) as say:
            self.plan: Plan = plan_rows(with_more, self.loading, asked=pipeline.pipeline, swept=swept, say=say)
        if is_profiled:
            if swept:
                raise UsageError(f"`--profiled` sets `{next(iter(swept))}` itself", hint="leave one of them out")
            self.plan = profiled_rows(self.plan, with_more, self.loading)

    def load_suite(self, source: str, limit: int | None) -> Suite:
        """The prompts to ask."""
        from specq.bench.prompts import load_suite

        return load_suite(source, offline=self.loading.offline).take(limit)

    def open(self, *, is_forced: bool = False) -> None:
        """Loads the models of all rows."""
        from specq.bench.contestants import Decoding
        from specq.bench.run import Asking
        from specq.bench.session import exact_sampling, open_models
        from specq.cli.answer import use_template

        with working(self.console) as say:
            self.pipeline, self.contestants = open_models(self.plan, self.loading, say=say)
        prompt = self.prompt
        use_template(self.pipeline, self._template, prompt)
        self.decoding: Decoding = Decoding(
            exact_sampling(self.plan.recipe), self.max_new_tokens, tuple(prompt.stop or ()), is_forced
        )
        self.asking: Asking = Asking(
            self.pipeline,
            is_raw=prompt.raw,
            system=prompt.system,
            thinking=False if prompt.thinking is Thinking.off else None,
            drops_oldest=prompt.overflow is Overflow.drop_oldest,
        )

    def measure(self, suite: Suite, *, repeats: int, warmups: int, against: bool = False) -> Run:
        """The answers of every row, and of transformers when asked for."""
        from specq.bench.run import run_benchmark
        from specq.bench.session import transformers_contestants

        with working(self.console) as say:
            others = transformers_contestants(self.plan, self.contestants, self.loading, say=say) if against else []
            return run_benchmark(
                [*self.contestants, *others],
                suite.prompts,
                self.asking,
                self.decoding,
                repeats=repeats,
                warmups=warmups,
                say=say,
            )

    def judge(self, run: Run, *, allow_code: bool) -> tuple[list[RowReport], Matcher]:
        """The reports of all rows, with verdicts on every answer and the right ones counted."""
        from specq.bench.accuracy import is_right
        from specq.bench.match import Asked, Matcher
        from specq.bench.report import report_rows
        from specq.bench.session import target_path

        base = self.contestants[0].name
        plain = {
            (sample.prompt.id, sample.turn): Asked(
                sample.prompt_ids, self.decoding.seeded(sample.index), sample.generation
            )
            for sample in run.samples
            if sample.contestant == base and sample.repeat == 0
        }
        path = target_path(self.plan.recipe, self.loading)
        asked = list(plain.values())
        with working(self.console) as say:
            matcher = Matcher(
                self.pipeline, path, dtype=self.loading.dtype, decoding=self.decoding, asked=asked, say=say
            )
            ours = {contestant.name for contestant in self.contestants}
            verdicts = {
                sample.order: self._verdict(matcher, plain[sample.prompt.id, sample.turn], sample)
                for sample in run.samples
                if sample.contestant in ours
            }
            right = {}
            for sample in run.samples:
                is_last = sample.turn == len(sample.prompt.turns) - 1 and sample.repeat == 0
                found = is_right(sample.prompt, sample.generation.text, allow_code=allow_code) if is_last else None
                if found is not None:
                    right[sample.order] = found
        names = list(dict.fromkeys([*(c.name for c in self.contestants), *(s.contestant for s in run.samples)]))
        return report_rows(names, run.samples, verdicts=verdicts, right=right), matcher

    def _verdict(self, matcher: Matcher, asked: Asked, sample: Sample) -> Verdict | None:
        try:
            return matcher.verdict(asked, sample.generation)
        except NotEnoughMemoryError as error:
            self.console.note(f"warning: {sample.prompt.id} differs and is not judged: {error.message}")
            return None

    def predictions(self, rows: Sequence[RowReport]) -> Comparison | None:
        """What the stored profile of these models predicted of the rows; None without a profile, or none of them."""
        from specq.bench.prediction import compare
        from specq.bench.session import profile_key

        forecasts = profile_key(self.plan, self.loading).forecasts()
        return None if forecasts is None else compare(forecasts, self.contestants, rows)

    def facts(self, matcher: Matcher) -> dict[str, Any]:
        """What a reader has to know to believe and to repeat the numbers."""
        return {
            "max_new_tokens": self.decoding.max_new_tokens,
            "sampling": self.decoding.sampling.model_dump(),
            "context": self.pipeline.context,
            "recipe": self.plan.recipe.model_dump(exclude_none=True, include=RECIPE_KEYS),
            "precision": {
                "decoding": matcher.working,
                "judging": matcher.precise,
                "rounding_error_logits": matcher.error,
                "tolerance_logits": matcher.tolerance,
            },
            "products": "torch" if self.pipeline.target.device_step is None else "kernels",
            "environment": self.pipeline.environment(),
        }
