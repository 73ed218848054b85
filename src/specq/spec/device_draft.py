"""The drafting of an EAGLE tree on the device: rows, levels, scores and the tree without the host.

Its shapes depend on how many rows of true features are new (in buckets), how many tokens lack one, and the depth; on
CUDA each combination is one graph. The definition is `EagleTree`; nodes that it leaves out, because their score is
-inf, stay here as nodes of token -1, which no verification takes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from specq.models.cache import KVCache
from specq.models.device_head import DeviceHead
from specq.models.eagle import EagleHead
from specq.spec.device_round import DeviceRound, DeviceVerifier, unpack_mask
from specq.spec.eagle_tree import EagleTree, TreeShape
from specq.spec.host import Upload
from specq.spec.sampling import Seen
from specq.spec.tree import MAX_NODES, DraftTree, chain
from specq_kernels.draft_tree import MAX_CANDIDATES, Candidates, Level, best_candidates, grow_level
from specq_kernels.filtered import CANDIDATES, filtered_scores
from specq_kernels.launch import runs_kernel
from specq_kernels.top_scores import MAX_COUNT, top_scores
from specq_kernels.tree_attention import pack_mask

NEW_ROWS = (1, 2, 4, 8, 16)
"""Buckets of rows with new true features; more are a prompt's, which run before."""


class DeviceEagleTree(EagleTree):
    """An EAGLE tree that is drafted on the device for a verifier there."""

    def __init__(self, drafting: EagleDrafting, cache: KVCache, verifier: DeviceVerifier) -> None:
        super().__init__(drafting.head, cache, verifier, drafting.shape)
        self.drafting, self.on_device = drafting, verifier

    @torch.inference_mode()
    def propose(self, context: Sequence[int], *, max_nodes: int, max_depth: int) -> DraftTree:
        known, last = self.verifier.cache.length, len(context) - 1
        depth = min(self.shape.depth, max_depth)
        if not self.drafting.fits(last - known, depth):
            return super().propose(context, max_nodes=max_nodes, max_depth=max_depth)
        budget = min(self.shape.nodes - 1, max_nodes, self.drafting.candidates(depth))
        if budget <= 0 or depth <= 0:
            return chain([], device=self.head.target.device)
        self.cache.truncate(min(self.cache.length, known - 1))
        if known - self.cache.length > NEW_ROWS[-1]:
            self._commit_rows(context, known - 1)
        start = self.cache.length
        tree = self.drafting(
            self.on_device.ready(context), start, context[start + 1 : known + 1], context[known + 1 : last + 1], depth
        )
        self.cache.commit(known - start)
        return DraftTree(tree[0, :budget], tree[1, :budget], self.shape.top_k == 1)


class EagleDrafting:
    """One head over its cache and that of its verifier, drafting trees of one shape."""

    def __init__(self, head: EagleHead, cache: KVCache, verified: KVCache, shape: TreeShape) -> None:
        """`verified` is the cache of the model that verifies, whose features the head reads."""
        device = head.target.device
        self.head, self.verified, self.shape = head, verified, shape
        self._rows = DeviceHead(head, cache)
        self._upload = Upload(3 + NEW_ROWS[-1] + MAX_NODES, device)
        values = self._upload.device
        self._start, self._last, self._known = values[:1], values[1:2], values[2:3]
        self._new_tokens, self._trunk = values[3 : 3 + NEW_ROWS[-1]], values[3 + NEW_ROWS[-1] :]
        self._chain = pack_mask(torch.ones(MAX_NODES, MAX_NODES, dtype=torch.bool, device=device).tril_())
        self._at = torch.arange(MAX_NODES, dtype=torch.int32, device=device)
        self._plans: dict[tuple[int, int], _Plan] = {}
        columns = head.target.spec.vocab if head.output is None else head.spec.vocab
        self._children = min(shape.top_k, columns)

    def fits(self, trunk: int, depth: int) -> bool:
        """Whether the nodes that run fit the mask, and what is drafted the kernels."""
        runs = trunk + max(depth - 1, 0) * self.shape.top_k
        return runs <= MAX_NODES and self._children <= MAX_COUNT and self.candidates(depth) <= MAX_CANDIDATES

    def candidates(self, depth: int) -> int:
        """Nodes drafted at this depth."""
        return self.shape.candidates(self._children, depth)

    def __call__(self, round_: DeviceRound, start: int, new: Sequence[int], trunk: Sequence[int], depth: int) -> Tensor:
        """int32 [2, 64], tokens and parents of the best nodes, best first, until the next call.

        `new` are the tokens of the rows from `start` on that have a true feature, `trunk` those after them. Samples
        are guessed at as `round_` is set to take them.
        """
        values = self._upload.write()
        values[:3] = start, len(new) - 1, start + len(new)
        values[3 : 3 + len(new)] = new
        values[3 + NEW_ROWS[-1] : 3 + NEW_ROWS[-1] + len(trunk)] = trunk
        self._upload.send()
        rows = next(bucket for bucket in NEW_ROWS if len(new) <= bucket)
        plan = self._plans.get((len(trunk), depth))
        if plan is None:
            plan = self._plans[len(trunk), depth] = _Plan(self, len(trunk), depth)
        # The round's own graphs, since what is captured reads its seed, temperature and ids.
        key = (plan, rows, round_.form)
        round_.graphs.run(key, lambda: self._draft(plan, round_, rows))
        return plan.tree

    def _draft(self, plan: _Plan, round_: DeviceRound, rows: int) -> None:
        following = plan.following + self._known
        state, at = self._catch_up(plan, rows), plan.trunk
        scores, ids = self._guess(plan, round_, state, following[0], start=-1)
        parents, first, parents_at = plan.root, 0, at - 1
        for deeper, level in enumerate(plan.levels):
            place = {"first": first, "parents_at": parents_at, "level_at": at if len(level.scores) else 0}
            grow_level(scores, ids, parents, level, plan.pool, plan.mask, **place)
            if deeper + 1 == len(plan.levels):
                break
            nodes = slice(at, at + len(level.scores))
            state = self._run_nodes(plan, level.tokens, state, level.rows, nodes)
            if round_.sampler.needs_seen:
                plan.tokens[nodes].copy_(level.tokens)
            scores, ids_next = self._guess(plan, round_, state, following[deeper + 1], start=at)
            first, parents, parents_at, at, ids = first + ids.numel(), level, at, nodes.stop, ids_next
        best_candidates(plan.pool, plan.tree)

    def _catch_up(self, plan: _Plan, rows: int) -> Tensor:
        """The predicted state [1, hidden] at the context's end; writes the rows of true features and of the trunk."""
        assert self.verified.features is not None  # a verifier with a head keeps features
        out = self._rows.run(
            self._new_tokens[:rows],
            *self._rows.enter(self.verified.features, self._at[:rows] + self._start),
            depths=self._at[:rows],
            mask=self._chain[:rows],
            length=self._start,
            earlier=0,
        )
        state = out.index_select(0, self._last)
        for i in range(plan.trunk):
            node = slice(i, i + 1)
            state = self._run_nodes(plan, self._trunk[node], state, self._at[:1], node)
        return state

    def _run_nodes(self, plan: _Plan, tokens: Tensor, states: Tensor, rows: Tensor, nodes: slice) -> Tensor:
        """States [nodes, hidden] of nodes behind the rows of true features."""
        return self._rows.run(
            tokens,
            states,
            rows,
            depths=plan.depths[nodes],
            mask=plan.mask[nodes],
            length=self._known,
            earlier=nodes.start,
        )

    def _guess(
        self, plan: _Plan, round_: DeviceRound, states: Tensor, following: Tensor, *, start: int
    ) -> tuple[Tensor, Tensor]:
        """(scores fp32, ids int32) [rows, children]: what may follow the nodes from `start` on (-1: the context).

        `following` are the positions of that, as many as a level can have.
        """
        sampler, rows = round_.sampler, len(states)
        logits, positions = self._rows.logits(states), following[:rows]
        target_ids, seen = self._rows.target_ids, None
        if sampler.needs_seen:
            logits, target_ids = self._rows.spread(logits), None
            seen = self._seen(plan, round_, rows, start)
        if sampler.has_filter and (not runs_kernel(logits) or sampler.top_k > CANDIDATES):
            return self._guess_in_torch(round_, logits if seen else self._rows.spread(logits), positions, seen)
        logits = sampler.penalized(logits, seen)
        vocab, scale = sampler.vocab, self.shape.noise_scale
        if sampler.has_filter:
            return filtered_scores(
                logits,
                self._children,
                positions,
                round_.draw,
                top_k=sampler.top_k,
                top_p=sampler.top_p,
                noise_scale=scale,
                vocab=vocab,
                target_ids=target_ids,
            )
        return top_scores(
            logits,
            self._children,
            draw=round_.draw if sampler.temperature > 0 else None,
            positions=positions,
            noise_scale=scale,
            vocab=vocab,
            target_ids=target_ids,
        )

    def _guess_in_torch(
        self, round_: DeviceRound, logits: Tensor, positions: Tensor, seen: Seen | None
    ) -> tuple[Tensor, Tensor]:
        """The same of logits over the target's vocabulary, where no kernel filters."""
        scale, draw = self.shape.noise_scale, round_.draw
        scores, ids = round_.sampler.guesses(
            logits, positions, seen, count=self._children, noise_scale=scale, draw=draw
        )
        lacking = self._children - scores.shape[1]  # a filter of fewer ids than a node has children
        scores = torch.nn.functional.pad(scores, (0, lacking), value=-torch.inf)
        return scores, torch.nn.functional.pad(ids, (0, lacking)).int().contiguous()

    def _seen(self, plan: _Plan, round_: DeviceRound, rows: int, start: int) -> Seen:
        """What counts for penalties: the context, and of the nodes those below its end."""
        below = slice(plan.trunk, MAX_NODES)
        tokens = plan.tokens[below].long()
        if start < 0:
            return Seen(round_.seen.ids, tokens, torch.zeros(1, len(tokens), dtype=torch.bool, device=tokens.device))
        return Seen(round_.seen.ids, tokens, unpack_mask(plan.mask[start : start + rows], MAX_NODES)[:, below])


class _Plan:
    """The buffers of draftings with one number of trunk tokens and one depth."""

    def __init__(self, drafting: EagleDrafting, trunk: int, depth: int) -> None:
        device, shape, children = drafting.head.target.device, drafting.shape, drafting._children
        self.trunk = trunk
        self.root = Level.trunk(device)
        self.levels: list[Level] = []
        width = 1
        for _ in range(depth - 1):
            width = min(shape.top_k, width * children)
            self.levels.append(Level.empty(width, device))
        self.levels.append(Level.empty(0, device))  # of the last level nothing is expanded
        self.pool = Candidates.empty(shape.candidates(children, depth), device)
        self.mask = drafting._chain.clone()
        self.tokens = torch.zeros(MAX_NODES, dtype=torch.int32, device=device)
        self.tree = torch.zeros(2, MAX_NODES, dtype=torch.int32, device=device)
        depths = [torch.full((len(level.scores),), trunk + i, dtype=torch.int32) for i, level in enumerate(self.levels)]
        # Of the nodes that run, counted from the rows of true features on.
        self.depths = torch.cat([torch.arange(trunk, dtype=torch.int32), *depths]).to(device)
        # The context ends `trunk` tokens behind them, and what a level's nodes stand for follows.
        levels = trunk + 1 + torch.arange(depth, device=device)
        self.following = levels[:, None].repeat(1, max(shape.top_k, 1))  # int64 [depth, top_k]
