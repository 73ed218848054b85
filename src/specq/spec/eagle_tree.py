"""The dynamic draft tree of EAGLE-2, grown from a head's own predictions.

A row is a token with the target's feature before it. Rows of drafted features are dropped after each draft, so that
accepted tokens get rows of true ones in the next. Source: arXiv 2406.16858; SafeAILab/EAGLE, model/cnets.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specq.models.cache import KVCache
from specq.models.eagle import EagleHead
from specq.spec.drafters import NoDrafter
from specq.spec.sampling import Seen, distinct_ids
from specq.spec.tree import DraftTree, chain
from specq.spec.verifier import PREFILL_CHUNK, Verifier


@dataclass(frozen=True)
class TreeShape:
    """`nodes` a verification runs, root included; `depth` in levels; `top_k` children a node and nodes a level."""

    nodes: int
    depth: int
    top_k: int
    noise_scale: float = 1.0

    def candidates(self, children: int, depth: int) -> int:
        """Nodes drafted at this depth with so many children a node, at most `top_k`."""
        level, made = 1, 0
        for _ in range(depth):
            made += level * children
            level = min(self.top_k, level * children)
        return made

    @property
    def scratch_rows(self) -> int:
        """Rows of the head's cache that drafting uses beyond the committed ones."""
        return (self.depth - 1) * self.top_k


@dataclass
class _Level:
    """The nodes of one level that are expanded: their candidate index, score, token and the state before the token."""

    candidates: Tensor
    scores: Tensor
    tokens: Tensor
    states: Tensor


class EagleTree(NoDrafter):
    """Drafts for the verifier whose features the head reads; only rows of true features stay in the head's cache."""

    def __init__(self, head: EagleHead, cache: KVCache, verifier: Verifier, shape: TreeShape) -> None:
        self.head, self.cache, self.verifier, self.shape = head, cache, verifier, shape

    def propose(self, context: Sequence[int], *, max_nodes: int, max_depth: int) -> DraftTree:
        budget = min(self.shape.nodes - 1, max_nodes)
        depth = min(self.shape.depth, max_depth)
        if budget <= 0 or depth <= 0:
            return chain([], device=self.head.target.device)
        trunk, state = self._catch_up(context)
        tokens, parents, scores = self._expand(context, trunk, state, depth)
        # Best first, so that a smaller tree is the beginning of this one. Stable by index: among equal scores a parent
        # comes before its child, so the choice is connected.
        order = scores.argsort(descending=True, stable=True)[:budget]
        kept = order[scores[order] > -torch.inf]
        place = torch.full((len(scores) + 1,), -1, dtype=torch.int64, device=scores.device)
        place[kept] = torch.arange(len(kept), device=scores.device)
        return DraftTree(tokens[kept].int(), place[parents[kept]].int(), self.shape.top_k == 1)

    def rollback(self, n: int) -> None:
        """Keep the rows of the first `n` tokens: one fewer, since a row pairs a token with the feature before it."""
        self.cache.truncate(min(self.cache.length, max(n - 1, 0)))

    def _catch_up(self, context: Sequence[int]) -> tuple[list[int], Tensor]:
        """(tokens whose rows have no true feature yet, the predicted state [1, hidden] at the context's end).

        Commits the rows of true features. The rows after them, where the verifier never ran a token it had decided,
        advance on predicted states and are not committed.
        """
        known, last = self.verifier.cache.length, len(context) - 1
        # At least one true row is run again, because its state is wanted.
        self.cache.truncate(min(self.cache.length, known - 1))
        state = self._commit_rows(context, known)
        trunk = list(context[known + 1 : last + 1])
        for i in range(len(trunk)):
            state = self.head(chain(trunk[: i + 1], device=state.device), state, self.cache, start=i)
        return trunk, state

    def _commit_rows(self, context: Sequence[int], end: int) -> Tensor:
        """Commit the rows of true features up to `end` of them; the state [1, hidden] after the last one run."""
        features = self.verifier.cache.features
        assert features is not None  # a verifier with a head keeps features
        state = features.new_empty(0)
        while (start := self.cache.length) < end:
            upto = min((start // PREFILL_CHUNK + 1) * PREFILL_CHUNK, end)
            rows = chain(context[start + 1 : upto + 1], device=features.device)
            state = self.head(rows, self.head.enter(features[start:upto]), self.cache)[-1:]
            self.cache.keep(range(upto - start))
        return state

    def _expand(
        self, context: Sequence[int], trunk: list[int], state: Tensor, depth: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Every candidate drafted: (tokens, parents, cumulative scores fp32), parents as candidate indices or -1."""
        device, top_k = state.device, self.shape.top_k
        known = distinct_ids(context, device) if self.verifier.sampler.needs_seen else None
        scores, ids = self._guess(known, chain([], device=device), state, position=len(context), start=-1)
        tokens, parents, totals = [ids[0]], [torch.full_like(ids[0], -1)], [scores[0]]
        level = _Level(torch.arange(len(ids[0]), device=device), scores[0], ids[0], state.expand(len(ids[0]), -1))
        nodes = chain(trunk, device=device)
        rows = torch.full((len(ids[0]),), len(trunk) - 1, device=device)  # each new node's parent among `nodes`
        for deeper in range(1, depth):
            start = len(nodes)
            nodes = DraftTree(
                torch.cat([nodes.tokens, level.tokens.int()]), torch.cat([nodes.parents, rows.int()]), False
            )
            out = self.head(nodes, level.states, self.cache, start=start)
            scores, ids = self._guess(known, nodes, out, position=len(context) + deeper, start=start)
            cumulative = level.scores[:, None] + scores  # [nodes of the level, children]
            first = sum(len(part) for part in tokens)
            tokens.append(ids.flatten())
            parents.append(level.candidates.repeat_interleave(ids.shape[1]))
            totals.append(cumulative.flatten())
            best, flat = cumulative.flatten().topk(min(top_k, cumulative.numel()))
            rows = start + flat // ids.shape[1]
            level = _Level(first + flat, best, ids.flatten()[flat], out[flat // ids.shape[1]])
        return torch.cat(tokens), torch.cat(parents), torch.cat(totals)

    def _guess(
        self, context_ids: Tensor | None, nodes: DraftTree, states: Tensor, *, position: int, start: int
    ) -> tuple[Tensor, Tensor]:
        """Scores and ids of the children of the nodes from `start` on (-1: of the context's end)."""
        seen = None if context_ids is None else Seen.of(context_ids, nodes, start=start)
        positions = torch.full((states.shape[0],), position, dtype=torch.int64, device=states.device)
        return self.verifier.sampler.guesses(
            self.head.logits(states), positions, seen, count=self.shape.top_k, noise_scale=self.shape.noise_scale
        )
