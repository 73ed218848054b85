"""Growing EAGLE's dynamic tree on the device: the best candidates of a level, and at the end the best of all.

Source: arXiv 2406.16858; specq/spec/eagle_tree.py has the definition it is held to.
Among equal scores the candidate made first comes first, so a parent always precedes its children. A score that is not
a number counts as -inf: ranks would not be an order, and parents might form a ring.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from specq_kernels.launch import MAX_ROWS, check_tensor, has_dependent_launch, interpreted, runs_kernel

MAX_CANDIDATES = 4096
CHUNK = 32


@dataclass(frozen=True)
class Candidates:
    """Every node drafted so far, in the order in which they were made; parents are candidates, -1 the trunk's end."""

    scores: Tensor  # float32 [candidates], cumulative
    tokens: Tensor  # int32 [candidates]
    parents: Tensor  # int32 [candidates]
    places: Tensor  # int32 [candidates], scratch of best_candidates

    @classmethod
    def empty(cls, count: int, device: torch.device | str = "cpu") -> Candidates:
        """Room for so many. Raises ValueError past what one program compares."""
        if not 1 <= count <= MAX_CANDIDATES:
            raise ValueError(f"count: {count} candidates, the kernels take 1 to {MAX_CANDIDATES}")
        whole = (torch.zeros(count, dtype=torch.int32, device=device) for _ in range(3))
        return cls(torch.zeros(count, dtype=torch.float32, device=device), *whole)


@dataclass(frozen=True)
class Level:
    """The nodes of a level that are expanded next, best first; the first level's parent is one row, the trunk's end."""

    scores: Tensor  # float32 [nodes]
    tokens: Tensor  # int32 [nodes]
    rows: Tensor  # int32 [nodes], the row of the level before that is the parent
    candidates: Tensor  # int32 [nodes]

    @classmethod
    def trunk(cls, device: torch.device | str = "cpu") -> Level:
        """What the first level hangs off."""
        return cls.empty(1, device, candidate=-1)

    @classmethod
    def empty(cls, nodes: int, device: torch.device | str = "cpu", *, candidate: int = 0) -> Level:
        """Room for so many nodes."""
        whole = (torch.full((nodes,), value, dtype=torch.int32, device=device) for value in (0, 0, candidate))
        return cls(torch.zeros(nodes, dtype=torch.float32, device=device), *whole)


def grow_level(
    scores: Tensor,
    ids: Tensor,
    parents: Level,
    level: Level,
    pool: Candidates,
    mask: Tensor,
    *,
    first: int,
    parents_at: int,
    level_at: int,
) -> None:
    """Put the children of `parents` into the pool from `first` on, and the best of them into `level`.

    scores float32 and ids int32 [parents, children] as top_scores gives them; mask int32 [64, 2], the ancestor words
    of the head's nodes: those of `parents` begin at node `parents_at` (-1: no node, before which nothing is), those of
    `level` at `level_at` and are filled. Raises ValueError naming the argument.
    """
    check_tensor("scores", scores, shape=(parents.scores.shape[0], None), dtype=torch.float32)
    check_tensor("ids", ids, shape=tuple(scores.shape), dtype=torch.int32, device=scores.device)
    check_tensor("mask", mask, shape=(MAX_ROWS, 2), dtype=torch.int32, device=scores.device)
    count, nodes = scores.numel(), level.scores.shape[0]
    if first < 0 or first + count > pool.scores.shape[0]:
        raise ValueError(f"first: {count} candidates from {first} on do not fit {pool.scores.shape[0]}")
    if nodes > count:
        raise ValueError(f"level: {nodes} nodes of {count} candidates")
    if level_at < 0 or level_at + nodes > MAX_ROWS:
        raise ValueError(f"level_at: {nodes} nodes from {level_at} on, the mask holds {MAX_ROWS}")
    if not runs_kernel(scores):
        grow_level_ref(scores, ids, parents, level, pool, mask, first=first, parents_at=parents_at, level_at=level_at)
        return
    early = has_dependent_launch(scores)
    options = {} if interpreted() else {"num_warps": 4, "launch_pdl": early}
    _level_kernel[(1,)](
        scores, ids, parents.scores, parents.candidates, level.scores, level.tokens, level.rows, level.candidates,
        pool.scores, pool.tokens, pool.parents, mask, count, scores.shape[1], nodes, first, parents_at, level_at,
        BLOCK=triton.next_power_of_2(max(count, CHUNK)), CHUNK=CHUNK, EARLY=early, **options,
    )  # fmt: skip


def grow_level_ref(
    scores: Tensor,
    ids: Tensor,
    parents: Level,
    level: Level,
    pool: Candidates,
    mask: Tensor,
    *,
    first: int,
    parents_at: int,
    level_at: int,
) -> None:
    """The definition."""
    cumulative = (parents.scores[:, None] + scores).flatten()
    cumulative = cumulative.masked_fill(cumulative.isnan(), -torch.inf)
    made = slice(first, first + len(cumulative))
    pool.scores[made], pool.tokens[made] = cumulative, ids.flatten()
    pool.parents[made] = parents.candidates.repeat_interleave(scores.shape[1])
    nodes = level.scores.shape[0]
    best = cumulative.sort(descending=True, stable=True).indices[:nodes]
    rows = best // scores.shape[1]
    level.scores.copy_(cumulative[best])
    level.tokens.copy_(ids.flatten()[best])
    level.rows.copy_(rows)
    level.candidates.copy_(first + best)
    own = level_at + torch.arange(nodes, device=scores.device)
    bits = torch.where(own % 32 == 31, -(2**31), 1 << own % 32)
    words = torch.stack([torch.where(own < 32, bits, 0), torch.where(own < 32, 0, bits)], 1).int()
    above = mask[parents_at + rows] if parents_at >= 0 else torch.zeros_like(words)
    mask[level_at : level_at + nodes] = above | words


def best_candidates(pool: Candidates, out: Tensor) -> None:
    """Write the best candidates, best first, to `out` int32 [2, 64]: tokens, and parents among them (-1: the trunk).

    What is left of 64, and every candidate of score -inf, has token -1. Raises ValueError naming the argument.
    """
    check_tensor("out", out, shape=(2, MAX_ROWS), dtype=torch.int32, device=pool.scores.device)
    if not runs_kernel(out):
        best_candidates_ref(pool, out)
        return
    count = pool.scores.shape[0]
    early = has_dependent_launch(out)
    options = {} if interpreted() else {"num_warps": 8, "launch_pdl": early}
    _best_kernel[(1,)](
        pool.scores, pool.tokens, pool.parents, pool.places, out, count, NODES=MAX_ROWS,
        BLOCK=triton.next_power_of_2(max(count, CHUNK)), CHUNK=CHUNK, EARLY=early, **options,
    )  # fmt: skip


def best_candidates_ref(pool: Candidates, out: Tensor) -> None:
    """The definition."""
    order = pool.scores.sort(descending=True, stable=True).indices
    pool.places[order] = torch.arange(len(order), dtype=torch.int32, device=out.device)
    kept = order[:MAX_ROWS]
    tokens = torch.where(pool.scores[kept] > -torch.inf, pool.tokens[kept], -1)
    above = pool.parents[kept]
    out.fill_(-1)
    out[0, : len(kept)] = tokens
    out[1, : len(kept)] = torch.where(above >= 0, pool.places[above.clamp(min=0).long()], -1)


@triton.jit
def _ranks(score, score_ptr, offs, count, BLOCK: tl.constexpr, CHUNK: tl.constexpr):
    """How many of the `count` scores come before each of `score`: those larger, or equal and earlier."""
    rank = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, count, CHUNK):
        other = start + tl.arange(0, CHUNK)
        value = tl.load(score_ptr + other, mask=other < count, other=-float("inf"))
        is_equal = (value[None, :] == score[:, None]) & (other[None, :] < offs[:, None])
        is_before = (value[None, :] > score[:, None]) | is_equal
        rank += tl.sum((is_before & (other < count)[None, :]).to(tl.int32), 1)
    return rank


@triton.jit(do_not_specialize=["first", "parents_at", "level_at"])
def _level_kernel(
    score_ptr, id_ptr, parent_score_ptr, parent_candidate_ptr, level_score_ptr, level_token_ptr, level_row_ptr,
    level_candidate_ptr, pool_score_ptr, pool_token_ptr, pool_parent_ptr, mask_ptr,
    count, children, nodes, first, parents_at, level_at,
    BLOCK: tl.constexpr, CHUNK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """One program; a candidate's rank says whether and where it lies in the level."""
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    offs = tl.arange(0, BLOCK)
    is_made = offs < count
    row = offs // children
    score = tl.load(score_ptr + offs, mask=is_made, other=-float("inf"))
    score += tl.load(parent_score_ptr + row, mask=is_made, other=0.0)
    score = tl.where(score == score, score, -float("inf"))
    token = tl.load(id_ptr + offs, mask=is_made, other=0)
    tl.store(pool_score_ptr + first + offs, score, mask=is_made)
    tl.store(pool_token_ptr + first + offs, token, mask=is_made)
    parent = tl.load(parent_candidate_ptr + row, mask=is_made, other=-1)
    tl.store(pool_parent_ptr + first + offs, parent, mask=is_made)
    tl.debug_barrier()
    rank = _ranks(score, pool_score_ptr + first, offs, count, BLOCK, CHUNK)
    is_best = is_made & (rank < nodes)
    tl.store(level_score_ptr + rank, score, mask=is_best)
    tl.store(level_token_ptr + rank, token, mask=is_best)
    tl.store(level_row_ptr + rank, row, mask=is_best)
    tl.store(level_candidate_ptr + rank, first + offs, mask=is_best)
    has_parent = is_best & (parents_at >= 0)
    above = mask_ptr + 2 * (parents_at + row)
    low = tl.load(above, mask=has_parent, other=0)
    high = tl.load(above + 1, mask=has_parent, other=0)
    node = level_at + rank
    bit = tl.where(is_best, 1, 0) << (node & 31)
    tl.store(mask_ptr + 2 * node, low | tl.where(node < 32, bit, 0), mask=is_best)
    tl.store(mask_ptr + 2 * node + 1, high | tl.where(node < 32, 0, bit), mask=is_best)


@triton.jit
def _best_kernel(
    score_ptr, token_ptr, parent_ptr, place_ptr, out_ptr, count,
    NODES: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """One program: every candidate's place, then the first NODES of them; out [2, NODES]."""
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    offs = tl.arange(0, BLOCK)
    is_made = offs < count
    score = tl.load(score_ptr + offs, mask=is_made, other=-float("inf"))
    rank = _ranks(score, score_ptr, offs, count, BLOCK, CHUNK)
    tl.store(place_ptr + offs, rank, mask=is_made)
    at = tl.arange(0, NODES)
    tl.store(out_ptr + at, -1, mask=at >= count)
    tl.store(out_ptr + NODES + at, -1, mask=at >= count)
    tl.debug_barrier()
    is_kept = is_made & (rank < NODES)
    token = tl.load(token_ptr + offs, mask=is_kept, other=-1)
    tl.store(out_ptr + rank, tl.where(score == -float("inf"), -1, token), mask=is_kept)
    parent = tl.load(parent_ptr + offs, mask=is_kept, other=-1)
    place = tl.load(place_ptr + parent, mask=is_kept & (parent >= 0), other=-1)
    tl.store(out_ptr + NODES + rank, place, mask=is_kept)
