"""What a benchmark times: specq's pipelines, and transformers' generate on the same weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Protocol

import torch

from specq.bench.memory import PeakMemory
from specq.bench.transformers_baseline import TransformersModel
from specq.models.causal_lm import CausalLM
from specq.models.storages import storages
from specq.recipe import Recipe, Sampling
from specq.spec.pipelines import PIPELINES
from specq.spec.session import Generation, Pipeline


@dataclass(frozen=True)
class Decoding:
    """How every contestant decodes. `is_forced`: exactly `max_new_tokens` tokens each, stops ignored."""

    sampling: Sampling
    max_new_tokens: int
    stop: tuple[str, ...] = ()
    is_forced: bool = False

    def seeded(self, index: int) -> Sampling:
        """The sampling of the prompt of this index: a seed of its own, the same for every contestant."""
        assert self.sampling.seed is not None
        return self.sampling.model_copy(update={"seed": (self.sampling.seed + index) % 2**64})


@dataclass(frozen=True)
class Answer:
    """A generation and the peak memory while it ran, less that of models it did not use (None: unknown)."""

    generation: Generation
    peak_bytes: int | None


class Contestant(Protocol):
    """Answers prompts, each with empty caches."""

    @property
    def name(self) -> str: ...

    def prepare(self, decoding: Decoding) -> None:
        """Do what only first answers do, before the clock runs."""

    def answer(self, prompt_ids: Sequence[int], decoding: Decoding, *, sampling: Sampling) -> Answer: ...


class PipelineContestant:
    """A pipeline of specq with the settings of one row; several share the models of one `Pipeline`.

    `decoded` is the pipeline that `auto` means; `idle_bytes` are those of models in memory that it does not use.
    """

    def __init__(self, name: str, pipeline: Pipeline, *, kind: str, recipe: Recipe) -> None:
        self.name, self.pipeline, self.kind, self.recipe = name, pipeline, kind, recipe
        parts = pipeline.parts
        self.decoded = pipeline.decision.pipeline if kind == "auto" and pipeline.decision else kind
        used = {role: getattr(parts, role) for role in ("target", *PIPELINES[self.decoded].needs)}
        everything = storages(vars(parts))
        self.idle_bytes = sum(everything.values()) - sum(storages(used).values())
        self._memory = PeakMemory(pipeline.target.device)

    def prepare(self, decoding: Decoding) -> None:
        self._take_over()
        self.pipeline.warm_up(decoding.seeded(0))

    def _take_over(self) -> None:
        """Make the shared models this row's."""
        self.pipeline.parts.rollback(0)
        self.pipeline.recipe = self.recipe
        self.pipeline.use(self.kind)

    def answer(self, prompt_ids: Sequence[int], decoding: Decoding, *, sampling: Sampling) -> Answer:
        pipeline = self.pipeline
        self._take_over()
        self._memory.restart()
        stream = pipeline.stream(
            prompt_ids,
            sampling=sampling,
            max_new_tokens=decoding.max_new_tokens,
            stop=decoding.stop,
            ignore_stop_ids=decoding.is_forced,
        )
        for _ in stream:
            pass
        peak = self._memory.bytes()
        return Answer(stream.result, None if peak is None else peak - self.idle_bytes)


class TransformersContestant:
    """transformers' generate, alone or assisted by the same intermediate model; its text need not equal ours."""

    def __init__(
        self, name: str, model: TransformersModel, pipeline: Pipeline, *, assistant: TransformersModel | None = None
    ) -> None:
        self.name, self.model, self.assistant, self.pipeline = name, model, assistant, pipeline

    def prepare(self, decoding: Decoding) -> None:
        """Nothing: its first answer is all there is to do."""

    def answer(self, prompt_ids: Sequence[int], decoding: Decoding, *, sampling: Sampling) -> Answer:
        tokenizer = self.pipeline.tokenizer
        room = self.pipeline.context - len(prompt_ids)
        began = perf_counter()
        ids, (first, last) = self.model.generate(
            prompt_ids,
            sampling=sampling,
            max_new_tokens=min(decoding.max_new_tokens, room),
            stop_ids=() if decoding.is_forced else sorted(tokenizer.eos_ids),
            assistant=self.assistant,
        )
        is_stopped = not decoding.is_forced and ids[-1] in tokenizer.eos_ids
        text = tokenizer.decode(ids[:-1] if is_stopped else ids)
        seconds, later = last[0] - first[0], len(ids) - first[1]
        generation = Generation(
            text=text,
            token_ids=tuple(ids),
            tokens_out=len(ids),
            finish_reason="stop" if is_stopped else "length",
            prompt_tokens=len(prompt_ids),
            reused_tokens=0,
            ttft_s=first[0] - began,
            decode_tps=later / seconds if later > 0 and seconds > 0 else None,
            e2e_tps=len(ids) / (last[0] - began),
            accept_len=None,
            accept_len_inner=None,
            rounds=0,
            draft_ms=0.0,
            intermediate_ms=0.0,
            verify_ms=0.0,
            overhead_ms=0.0,
            pipeline=self.name,
            seed=sampling.seed or 0,
        )
        return Answer(generation, None)


def transformers_dtypes(model: CausalLM) -> tuple[torch.dtype, ...]:
    """The number formats the outside baseline is tried in: ours, and on a CPU both, since the best is not known."""
    return (torch.float32, torch.bfloat16) if model.device.type == "cpu" else (model.dtype,)
