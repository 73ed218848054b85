"""One decoding step of a model on our Triton kernels: 1 to 64 nodes, static buffers, the length on the device.

A step has no host read and no shape that depends on the context, so on CUDA it is captured as a graph, once for every
bucket of node counts; in Triton's interpreter the same function runs eagerly. Long prompts stay with
`CausalLM.forward`, which calls this for a model it was attached to (quant/kernel_choice.py).
"""

from __future__ import annotations

import logging
import os
import weakref
from pathlib import Path
from typing import cast

import torch
from torch import Tensor

from specq.models.cache import KVCache
from specq.models.causal_lm import CausalLM, Nodes, Output
from specq.models.device_layer import Stream, attention_sides, finish_layer, multiply_normed, norm, rotary_tables
from specq.models.graphs import GraphPool, Graphs
from specq.models.layers import DecoderLayer
from specq.models.rope import RopeTable
from specq.quant.kernel_choice import why_no_kernels
from specq.quant.rounding import FULL
from specq_kernels.kv_cache import append_rotary
from specq_kernels.launch import MAX_ROWS
from specq_kernels.step_rows import embed_rows, keep_rows
from specq_kernels.tree_attention import pack_mask, tree_attention

BUCKETS = (1, 2, 4, 8, 10, 16, 32, 64)

log = logging.getLogger("specq")


def attach_device_step(model: CausalLM, *, use_graphs: bool = True) -> None:
    """Make `model.forward` decode through a DeviceStep; where none runs the model, say why and leave it."""
    reason = why_no_step(model)
    if reason is not None:
        log.warning(f"steps run in torch, not on our kernels: {reason}")
        return
    model.device_step = DeviceStep(model, use_graphs=use_graphs)
    if model.device.type == "cuda" and not compiled_kernels().is_dir():
        log.info("kernels are compiled when they are first used, once on this machine: the first answers take longer")


def compiled_kernels() -> Path:
    """Where Triton keeps what it compiled."""
    return Path(os.environ.get("TRITON_CACHE_DIR") or Path.home() / ".triton" / "cache")


def why_no_step(model: CausalLM) -> str | None:
    """The reason why no DeviceStep runs this model on kernels, or None."""
    return why_no_attention(model.spec.head_dim) or why_no_kernels(model.dtype, model.device)


def why_no_attention(head_dim: int) -> str | None:
    """The reason why the attention kernel does not take heads of this size, or None."""
    if head_dim > 128 or head_dim % 16:
        return f"a head_dim of {head_dim} is not a multiple of 16 up to 128"
    return None


class DeviceStep:
    """Runs the nodes of one forward on kernels, with what `CausalLM.forward` promises.

    The nodes are padded to a bucket; no real node sees padding, and what that writes lies in slots that nothing
    commits. Where no kernel runs (a CPU), their definitions do.
    """

    def __init__(self, model: CausalLM, *, use_graphs: bool = True) -> None:
        """`use_graphs` False runs every step eagerly, as on a CPU."""
        self._model = cast(CausalLM, weakref.proxy(model))  # the model owns the step
        self._pool = GraphPool(model.device) if use_graphs and model.device.type == "cuda" else None
        self._bound: weakref.WeakKeyDictionary[KVCache, BoundStep] = weakref.WeakKeyDictionary()

    @torch.inference_mode()
    def __call__(self, nodes: Nodes, cache: KVCache, rows: slice | None = None) -> Output:
        """As `CausalLM.forward`, for 1 to 64 nodes that fit the cache, or a longer chain, 64 at a time."""
        base, count = cache.length, nodes.tokens.shape[0]
        step = self.bind(cache)
        if count > MAX_ROWS:
            return self._long_chain(step, nodes.tokens, cache, rows)
        step.load(nodes, base)
        step.run(padded_count(count, room=cache.max_len - base))
        final = step.final[:count]
        return Output(
            # Outside the graph: one launch, over the rows asked for only.
            logits=self._model.logits(final if rows is None else final[rows].contiguous()),
            features=step.features[:count].clone(),
            positions=step.depths[:count].long() + base,
        )

    def _long_chain(self, step: BoundStep, tokens: Tensor, cache: KVCache, rows: slice | None) -> Output:
        base = cache.length
        finals: list[Tensor] = []
        features: list[Tensor] = []
        for part in tokens.split(MAX_ROWS):
            start, count = base + MAX_ROWS * len(finals), part.shape[0]
            step.load_chain(part, start)
            step.run(padded_count(count, room=cache.max_len - start))
            finals.append(step.final[:count].clone())
            features.append(step.features[:count].clone())
        final = torch.cat(finals)
        return Output(
            logits=self._model.logits(final if rows is None else final[rows].contiguous()),
            features=torch.cat(features),
            positions=torch.arange(base, base + len(tokens), device=tokens.device),
        )

    def bind(self, cache: KVCache) -> BoundStep:
        """The step over this cache, always the same one."""
        step = self._bound.get(cache)
        if step is None:
            step = self._bound[cache] = BoundStep(self._model, cache, self._pool)
        return step

    def graphs(self) -> Graphs:
        """For functions that run this step among others: they share its memory."""
        return Graphs(self._pool)

    def captured(self, cache: KVCache) -> tuple[int, ...]:
        """The node counts this cache has graphs for, ascending."""
        step = self._bound.get(cache)
        return () if step is None else step.captured


def padded_count(count: int, *, room: int) -> int:
    """Nodes to run: the least bucket that holds `count`, or `count` itself where so many slots are not left."""
    bucket = next(bucket for bucket in BUCKETS if count <= bucket)
    return bucket if bucket <= room else count


class BoundStep:
    """The step of one model over one cache: its inputs and outputs at fixed addresses, and its graphs.

    Inputs are `tokens` (ids to embed), `depths`, `mask` and `length`; outputs `final`, `features` and the cache's
    slots behind `length`. Every step reads and writes these, so results are to be used or copied before the next one.
    """

    def __init__(self, model: CausalLM, cache: KVCache, pool: GraphPool | None) -> None:
        device, spec = model.device, model.spec
        self._model, self._graphs = model, Graphs(pool)
        # Not the cache itself: it is the weak key that this object hangs off.
        self._k, self._v = cache.k.unbind(), cache.v.unbind()
        self._cache_features = cache.features
        self._wanted = cache.feature_layers if isinstance(cache.feature_layers, tuple) else ()
        table = RopeTable(spec.rope, spec.head_dim, dtype=model.dtype, device=device)
        self._cos, self._sin = rotary_tables(table, cache.max_len)
        self._chain_depths = torch.arange(MAX_ROWS, dtype=torch.int32, device=device)
        self._chain_mask = pack_mask(torch.ones(MAX_ROWS, MAX_ROWS, dtype=torch.bool, device=device).tril_())
        self.tokens = torch.zeros(MAX_ROWS, dtype=torch.int32, device=device)
        self.depths, self.mask = self._chain_depths.clone(), self._chain_mask.clone()
        self.length = torch.zeros(1, dtype=torch.int32, device=device)
        self.final = torch.zeros(MAX_ROWS, spec.hidden, dtype=model.dtype, device=device)
        self.features = self.final.repeat(1, len(self._wanted)) if self._wanted else self.final

    def load(self, nodes: Nodes, base: int) -> None:
        """Make these nodes, behind `base` tokens, the next step's; what follows them is a chain of padding."""
        self.load_chain(nodes.tokens, base)
        if not nodes.is_chain:
            count = nodes.tokens.shape[0]
            self.depths[:count].copy_(nodes.depths())
            self.mask[:count].copy_(pack_mask(nodes.ancestor_mask()))

    def load_chain(self, tokens: Tensor, base: int) -> None:
        """The same for a chain of at most 64 tokens."""
        self.tokens[: tokens.shape[0]].copy_(tokens)
        self.length.fill_(base)
        self.depths.copy_(self._chain_depths)
        self.mask.copy_(self._chain_mask)

    def run(self, count: int) -> None:
        """Run the first `count` loaded nodes, as a graph where they are a bucket and graphs are used."""
        if count in BUCKETS:
            self._graphs.run(count, lambda: self.forward(count))
        else:
            self.forward(count)

    @property
    def captured(self) -> tuple[int, ...]:
        """The node counts that have a graph, ascending."""
        return tuple(sorted(cast(tuple[int, ...], self._graphs.keys)))

    def forward(self, count: int, act: str = FULL) -> None:
        """Fills `final`, `features` and the cache's slots behind `length` for the first `count` nodes.

        `act` is the precision of activations inside 4-bit products.
        """
        model = self._model
        stream = Stream(embed_rows(model.embedding, self.tokens[:count], dtype=model.dtype))
        for i, layer in enumerate(model.layers):
            assert isinstance(layer, DecoderLayer)
            stream = self._layer(layer, i, stream, act)
        final, x, _ = norm(stream, model.norm, eps=model.spec.norm_eps)
        self._keep_features(model.spec.layers, x)
        keep_rows(final, self.final, None if self._wanted else self._cache_features, self.length)

    def _keep_features(self, index: int, x: Tensor) -> None:
        """Keep the states that enter a layer where they are wanted."""
        for i, wanted in enumerate(self._wanted):
            if wanted == index:
                keep_rows(x, self.features, self._cache_features, self.length, column=i * x.shape[1])

    def _layer(self, layer: DecoderLayer, index: int, stream: Stream, act: str) -> Stream:
        """The residual stream after a layer; appends its K and V."""
        assert layer.attention_norm is not None
        weight = layer.attention_norm
        qkv, x = multiply_normed(stream, layer.qkv, weight, eps=layer.eps, act=act, in_parts=True)
        self._keep_features(index, x)
        count = x.shape[0]
        q = append_rotary(
            qkv,
            self._k[index],
            self._v[index],
            self._cos,
            self._sin,
            self.depths[:count],
            self.length,
            heads=layer.heads,
            q_norm=layer.q_norm if layer.has_head_norms else None,
            k_norm=layer.k_norm if layer.has_head_norms else None,
            eps=layer.eps,
        )  # [nodes, heads, head_dim]
        sides = attention_sides(layer, q, act=act)
        attended = tree_attention(
            q,
            self._k[index],
            self._v[index],
            self.mask[:count],
            self.length,
            depths=self.depths[:count],
            window=self._model.spec.sliding_windows[index],
            sides=sides,
        )
        return finish_layer(layer, x, attended, sides=sides, act=act)
