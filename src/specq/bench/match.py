"""Verdicts on answers, with the judge's model loaded only when some answer differs from plain decoding's."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch

from specq.bench.contestants import Decoding
from specq.errors import NotEnoughMemoryError
from specq.models.causal_lm import CausalLM
from specq.models.loader import check_memory, keeps_4_bits, load_model
from specq.recipe import Sampling
from specq.spec.lossless import Ending, Judge, Verdict, rounding_error, same_answer, tolerance_for
from specq.spec.session import Generation, Pipeline

log = logging.getLogger("specq")

CALIBRATING = 4
"""Answers of plain decoding from which the rounding error is measured."""


@dataclass(frozen=True)
class Asked:
    """A prompt and how it was sampled, with what plain decoding answered."""

    prompt_ids: tuple[int, ...]
    sampling: Sampling
    plain: Generation


class Matcher:
    """Compares answers with plain decoding's; `path` is the target's folder and `dtype` the flag it was loaded with."""

    def __init__(
        self,
        pipeline: Pipeline,
        path: Path,
        *,
        dtype: str,
        decoding: Decoding,
        asked: Sequence[Asked],
        say: Callable[[str], None] = lambda text: None,
    ) -> None:
        self._pipeline, self._path, self._decoding = pipeline, path, decoding
        self._asked, self._say = list(asked), say
        self.working = working_precision(pipeline.target, dtype)
        self.tolerance: float | None = None
        self.error: float | None = None

    @property
    def precise(self) -> str:
        """The precision answers are judged in."""
        return "float64" if self.working in ("float32", "float64") else "float32"

    def verdict(self, asked: Asked, answer: Generation) -> Verdict:
        """Raises NotEnoughMemoryError when the tokens differ and a copy in higher precision does not fit."""
        known = same_answer(asked.plain, answer)
        if known is not None:
            return known
        return self._judge.compare(
            asked.prompt_ids,
            asked.plain,
            answer,
            sampler=self._pipeline.sampler(asked.sampling),
            ending=self._ending(len(asked.prompt_ids)),
        )

    def _ending(self, prompt_tokens: int) -> Ending:
        decoding = self._decoding
        stop_ids = frozenset[int]() if decoding.is_forced else self._pipeline.tokenizer.eos_ids
        return Ending(stop_ids, min(decoding.max_new_tokens, self._pipeline.context - prompt_tokens))

    @cached_property
    def _judge(self) -> Judge:
        target = self._pipeline.target
        self._say(f"loading the target in {self.precise} to judge what differs")
        context = max(len(asked.prompt_ids) + len(asked.plain.token_ids) for asked in self._asked)
        device = str(target.device)
        if target.device.type == "cuda":
            torch.cuda.empty_cache()  # what answers took is free, but the device counts it as taken
        check_memory([(target.spec, self._path, context)], device=device, dtype=self.precise)
        precise = self._load(device)
        self.error = max(
            rounding_error(
                target, precise, asked.prompt_ids, asked.plain.token_ids, self._pipeline.sampler(asked.sampling)
            )
            for asked in self._asked[:CALIBRATING]
        )
        self.tolerance = tolerance_for(self.working, self.error)
        if 2 * self.error > self.tolerance:
            log.warning(
                f"scores in {self.working} are off by {self.error:.3g} logits, more than that precision explains"
            )
        return Judge(precise, tolerance=self.tolerance)

    def _load(self, device: str) -> CausalLM:
        """The target in higher precision; what was measured before must not be lost for want of memory."""
        try:
            return load_model(self._path, device=device, dtype=self.precise)
        except torch.cuda.OutOfMemoryError as error:
            raise NotEnoughMemoryError(f"the target does not fit in {self.precise} beside what is loaded") from error


def working_precision(model: CausalLM, dtype: str) -> str:
    """The lowest precision inside the target: 4-bit products on a CPU take bfloat16, whatever surrounds them."""
    if keeps_4_bits(model.spec, dtype=dtype, device=model.device.type):
        return "bfloat16"
    return str(model.dtype).removeprefix("torch.")
