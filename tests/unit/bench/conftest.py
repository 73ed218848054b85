"""Pipelines over tiny models, and a clock that only moves when a model runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from factories import CHAT_TEMPLATE, tiny_model, write_tokenizer

from specq.models.causal_lm import CausalLM, Nodes, Output
from specq.recipe import Recipe, Sampling
from specq.spec.pipelines import Parts, Seat
from specq.spec.session import Pipeline
from specq.spec.tree import MAX_NODES
from specq.tokenizer import Tokenizer


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = write_tokenizer(tmp_path_factory.mktemp("tokenizer"), chat_template=CHAT_TEMPLATE)
    return Tokenizer.load(folder)


@pytest.fixture
def make_pipeline(tokenizer: Tokenizer) -> Callable[..., Pipeline]:
    """A pipeline over a target and, if given, an intermediate; float64 and random by default."""

    def make(target: CausalLM | None = None, intermediate: CausalLM | None = None, *, context: int = 300) -> Pipeline:
        def seat(model: CausalLM) -> Seat:
            return Seat(model, model.new_cache(context + MAX_NODES))

        return Pipeline(
            recipe=Recipe.model_validate({"target": "tiny", "pipeline": {"draft_length": 4}}),
            parts=Parts(seat(target or tiny_model()), None if intermediate is None else seat(intermediate)),
            tokenizer=tokenizer,
            context=context,
            defaults=Sampling(),
            models={"target": ("tiny", None)},
        )

    return make


class Clock:
    """Seconds that pass only where a test says so."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    for module in ("spec.session", "spec.stopwatch", "bench.run"):
        monkeypatch.setattr(f"specq.{module}.perf_counter", clock)
    return clock


@pytest.fixture
def timed_forward(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[CausalLM, int], float]], None]:
    """Makes every forward pass take the seconds that a function of (model, nodes) says."""
    original = CausalLM.forward

    def install(seconds: Callable[[CausalLM, int], float]) -> None:
        def forward(self: CausalLM, nodes: Nodes, *arguments: object, **options: object) -> Output:
            clock.now += seconds(self, len(nodes.tokens))
            return original(self, nodes, *arguments, **options)  # type: ignore[arg-type]

        monkeypatch.setattr(CausalLM, "forward", forward)

    return install


@pytest.fixture
def suite_file(tmp_path: Path) -> Callable[[Sequence[str]], Path]:
    """A .jsonl file of these lines."""

    def write(lines: Sequence[str]) -> Path:
        path = tmp_path / "suite.jsonl"
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")
        return path

    return write
