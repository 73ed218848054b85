"""The finished folder's weights and configs; what lies beside them is companions.py's, the model card card.py's."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from specq import __version__
from specq.checkpoint import ModelSpec, write_json
from specq.companions import without_local_keys
from specq.compress.plan import HEAD_NAME, Plan, Settings
from specq.models.inventory import HEAD, expected_tensors
from specq.models.loader import model_config
from specq.models.shared import KEY, MANIFEST, SharedEmbeddings
from specq.tensor_files import safe_path
from specq.tensors import WeightSource

SHARD_BYTES = 4 << 30
INDEX = "model.safetensors.index.json"
DTYPE_NAMES = {torch.float16: "float16", torch.bfloat16: "bfloat16"}


def written_dtype(spec: ModelSpec) -> torch.dtype:
    """The 16-bit type of what is not quantized: the source's own, bfloat16 for a source in fp32."""
    return torch.float16 if spec.dtype == "float16" else torch.bfloat16


def dense_tensors(spec: ModelSpec, source: WeightSource, plan: Plan) -> Iterator[tuple[str, Tensor]]:
    """Every tensor that stays in 16 bits, by name, in the order of the model; read as it is asked for."""
    packed = {f"{matrix.name}.weight" for matrix in plan.matrices if matrix.grid is not None}
    for name in expected_tensors(spec):
        if name == HEAD and plan.packs_head:
            continue
        if not name.startswith("model.layers.") or name.split(".", 3)[3] not in packed:
            yield name, source.tensor(name).to(written_dtype(spec)).contiguous()


def write_weights(folder: Path, tensors: Iterator[tuple[str, Tensor]]) -> int:
    """Writes the tensors as one file, or as shards of at most SHARD_BYTES with their index; returns their bytes."""
    shards: list[list[str]] = []
    pending: dict[str, Tensor] = {}
    total = waiting = 0

    def flush() -> None:
        save_file(pending, folder / f"shard-{len(shards)}", metadata={"format": "pt"})
        shards.append(list(pending))
        pending.clear()

    for name, tensor in tensors:
        if pending and waiting + tensor.nbytes > SHARD_BYTES:
            flush()
            waiting = 0
        pending[name] = tensor
        waiting += tensor.nbytes
        total += tensor.nbytes
    flush()
    if len(shards) == 1:
        (folder / "shard-0").rename(folder / "model.safetensors")
        return total
    weight_map: dict[str, str] = {}
    for number, names in enumerate(shards):
        file = f"model-{number + 1:05}-of-{len(shards):05}.safetensors"
        (folder / f"shard-{number}").rename(folder / file)
        weight_map |= dict.fromkeys(names, file)
    write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})
    return total


def write_configs(folder: Path, source: Path, spec: ModelSpec, plan: Plan, settings: Settings) -> None:
    """Writes config.json with its quantization_config, and quantize_config.json where the format has one."""
    config = without_local_keys(source_config(source))
    if plan.packs_head:
        config["tie_word_embeddings"] = False
    quantization = quantization_config(plan, settings)
    dtype = DTYPE_NAMES[written_dtype(spec)]
    key = "torch_dtype" if "torch_dtype" in config else "dtype"
    write_json(folder / "config.json", {**config, key: dtype, "quantization_config": quantization})
    if settings.format == "gptq":
        write_json(folder / "quantize_config.json", quantization)


def source_config(source: Path) -> dict[str, Any]:
    """The source's config.json, or what a GGUF file's header makes of one, without how it is quantized."""
    return {key: value for key, value in model_config(source).items() if key != "quantization_config"}


def quantization_config(plan: Plan, settings: Settings) -> dict[str, Any]:
    """What readers need to know: the keys of AutoGPTQ and its successors, or compressed-tensors' own."""
    skipped = [matrix.name for matrix in plan.matrices if matrix.grid is None]
    if settings.format == "compressed-tensors":
        return _compressed_tensors_config(plan, settings, skipped)
    config: dict[str, Any] = {
        "quant_method": "gptq",
        "bits": 4,
        "group_size": plan.group_size,
        "desc_act": settings.stored_order,
        "sym": settings.symmetric,
        "lm_head": plan.packs_head,
        "checkpoint_format": "gptq",
        "format": "gptq",
        "pack_dtype": "int32",
        "meta": {"quantizer": [f"specq:{__version__}"], "method": settings.method},
    }
    dynamic: dict[str, Any] = {f"-:.*\\.{name.replace('.', chr(92) + '.')}$": {} for name in skipped}
    if plan.packs_head and settings.head_bits != config["bits"]:
        keys = ("group_size", "sym", "desc_act")
        dynamic[HEAD_NAME] = {"bits": settings.head_bits, **{key: config[key] for key in keys}}
    return {**config, "dynamic": dynamic} if dynamic else config


def _compressed_tensors_config(plan: Plan, settings: Settings, skipped: list[str]) -> dict[str, Any]:
    def group(target: str, bits: int) -> dict[str, Any]:
        weights = {
            "num_bits": bits,
            "type": "int",
            "symmetric": settings.symmetric,
            "strategy": "channel" if plan.group_size == -1 else "group",
            "group_size": None if plan.group_size == -1 else plan.group_size,
            "actorder": None,
            "dynamic": False,
        }
        return {
            "targets": [target],
            "weights": weights,
            "input_activations": None,
            "output_activations": None,
            "format": "pack-quantized",
        }

    groups = {"group_0": group("Linear", 4)}
    if plan.packs_head and settings.head_bits == 8:
        groups["group_1"] = group(f"re:.*{HEAD_NAME}$", 8)
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": groups,
        "ignore": [
            *([] if plan.packs_head else [HEAD_NAME]),
            *(f"re:.*{name.replace('.', chr(92) + '.')}$" for name in skipped),
        ],
        "kv_cache_scheme": None,
    }


def write_manifest(folder: Path, source: Path, shared: SharedEmbeddings) -> None:
    """Writes the source's manifest of an intermediate, if it has one, with what is left to another model."""
    file = source / MANIFEST
    own = json.loads(safe_path(source, MANIFEST).read_text(encoding="utf-8")) if file.is_file() else {}
    write_json(folder / MANIFEST, {"kind": "intermediate", **own, KEY: shared.record()})
