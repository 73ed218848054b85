"""Pipelines whose rounds run on kernels, in the interpreter (tests/kernels) and on a GPU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from factories import WeightsInMemory
from step_cases import fast_model
from tiny_models import make_head

from specq.models.causal_lm import CausalLM
from specq.models.device_step import DeviceStep
from specq.models.eagle import EagleHead
from specq.recipe import Recipe
from specq.spec.eagle_tree import EagleTree
from specq.spec.pipelines import PIPELINES, HeadSeat, Parts, Seat, tree_shape
from specq.spec.sampling import Sampler
from specq.spec.speculator import Speculator, StopRule, generate
from specq.spec.tree import MAX_NODES, DraftTree
from specq.spec.verifier import Verifier

LIMIT = 192
SAMPLERS: Mapping[str, Sampler] = {
    "greedy": Sampler(vocab=300),
    "noise": Sampler(temperature=0.8, seed=2**40 + 3, vocab=300),
    # Random models are flat: at a higher temperature top-p keeps more than the kernels look at.
    "top-p": Sampler(temperature=0.2, top_p=0.9, seed=5),
    "top-k, penalty": Sampler(temperature=1.0, top_k=20, top_p=0.95, repetition_penalty=1.2, seed=9),
}


def make_recipe(*, nodes: int = 20, depth: int = 3, top_k: int = 4, draft_length: int = 5) -> Recipe:
    drafter = {"nodes": nodes, "depth": depth, "top_k": top_k}
    pipeline = {"draft_length": draft_length, "min_draft": draft_length}
    return Recipe.model_validate({"target": "tiny", "pipeline": pipeline, "drafter": drafter})


def make_parts(
    config: Mapping[str, Any],
    source: WeightsInMemory | None = None,
    *,
    dtype: str,
    device: str = "cpu",
    use_graphs: bool = True,
) -> Parts:
    """Every part on kernels: an EAGLE-2 head for the target, a trimmed EAGLE-3 head for an equal intermediate."""
    target, intermediate = (fast_model(config, source, dtype=dtype, device=device) for _ in range(2))
    for model in (target, intermediate):
        model.device_step = DeviceStep(model, use_graphs=use_graphs)
    head, inner = make_head(target), make_head(intermediate, eagle3=True, trimmed=200)
    return Parts(
        target=seat(target, head),
        intermediate=seat(intermediate, inner),
        target_head=HeadSeat(head, head.new_cache(LIMIT + 2 * MAX_NODES)),
        intermediate_head=HeadSeat(inner, inner.new_cache(LIMIT + 2 * MAX_NODES)),
    )


def seat(model: CausalLM, head: EagleHead | None = None) -> Seat:
    return Seat(model, model.new_cache(LIMIT + MAX_NODES, features=head.spec.features if head else None))


@dataclass(frozen=True)
class Decoded:
    """A text, and of every decode round the draft (without nodes that nothing takes) and what was decided."""

    tokens: list[int]
    rounds: list[tuple[list[int], list[int], list[int]]]


def decode(parts: Parts, name: str, sampler: Sampler, recipe: Recipe, prompt: Sequence[int], count: int) -> Decoded:
    """What a pipeline makes of a prompt, from empty caches."""
    parts.rollback(0)
    speculator = PIPELINES[name].build(parts, sampler, recipe)
    rounds: list[tuple[list[int], list[int], list[int]]] = []

    def note(tree: DraftTree, decided: list[int]) -> None:
        kept = tree.tokens >= 0
        rounds.append((tree.tokens[kept].tolist(), tree.parents[kept].tolist(), decided))

    for level in speculator.levels():
        level.observer = note
    rule = StopRule(start=len(prompt), stop_ids=frozenset(), max_new_tokens=count, context_limit=LIMIT)
    return Decoded(list(generate(speculator, list(prompt), rule)), rounds)


def reference(parts: Parts, sampler: Sampler, recipe: Recipe) -> Speculator:
    """The pipeline eagle2 of these parts with the rounds of lists: the same step, everything else its definition."""
    target, head = parts.target, parts.target_head
    assert head is not None
    verifier = Verifier(target.model, target.cache, sampler)
    return Speculator(EagleTree(head.head, head.cache, verifier, tree_shape(recipe)), verifier)
