"""The drafted tree against one that is built path by path, every path run alone from the start."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import VOCAB, make_head, make_model

from specq.models.causal_lm import CausalLM
from specq.models.eagle import EagleHead
from specq.spec.eagle_tree import EagleTree, TreeShape
from specq.spec.sampling import Sampler, Seen
from specq.spec.tree import DraftTree, chain
from specq.spec.verifier import Verifier

TARGET = make_model()
HEADS = {
    "eagle2": make_head(TARGET),
    "trimmed": make_head(TARGET, trimmed=20),
    "eagle3": make_head(TARGET, eagle3=True),
    "eagle3-trimmed": make_head(TARGET, eagle3=True, trimmed=20),
}


def filled_verifier(model: CausalLM, head: EagleHead, context: Sequence[int], sampler: Sampler) -> Verifier:
    verifier = Verifier(model, model.new_cache(200, features=head.spec.features), sampler)
    with torch.inference_mode():
        verifier.prefill(list(context))
    return verifier


def state_after(head: EagleHead, features: torch.Tensor, context: Sequence[int], path: Sequence[int]) -> torch.Tensor:
    """The predicted state after `path`: true rows as long as there are features, then one row at a time, alone."""
    tokens, cache = [*context, *path], head.new_cache(200)
    known = features.shape[0]
    states = head.enter(features)
    out = head(chain(tokens[1 : known + 1]), states, cache)
    cache.keep(range(known))
    state = out[-1:]
    for token in tokens[known + 1 :]:
        state = head(chain([token]), state, cache)
        cache.keep([0])
    return state


def reference_paths(
    head: EagleHead, features: torch.Tensor, context: list[int], shape: TreeShape, sampler: Sampler
) -> set[tuple[int, ...]]:
    """The kept paths, from scores of single paths and Python sorting."""

    def children(path: tuple[int, ...]) -> list[tuple[float, tuple[int, ...]]]:
        logits = head.logits(state_after(head, features, context, path))
        seen = Seen(torch.tensor([*context, *path]), torch.tensor([0]), torch.zeros(1, 1, dtype=torch.bool))
        position = torch.tensor([len(context) + len(path)])
        scores, ids = sampler.guesses(logits, position, seen, count=shape.top_k, noise_scale=shape.noise_scale)
        return [(float(s), (*path, int(t))) for s, t in zip(scores[0], ids[0], strict=True) if s > -torch.inf]

    pool = level = children(())
    for _ in range(1, shape.depth):
        grown = [(score + more, path) for score, parent in level for more, path in children(parent)]
        pool = pool + grown
        level = sorted(grown, key=lambda item: -item[0])[: shape.top_k]
    best = sorted(pool, key=lambda item: -item[0])[: shape.nodes - 1]
    return {path for _, path in best}


def paths_of(tree: DraftTree) -> set[tuple[int, ...]]:
    paths: list[tuple[int, ...]] = []
    for token, parent in zip(tree.tokens.tolist(), tree.parents.tolist(), strict=True):
        paths.append((*(paths[parent] if parent >= 0 else ()), token))
    assert len(set(paths)) == len(paths)
    return set(paths)


@pytest.mark.parametrize("kind", HEADS)
@settings(max_examples=8, deadline=None)
@given(
    context=st.lists(st.integers(0, VOCAB - 1), min_size=4, max_size=12),
    shape=st.builds(TreeShape, nodes=st.integers(2, 30), depth=st.integers(1, 4), top_k=st.integers(1, 4)),
    temperature=st.sampled_from([0.0, 0.8]),
    penalty=st.sampled_from([1.0, 1.3]),
    missing=st.integers(0, 2),
)
def test_the_tree_is_the_one_of_single_paths(
    kind: str, context: list[int], shape: TreeShape, temperature: float, penalty: float, missing: int
) -> None:
    head = HEADS[kind]
    sampler = Sampler(temperature=temperature, top_p=0.95, repetition_penalty=penalty, seed=4)
    verifier = filled_verifier(TARGET, head, context[: -1 - missing], sampler)
    with torch.inference_mode():
        drafter = EagleTree(head, head.new_cache(260), verifier, shape)
        got = drafter.propose(context, max_nodes=63, max_depth=63)
        assert verifier.cache.features is not None
        features = verifier.cache.features[: verifier.cache.length]
        assert paths_of(got) == reference_paths(head, features, context, shape, sampler)
        assert drafter.cache.length == verifier.cache.length  # predicted rows are not kept


def test_caps_on_nodes_and_depth_hold() -> None:
    head = HEADS["eagle2"]
    verifier = filled_verifier(TARGET, head, [1, 2, 3], Sampler())
    drafter = EagleTree(head, head.new_cache(260), verifier, TreeShape(nodes=60, depth=5, top_k=6))
    with torch.inference_mode():
        tree = drafter.propose([1, 2, 3, 4], max_nodes=17, max_depth=2)
        assert len(tree) == 17
        assert int(tree.depths().max()) == 1
        assert len(drafter.propose([1, 2, 3, 4], max_nodes=17, max_depth=0)) == 0


def test_long_prompts_fill_the_head_in_chunks_that_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    head, context = HEADS["eagle2"], [(5 * i) % VOCAB for i in range(90)]
    verifier = filled_verifier(TARGET, head, context[:-1], Sampler())
    shape = TreeShape(nodes=20, depth=3, top_k=4)

    def draft() -> tuple[DraftTree, torch.Tensor]:
        drafter = EagleTree(head, head.new_cache(260), verifier, shape)
        with torch.inference_mode():
            return drafter.propose(context, max_nodes=63, max_depth=63), drafter.cache.k[:, :, :89].clone()

    whole, rows = draft()
    monkeypatch.setattr("specq.spec.eagle_tree.PREFILL_CHUNK", 16)
    parts, chunked_rows = draft()
    assert paths_of(whole) == paths_of(parts)
    torch.testing.assert_close(rows, chunked_rows)
