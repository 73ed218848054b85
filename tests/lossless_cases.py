"""What the property tests run: prompts, samplers and recipes, the parts of a pipeline, and a drafter that knows."""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch
from hypothesis import strategies as st
from tiny_models import VOCAB, make_head

from specq.models.causal_lm import CausalLM
from specq.models.eagle import EagleHead
from specq.recipe import Recipe
from specq.spec.drafters import NoDrafter
from specq.spec.eagle_tree import EagleTree
from specq.spec.pipelines import HeadSeat, Parts, Seat
from specq.spec.sampling import Sampler
from specq.spec.speculator import Speculator, StopRule, generate
from specq.spec.tree import MAX_NODES, DraftTree, chain
from specq.spec.verifier import Verifier

CONTEXT = 160

prompts = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=24)
samplers = st.builds(
    Sampler,
    temperature=st.sampled_from([0.0, 0.7, 1.0]),
    top_k=st.sampled_from([0, 5]),
    top_p=st.sampled_from([1.0, 0.9]),
    repetition_penalty=st.sampled_from([1.0, 1.3]),
    seed=st.integers(0, 2**40),
    vocab=st.sampled_from([None, VOCAB - 3]),
)
kinds = st.sampled_from(["same", "close", "far"])


def make_recipe(*, draft_length: int = 5, nodes: int = 20, depth: int = 3, top_k: int = 4, act_bits: int = 8) -> Recipe:
    return Recipe.model_validate(
        {
            "target": "tiny",
            "pipeline": {"draft_length": draft_length, "min_draft": draft_length, "act_bits": act_bits},
            "drafter": {"nodes": nodes, "depth": depth, "top_k": top_k},
        }
    )


recipes = st.builds(
    make_recipe,
    draft_length=st.integers(1, 12) | st.just(56),
    nodes=st.integers(2, 64),
    depth=st.integers(1, 6),
    top_k=st.integers(1, 6),
    act_bits=st.sampled_from([8, 4]),
)


def seat(model: CausalLM, *, limit: int = CONTEXT, head: EagleHead | None = None) -> Seat:
    return Seat(model, model.new_cache(limit + MAX_NODES, features=head.spec.features if head else None))


def head_seat(head: EagleHead, *, limit: int = CONTEXT) -> HeadSeat:
    return HeadSeat(head, head.new_cache(limit + MAX_NODES + 36))


def make_parts(target: CausalLM, intermediate: CausalLM, *, limit: int = CONTEXT) -> Parts:
    """Every part: an EAGLE-2 head for the target, a trimmed EAGLE-3 head for the intermediate."""
    head, inner = make_head(target), make_head(intermediate, eagle3=True, trimmed=VOCAB - 8)
    return Parts(
        target=seat(target, head=head, limit=limit),
        intermediate=seat(intermediate, head=inner, limit=limit),
        target_head=head_seat(head, limit=limit),
        intermediate_head=head_seat(inner, limit=limit),
    )


def decode(
    speculator: Speculator, prompt: Sequence[int], count: int, *, stop_ids: frozenset[int] = frozenset()
) -> list[int]:
    rule = StopRule(start=len(prompt), stop_ids=stop_ids, max_new_tokens=count, context_limit=CONTEXT)
    return list(generate(speculator, list(prompt), rule))


def plain_text(target: CausalLM, sampler: Sampler, prompt: Sequence[int], count: int) -> list[int]:
    return decode(Speculator(NoDrafter(), seat(target).verifier(sampler)), prompt, count)


def assert_cache_holds(speculator: Speculator, context: Sequence[int]) -> None:
    """Every cache of the pipeline holds a prefix of the context: K and V equal those of a fresh run over it."""
    for level in speculator.levels():
        model, cache = level.verifier.model, level.verifier.cache
        assert cache.length < len(context)
        fresh = Verifier(model, model.new_cache(CONTEXT + MAX_NODES), Sampler())
        if cache.length:
            fresh.prefill(list(context[: cache.length]))
            torch.testing.assert_close(cache.k[:, :, : cache.length], fresh.cache.k[:, :, : cache.length])
            torch.testing.assert_close(cache.v[:, :, : cache.length], fresh.cache.v[:, :, : cache.length])
        if isinstance(level.drafter, EagleTree):
            assert_head_holds(level.drafter, context)


def assert_head_holds(drafter: EagleTree, context: Sequence[int]) -> None:
    """The head's rows are those of true features of the context, one fewer than the tokens kept."""
    head, cache, model = drafter.head, drafter.cache, drafter.verifier.model
    n = cache.length
    assert n < len(context)
    if n == 0:
        return
    fresh = Verifier(model, model.new_cache(CONTEXT + MAX_NODES, features=head.spec.features), Sampler())
    fresh.prefill(list(context[:n]))
    rows = head.new_cache(CONTEXT)
    assert fresh.cache.features is not None
    with torch.inference_mode():
        head(chain(context[1 : n + 1]), head.enter(fresh.cache.features[:n]), rows)
    torch.testing.assert_close(cache.k[:, :, :n], rows.k[:, :, :n])
    torch.testing.assert_close(cache.v[:, :, :n], rows.v[:, :, :n])


class OracleTree(NoDrafter):
    """Trees that hold the true continuation down to a random depth, among decoys and at random places."""

    def __init__(self, truth: Sequence[int], *, seed: int, is_chain: bool = False) -> None:
        self.truth, self.draws, self.is_chain = list(truth), random.Random(seed), is_chain

    def propose(self, context: Sequence[int], *, max_nodes: int, max_depth: int) -> DraftTree:
        tokens: list[int] = []
        parents: list[int] = []
        depth: list[int] = []
        true_node, true_depth = -1, 0
        for _ in range(self.draws.randint(0, min(20, max_nodes))):
            grow_truth = self.draws.random() < 0.5 and len(context) + true_depth < len(self.truth)
            parent = true_node if grow_truth or self.is_chain else self.draws.randint(-1, len(tokens) - 1)
            level = 1 if parent < 0 else depth[parent] + 1
            if level > max_depth:
                continue
            token = self.truth[len(context) + true_depth] if grow_truth else self.draws.randrange(VOCAB)
            if self.is_chain or grow_truth:
                true_node, true_depth = len(tokens), true_depth + 1
            tokens.append(token)
            parents.append(parent)
            depth.append(level)
        return DraftTree.from_lists(tokens, parents)
