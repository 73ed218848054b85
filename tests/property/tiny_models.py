"""Tiny random float64 models for the property tests: a target, and drafters that agree with it more or less."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from specq.checkpoint import ModelSpec
from specq.models.causal_lm import CausalLM
from specq.models.loader import build_model, expected_tensors

VOCAB = 32
CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": VOCAB,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}


class DictSource:
    """A WeightSource over tensors in memory."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = tensors

    def names(self) -> frozenset[str]:
        return frozenset(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._tensors[name].shape)

    def tensor(self, name: str) -> Tensor:
        return self._tensors[name]

    def linear(self, prefix: str) -> Tensor:
        return self._tensors[f"{prefix}.weight"]

    def bytes(self) -> int:
        return sum(t.nbytes for t in self._tensors.values())


def random_weights(spec: ModelSpec, *, seed: int) -> dict[str, Tensor]:
    """Weights with a confident head, so that greedy text is no ties and drafters can agree with it."""
    draws = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, shape in expected_tensors(spec).items():
        values = torch.randn(shape, generator=draws, dtype=torch.float64)
        scale = 1.0 if len(shape) == 1 or "embed" in name else (3.0 if "lm_head" in name else 1.5) / shape[-1] ** 0.5
        tensors[name] = values.abs() + 0.5 if "norm" in name else values * scale
    return tensors


def make_model(*, seed: int = 0, noise: float = 0.0, **changes: object) -> CausalLM:
    """A tiny model; with `noise` its weights are those of the same seed, each moved by that fraction of its size."""
    spec = ModelSpec.from_config(CONFIG | changes)
    tensors = random_weights(spec, seed=seed)
    if noise:
        other = random_weights(spec, seed=seed + 1000)
        tensors = {name: t + noise * other[name] for name, t in tensors.items()}
    return build_model(spec, DictSource(tensors), device="cpu", dtype="float64")
