"""The rows of an EAGLE head on our kernels: fixed buffers, lengths on the device, no host read.

A row is one token with the state before it. What a row sees is what lies committed in the head's cache and its
ancestors among the nodes of this drafting. Source: arXiv 2406.16858 section 4.1.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specq.models.cache import KVCache
from specq.models.device_layer import attention_sides, finish_layer, multiply, rotary_tables
from specq.models.device_step import why_no_attention
from specq.models.eagle import EagleHead
from specq.quant.kernel_choice import why_no_kernels
from specq.quant.kernel_linear import DenseKernelLinear
from specq.quant.linear import DenseLinear, DequantizedLinear
from specq_kernels.kv_cache import append_rotary
from specq_kernels.launch import MAX_ROWS
from specq_kernels.norm_rope import rms_norm
from specq_kernels.pair_rows import pair_rows
from specq_kernels.tree_attention import tree_attention


def why_no_device_head(head: EagleHead) -> str | None:
    """The reason why no DeviceHead runs this head for a model that has a DeviceStep, or None."""
    if why_no_kernels(head.target.dtype, head.target.device) is not None:
        return None  # definitions run there
    return why_no_attention(head.spec.head_dim)


class DeviceHead:
    """A head over its cache. Where kernels run, the head's 16-bit products are put on them, for all who use it."""

    def __init__(self, head: EagleHead, cache: KVCache) -> None:
        self.head = head
        if why_no_kernels(head.target.dtype, head.target.device) is None:
            put_on_kernels(head)
        self._k, self._v = cache.k[0], cache.v[0]
        self._cos, self._sin = rotary_tables(head.rope, cache.max_len)
        own = head.embedding
        self._embedding = head.target.embedding.data if own is None else own.data
        self._norms = (head.norms["embedding"].data, head.norms["feature"].data) if head.norms else None
        self._at = torch.arange(MAX_ROWS, dtype=torch.int32, device=head.target.device)
        self.target_ids = None if head.target_ids is None else head.target_ids.int()

    def enter(self, features: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        """(states [any, hidden], int32 [n]): where among them are those of these rows, int32 [n], of the features."""
        if self.head.spec.feature_layers is None:
            return features, rows
        return multiply(self.head.fc, features.index_select(0, rows)), self._at[: len(rows)]

    def run(
        self,
        tokens: Tensor,
        states: Tensor,
        rows: Tensor,
        *,
        depths: Tensor,
        mask: Tensor,
        length: Tensor,
        earlier: int,
    ) -> Tensor:
        """Predicted states [nodes, hidden] of `tokens`, int32 [nodes] ids within the embedding.

        `states[rows]` (int32 [nodes]) are those before the tokens. The nodes, at positions length + depths (int32
        [nodes]), follow `earlier` ones behind the `length` int32 [1] committed rows; both are there before any kernel
        of a draft runs. `mask` int32 [nodes, 2] says what of the nodes each sees.
        """
        head, spec, layer = self.head, self.head.spec, self.head.layer
        pair, x = pair_rows(self._embedding, tokens, states, rows, norms=self._norms, eps=spec.norm_eps)
        if spec.feature_layers is None:
            pair = x = multiply(head.fc, pair)
        qkv = multiply(layer.qkv, pair)
        q = append_rotary(qkv, self._k, self._v, self._cos, self._sin, depths, length, earlier=earlier)
        sides = attention_sides(layer, q)
        attended = tree_attention(q, self._k, self._v, mask, length, earlier=earlier, sides=sides)
        return finish_layer(layer, x, attended, sides=sides, in_parts=False).x

    def logits(self, states: Tensor) -> Tensor:
        """Logits [rows, the head's vocab] of predicted states, fp32 (fp64 from fp64)."""
        head = self.head
        if "output" in head.norms:
            states, _, _ = rms_norm(states, head.norms["output"].data, eps=head.spec.norm_eps)
        if head.output is None:
            return head.target.logits(states)
        own = multiply(head.output, states)
        return own.to(torch.promote_types(own.dtype, torch.float32))

    def spread(self, logits: Tensor) -> Tensor:
        """The same logits over the target's vocabulary, -inf where the head has none."""
        return self.head.spread(logits)


def put_on_kernels(head: EagleHead) -> None:
    """Make the head's dense products run on kernels; its weights are shared, not copied."""
    for owner in (head, head.layer):
        for name, module in owner.named_children():
            if isinstance(module, DenseLinear) and type(module) in (DenseLinear, DequantizedLinear):
                out = torch.float32 if name == "output" else None
                bias = None if module.bias is None else module.bias.data
                setattr(owner, name, DenseKernelLinear(module.weight.data.contiguous(), bias, out_dtype=out))
