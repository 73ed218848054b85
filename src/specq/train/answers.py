"""What the target writes for a drafter to learn from: answers, and prompts of its own, by way of the cache."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch

from specq.models.causal_lm import CausalLM
from specq.models.memory import kv_bytes_per_token
from specq.storage import cache_dir
from specq.tokenizer import Tokenizer
from specq.train import own_prompts
from specq.train.data import AnswerStore, Sequences, fitting_prompts
from specq.train.generate import AnswerWriter
from specq.train.job import Job
from specq.train.memory import MEMORY_HINT, left_on, require_left

ANSWERS_AT_ONCE = {"cpu": 16, "cuda": 2048}

CACHE_PART = 4
"""Answers written at once may take a quarter of a GPU's memory for K and V. Of all of it, not of what is free: the
number decides which random numbers an answer gets, and answers in the cache are found again by it."""

log = logging.getLogger("specq")

Say = Callable[[str], None]


def written_answers(
    job: Job, model: CausalLM, tokenizer: Tokenizer, prompts: list[list[int]], digest: str, say: Say
) -> Sequences:
    """The target's answers, from the cache as far as they are there: both kinds of drafter share them."""
    settings = job.settings
    return _written(
        model,
        prompts,
        vocab=tokenizer.size,
        stop_ids=tokenizer.eos_ids,
        shared={
            "target": digest,
            "temperatures": settings.temperatures,
            "max_new_tokens": settings.max_new_tokens,
            "seed": settings.seed,
        },
        say=lambda text: say(f"answers: {text}"),
    )


def written_prompts(
    job: Job, model: CausalLM, tokenizer: Tokenizer, digest: str, *, without: Sequence[str], say: Say
) -> list[list[int]]:
    """The ids of prompts that the target wrote, as many as are whole, new and short enough of `own_prompts`."""
    opening, ends = own_prompts.user_opening(tokenizer)
    written = _written(
        model,
        [opening] * job.settings.own_prompts,
        vocab=tokenizer.size,
        stop_ids=ends,
        shared={
            "target": digest,
            "temperatures": (own_prompts.TEMPERATURE,),
            "max_new_tokens": own_prompts.MAX_TOKENS,
            "seed": job.settings.seed,
        },
        say=lambda text: say(f"prompts: {text}"),
    )
    texts = own_prompts.finished_prompts(tokenizer, written, ends, without=without)
    fitting = fitting_prompts(tokenizer, texts, longest=job.settings.length - 1)
    count = f"{len(fitting)} of the {job.settings.own_prompts} that the target wrote are whole, new and short enough"
    say(f"prompts: {count}")
    if not fitting:
        log.warning(f"--own-prompts: {count}")
    return fitting


def _written(
    model: CausalLM,
    prompts: list[list[int]],
    *,
    vocab: int,
    stop_ids: frozenset[int],
    shared: dict[str, Any],
    say: Say,
) -> Sequences:
    """What the target writes after each of `prompts`; `shared` is what text in the cache must have been made with."""
    longest, seed = int(shared["max_new_tokens"]), int(shared["seed"])
    shard = _answers_at_once(model, model.device.type, max(map(len, prompts)) + longest)
    name = hashlib.sha256(json.dumps({**shared, "prompts": prompts, "shard": shard}).encode()).hexdigest()[:32]
    writer = AnswerWriter(model, vocab=vocab, stop_ids=stop_ids, max_new_tokens=longest)

    def write(part: Sequence[list[int]], temperature: float, number: int) -> list[list[int]]:
        slots = max(map(len, part)) + longest
        require_left(
            _kv_bytes(model, slots) * len(part),
            f"{len(part)} texts of up to {slots} tokens, written at once,",
            device=model.device,
            left=left_on(model.device),
            hint=MEMORY_HINT,
        )
        return writer.answers(part, temperature=temperature, seed=(seed << 20) + number)

    store = AnswerStore(cache_dir() / "answers" / name)
    return store.collect(prompts, write, temperatures=shared["temperatures"], shard=shard, say=say)


def _answers_at_once(model: CausalLM, device: str, slots: int) -> int:
    """Prompts answered together: a fixed number, less where K and V would crowd the GPU (then a power of two)."""
    most = ANSWERS_AT_ONCE[device]
    if device == "cpu":
        return most
    fitting = torch.cuda.mem_get_info(model.device)[1] // CACHE_PART // _kv_bytes(model, slots)
    return min(most, 1 << max(0, int(fitting).bit_length() - 1))


def _kv_bytes(model: CausalLM, slots: int) -> int:
    """Bytes of K and V of one text."""
    return kv_bytes_per_token(model.spec, model.dtype) * slots
