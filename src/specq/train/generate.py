"""Answers of a model to many prompts at once: what a drafter is trained on.

Every sequence keeps its own positions (slot = position), so a batch needs no padding on the left and its K and V are
those of decoding alone. What is gained is throughput: this is not the decode loop of the pipelines.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from specq.models.causal_lm import CausalLM
from specq.train.batch import BatchedForward, causal, pad, table_rows

CHECK_EVERY = 16
"""Steps between two looks at which answers are finished: each look waits for the device."""

SLOT_MULTIPLE = 64


class AnswerWriter:
    """Writes answers in batches. `vocab` ids have a meaning, `stop_ids` end an answer and stay in it."""

    def __init__(self, model: CausalLM, *, vocab: int, stop_ids: frozenset[int], max_new_tokens: int) -> None:
        self.model, self.vocab, self.max_new_tokens = model, vocab, max_new_tokens
        self._forward = BatchedForward(model)
        self._stop_ids = torch.tensor(sorted(stop_ids), dtype=torch.int64, device=model.device)

    @torch.inference_mode()
    def answers(self, prompts: Sequence[Sequence[int]], *, temperature: float, seed: int) -> list[list[int]]:
        """The answer to each prompt: at most `max_new_tokens` ids, up to and with the first stop id.

        The same prompts, temperature and seed give the same answers on the same device.
        """
        draws = torch.Generator(self.model.device).manual_seed(seed)
        cache = _Slots(self.model, prompts, self.max_new_tokens)
        written = torch.zeros(len(prompts), self.max_new_tokens, dtype=torch.int64, device=self.model.device)
        next_ids = self._choose(self._prefill(prompts, cache), temperature, draws)
        for step in range(self.max_new_tokens):
            written[cache.rows, step] = next_ids
            cache.is_done |= torch.isin(next_ids, self._stop_ids)
            if step + 1 == self.max_new_tokens:
                break
            if step % CHECK_EVERY == CHECK_EVERY - 1:
                live = (~cache.is_done).nonzero().squeeze(1)
                if len(live) == 0:
                    break
                if len(live) <= len(cache.rows) // 2:
                    cache.select(live)
                    next_ids = next_ids[live]
            next_ids = self._choose(self._step(next_ids, cache), temperature, draws)
        return [self._cut(row) for row in written.tolist()]

    def _cut(self, row: list[int]) -> list[int]:
        stops = set(self._stop_ids.tolist())
        end = next((i for i, token in enumerate(row) if token in stops), len(row) - 1)
        return row[: end + 1]

    def _prefill(self, prompts: Sequence[Sequence[int]], cache: _Slots) -> Tensor:
        """Logits [batch, vocab] after each prompt; fills the cache."""
        tokens = pad(prompts).to(self.model.device)
        batch, length = tokens.shape
        self._forward.rope.grow(cache.slots)
        rope = table_rows(self._forward.rope, torch.arange(length, device=tokens.device).repeat(batch))
        x = self.model.embed(tokens.flatten())
        for i, layer in enumerate(self._forward.layers):
            q, k, v = layer.project(layer.normed(x), rope, "a16")
            q, k, v = (part.view(batch, length, -1, part.shape[-1]).transpose(1, 2) for part in (q, k, v))
            cache.k[i][:, :, :length], cache.v[i][:, :, :length] = k, v
            out = causal(q, k, v, self.model.spec.sliding_windows[i])
            x = layer.finish(x, out.transpose(1, 2).reshape(batch * length, -1), "a16")
        last = x.view(batch, length, -1)[torch.arange(batch, device=x.device), cache.lengths - 1]
        return self.model.logits(self._forward.normed(last))

    def _step(self, next_ids: Tensor, cache: _Slots) -> Tensor:
        """Logits [batch, vocab] after one more token each, which is written to the cache."""
        positions = cache.lengths.clone()
        cache.advance()
        masks = {window: cache.seen(positions, window) for window in set(self.model.spec.sliding_windows)}
        batch, rope = len(next_ids), table_rows(self._forward.rope, positions)
        x = self.model.embed(next_ids)
        for i, layer in enumerate(self._forward.layers):
            q, k, v = layer.project(layer.normed(x), rope, "a16")
            cache.k[i][cache.numbers, :, positions] = k
            cache.v[i][cache.numbers, :, positions] = v
            seen_k, seen_v = cache.k[i][:, :, : cache.used], cache.v[i][:, :, : cache.used]
            # The queries that share a key head are rows of one product, [batch, kv_heads, group, head_dim].
            rows = q.reshape(batch, seen_k.shape[1], -1, q.shape[-1])
            mask = masks[self.model.spec.sliding_windows[i]]
            out = F.scaled_dot_product_attention(rows, seen_k, seen_v, attn_mask=mask)
            x = layer.finish(x, out.reshape(batch, -1), "a16")
        return self.model.logits(self._forward.normed(x))

    def _choose(self, logits: Tensor, temperature: float, draws: torch.Generator) -> Tensor:
        """int64 [batch]: the argmax, or a sample of softmax(logits / temperature)."""
        logits = logits[:, : self.vocab]
        if temperature == 0.0:
            return logits.argmax(-1)
        waits = torch.empty_like(logits).exponential_(generator=draws)
        return (logits / temperature - waits.log()).argmax(-1)


class _Slots:
    """K and V of a batch of sequences of different lengths; a slot is a position."""

    def __init__(self, model: CausalLM, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> None:
        longest = max(map(len, prompts))
        self.slots = -(-(longest + max_new_tokens) // SLOT_MULTIPLE) * SLOT_MULTIPLE
        shape = (len(prompts), model.spec.kv_heads, self.slots, model.spec.head_dim)

        def empty() -> list[Tensor]:
            return [torch.zeros(shape, dtype=model.dtype, device=model.device) for _ in range(model.spec.layers)]

        self.k, self.v = empty(), empty()
        self.lengths = torch.tensor([len(p) for p in prompts], device=model.device)
        self.rows = torch.arange(len(prompts), device=model.device)
        self.is_done = torch.zeros(len(prompts), dtype=torch.bool, device=model.device)
        self._longest = longest

    @property
    def numbers(self) -> Tensor:
        """0, 1 ... for the sequences still written."""
        return torch.arange(len(self.rows), device=self.rows.device)

    @property
    def used(self) -> int:
        """Slots that some sequence may have filled."""
        return min(-(-self._longest // SLOT_MULTIPLE) * SLOT_MULTIPLE, self.slots)

    def advance(self) -> None:
        self.lengths += 1
        self._longest += 1

    def seen(self, positions: Tensor, window: int | None) -> Tensor:
        """bool [batch, 1, 1, used]: the slots that the token at each position attends to."""
        distance = positions[:, None] - torch.arange(self.used, device=positions.device)
        allowed = distance >= 0
        if window is not None:
            allowed &= distance < window
        return allowed[:, None, None]

    def select(self, live: Tensor) -> None:
        """Keep these sequences only."""
        for part in (self.k, self.v):
            for i, tensor in enumerate(part):
                part[i] = tensor[live]
        self.lengths, self.rows, self.is_done = self.lengths[live], self.rows[live], self.is_done[live]
