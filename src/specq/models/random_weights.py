"""Models and EAGLE heads of a given shape with random weights, made on the device: they tell times and nothing else."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specq.checkpoint import ModelSpec, QuantSpec, read_config
from specq.errors import UsageError
from specq.files import named_path
from specq.models.causal_lm import CausalLM
from specq.models.eagle_files import ATTENTION, MLP, MLP_NORM, HeadFiles
from specq.models.inventory import expected_tensors
from specq.models.loader import DTYPES, Engine, build_model
from specq.quant.packed import PackedWeight

GROUP = 128
QUANTIZATION = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "sym": True}
"""What `specq quantize` makes of a wide model."""

SHAPES: Mapping[str, Mapping[str, int]] = {
    "8b": {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32},
    "70b": {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64},
}
"""Llama 3's; 8 key-value heads and 128256 ids in both."""


def llama_config(**sizes: int) -> dict[str, Any]:
    """A config.json of a 4-bit Llama 3 of these sizes."""
    return {
        "model_type": "llama",
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "max_position_embeddings": 131072,
        "rope_theta": 500000.0,
        "rms_norm_eps": 1e-5,
        "torch_dtype": "bfloat16",
        "quantization_config": dict(QUANTIZATION),
        **sizes,
    }


def shape_config(name: str) -> dict[str, Any]:
    """The config of a shape: `8b`, `70b`, a config.json or a folder that holds one.

    It is one of 4 bits where the file has no `quantization_config`; null there keeps 16.
    Raises UsageError when it is none of these.
    """
    if name.lower() in SHAPES:
        return llama_config(**SHAPES[name.lower()])
    path = named_path(name)
    if (path / "config.json").is_file():
        config = read_config(path)
    elif path.is_file() and path.suffix == ".json":
        config = _read_json(path)
    else:
        raise UsageError(
            f"`{name}` is no shape for random weights",
            hint=f"give {', '.join(SHAPES)}, a config.json or a folder that holds one",
        )
    config.setdefault("quantization_config", dict(QUANTIZATION))
    return config


def _read_json(path: Path) -> dict[str, Any]:
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"`{path}` cannot be read as JSON: {error}") from None
    if not isinstance(config, dict):
        raise UsageError(f"`{path}` is no JSON object")
    return config


def random_model(config: Mapping[str, Any], *, device: str, dtype: str, use_graphs: bool = True) -> CausalLM:
    """A model of this config with random weights, all made on `device`; see RandomWeights for their form."""
    spec = ModelSpec.from_config(config)
    source = RandomWeights(spec, torch.device(device))
    return build_model(spec, source, device=device, dtype=dtype, engine=Engine(use_graphs=use_graphs))


def random_head(target: CausalLM) -> HeadFiles:
    """An EAGLE-2 head for this model with random weights in its type: one layer of the model's own sizes and the fc."""
    spec = target.spec
    q, kv = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (spec.hidden, 2 * spec.hidden),
        f"{ATTENTION}q_proj.weight": (q, spec.hidden),
        f"{ATTENTION}k_proj.weight": (kv, spec.hidden),
        f"{ATTENTION}v_proj.weight": (kv, spec.hidden),
        f"{ATTENTION}o_proj.weight": (spec.hidden, q),
        f"{MLP}gate_proj.weight": (spec.intermediate, spec.hidden),
        f"{MLP}up_proj.weight": (spec.intermediate, spec.hidden),
        f"{MLP}down_proj.weight": (spec.hidden, spec.intermediate),
        MLP_NORM: (spec.hidden,),
    }
    config = {
        "num_attention_heads": spec.heads,
        "num_key_value_heads": spec.kv_heads,
        "vocab_size": spec.vocab,
        "rms_norm_eps": spec.norm_eps,
        "rope_theta": spec.rope.theta,
        "max_position_embeddings": spec.max_context,
    }
    return HeadFiles.from_source(config, _RandomTensors(shapes, target.device, target.dtype))


def random_packed(rows: int, columns: int, *, group: int, device: torch.device) -> PackedWeight:
    """A symmetric 4-bit matrix [rows, columns] of random numbers about columns ** -0.5 in size."""
    codes = torch.randint(-(2**31), 2**31 - 1, (rows, columns // 8), dtype=torch.int32, device=device)
    # codes around 8 have a deviation of 4.6
    scales = torch.full((rows, -(-columns // group)), columns**-0.5 / 4.6, dtype=torch.float16, device=device)
    return PackedWeight(codes, scales, group_size=group)


class _RandomTensors:
    """Dense random tensors of these shapes and this type, drawn anew at every call; vectors are ones."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], device: torch.device, dtype: torch.dtype) -> None:
        self._shapes, self._device, self._dtype = shapes, device, dtype

    def names(self) -> frozenset[str]:
        return frozenset(self._shapes)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._shapes[name]

    def tensor(self, name: str) -> Tensor:
        shape = self._shapes[name]
        if len(shape) == 1:
            return torch.ones(shape, dtype=self._dtype, device=self._device)
        return torch.randn(shape, dtype=self._dtype, device=self._device) * shape[1] ** -0.5

    def integers(self, name: str) -> Tensor:
        raise KeyError(name)

    def linear(self, prefix: str) -> Tensor | PackedWeight:
        return self.tensor(f"{prefix}.weight")

    def bytes(self) -> int:
        return 0


class RandomWeights(_RandomTensors):
    """A weight source of random tensors: products in 4 bits where the spec is of a quantized model, the rest dense."""

    def __init__(self, spec: ModelSpec, device: torch.device) -> None:
        super().__init__(expected_tensors(spec), device, DTYPES[spec.dtype])
        self._quantization: QuantSpec | None = spec.quantization

    def linear(self, prefix: str) -> Tensor | PackedWeight:
        if not self.is_packed(prefix):
            return self.tensor(f"{prefix}.weight")
        rows, columns = self._shapes[f"{prefix}.weight"]
        return random_packed(rows, columns, group=self._group_size(columns), device=self._device)

    def is_packed(self, prefix: str) -> bool:
        if self._quantization is None or not prefix.endswith("_proj"):
            return False
        return self._shapes[f"{prefix}.weight"][1] % 8 == 0  # eight codes a word

    def _group_size(self, columns: int) -> int:
        asked = self._quantization.group_size if self._quantization is not None else GROUP
        return columns if asked <= 0 else min(asked, columns)
