"""The target drafts for itself, with activations of low precision: same weights, same slots of the same cache.

Source: QSpec, arXiv 2410.11305.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from specq.models.causal_lm import Output
from specq.quant.rounding import Act
from specq.spec.drafters import NoDrafter
from specq.spec.sampling import Seen, distinct_ids
from specq.spec.tree import DraftTree, chain
from specq.spec.verifier import Verifier


class SelfChain(NoDrafter):
    """Drafts a chain with the verifier's own model, whose 4-bit products round their activations to `act`.

    K and V of the chain lie behind the committed slots, where the verification writes its own before any attention
    reads them; the cache is as long afterwards as before. So history is always that of the verifier.
    """

    def __init__(self, verifier: Verifier, *, act: Act, draft_length: int) -> None:
        self.verifier, self.act, self.draft_length = verifier, act, draft_length

    @torch.inference_mode()
    def propose(self, context: Sequence[int], *, max_nodes: int, max_depth: int) -> DraftTree:
        length = min(self.draft_length, max_nodes, max_depth)
        if length <= 0:
            return chain([])
        cache = self.verifier.cache
        start = cache.length
        drafted: list[int] = []
        unseen = list(context[start:])
        try:
            while len(drafted) < length:
                out = self.verifier.model.forward(
                    chain(unseen, device=self.verifier.model.device), cache, rows=slice(-1, None), act=self.act
                )
                drafted.append(self._sample([*context, *drafted], out))
                cache.commit(len(unseen))
                unseen = drafted[-1:]
        finally:
            cache.truncate(start)
        return chain(drafted)

    def _sample(self, context: Sequence[int], out: Output) -> int:
        """The token after the last node, with the noise that the verification will draw."""
        sampler, device = self.verifier.sampler, out.logits.device
        seen = None
        if sampler.needs_seen:
            seen = Seen.of(distinct_ids(context, device), chain([], device=device), start=-1)
        return int(sampler(out.logits, out.positions[-1:] + 1, seen))
