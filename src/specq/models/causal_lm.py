"""The one forward pass: a chain or a tree of tokens over a cache, for every family."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specq.checkpoint import ModelSpec
from specq.models.cache import KVCache
from specq.models.layers import FOLDED_NODES, AttentionView, DecoderLayer, attention_view, frozen
from specq.models.rope import RopeTable
from specq.quant.linear import DenseLinear

SHORT_CHAIN = 256
"""Tokens of a prompt up to which its steps on the device, 64 at a time, are faster than products launched one by one.

On an H200 SmolLM2-135M takes 45 ms for 65 to 190 tokens in the second way, whatever their number, and 3 ms a step.
"""

FeatureKind = Literal["final"] | tuple[int, ...] | None


class Nodes(Protocol):
    """Tokens to run, each below its ancestors; a chain's ancestors are all before it."""

    @property
    def tokens(self) -> Tensor:
        """int32 [nodes], parents before children."""

    @property
    def is_chain(self) -> bool: ...

    def depths(self) -> Tensor:
        """int32 [nodes], 0 for a root."""

    def ancestor_mask(self) -> Tensor:
        """bool [nodes, nodes], a node among its own ancestors."""


@dataclass(frozen=True)
class Output:
    """What one forward pass says of its nodes.

    `logits` are [rows, vocab] in fp32 (fp64 from an fp64 model), `features` [nodes, feature_dim] what the cache
    keeps or else the final hidden states, `positions` int64 [nodes].
    """

    logits: Tensor
    features: Tensor
    positions: Tensor


class CausalLM(nn.Module):
    """A decoder with its weights on one device; `forward` is run under `torch.inference_mode`."""

    def __init__(
        self,
        spec: ModelSpec,
        *,
        embedding: Tensor,
        layers: Sequence[DecoderLayer],
        norm: Tensor,
        head: nn.Module,
    ) -> None:
        """The norm's dtype is that of activations, K and V; the embedding's rows are cast to it."""
        super().__init__()
        self.spec = spec
        self.dtype, self.device = norm.dtype, norm.device
        self.embedding = frozen(embedding)
        self.layers = nn.ModuleList(layers)
        self.norm = frozen(norm)
        self.head = head
        self._rope = RopeTable(spec.rope, spec.head_dim, dtype=self.dtype, device=self.device)
        self.device_step: Callable[[Nodes, KVCache, slice | None], Output] | None = None  # see device_step.py

    @property
    def has_four_bit_products(self) -> bool:
        """Whether `act` changes anything: some matrix has 4 bits."""
        return any(getattr(module, "is_four_bit", False) for module in self.modules())

    def new_cache(self, max_len: int, *, features: FeatureKind = None) -> KVCache:
        """An empty cache of `max_len` slots.

        `features` says which hidden states it keeps of each token: "final" (after the last norm, what EAGLE-1 and
        EAGLE-2 read) or those entering the named layers, concatenated (EAGLE-3); layer `layers` is the end.
        """
        if isinstance(features, tuple) and not all(0 <= layer <= self.spec.layers for layer in features):
            raise ValueError(f"features: {features} are not layers of a model of {self.spec.layers}")
        self._rope.grow(max_len)
        return KVCache(
            (self.spec.layers, self.spec.kv_heads, max_len, self.spec.head_dim),
            feature_layers=features,
            feature_dim=self.spec.hidden * (len(features) if isinstance(features, tuple) else 1),
            dtype=self.dtype,
            device=self.device,
        )

    def forward(self, nodes: Nodes, cache: KVCache, *, rows: slice | None = None, act: str = "a16") -> Output:
        """Logits of the nodes in `rows` (default all), each at position `cache.length` plus its depth.

        Writes K, V and features at slots `cache.length` plus node and commits nothing. `act` is the precision of
        activations inside 4-bit products. Raises ValueError when the nodes do not fit the cache.
        """
        base, count = cache.length, nodes.tokens.shape[0]
        end = base + count
        if end > cache.max_len:
            raise ValueError(f"nodes: {count} nodes after {base} tokens do not fit a cache of {cache.max_len} slots")
        if self.device_step is not None and act == "a16" and count <= (SHORT_CHAIN if nodes.is_chain else FOLDED_NODES):
            return self.device_step(nodes, cache, rows)
        if nodes.is_chain:
            positions = torch.arange(base, end, device=self.device)
            rope = self._rope.cos[base:end, None], self._rope.sin[base:end, None]
        else:
            positions = nodes.depths().long() + base
            rope = self._rope.cos[positions, None], self._rope.sin[positions, None]
        views = self._views(nodes, positions, base)
        new_k, new_v = cache.k[:, :, base:end].unbind(), cache.v[:, :, base:end].unbind()
        seen = {
            window: (
                cache.k[:, None, :, view.start : end].unbind(),
                cache.v[:, None, :, view.start : end].unbind(),
            )
            for window, view in views.items()
        }
        wanted = cache.feature_layers if isinstance(cache.feature_layers, tuple) else ()
        entering: dict[int, Tensor] = {}
        x = self.embed(nodes.tokens)
        for i, (layer, window) in enumerate(zip(self.layers, self.spec.sliding_windows, strict=True)):
            if i in wanted:
                entering[i] = x
            k, v = seen[window]
            x = layer(x, rope, (new_k[i], new_v[i]), (k[i], v[i]), views[window], act)
        entering[self.spec.layers] = x
        final = F.rms_norm(x, x.shape[-1:], self.norm, self.spec.norm_eps)
        features = torch.cat([entering[i] for i in wanted], -1) if wanted else final
        if cache.features is not None:
            cache.features[base:end] = features
        return Output(self.logits(final if rows is None else final[rows], act=act), features, positions)

    def embed(self, tokens: Tensor) -> Tensor:
        """Embedding rows [nodes, hidden] of int tokens [nodes], in the dtype of activations."""
        return F.embedding(tokens, self.embedding).to(self.dtype)

    def head_rows(self, ids: Tensor | None) -> Tensor:
        """Rows [ids, hidden] of the output head (None: all of them), for a copy that only drafts."""
        if isinstance(self.head, DenseLinear):
            return self.head.weight.data if ids is None else self.head.weight[ids]
        # A packed head is read off what it does to the unit vectors.
        rows = self.head(torch.eye(self.spec.hidden, dtype=self.dtype, device=self.device), "a16").T
        return rows.contiguous() if ids is None else rows[ids]

    def logits(self, hidden: Tensor, *, act: str = "a16") -> Tensor:
        """The head's logits [rows, vocab] of final hidden states [rows, hidden], in fp32 (fp64 from fp64)."""
        if hidden.shape[0] == 0:
            return hidden.new_empty(0, self.spec.vocab, dtype=torch.promote_types(self.dtype, torch.float32))
        out: Tensor = self.head(hidden, act)
        return out.to(torch.promote_types(out.dtype, torch.float32))

    def _views(self, nodes: Nodes, positions: Tensor, base: int) -> dict[int | None, AttentionView]:
        """What the nodes see, for each window some layer has."""
        ancestors = None if nodes.is_chain else nodes.ancestor_mask()
        return {
            window: attention_view(
                ancestors,
                positions,
                base=base,
                window=window,
                group=self.spec.heads // self.spec.kv_heads,
                dtype=self.dtype,
            )
            for window in set(self.spec.sliding_windows)
        }
