"""Models and forwards that the kernel-built step is held to: in the interpreter (tests/kernels) and on a GPU."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from factories import VOCAB, WeightsInMemory, random_weights, tiny_config
from packed_weights import random_packed
from torch import Tensor

from specq.checkpoint import ModelSpec
from specq.models.causal_lm import CausalLM, FeatureKind
from specq.models.device_step import DeviceStep
from specq.models.loader import Engine, build_model
from specq.quant.packed import PackedWeight
from specq.spec.tree import DraftTree, chain

ONE_LAYER = {"num_hidden_layers": 1}
DENSE: Mapping[str, dict[str, Any]] = {
    "grouped heads": tiny_config("llama"),
    "one key head, window": tiny_config("mistral", sliding_window=16, num_key_value_heads=1, head_dim=32, **ONE_LAYER),
    "biases, tied head": tiny_config("qwen2", tie_word_embeddings=True, **ONE_LAYER),
    "norms of heads": tiny_config("qwen3", **ONE_LAYER),
    "every bias, own key heads": tiny_config(
        "llama", attention_bias=True, mlp_bias=True, num_attention_heads=2, num_key_value_heads=2, **ONE_LAYER
    ),
}


@dataclass(frozen=True)
class Form:
    """How the matrices of a 4-bit model are stored."""

    group_size: int
    kind: str = "symmetric"
    is_permuted: bool = False
    family: str = "llama"
    head_dim: int = 128
    width: int = 128


FORMS: Mapping[str, Form] = {
    "symmetric": Form(128),
    "per channel": Form(-1, head_dim=16),
    "zeros, act-order": Form(32, "zeros", is_permuted=True),
    "minima, biases": Form(64, "minima", family="qwen2"),
    "two-level": Form(32, "two-level", width=256),
    "a group no kernel runs": Form(16, head_dim=16),
}


def packed_config(form: Form, **changes: Any) -> dict[str, Any]:
    """A config of two layers whose matrices have this form; two-level ones are a multiple of 256 wide."""
    sizes = {"hidden_size": form.width, "intermediate_size": form.width, "head_dim": form.head_dim}
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 1}
    quantization = {"quant_method": "gguf"}
    return tiny_config(form.family, quantization_config=quantization, **(sizes | changes))


class PackedInMemory(WeightsInMemory):
    """Random weights of a config, those of the layers' products 4-bit in this form."""

    def __init__(self, config: Mapping[str, Any], form: Form) -> None:
        weights = random_weights(config)
        self.packed: dict[str, PackedWeight] = {}
        for seed, name in enumerate(name for name in weights if "_proj.weight" in name):
            rows, columns = weights[name].shape
            group = columns if form.group_size == -1 else form.group_size
            matrix = random_packed(rows, columns, group, kind=form.kind, seed=seed)
            if matrix.two_level is not None:  # its codes go to 63: back to the size of the others
                level = replace(matrix.two_level, minima=matrix.two_level.minima / 64)
                matrix = replace(matrix, scales=matrix.scales / 64, two_level=level)
            if form.is_permuted:  # one order for all columns of a number: what reads the same x has to fuse
                order = torch.randperm(columns, generator=torch.Generator().manual_seed(columns))
                matrix = replace(matrix, g_idx=(order // group).to(torch.int32))
            self.packed[name.removesuffix(".weight")] = matrix
            weights[name] = matrix.dequantize()
        super().__init__(weights)

    def linear(self, prefix: str) -> Tensor | PackedWeight:  # type: ignore[override]
        return self.packed[prefix] if prefix in self.packed else super().linear(prefix)

    def is_packed(self, prefix: str) -> bool:
        return prefix in self.packed


def random_tree(nodes: int, *, seed: int, device: torch.device | None = None) -> DraftTree:
    """A tree in which each node hangs off one of the six before it."""
    draw = random.Random(seed)
    parents = [-1] + [draw.randint(max(0, i - 6), i - 1) for i in range(1, nodes)]
    return DraftTree.from_lists([draw.randrange(VOCAB) for _ in range(nodes)], parents, device=device)


def random_chain(nodes: int, *, seed: int, device: torch.device | None = None) -> DraftTree:
    draw = random.Random(seed)
    return chain([draw.randrange(VOCAB) for _ in range(nodes)], device=device)


Steps = Sequence[tuple[DraftTree, Sequence[int]]]
"""Forwards in turn, each with the path of its nodes that is kept."""


@dataclass(frozen=True)
class Ran:
    """What a series of forwards left: logits of all, K, V and features of every slot they wrote."""

    logits: Tensor
    k: Tensor
    v: Tensor
    features: Tensor


@torch.inference_mode()
def run_forwards(
    model: CausalLM,
    forwards: Steps,
    *,
    max_len: int,
    features: FeatureKind = "final",
    skip: int = 0,
) -> Ran:
    """What the forwards leave in a new cache of `max_len` slots; the first `skip` say nothing in `logits`."""
    cache = model.new_cache(max_len, features=features)
    logits, end = [], 0
    for i, (nodes, path) in enumerate(forwards):
        out = model(nodes, cache, rows=slice(0, 0) if i < skip else None)
        assert out.features.shape[0] == out.positions.shape[0] == len(nodes)
        assert cache.features is not None
        end = cache.length + len(nodes)
        torch.testing.assert_close(cache.features[cache.length : end], out.features, rtol=0, atol=0)
        logits.append(out.logits)
        cache.keep(path)
    assert cache.features is not None
    return Ran(
        torch.cat(logits), cache.k[:, :, :end].clone(), cache.v[:, :, :end].clone(), cache.features[:end].clone()
    )


def fast_model(
    config: Mapping[str, Any], source: WeightsInMemory | None = None, *, dtype: str, device: str = "cpu"
) -> CausalLM:
    """The model of these (or random) weights on kernels."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPECQ_KERNELS", "triton")
        source = source or WeightsInMemory(random_weights(config))
        model = build_model(ModelSpec.from_config(config), source, dtype=dtype, device=device)
    assert isinstance(model.device_step, DeviceStep)
    return model


def plain_model(spec: ModelSpec, source: WeightsInMemory, *, dtype: str, device: str = "cpu") -> CausalLM:
    """The model of these weights in torch."""
    return build_model(spec, source, dtype=dtype, device=device, engine=Engine(use_kernels=False))


def assert_equal_to_plain(fast: CausalLM, source: WeightsInMemory, steps: Steps, **options: Any) -> None:
    """Logits, K, V and features are as close to those of float64 weights as plain decoding in the same dtype gets.

    Sums run in another order, so the errors are others: half as large again over all values is allowed, and four
    times for the largest, which a single row with a near-tie in its attention decides.
    """
    dtype, device = str(fast.dtype).removeprefix("torch."), str(fast.device)
    rough, exact = (plain_model(fast.spec, source, dtype=kind, device=device) for kind in (dtype, "float64"))
    found, plain, expected = (run_forwards(model, steps, **options) for model in (fast, rough, exact))
    for name in ("logits", "k", "v", "features"):
        ours, theirs, true = (getattr(ran, name).double() for ran in (found, plain, expected))
        assert ours.shape == true.shape
        ours, theirs = (ours - true).abs(), (theirs - true).abs()
        assert float(ours.square().mean().sqrt()) < 1.5 * float(theirs.square().mean().sqrt()) + 1e-6, name
        assert float(ours.max()) < 4 * float(theirs.max()) + 1e-5, name
