"""A verification on the device: nodes, step, samples, walk and compaction without the host, then one read.

Its shapes are those of the node bucket, so on CUDA it is one graph a bucket and form of sampling; everywhere it is the
same code. The definition is `Verifier.verify`.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from specq.models.cache import KVCache
from specq.models.causal_lm import CausalLM
from specq.models.device_step import BUCKETS, BoundStep, DeviceStep, padded_count
from specq.quant.kernel_linear import DenseKernelLinear
from specq.quant.rounding import FULL
from specq.spec.host import Download, Upload
from specq.spec.sampling import Sampler, Seen
from specq.spec.tree import MAX_NODES, DraftTree, chain
from specq.spec.verifier import Verifier
from specq_kernels.filtered import CANDIDATES, filtered_choice
from specq_kernels.kv_cache import compact, compact_rows
from specq_kernels.launch import runs_kernel
from specq_kernels.sampling import Draw, argmax, gumbel_argmax, signed
from specq_kernels.tree_nodes import graft_nodes, walk_nodes
from specq_kernels.w16a16 import w16a16_argmax


class DeviceVerifier(Verifier):
    """A verifier whose rounds run on the device; prompts as before."""

    is_on_device = True

    def __init__(self, round_: DeviceRound, sampler: Sampler) -> None:
        super().__init__(round_.model, round_.cache, sampler)
        self.round = round_

    def verify(self, context: Sequence[int], tree: DraftTree) -> list[int]:
        start = self._checked_length(context)
        pending = context[start:]
        decided = self.ready(context)(start, pending, tree)
        if not decided:
            decided = [self._decide_alone(context, len(pending) - 1)]
        self.cache.commit(len(pending) - 1 + len(decided))
        return decided

    def ready(self, context: Sequence[int]) -> DeviceRound:
        """The round, set to sample as this verifier does behind this context."""
        if self.round.user is None or self.round.user() is not self:
            self.round.use(self.sampler)
            self.round.user = weakref.ref(self)
        if self.sampler.needs_seen:
            self.round.seen.show(context)
        return self.round

    def rollback(self, n: int) -> None:
        super().rollback(n)
        self.round.seen.forget(n)

    def _decide_alone(self, context: Sequence[int], row: int) -> int:
        """The token after the pending ones, from a distribution too flat for the round's candidates."""
        logits, positions = self.round.last_row(row)
        seen = self._seen(context, chain([], device=self.model.device), -1)
        return int(self.sampler(logits, positions, seen))


class DeviceRound:
    """The verification of one model over one cache: its buffers, and a graph for every bucket and form of sampling."""

    def __init__(self, model: CausalLM, cache: KVCache) -> None:
        """Raises TypeError for a model without a DeviceStep."""
        if not isinstance(model.device_step, DeviceStep):
            raise TypeError("model: it has no DeviceStep")
        device = model.device
        self.model, self.cache = model, cache
        self._step = model.device_step.bind(cache)
        self.graphs = model.device_step.graphs()
        self._upload = Upload(3 + 3 * MAX_NODES, device)
        whole = self._upload.device
        self._counts, self._pending = whole[:3], whole[3 : 3 + MAX_NODES]
        self._draft = whole[3 + MAX_NODES :].view(2, MAX_NODES)
        self._tokens, self._parents, self._path = torch.zeros(3, MAX_NODES, dtype=torch.int32, device=device).unbind()
        self.positions = torch.zeros(MAX_NODES, dtype=torch.int64, device=device)
        """Of the token after each node."""
        self._kept = torch.zeros(1, dtype=torch.int32, device=device)
        self._result = torch.zeros(MAX_NODES + 1, dtype=torch.int32, device=device)
        self._download = Download(self._result)
        self._last_logits: Tensor | None = None
        # Weak, because it holds this: a ring would keep models and caches that nobody uses until a collection.
        self.user: weakref.ref[Verifier] | None = None
        self.sampler = self.form = Sampler()
        self.draw = Draw.of(0, 1.0, device)
        self.seen = SeenIds(cache.max_len, device)

    def use(self, sampler: Sampler) -> None:
        """Sample as this one does from now on."""
        vocab = self.model.spec.vocab
        if sampler.vocab is not None and sampler.vocab > vocab:  # a tokenizer of more ids; kernels want it exact
            sampler = replace(sampler, vocab=vocab)
        self.sampler, self.form = sampler, sampler.form
        self.draw.seed.fill_(signed(sampler.seed))
        if sampler.temperature > 0:
            self.draw.temperature.fill_(sampler.temperature)
        if sampler.has_filter and self._last_logits is None:
            dtype = torch.promote_types(self.model.dtype, torch.float32)
            self._last_logits = torch.zeros(1, self.model.spec.vocab, dtype=dtype, device=self.model.device)
        self.seen.forget(0)

    @torch.inference_mode()
    def __call__(self, length: int, pending: Sequence[int], tree: DraftTree) -> list[int]:
        """The tokens decided behind `length` committed ones; none where the first could not be decided."""
        self.run(self.load(length, pending, tree))
        values = self._download.read()
        return values[1 : values[0] + 1]

    def load(self, length: int, pending: Sequence[int], tree: DraftTree) -> int:
        """Send what the next round verifies; the nodes to run, padding included."""
        n, drafted = len(pending), len(tree)
        values = self._upload.write()
        values[:3] = length, n, drafted
        values[3 : 3 + n] = pending
        is_here = tree.tokens.device.type == "cpu" and drafted > 0
        if is_here:
            at = 3 + MAX_NODES
            values[at : at + drafted] = tree.tokens.numpy()
            values[at + MAX_NODES : at + MAX_NODES + drafted] = tree.parents.numpy()
        self._upload.send()
        if drafted > 0 and not is_here:
            self._draft[0, :drafted].copy_(tree.tokens)
            self._draft[1, :drafted].copy_(tree.parents)
        return padded_count(n + drafted, room=self.cache.max_len - length)

    def run(self, count: int) -> None:
        """Do the round of what was loaded, of `count` nodes; nothing waits."""
        if count in BUCKETS:
            self.graphs.run((count, self.form), lambda: self._run(count))
        else:
            self._run(count)

    def last_row(self, row: int) -> tuple[Tensor, Tensor]:
        """(logits [1, vocab], position [1] of the token after it) of the trunk's end in the last round."""
        assert self._last_logits is not None  # only a filter leaves anything undecided
        return self._last_logits, self.positions[row : row + 1]

    def lay_out(self) -> BoundStep:
        """The step, set to run the nodes of what was loaded."""
        step = self._step
        graft_nodes(
            self._counts,
            self._pending,
            self._draft,
            tokens=self._tokens,
            ids=step.tokens,
            parents=self._parents,
            depths=step.depths,
            mask=step.mask,
            positions=self.positions,
            length=step.length,
        )
        return step

    def _run(self, count: int) -> None:
        """A round of `count` nodes, padding included."""
        step, cache = self.lay_out(), self.cache
        step.forward(count)
        sampled = self._sample(count)
        walk_nodes(
            self._counts, self._tokens, self._parents, sampled, path=self._path, kept=self._kept, result=self._result
        )
        if count > 1:
            path = self._path[:count]
            compact(cache.k, cache.v, path, self._kept, step.length)
            if cache.features is not None:
                compact_rows(cache.features, path, self._kept, step.length)

    def _sample(self, count: int) -> Tensor:
        """int64 [count]: the token after each node, UNDECIDED where it cannot be said without the host."""
        seen = None
        if self.sampler.needs_seen:
            ancestors = unpack_mask(self._step.mask[:count], count)
            seen = Seen(self.seen.ids, self._step.tokens[:count].long(), ancestors)
        last = self._counts[1:2] - 1 if self.sampler.has_filter else None
        return self.choose(self._step.final[:count], self.positions[:count], seen, last=last)

    def choose(
        self, hidden: Tensor, positions: Tensor, seen: Seen | None, *, act: str = FULL, last: Tensor | None = None
    ) -> Tensor:
        """int64 [rows]: what is sampled at these positions from final states [rows, hidden], UNDECIDED as in a round.

        `act` is the precision of activations in an output head of 4 bits; the logits of row `last` are kept for
        `last_row` where they may be needed.
        """
        sampler, head = self.sampler, self.model.head
        is_fused = sampler.temperature == 0 and not sampler.needs_seen and runs_kernel(hidden)
        if is_fused and isinstance(head, DenseKernelLinear) and head.bias is None:
            return w16a16_argmax(hidden, head.kernel_weight, vocab=sampler.vocab)
        logits = self.model.logits(hidden, act=act)
        if sampler.has_filter and self._last_logits is not None and last is not None:
            self._last_logits.copy_(logits.index_select(0, last))
        if not runs_kernel(logits) or sampler.top_k > CANDIDATES:
            return sampler.choose(logits, positions, seen, draw=self.draw)
        logits, vocab = sampler.penalized(logits, seen), sampler.vocab
        if sampler.temperature == 0:
            return argmax(logits, vocab=vocab)
        if not sampler.has_filter:
            return gumbel_argmax(logits, positions, self.draw, vocab=vocab)
        return filtered_choice(logits, positions, self.draw, top_k=sampler.top_k, top_p=sampler.top_p, vocab=vocab)


class SeenIds:
    """The ids of a context on the device, in a buffer of fixed size; `ids` int64 [max_len], repeated to its end."""

    def __init__(self, max_len: int, device: torch.device) -> None:
        self._upload = Upload(max_len, device)
        self.ids = torch.zeros(max_len, dtype=torch.int64, device=device)
        self._count = 0

    def show(self, context: Sequence[int]) -> None:
        """Make `ids` those of the context; only what is new since `forget` travels."""
        if self._count < len(context):
            values = self._upload.write()
            values[self._count : len(context)] = context[self._count :]
            values[len(context) :] = context[0]
            self._upload.send()
            self.ids.copy_(self._upload.device)
            self._count = len(context)

    def forget(self, n: int) -> None:
        """What lies behind the first `n` tokens may have changed."""
        self._count = min(self._count, n)


def unpack_mask(words: Tensor, nodes: int) -> Tensor:
    """bool [rows, nodes] of ancestor words int32 [rows, 2]."""
    bits = torch.arange(nodes, device=words.device)
    return (words[:, bits // 32] >> bits % 32 & 1).bool()
