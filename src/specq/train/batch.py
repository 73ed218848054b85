"""The layers of a CausalLM over padded sequences, [batch, length] at a time, in plain torch.

Sequences are padded at their end, where causal attention never looks. Training and the writing of answers use it;
decoding one context over a cache is models/causal_lm.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from specq.models.causal_lm import CausalLM
from specq.models.layers import DecoderLayer
from specq.models.rope import RopeTable

Attention = Callable[[Tensor, Tensor, Tensor, int | None], Tensor]
"""(q [batch, heads, length, head_dim], k and v [batch, kv_heads, ...], window) -> like q."""


class BatchedForward:
    """A model's forward pass over batches; gradients flow where its parameters ask for them."""

    def __init__(self, model: CausalLM) -> None:
        self.model = model
        self.layers = decoder_layers(model)
        self.rope = RopeTable(model.spec.rope, model.spec.head_dim, dtype=model.dtype, device=model.device)

    def states(self, tokens: Tensor, *, layers: Iterable[int] | None = None) -> Tensor:
        """Final hidden states [batch, length, hidden], after the last norm, of int64 tokens [batch, length].

        `layers` are those to run, in this order (default all).
        """
        model, (batch, length) = self.model, tokens.shape
        self.rope.grow(length)
        rope = table_rows(self.rope, torch.arange(length, device=tokens.device).repeat(batch))
        x = model.embed(tokens.flatten())  # [batch * length, hidden]
        for i in range(model.spec.layers) if layers is None else layers:
            window = model.spec.sliding_windows[i]
            layer = self.layers[i]
            q, k, v = layer.project(layer.normed(x), rope, "a16")
            x = layer.finish(x, attend_batch(causal, q, k, v, batch=batch, window=window), "a16")
        return self.normed(x).view(batch, length, -1)

    def normed(self, x: Tensor) -> Tensor:
        """`x` behind the last norm."""
        return F.rms_norm(x, x.shape[-1:], self.model.norm, self.model.spec.norm_eps)


def decoder_layers(model: CausalLM) -> list[DecoderLayer]:
    """The model's layers, as what they are."""
    return [layer for layer in model.layers if isinstance(layer, DecoderLayer)]


def table_rows(table: RopeTable, positions: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin [rows, 1, head_dim] of int64 positions [rows]; the table must reach that far."""
    return table.cos[positions].unsqueeze(1), table.sin[positions].unsqueeze(1)


def attend_batch(
    attention: Attention, q: Tensor, k: Tensor, v: Tensor, *, batch: int, window: int | None = None
) -> Tensor:
    """[batch * length, heads * head_dim]: attention within each sequence of q [batch * length, heads, head_dim]."""
    parts = [part.view(batch, -1, *part.shape[1:]).transpose(1, 2) for part in (q, k, v)]
    out = attention(parts[0], parts[1], parts[2], window)
    return out.transpose(1, 2).reshape(q.shape[0], -1)


def causal(q: Tensor, k: Tensor, v: Tensor, window: int | None) -> Tensor:
    """Every position attends to itself and those before it, inside the window."""
    k, v = share_heads(k, q.shape[1]), share_heads(v, q.shape[1])
    length = q.shape[2]
    if window is None or length <= window:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)
    steps = torch.arange(length, device=q.device)
    distance = steps[:, None] - steps
    return F.scaled_dot_product_attention(q, k, v, attn_mask=(distance >= 0) & (distance < window))


def share_heads(x: Tensor, heads: int) -> Tensor:
    """Key or value heads [batch, kv_heads, ...] repeated for the query heads that share them."""
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], 1)


def pad(sequences: Sequence[Sequence[int]], *, multiple: int = 1) -> Tensor:
    """int64 [batch, length] on the CPU, zeros behind each sequence; the length is rounded up to `multiple`."""
    length = -(-max(map(len, sequences)) // multiple) * multiple
    tokens = torch.zeros(len(sequences), length, dtype=torch.int64)
    for row, ids in enumerate(sequences):
        tokens[row, : len(ids)] = torch.tensor(ids)
    return tokens
