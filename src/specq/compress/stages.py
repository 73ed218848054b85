"""One decoder layer taken apart at its four products, for batches of whole sequences without a cache.

It is the forward pass of models/layers.py cut where quantization has to look in; a test holds the two together.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from specq.checkpoint import ModelSpec
from specq.models.layers import attend, attention_view
from specq.models.rope import RopeTable, rotate
from specq.tensors import WeightSource

PRODUCTS: Mapping[str, tuple[str, ...]] = {
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "o": ("self_attn.o_proj",),
    "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "down": ("mlp.down_proj",),
}
"""The matrices that share their input, in the order in which a layer uses them."""


class StagedLayer:
    """The parts of layer `index` that stay as they are, and what happens between its products.

    The residual stream is [sequences, tokens, hidden]; `weights` holds the products' matrices [out, in] by name.
    """

    def __init__(self, spec: ModelSpec, index: int, source: WeightSource, rope: RopeTable) -> None:
        self._spec, self._rope = spec, rope
        self._window = spec.sliding_windows[index]
        self._source, self._prefix = source, f"model.layers.{index}."
        self._attention_norm = self._vector("input_layernorm.weight")
        self._mlp_norm = self._vector("post_attention_layernorm.weight")
        self._head_norms: tuple[Tensor, Tensor] | None = None
        if spec.qk_norm:
            self._head_norms = self._vector("self_attn.q_norm.weight"), self._vector("self_attn.k_norm.weight")
        has_bias = {"qkv": spec.qkv_bias, "o": spec.o_bias, "gate_up": spec.mlp_bias, "down": spec.mlp_bias}
        self._biases = {
            product: torch.cat([self._vector(f"{name}.bias") for name in names]) if has_bias[product] else None
            for product, names in PRODUCTS.items()
        }
        self.weights: dict[str, Tensor] = {}

    def _vector(self, name: str) -> Tensor:
        return self._source.tensor(self._prefix + name).to(self._rope.cos)

    def apply(self, product: str, x: Tensor) -> Tensor:
        """The product's outputs [..., out]."""
        return F.linear(x, self.weights[product], self._biases[product])

    def attention_input(self, x: Tensor) -> Tensor:
        """What q, k and v read."""
        return F.rms_norm(x, x.shape[-1:], self._attention_norm, self._spec.norm_eps)

    def attended(self, x: Tensor) -> Tensor:
        """What o reads, [sequences, tokens, heads * head_dim]."""
        spec = self._spec
        sequences, tokens, _ = x.shape
        qkv = self.apply("qkv", self.attention_input(x)).view(sequences, tokens, -1, spec.head_dim)
        turning, v = qkv[:, :, : -spec.kv_heads], qkv[:, :, -spec.kv_heads :]
        if self._head_norms is not None:
            q, k = turning.split((spec.heads, spec.kv_heads), 2)
            shape = (spec.head_dim,)
            q, k = (F.rms_norm(a, shape, w, spec.norm_eps) for a, w in zip((q, k), self._head_norms, strict=True))
            turning = torch.cat((q, k), 2)
        turned = rotate(turning, self._rope.cos[:tokens, None], self._rope.sin[:tokens, None])
        q, k = turned.split((spec.heads, spec.kv_heads), 2)
        view = attention_view(
            None,
            torch.arange(tokens, device=x.device),
            base=0,
            window=self._window,
            group=spec.heads // spec.kv_heads,
            dtype=x.dtype,
        )
        one_by_one = (
            attend(q[i], k[i].transpose(0, 1)[None], v[i].transpose(0, 1)[None], view) for i in range(sequences)
        )
        return torch.stack(list(one_by_one))

    def mlp_input(self, x: Tensor) -> Tensor:
        """What gate and up read."""
        return F.rms_norm(x, x.shape[-1:], self._mlp_norm, self._spec.norm_eps)

    def gated(self, x: Tensor) -> Tensor:
        """What down reads, [sequences, tokens, intermediate]."""
        gate, up = self.apply("gate_up", self.mlp_input(x)).chunk(2, -1)
        return F.silu(gate) * up

    def run(self, x: Tensor) -> Tensor:
        """The residual stream after the whole layer."""
        x = x + self.apply("o", self.attended(x))
        return x + self.apply("down", self.gated(x))
