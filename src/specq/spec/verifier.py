"""A model with its cache that judges drafts by its own samples, and catches up with the context whatever happened."""

from __future__ import annotations

from collections.abc import Sequence

from specq.models.cache import KVCache
from specq.models.causal_lm import CausalLM
from specq.spec.sampling import Sampler, Seen, distinct_ids
from specq.spec.tree import MAX_NODES, DraftTree, chain, graft, walk

PREFILL_CHUNK = 512
"""Prompts run in chunks cut at fixed multiples of this, so their K and V do not depend on the pipeline."""

MAX_TRUNK = 8
"""Pending tokens up to here ride as the trunk of a draft; more, or an empty cache, is a prefill without a draft."""


class Verifier:
    """`verify` decides at least one token and leaves in the cache exactly the context but its newest token."""

    is_on_device = False

    def __init__(self, model: CausalLM, cache: KVCache, sampler: Sampler) -> None:
        self.model, self.cache, self.sampler = model, cache, sampler

    @property
    def limit(self) -> int:
        """The longest context this verifier can decide the next token of."""
        return self.cache.max_len - MAX_NODES

    def needs_prefill(self, context: Sequence[int]) -> bool:
        """Whether the context is too far ahead of the cache to ride along with a draft."""
        return self.cache.length == 0 or len(context) - self.cache.length > MAX_TRUNK

    def max_draft(self, context: Sequence[int]) -> int:
        """Draft nodes that fit one verification beside the pending tokens."""
        return MAX_NODES - (len(context) - self.cache.length)

    def prefill(self, context: Sequence[int]) -> list[int]:
        """The one token after the context; runs what is pending in chunks, without a draft."""
        while True:
            start = self._checked_length(context)
            end = min((start // PREFILL_CHUNK + 1) * PREFILL_CHUNK, len(context))
            nodes = chain(context[start:end], device=self.model.device)
            if end == len(context):
                return self._decide(context, nodes, start=end - start - 1)
            self.model.forward(nodes, self.cache, rows=slice(0, 0))
            self.cache.keep(range(end - start))

    def verify(self, context: Sequence[int], tree: DraftTree) -> list[int]:
        """The tokens decided this round: the draft as far as the model's own samples follow it, then one more."""
        pending = context[self._checked_length(context) :]
        return self._decide(context, graft(pending, tree, device=self.model.device), start=len(pending) - 1)

    def rollback(self, n: int) -> None:
        """Forget everything after the first `n` tokens."""
        self.cache.truncate(min(self.cache.length, n))

    def _checked_length(self, context: Sequence[int]) -> int:
        length = self.cache.length
        if not 0 <= length < len(context):
            raise AssertionError(f"cache holds {length} tokens of a context of {len(context)}")
        return length

    def _decide(self, context: Sequence[int], nodes: DraftTree, *, start: int) -> list[int]:
        """Run the nodes, sample from `start` on, commit the path that follows the samples."""
        out = self.model.forward(nodes, self.cache, rows=slice(start, None))
        positions = out.positions[start:] + 1
        sampled = self.sampler(out.logits, positions, self._seen(context, nodes, start)).tolist()
        path = walk(nodes, sampled, start=start) if len(nodes) > start + 1 else [start]
        self.cache.keep([*range(start), *path])
        return [sampled[node - start] for node in path]

    def _seen(self, context: Sequence[int], nodes: DraftTree, start: int) -> Seen | None:
        if not self.sampler.needs_seen:
            return None
        return Seen.of(distinct_ids(context, self.model.device), nodes, start=start)
