"""The target's own draft on the device: a chain of low-precision steps without the host, captured as CUDA graphs.

One graph is of a length and a number of pending tokens (1 but for the first round of a continued context). The
definition is `SelfChain`. Its steps are those of the model's DeviceStep, over the buffers that verification uses
next: both lay out their nodes anew.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from specq.quant.rounding import Act
from specq.spec.device_round import DeviceRound, DeviceVerifier
from specq.spec.sampling import Seen
from specq.spec.self_chain import SelfChain
from specq.spec.tree import MAX_NODES, DraftTree, chain
from specq_kernels.follow_sample import follow_sample


class DeviceSelfChain(SelfChain):
    """A chain that is drafted on the device for a verifier there."""

    def __init__(self, drafting: SelfDrafting, verifier: DeviceVerifier, *, act: Act, draft_length: int) -> None:
        super().__init__(verifier, act=act, draft_length=draft_length)
        self.drafting, self.on_device = drafting, verifier

    @torch.inference_mode()
    def propose(self, context: Sequence[int], *, max_nodes: int, max_depth: int) -> DraftTree:
        length = min(self.draft_length, max_nodes, max_depth)
        if length <= 0:
            return chain([], device=self.verifier.model.device)
        round_, start = self.on_device.ready(context), self.verifier.cache.length
        tree = self.drafting(round_, start, context[start:], act=self.act, length=length)
        return DraftTree(tree[0, :length], tree[1, :length], True)


class SelfDrafting:
    """One model over one cache, drafting chains; outlives drafters, since what it captured does."""

    def __init__(self, device: torch.device) -> None:
        self._at = torch.arange(MAX_NODES, device=device)
        self._tree = torch.zeros(2, MAX_NODES, dtype=torch.int32, device=device)
        self._tree[1] = self._at - 1
        self._position = torch.zeros(1, dtype=torch.int64, device=device)

    def __call__(self, round_: DeviceRound, start: int, unseen: Sequence[int], *, act: Act, length: int) -> Tensor:
        """int32 [2, 64], tokens (-1 where the sampler is undecided) and parents of a chain, until the next call.

        It follows the tokens `unseen`, which follow the `start` committed ones; samples are taken as `round_` is set.
        """
        count = round_.load(start, unseen, chain([]))
        key = ("self", act, count, len(unseen), length, round_.form)
        round_.graphs.run(key, lambda: self._draft(round_, count, len(unseen), act, length))
        return self._tree

    def _draft(self, round_: DeviceRound, count: int, trunk: int, act: Act, length: int) -> None:
        step, last = round_.lay_out(), trunk - 1
        step.forward(count, act)
        self._position.copy_(round_.positions[last : last + 1])
        hidden, nodes = step.final[last : last + 1], trunk
        for i in range(length):
            sampled = round_.choose(hidden, self._position, self._seen(round_, i), act=act)
            # The next node stands alone in its step: the first of the buffers, a root that sees itself.
            follow_sample(
                sampled, self._tree[0], i, ids=step.tokens, length=step.length, position=self._position, nodes=nodes
            )
            if i + 1 < length:
                step.forward(1, act)
                hidden, nodes = step.final[:1], 1

    def _seen(self, round_: DeviceRound, count: int) -> Seen | None:
        """What counts for penalties behind so many drafted tokens."""
        if not round_.sampler.needs_seen:
            return None
        return Seen(round_.seen.ids, self._tree[0].long().clamp(min=0), (self._at < count)[None])
