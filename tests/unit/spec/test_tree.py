"""Tree functions against brute-force enumeration of paths (P4)."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from specq.spec.tree import DraftTree, chain, graft, walk


@st.composite
def trees(draw: st.DrawFn, max_nodes: int = 24, vocab: int = 4) -> tuple[list[int], list[int]]:
    n = draw(st.integers(0, max_nodes))
    tokens = draw(st.lists(st.integers(0, vocab - 1), min_size=n, max_size=n))
    parents = [draw(st.integers(-1, node - 1)) for node in range(n)]
    return tokens, parents


def path_to(parents: list[int], node: int) -> list[int]:
    path = []
    while node >= 0:
        path.append(node)
        node = parents[node]
    return path[::-1]


@given(trees())
def test_mask_and_depths_equal_enumerated_paths(tree: tuple[list[int], list[int]]) -> None:
    tokens, parents = tree
    built = DraftTree.from_lists(tokens, parents)
    mask, depths = built.ancestor_mask(), built.depths()
    assert mask.shape == (len(tokens), len(tokens))
    for node in range(len(tokens)):
        path = path_to(parents, node)
        assert mask[node].nonzero().flatten().tolist() == path
        assert depths[node] == len(path) - 1


@given(trees(), st.lists(st.integers(0, 3), min_size=1, max_size=5), st.data())
def test_walk_takes_the_deepest_path_the_samples_follow(
    tree: tuple[list[int], list[int]], pending: list[int], data: st.DataObject
) -> None:
    tokens, parents = tree
    full = graft(pending, DraftTree.from_lists(tokens, parents))
    all_parents = full.parents.tolist()
    all_tokens = full.tokens.tolist()
    start = len(pending) - 1
    sampled = data.draw(st.lists(st.integers(0, 3), min_size=len(all_tokens) - start, max_size=len(all_tokens) - start))
    got = walk(full, sampled, start=start)

    def follows(path: list[int]) -> bool:
        return all(all_tokens[b] == sampled[a - start] for a, b in itertools.pairwise(path))

    candidates = [
        path[start:] for node in range(start, len(all_tokens)) if follows((path := path_to(all_parents, node))[start:])
    ]
    # Equal siblings are the only freedom: the first is taken, so compare the tokens' length against the best of those.
    first_choice = [c for c in candidates if all(is_first_sibling(all_parents, all_tokens, n, start) for n in c)]
    assert got == max(first_choice, key=len)


def is_first_sibling(parents: list[int], tokens: list[int], node: int, start: int) -> bool:
    return not any(
        parents[other] == parents[node] and tokens[other] == tokens[node] for other in range(start + 1, node)
    )


def test_graft_makes_pending_tokens_the_trunk() -> None:
    full = graft([7, 8], DraftTree.from_lists([1, 2, 3], [-1, -1, 0]))
    assert full.tokens.tolist() == [7, 8, 1, 2, 3]
    assert full.parents.tolist() == [-1, 0, 1, 1, 2]
    assert full.depths().tolist() == [0, 1, 2, 2, 3]
    assert not full.is_chain
    assert graft([7], chain([1, 2])).is_chain


def test_a_parent_after_its_child_is_refused() -> None:
    with pytest.raises(ValueError, match="parents: node 0"):
        DraftTree.from_lists([1, 2], [1, -1])


def test_a_chain_found_in_lists_is_known_as_one() -> None:
    assert DraftTree.from_lists([5, 6, 7], [-1, 0, 1]).is_chain
    assert torch.equal(DraftTree.from_lists([5, 6], [-1, 0]).ancestor_mask(), chain([5, 6]).ancestor_mask())


def test_a_draft_made_on_the_cpu_is_verified_where_the_model_is() -> None:
    for draft in (chain([]), chain([7, 8])):
        full = graft([1, 2], draft, device=torch.device("meta"))
        assert (full.tokens.device.type, full.parents.device.type) == ("meta", "meta")
        assert len(full) == 2 + len(draft)
