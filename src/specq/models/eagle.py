"""EAGLE heads: one decoder layer that predicts a model's next hidden state from its last one and the next token.

EAGLE-1 and EAGLE-2 share their weights (arXiv 2401.15077, 2406.16858); EAGLE-3 reads three hidden states and brings
its own norm, head and, often, a trimmed vocabulary (2503.01840). Building the tree is the drafter's business.
Source of shapes and of what a checkpoint leaves out: SafeAILab/EAGLE, model/cnets1.py and model/cnets.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specq.models.cache import KVCache
from specq.models.causal_lm import CausalLM, FeatureKind, Nodes
from specq.models.layers import DecoderLayer, attention_view, frozen
from specq.models.rope import RopeTable


@dataclass(frozen=True)
class HeadSpec:
    """What a head is besides its weights.

    `feature_layers` None means the hidden state after the target's last norm (EAGLE-1/2); a tuple names the layers
    whose entering states are concatenated (EAGLE-3). `vocab` counts the head's own ids.
    """

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    norm_eps: float
    vocab: int
    feature_layers: tuple[int, ...] | None

    @property
    def features(self) -> FeatureKind:
        """What the target's cache has to keep."""
        return "final" if self.feature_layers is None else self.feature_layers


class EagleHead(nn.Module):
    """A head with the model it drafts for, whose embedding (and, in EAGLE-1/2, output head) it uses.

    A row of its cache pairs token i + 1 with the feature of token i, at position i: a head that has seen n tokens of
    context has n - 1 rows.
    """

    def __init__(
        self,
        spec: HeadSpec,
        target: CausalLM,
        *,
        fc: nn.Module,
        layer: DecoderLayer,
        rope: RopeTable,
        embedding: Tensor | None = None,
        norms: Mapping[str, Tensor] | None = None,
        output: nn.Module | None = None,
        target_ids: Tensor | None = None,
        head_bits: int = 16,
    ) -> None:
        """`norms` (embedding, feature, output) are an EAGLE-3 head's own; `output` replaces the target's output head.

        `target_ids` int64 [vocab] are the target's ids of a trimmed `output`; without it they are the same.
        `head_bits` says in how many bits the output head is that drafts.
        """
        super().__init__()
        self.spec, self.head_bits = spec, head_bits
        self._target = [target]  # in a list, so that the target's weights are not this module's
        self.fc, self.layer, self.output = fc, layer, output
        self.rope = rope
        self.embedding = None if embedding is None else frozen(embedding)
        self.norms = nn.ParameterDict({name: frozen(norm) for name, norm in (norms or {}).items()})
        self.target_ids: Tensor | None
        self.register_buffer("target_ids", target_ids)

    @property
    def target(self) -> CausalLM:
        """The model this head drafts for."""
        return self._target[0]

    def with_output(self, output: nn.Module | None, *, head_bits: int) -> EagleHead:
        """The same head, its weights shared, that drafts with another output head."""
        return EagleHead(
            self.spec,
            self.target,
            fc=self.fc,
            layer=self.layer,
            rope=self.rope,
            embedding=self.embedding,
            norms=dict(self.norms),
            output=output,
            target_ids=self.target_ids,
            head_bits=head_bits,
        )

    def new_cache(self, max_len: int) -> KVCache:
        """An empty cache of `max_len` rows."""
        self.rope.grow(max_len)
        return KVCache(
            (1, self.spec.kv_heads, max_len, self.spec.head_dim),
            feature_layers=None,
            feature_dim=0,
            dtype=self.target.dtype,
            device=self.target.device,
        )

    def enter(self, features: Tensor) -> Tensor:
        """States [rows, hidden] of the target's features [rows, feature_dim]."""
        return self.fc(features) if self.spec.feature_layers is not None else features

    def forward(self, nodes: Nodes, states: Tensor, cache: KVCache, *, start: int = 0) -> Tensor:
        """Predicted states [nodes - start, hidden] of the nodes from `start` on.

        `states` [nodes - start, hidden] are those before each node's token. Earlier nodes were run before and lie in
        the cache behind `cache.length`; K and V of the new ones are written after them, and nothing is committed.
        """
        base, count = cache.length, nodes.tokens.shape[0]
        end = base + count
        if end > cache.max_len:
            raise ValueError(f"nodes: {count} nodes after {base} rows do not fit a cache of {cache.max_len}")
        positions = nodes.depths().long() + base
        rope = self.rope.cos[positions[start:], None], self.rope.sin[positions[start:], None]
        x, attention_input = self._layer_input(nodes.tokens[start:], states)
        slots = cache.k[0, :, base + start : end], cache.v[0, :, base + start : end]
        seen = cache.k[:1, :, :end], cache.v[:1, :, :end]
        view = attention_view(
            None if nodes.is_chain else nodes.ancestor_mask(),
            positions,
            base=base,
            window=None,
            group=self.spec.heads // self.spec.kv_heads,
            dtype=self.target.dtype,
            first=start,
        )
        out: Tensor = self.layer(x, rope, slots, seen, view, "a16", attention_input=attention_input)
        return out

    def logits(self, states: Tensor) -> Tensor:
        """Logits [rows, target's vocab] of predicted states [rows, hidden]; -inf outside a trimmed vocabulary.

        fp32, fp64 from a fp64 target.
        """
        if "output" in self.norms:
            states = F.rms_norm(states, states.shape[-1:], self.norms["output"], self.spec.norm_eps)
        if self.output is None:
            return self.target.logits(states)
        own: Tensor = self.output(states)
        own = own.to(torch.promote_types(own.dtype, torch.float32))
        return self.spread(own)

    def spread(self, own: Tensor) -> Tensor:
        """Logits [rows, target's vocab] of those over the head's own ids; -inf outside a trimmed vocabulary."""
        if self.target_ids is None:
            return own
        return own.new_full((own.shape[0], self.target.spec.vocab), -torch.inf).index_copy_(1, self.target_ids, own)

    def _layer_input(self, tokens: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
        """(residual stream, what attention reads) before the layer."""
        table = self.embedding
        embedded = self.target.embed(tokens) if table is None else F.embedding(tokens, table).to(self.target.dtype)
        if self.spec.feature_layers is None:
            # EAGLE-1/2: embedding first, feature second; the layer has no input norm, the feature is normalised.
            x: Tensor = self.fc(torch.cat((embedded, states), -1))
            return x, x
        shape, eps = states.shape[-1:], self.spec.norm_eps
        pair = (
            F.rms_norm(embedded, shape, self.norms["embedding"], eps),
            F.rms_norm(states, shape, self.norms["feature"], eps),
        )
        return states, torch.cat(pair, -1)
