"""Tiny float64 models for the property tests: a target, drafters that agree with it more or less, EAGLE heads."""

from __future__ import annotations

from typing import Any

import torch
from factories import WeightsInMemory, tiny_config
from torch import Tensor

from specq.checkpoint import ModelSpec, RopeSpec
from specq.models.causal_lm import CausalLM
from specq.models.eagle import EagleHead, HeadSpec
from specq.models.layers import DecoderLayer
from specq.models.loader import build_model, expected_tensors
from specq.models.rope import RopeTable
from specq.quant.linear import DenseLinear
from specq.quant.packed import PackedWeight, pack_nibbles

VOCAB = 32


def confident_weights(spec: ModelSpec, *, seed: int) -> dict[str, Tensor]:
    """Weights with a confident head, so that greedy text has no ties and drafters can agree with it."""
    draws = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, shape in expected_tensors(spec).items():
        values = torch.randn(shape, generator=draws, dtype=torch.float64)
        scale = 1.0 if len(shape) == 1 or "embed" in name else (3.0 if "lm_head" in name else 1.5) / shape[-1] ** 0.5
        tensors[name] = values.abs() + 0.5 if "norm" in name else values * scale
    return tensors


class FourBitWeights(WeightsInMemory):
    """These weights with the matrices of the layers in 4 bits, one scale a row."""

    def linear(self, prefix: str) -> Tensor | PackedWeight:  # type: ignore[override]
        weight = super().linear(prefix)
        if "_proj" not in prefix:
            return weight
        scales = (weight.abs().amax(1, keepdim=True) / 7).half()
        codes = (weight / scales).round().clamp(-8, 7) + 8
        return PackedWeight(pack_nibbles(codes), scales, group_size=weight.shape[1])


def make_model(
    *, seed: int = 0, noise: float = 0.0, family: str = "llama", bits: int = 16, **changes: object
) -> CausalLM:
    """A tiny model; with `noise` its weights are those of the same seed, each moved by that fraction of its size.

    With `bits` 4 the matrices of its layers have them.
    """
    shape = {"vocab_size": VOCAB, "hidden_size": 24, "intermediate_size": 40}
    spec = ModelSpec.from_config(tiny_config(family, **(shape | changes)))
    tensors = confident_weights(spec, seed=seed)
    if noise:
        other = confident_weights(spec, seed=seed + 1000)
        tensors = {name: t + noise * other[name] for name, t in tensors.items()}
    source = FourBitWeights(tensors) if bits == 4 else WeightsInMemory(tensors)
    return build_model(spec, source, device="cpu", dtype="float64")


def make_head(target: CausalLM, *, eagle3: bool = False, trimmed: int | None = None, seed: int = 0) -> EagleHead:
    """A random head for this target; EAGLE-1/2 by default, with an fc bias, or EAGLE-3 with its own output."""
    draws = torch.Generator().manual_seed(seed + 77)

    place: Any = {"dtype": target.dtype, "device": target.device}

    def weight(*shape: int, scale: float = 1.5) -> Tensor:
        return (torch.randn(shape, generator=draws, dtype=torch.float64) * scale / shape[-1] ** 0.5).to(**place)

    def linear(rows: int, columns: int, *, has_bias: bool = False) -> DenseLinear:
        return DenseLinear(weight(rows, columns), weight(rows) * 0.3 if has_bias else None)

    hidden, heads, kv_heads = target.spec.hidden, 4, 2
    head_dim = hidden // heads
    spec = HeadSpec(
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate=40,
        norm_eps=1e-6,
        vocab=trimmed or target.spec.vocab,
        feature_layers=(0, 1, target.spec.layers) if eagle3 else None,
    )
    attention_width = 2 * hidden if eagle3 else hidden
    layer = DecoderLayer(
        spec,
        norms=(None, torch.ones(hidden, **place)),
        head_norms=None,
        qkv=linear((heads + 2 * kv_heads) * head_dim, attention_width),
        o=linear(hidden, hidden),
        gate_up=linear(80, hidden),
        down=linear(hidden, 40),
    )
    ones = torch.ones(hidden, **place)
    fc = linear(hidden, 3 * hidden) if eagle3 else linear(hidden, 2 * hidden, has_bias=True)
    output = linear(spec.vocab, hidden) if eagle3 or trimmed else None
    ids = torch.randperm(target.spec.vocab, generator=draws)[:trimmed].sort().values.to(target.device)
    return EagleHead(
        spec,
        target,
        fc=fc,
        layer=layer,
        rope=RopeTable(RopeSpec("default", 10000.0), head_dim, **place),
        norms={"embedding": ones, "feature": ones, "output": ones} if eagle3 else None,
        output=output,
        target_ids=ids if trimmed else None,
    )
