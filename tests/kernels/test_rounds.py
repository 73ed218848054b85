"""What a round runs between products, in the interpreter: nodes, walk, best scores, the tree of an EAGLE head."""

from __future__ import annotations

import random

import pytest
import torch

from specq.spec.sampling import Sampler
from specq.spec.tree import DraftTree, chain, graft, walk
from specq_kernels.draft_tree import (
    Candidates,
    Level,
    best_candidates,
    best_candidates_ref,
    grow_level,
    grow_level_ref,
)
from specq_kernels.filtered import filtered_choice, filtered_ref, filtered_scores
from specq_kernels.kv_cache import compact_rows, compact_rows_ref
from specq_kernels.launch import MAX_ROWS
from specq_kernels.pair_rows import pair_rows, pair_rows_ref
from specq_kernels.sampling import Draw
from specq_kernels.top_scores import top_scores, top_scores_ref
from specq_kernels.tree_attention import pack_mask
from specq_kernels.tree_nodes import graft_nodes, graft_nodes_ref, walk_nodes, walk_nodes_ref

Nodes = dict[str, torch.Tensor]


def random_draft(nodes: int, *, seed: int, vocab: int = 5) -> DraftTree:
    draw = random.Random(seed)
    parents = [draw.randint(max(-1, i - 5), i - 1) for i in range(nodes)]
    return DraftTree.from_lists([draw.randrange(vocab) for _ in range(nodes)], parents)


def inputs(length: int, pending: list[int], tree: DraftTree) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    counts = torch.tensor([length, len(pending), len(tree)], dtype=torch.int32)
    trunk, draft = torch.full((64,), 99, dtype=torch.int32), torch.full((2, 64), 77, dtype=torch.int32)
    trunk[: len(pending)] = torch.tensor(pending, dtype=torch.int32)
    draft[0, : len(tree)], draft[1, : len(tree)] = tree.tokens, tree.parents
    return counts, trunk, draft


def node_buffers() -> Nodes:
    buffers = {name: torch.full((64,), -9, dtype=torch.int32) for name in ("tokens", "ids", "parents", "depths")}
    buffers |= {"mask": torch.full((64, 2), -9, dtype=torch.int32), "positions": torch.zeros(64, dtype=torch.int64)}
    return buffers | {"length": torch.zeros(1, dtype=torch.int32)}


@pytest.mark.parametrize(
    ("pending", "drafted"), [(1, 0), (1, 59), (3, 10), (8, 56), (1, 63), (64, 0)], ids=lambda n: str(n)
)
def test_nodes_are_those_of_the_grafted_tree(pending: int, drafted: int) -> None:
    tree, trunk = random_draft(drafted, seed=drafted), [7 + i for i in range(pending)]
    found = node_buffers()
    arguments = inputs(130, trunk, tree)
    graft_nodes(*arguments, **found)
    whole, n = graft(trunk, tree), pending + drafted
    assert found["tokens"].tolist() == [*whole.tokens.tolist(), *[-1] * (64 - n)]
    assert found["ids"].tolist() == [*whole.tokens.tolist(), *[0] * (64 - n)]
    assert found["parents"][:n].tolist() == whole.parents.tolist()
    assert found["depths"][:n].tolist() == whole.depths().tolist()
    assert torch.equal(found["mask"][:n], pack_mask(whole.ancestor_mask()))
    assert found["positions"][:n].tolist() == (whole.depths() + 131).tolist()
    assert found["length"].item() == 130
    # what is left stands alone, so that nothing sees it
    assert found["parents"][n:].tolist() == [-1] * (64 - n)
    reference = graft_nodes_ref(*arguments)
    for value, expected in zip(found.values(), reference, strict=True):
        assert torch.equal(value, expected)


@pytest.mark.parametrize("seed", range(6))
def test_the_walk_is_that_of_the_lists(seed: int) -> None:
    draw = random.Random(seed)
    pending, tree = draw.randint(1, 4), random_draft(draw.randint(0, 40), seed=seed, vocab=2)
    arguments, nodes = inputs(9, list(range(pending)), tree), node_buffers()
    graft_nodes(*arguments, **nodes)
    whole = graft(list(range(pending)), tree)
    sampled = [draw.randrange(2) for _ in range(len(whole))]
    path = walk(whole, sampled[pending - 1 :], start=pending - 1)
    expected = [*range(pending - 1), *path]
    found = walk_of(arguments[0], nodes, torch.tensor(sampled))
    kept = int(found["kept"])
    assert found["path"].tolist() == [*expected, *range(len(expected), 64)]
    assert kept == len(expected)
    assert found["result"][0] == len(path)
    assert found["result"][1 : len(path) + 1].tolist() == [sampled[node] for node in path]
    assert_equal_up_to_decided(
        found, walk_nodes_ref(arguments[0], nodes["tokens"], nodes["parents"], torch.tensor(sampled))
    )


def walk_of(counts: torch.Tensor, nodes: Nodes, sampled: torch.Tensor) -> Nodes:
    found = {"path": torch.zeros(64, dtype=torch.int32), "kept": torch.zeros(1, dtype=torch.int32)}
    found["result"] = torch.zeros(65, dtype=torch.int32)
    walk_nodes(counts, nodes["tokens"], nodes["parents"], sampled, **found)
    return found


def assert_equal_up_to_decided(found: Nodes, reference: tuple[torch.Tensor, ...]) -> None:
    path, kept, result = reference
    assert torch.equal(found["path"], path)
    assert torch.equal(found["kept"], kept)
    decided = int(result[0])
    assert torch.equal(found["result"][: decided + 1], result[: decided + 1])


def test_the_walk_ends_before_a_node_without_a_sample() -> None:
    tree = chain([3, 4, 5, 6])
    arguments, nodes = inputs(0, [1, 2], tree), node_buffers()
    graft_nodes(*arguments, **nodes)
    for undecided, decided in ((1, []), (2, [3]), (4, [3, 4, 5]), (5, [3, 4, 5, 6])):
        sampled = torch.tensor([2, 3, 4, 5, 6, 9])
        sampled[undecided] = -1
        found = walk_of(arguments[0], nodes, sampled)
        assert found["result"][0] == len(decided), undecided
        assert found["result"][1 : len(decided) + 1].tolist() == decided
        assert found["kept"].item() == 1 + len(decided)
        reference = walk_nodes_ref(arguments[0], nodes["tokens"], nodes["parents"], sampled)
        assert_equal_up_to_decided(found, reference)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_rows_of_features_move_with_their_nodes(dtype: torch.dtype) -> None:
    x = torch.randn(40, 200).to(dtype)
    expected = x.clone()
    path = torch.tensor([0, 2, 3, 9, 11, 30, 30], dtype=torch.int32)
    count, length = torch.tensor([5], dtype=torch.int32), torch.tensor([6], dtype=torch.int32)
    compact_rows_ref(expected, path, count, length)
    compact_rows(x, path, count, length)
    assert torch.equal(x, expected)
    assert torch.equal(x[6:11], expected[6:11])


@pytest.mark.parametrize("noise", [None, 0.7])
@pytest.mark.parametrize("trimmed", [False, True])
@pytest.mark.parametrize(("rows", "columns", "count"), [(1, 300, 3), (10, 5000, 10)])
def test_best_scores_are_those_a_sampler_expects(
    rows: int, columns: int, count: int, trimmed: bool, noise: float | None
) -> None:
    logits = torch.randn(rows, columns) * 3
    positions = torch.arange(rows) + 131000
    ids = torch.randperm(2 * columns)[:columns].sort().values if trimmed else None
    draw = None if noise is None else Draw.of(2**40 + 5, noise)
    options = {"draw": draw, "positions": positions, "noise_scale": 1.5 if noise else 1.0, "vocab": columns - 3}
    found = top_scores(logits, count, **options, target_ids=None if ids is None else ids.int())
    reference = top_scores_ref(logits, count, **options, target_ids=None if ids is None else ids.int())
    whole = logits
    if ids is not None:
        whole = logits.new_full((rows, 2 * columns), -torch.inf).index_copy_(1, ids, logits)
    sampler = Sampler(temperature=noise or 0.0, seed=2**40 + 5, vocab=columns - 3)
    expected = sampler.guesses(whole, positions, count=count, noise_scale=1.5)
    for scores, chosen in (found, reference):
        assert torch.equal(chosen.long(), expected[1])
        torch.testing.assert_close(scores, expected[0], rtol=1e-5, atol=1e-5)


def test_of_equal_scores_the_lowest_column_is_first_and_what_is_left_out_scores_nothing() -> None:
    logits = torch.zeros(1, 4100)
    logits[0, [5, 3000, 4000]] = 4.0
    scores, ids = top_scores(logits, 5)
    assert ids[0].tolist() == [5, 3000, 4000, 0, 1]
    scores, ids = top_scores(logits, 5, vocab=2)
    assert ids[0, :2].tolist() == [0, 1]
    assert scores[0, 2:].tolist() == [-torch.inf] * 3
    assert int(ids.min()) >= 0
    assert int(ids.max()) < 4100


FILTERS = {"top-p": {"top_p": 0.9}, "top-k": {"top_k": 40}, "both": {"top_k": 20, "top_p": 0.8}, "one": {"top_k": 1}}


@pytest.mark.parametrize(
    ("name", "rows", "columns"), [*((name, 1, 300) for name in FILTERS), ("both", 2, 33000), ("top-p", 2, 33000)]
)
def test_filtered_choices_are_the_samplers(rows: int, columns: int, name: str) -> None:
    logits, positions = torch.randn(rows, columns) * 4, torch.arange(rows) * 977
    settings = {"vocab": columns - 3, **FILTERS[name]}
    draw, sampler = Draw.of(2**40 + 7, 0.6), Sampler(temperature=0.6, seed=2**40 + 7, **settings)
    found, expected = filtered_choice(logits, positions, draw, **settings), sampler(logits, positions)
    decided = found >= 0
    assert torch.equal(found[decided], expected[decided])
    assert decided.any()
    reference = filtered_ref(logits, positions, draw, 1, **settings)
    certain = reference[0][:, 0] > -torch.inf
    assert torch.equal(reference[1][certain, 0].long(), expected[certain])
    assert certain[decided].all()


@pytest.mark.parametrize("name", FILTERS)
@pytest.mark.parametrize("trimmed", [False, True])
def test_filtered_scores_are_those_a_sampler_expects(trimmed: bool, name: str) -> None:
    logits, positions = torch.randn(5, 3000) * 4, torch.arange(5) + 131000
    ids = torch.randperm(6000)[:3000].sort().values if trimmed else None
    draw, settings = Draw.of(5, 0.7), {"vocab": 2990, **FILTERS[name]}
    target_ids = None if ids is None else ids.int()
    options = {"noise_scale": 1.5, "target_ids": target_ids, **settings}
    found = filtered_scores(logits, 6, positions, draw, **options)
    reference = filtered_ref(logits, positions, draw, 6, **options)
    whole = logits if ids is None else logits.new_full((5, 6000), -torch.inf).index_copy_(1, ids, logits)
    sampler = Sampler(temperature=0.7, seed=5, **settings)
    scores, tokens = sampler.guesses(whole, positions, count=6, noise_scale=1.5)
    for values, chosen in (found, reference):
        kept = values > -torch.inf
        assert int(chosen.min()) >= 0
        assert int(chosen.max()) < 6000
        values, chosen = values[:, : scores.shape[1]], chosen[:, : scores.shape[1]]
        torch.testing.assert_close(values, scores, rtol=1e-4, atol=1e-4)
        assert torch.equal(chosen[kept[:, : scores.shape[1]]].long(), tokens[scores > -torch.inf])
        assert not kept[:, scores.shape[1] :].any()


def test_rows_too_flat_for_the_candidates_are_undecided() -> None:
    positions, draw = torch.arange(3), Draw.of(1, 1.0)
    logits = torch.zeros(3, 600)
    logits[1, 70] = 30.0
    logits[2, 3:10] = 25.0
    assert (filtered_choice(logits, positions, draw, top_p=0.9) >= 0).tolist() == [False, True, True]
    assert (filtered_choice(logits, positions, draw, top_p=0.9, vocab=60) >= 0).tolist() == [True, True, True]
    # of equals no block shows how many more there are
    assert (filtered_choice(logits, positions, draw, top_k=7) >= 0).tolist() == [False, False, True]
    with pytest.raises(ValueError, match="top_k: 65"):
        filtered_choice(logits, positions, draw, top_k=65)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("has_norm", [False, True])
def test_pairs_are_embeddings_beside_gathered_states(has_norm: bool, dtype: torch.dtype) -> None:
    embedding, states = torch.randn(50, 40).half(), torch.randn(6, 72).to(dtype)
    tokens, rows = torch.tensor([3, 49, 0, 3], dtype=torch.int32), torch.tensor([5, 0, 0, 2], dtype=torch.int32)
    norms = (torch.rand(40), torch.rand(72)) if has_norm else None
    found = pair_rows(embedding, tokens, states, rows, norms=norms, eps=1e-5)
    expected = pair_rows_ref(embedding, tokens, states, rows, norms=norms, eps=1e-5)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2e-3, atol=1e-3)
    assert torch.equal(found[1], states[rows.long()])


@pytest.mark.parametrize(("top_k", "depth", "trunk"), [(3, 4, 0), (10, 3, 2), (1, 5, 1), (6, 2, 0)])
def test_trees_grow_as_defined(top_k: int, depth: int, trunk: int) -> None:
    """Levels, masks and the final order; scores repeat, so that ties decide."""
    made, wanted = (grown(top_k, depth, trunk, *kernels) for kernels in (
        (grow_level, best_candidates), (grow_level_ref, best_candidates_ref)
    ))  # fmt: skip
    for found, expected in zip(made, wanted, strict=True):
        assert torch.equal(found, expected)
    tokens, parents = made[-1]
    kept = int((tokens >= 0).sum())
    assert kept == min(64, top_k + (depth - 1) * top_k * top_k - top_k)  # one row has no token
    for node in range(kept):
        assert -1 <= int(parents[node]) < node


def grown(top_k: int, depth: int, trunk: int, grow: object, best: object) -> list[torch.Tensor]:
    draws = torch.Generator().manual_seed(top_k)
    pool, mask = Candidates.empty(top_k + (depth - 1) * top_k * top_k), torch.zeros(64, 2, dtype=torch.int32)
    for node in range(trunk):
        mask[node, 0] = 2 ** (node + 1) - 1
    parents, first, at, levels = Level.trunk(), 0, trunk - 1, []
    for deeper in range(depth):
        rows = parents.scores.shape[0]
        scores = -torch.randint(0, 4, (rows, top_k), generator=draws).float().sort(-1).values
        if deeper == depth - 1:
            scores[-1] = -torch.inf
        ids = torch.randint(0, 50, (rows, top_k), generator=draws, dtype=torch.int32)
        level, level_at = Level.empty(top_k), at + rows if deeper else trunk
        if level_at + top_k > MAX_ROWS:
            break
        grow(scores, ids, parents, level, pool, mask, first=first, parents_at=at, level_at=level_at)  # type: ignore[operator]
        levels += [level.scores, level.tokens, level.rows, level.candidates]
        first, parents, at = first + scores.numel(), level, level_at
    out = torch.zeros(2, 64, dtype=torch.int32)
    best(pool, out)  # type: ignore[operator]
    return [*levels, mask, pool.scores, pool.tokens, pool.parents, out]


@pytest.mark.parametrize(("grow", "best"), [(grow_level, best_candidates), (grow_level_ref, best_candidates_ref)])
def test_scores_that_are_no_numbers_make_no_ring_of_parents(grow: object, best: object) -> None:
    pool, mask, level = Candidates.empty(6), torch.zeros(64, 2, dtype=torch.int32), Level.empty(2)
    scores, ids = torch.full((2, 2), torch.nan), torch.arange(4, dtype=torch.int32).view(2, 2)
    grow(scores[:1], ids[:1], Level.trunk(), level, pool, mask, first=0, parents_at=-1, level_at=0)  # type: ignore[operator]
    grow(scores, ids, level, Level.empty(0), pool, mask, first=2, parents_at=0, level_at=0)  # type: ignore[operator]
    out = torch.full((2, 64), 63, dtype=torch.int32)
    best(pool, out)  # type: ignore[operator]
    assert (out[0] == -1).all()
    assert (out[1] < torch.arange(64)).all()


def test_errors_name_the_argument() -> None:
    with pytest.raises(ValueError, match="count: 70"):
        top_scores(torch.zeros(1, 80), 70)
    with pytest.raises(ValueError, match="positions: needed"):
        top_scores(torch.zeros(1, 80), 3, draw=Draw.of(1, 1.0))
    with pytest.raises(ValueError, match="count: 5000 candidates"):
        Candidates.empty(5000)
    states, tokens = torch.zeros(2, 8), torch.zeros(2, dtype=torch.int32)
    with pytest.raises(ValueError, match="rows: shape"):
        pair_rows(states, tokens, states, torch.zeros(3, dtype=torch.int32))
