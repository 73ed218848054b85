"""What is profiled: loaded models with what a profile needs to know of them; study.py makes those of a mere shape."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from specq.models.causal_lm import CausalLM
from specq.profile.acceptance import Rates
from specq.profile.cost import Tree
from specq.profile.dense import load_dense
from specq.profile.observe import Mute
from specq.quant.draft_head import draft_head_bits
from specq.recipe import Recipe, Sampling
from specq.spec.decision import ProfileKey, with_settings
from specq.spec.load import load_pipeline
from specq.spec.parts import DRAFTING_ROLES
from specq.spec.pipelines import Parts
from specq.spec.sampling import Sampler
from specq.spec.session import Reader
from specq.spec.tree import MAX_NODES
from specq.tokenizer import TextStream

SEED = 0
LARGEST = Tree(MAX_NODES, 8, 10)
"""Levels and width of the largest tree that is tried, unless the recipe's is larger."""


@dataclass(frozen=True)
class Request:
    """What to profile, where, and for how long. `by_hand` are acceptance rates that are not measured then.

    `max_new_tokens` are those of a calibration answer. With `is_random` the models of the recipe are mere shapes, see
    study.py, and `prompts` are not used.
    """

    recipe: Recipe
    prompts: Sequence[str]
    device: str = "auto"
    dtype: str = "auto"
    threads: int | None = None
    offline: bool | None = None
    use_graphs: bool = True
    seconds: float | None = None
    max_new_tokens: int | None = None
    by_hand: Mapping[str, Rates] = field(default_factory=dict)
    compare_fp16: bool = False
    is_random: bool = False


@dataclass(frozen=True)
class Subject:
    """Loaded models and what a profile has to know of them.

    `encode` gives the ids of the calibration prompts that are shorter than so many tokens. `available` has every
    pipeline, with the reason when it cannot be planned. `reader` gives what makes text of an answer. `load_dense` gives
    the target without 4-bit matrices, for a cache of so many tokens.
    """

    parts: Parts
    sampler: Sampler
    stop_ids: frozenset[int]
    context: int
    encode: Callable[[int], list[list[int]]]
    available: dict[str, str | None]
    key: ProfileKey
    environment: dict[str, Any]
    load_dense: Callable[[int], CausalLM]
    reader: Callable[[], Reader] = Mute

    @property
    def device(self) -> torch.device:
        return self.parts.target.model.device

    @property
    def head_bits(self) -> tuple[int, ...]:
        """The bits that the draft heads of its heads can have."""
        heads = [seat for seat in (self.parts.target_head, self.parts.intermediate_head) if seat is not None]
        bits = {draft_head_bits(seat.head.target.device, seat.head.target.dtype) for seat in heads if seat.files}
        return min(bits, key=len, default=(16,))

    @property
    def sampling(self) -> dict[str, float]:
        """How the tokens of calibration are chosen, by the names of a recipe."""
        names = ("temperature", "top_k", "top_p", "repetition_penalty")
        return {name: getattr(self.sampler, name) for name in names}


def load_subject(request: Request, say: Callable[[str], None]) -> Subject:
    """The models of the request in memory, with room for the largest tree that is tried.

    Raises a SpecqError of the fitting kind before weights are read when models do not fit each other or the device.
    """
    # `auto` would only look for the profile that is made here.
    drafter, wanted = request.recipe.drafter, request.recipe.pipeline.name
    largest = (
        ("drafter.depth", max(LARGEST.depth, drafter.depth)),
        ("drafter.top_k", max(LARGEST.top_k, drafter.top_k)),
    )
    pipeline = load_pipeline(
        with_settings(request.recipe, largest),
        pipeline="hierarchical" if wanted == "hierarchical" else "plain",
        device=request.device,
        dtype=request.dtype,
        threads=request.threads,
        offline=request.offline,
        use_graphs=request.use_graphs,
        also=DRAFTING_ROLES,
        on_progress=say,
    )
    device, target = pipeline.target.device, pipeline.folders["target"]
    dtype = str(pipeline.target.dtype).removeprefix("torch.")
    return Subject(
        parts=pipeline.parts,
        sampler=pipeline.sampler(Sampling(seed=SEED)),
        stop_ids=pipeline.tokenizer.eos_ids,
        context=pipeline.context,
        encode=lambda room: [ids for text in request.prompts if len(ids := pipeline.encode(text)) < room],
        available=pipeline.available,
        key=ProfileKey.here(pipeline.folders, device=str(device), dtype=request.dtype, use_graphs=request.use_graphs),
        environment=pipeline.environment(),
        load_dense=lambda context: load_dense(target, device=str(device), dtype=dtype, context=context),
        reader=lambda: TextStream(pipeline.tokenizer),
    )
