"""What a model is, read from its config.json alone.

Reading tensors is `tensors`' business; this module imports no torch, so a command can refuse a model at once.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specq.errors import UnsupportedError, UsageError
from specq.families import FAMILIES, Family, supported_families
from specq.files import require_readable
from specq.quant_spec import FORMATS_HINT, QuantSpec
from specq.rope_spec import RopeSpec

__all__ = [
    "FORMATS_HINT",
    "ModelSpec",
    "QuantSpec",
    "RopeSpec",
    "read_config",
    "read_generation_config",
]

DTYPES = ("float32", "float16", "bfloat16")


SAMPLES, SAMPLE_BYTES = 16, 4096
WEIGHTS = (".safetensors", ".gguf", ".bin")
"""What the digest of a model looks at: blocks of every file of weights."""


@dataclass(frozen=True)
class ModelSpec:
    """Everything the forward pass must know of a model besides its weights."""

    family: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    max_context: int
    norm_eps: float
    rope: RopeSpec
    tie_embeddings: bool
    sliding_windows: tuple[int | None, ...]
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    dtype: str
    bos_ids: tuple[int, ...]
    eos_ids: tuple[int, ...]
    quantization: QuantSpec | None

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> ModelSpec:
        """The model a config.json describes, in old and new spellings of its keys.

        A missing key means what it means to transformers. `auto_map` is ignored: no supported family needs
        code from its repository.

        Raises UnsupportedError naming the value specq does not run, UsageError where a needed key is missing.
        """
        name = _family_name(config)
        family = FAMILIES[name]
        keys = _Keys(config, family)
        _refuse_variants(config)
        layers, hidden, heads = (keys.count(key) for key in ("num_hidden_layers", "hidden_size", "num_attention_heads"))
        kv_heads = heads if keys.get("num_key_value_heads") is None else keys.count("num_key_value_heads")
        head_dim = hidden // heads if keys.get("head_dim") is None else keys.count("head_dim")
        if heads % kv_heads:
            raise UnsupportedError(
                f"{heads} attention heads cannot share {kv_heads} key-value heads evenly",
                hint="take the config.json of the model's own repository",
            )
        if head_dim % 2:
            raise UnsupportedError(f"a head_dim of {head_dim} cannot be rotated", hint="it has to be even")
        max_positions = int(keys.get("max_sequence_length") or keys.count("max_position_embeddings"))
        rope = RopeSpec.from_config(config, max_positions=max_positions)
        if rope.kind == "yarn":
            max_positions = max(max_positions, int(rope["factor"] * rope["original_max_position_embeddings"]))
        quantization = config.get("quantization_config")
        return cls(
            family=name,
            hidden=hidden,
            layers=layers,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            intermediate=keys.count("intermediate_size"),
            vocab=keys.count("vocab_size"),
            max_context=max_positions,
            norm_eps=float(config.get("rms_norm_eps", 1e-6)),
            rope=rope,
            tie_embeddings=bool(config.get("tie_word_embeddings", False)),
            sliding_windows=_sliding_windows(keys, family, layers),
            qkv_bias=keys.flag(family.qkv_bias),
            o_bias=keys.flag(family.o_bias),
            mlp_bias=keys.flag(family.mlp_bias),
            qk_norm=family.qk_norm,
            dtype=_dtype(config),
            bos_ids=_ids(keys.get("bos_token_id")),
            eos_ids=_ids(keys.get("eos_token_id")),
            quantization=QuantSpec.from_config(quantization) if quantization else None,
        )


def read_config(folder: Path) -> dict[str, Any]:
    """The folder's config.json; an old quantizer's own file beside it becomes its `quantization_config`.

    Raises UsageError when there is none or it is not a JSON object.
    """
    path = folder / "config.json"
    if not path.is_file():
        raise UsageError(f"`{folder}` holds no config.json", hint="give a model's folder, a .gguf file or a Hub id")
    config = _read_object(path)
    for name, method in (("quantize_config.json", "gptq"), ("quant_config.json", "awq")):
        if not config.get("quantization_config") and (folder / name).is_file():
            config["quantization_config"] = {"quant_method": method, **_read_object(folder / name)}
    return config


def read_generation_config(folder: Path) -> dict[str, Any]:
    """The folder's generation_config.json, empty when there is none."""
    path = folder / "generation_config.json"
    return _read_object(path) if path.is_file() else {}


def model_digest(path: Path) -> str:
    """A digest of a model's config and weights that does not depend on where they lie.

    Of large files name, size and some blocks count, not every byte: a start must not read gigabytes.
    """
    digest = hashlib.sha256()
    files = [path] if path.is_file() else sorted(p for p in path.iterdir() if p.suffix in WEIGHTS)
    config = path / "config.json"
    if config.is_file():
        digest.update(config.read_bytes())
    for file in files:
        size = file.stat().st_size
        digest.update(f"{file.name if path.is_dir() else ''}:{size}".encode())
        with open(file, "rb") as handle:
            for block in range(SAMPLES):
                handle.seek(block * max(size - SAMPLE_BYTES, 0) // (SAMPLES - 1))
                digest.update(handle.read(SAMPLE_BYTES))
    return digest.hexdigest()


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write a JSON object a person can read."""
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


class _Keys:
    """config.json seen with its family's defaults."""

    def __init__(self, config: Mapping[str, Any], family: Family) -> None:
        self._config, self._family = config, family

    def get(self, key: str) -> Any:
        return self._config[key] if key in self._config else self._family.defaults.get(key)

    def count(self, key: str) -> int:
        value = self.get(key)
        if value is None:
            raise UsageError(f"config.json has no `{key}`", hint="take the config.json of the model's own repository")
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise UsageError(f"`{key}` in config.json is `{value}`", hint="it has to be a whole number above 0")
        return value

    def flag(self, bias: bool | str) -> bool:
        return bias if isinstance(bias, bool) else bool(self._config.get(bias, False))


def _family_name(config: Mapping[str, Any]) -> str:
    """The key of FAMILIES, by `model_type` and `architectures`, which must not contradict each other."""
    names = [str(name) for name in config.get("architectures") or ()]
    model_type = config.get("model_type")
    if model_type is None:
        model_type = next((key for key, family in FAMILIES.items() if family.architecture in names), None)
        if model_type is None:
            raise UnsupportedError(f"architecture `{', '.join(names)}` is not run", hint=supported_families())
    if model_type not in FAMILIES:
        raise UnsupportedError(f"model_type `{model_type}` is not run", hint=supported_families())
    expected = FAMILIES[model_type].architecture
    if names and expected.lower() not in [name.lower() for name in names]:
        raise UnsupportedError(f"architecture `{', '.join(names)}` is not run", hint=supported_families())
    return str(model_type)


def _refuse_variants(config: Mapping[str, Any]) -> None:
    """Raises UnsupportedError for a key that changes the forward pass in a way no family here has."""
    activation = config.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise UnsupportedError(f"hidden_act `{activation}` is not run", hint="the supported one is `silu`")
    for key in ("attn_logit_softcapping", "final_logit_softcapping", "num_experts", "num_local_experts"):
        if config.get(key):
            raise UnsupportedError(f"`{key}` of {config[key]} is not run", hint=supported_families())
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    rotary = rope.get("partial_rotary_factor", config.get("partial_rotary_factor"))
    if rotary not in (None, 1, 1.0):
        raise UnsupportedError(f"partial_rotary_factor `{rotary}` is not run", hint="only whole heads are rotated")


def _sliding_windows(keys: _Keys, family: Family, layers: int) -> tuple[int | None, ...]:
    """The number of last positions each layer sees, None for all."""
    window = keys.get("sliding_window")
    if family.windows == "none" or window is None:
        return (None,) * layers
    if family.windows == "all":
        return (keys.count("sliding_window"),) * layers
    kinds = keys.get("layer_types")
    if not keys.get("use_sliding_window"):
        if "sliding_attention" in (kinds or ()):
            raise UsageError(
                "`layer_types` in config.json names sliding_attention, but `use_sliding_window` is false",
                hint="set `use_sliding_window` to true or the layers to full_attention",
            )
        return (None,) * layers
    if kinds is None:
        first = keys.get("max_window_layers")
        kinds = ["full_attention" if layer < first else "sliding_attention" for layer in range(layers)]
    unknown = sorted(set(kinds) - {"full_attention", "sliding_attention"})
    if unknown or len(kinds) != layers:
        raise UnsupportedError(
            f"layer_types `{', '.join(unknown) or len(kinds)}` do not fit a model of {layers} layers",
            hint="the types run are full_attention, sliding_attention, one entry a layer",
        )
    return tuple(keys.count("sliding_window") if kind == "sliding_attention" else None for kind in kinds)


def _dtype(config: Mapping[str, Any]) -> str:
    name = str(config.get("dtype") or config.get("torch_dtype") or "float32").removeprefix("torch.")
    if name not in DTYPES:
        raise UnsupportedError(f"a checkpoint in `{name}` is not read", hint=f"dtypes read: {', '.join(DTYPES)}")
    return name


def _ids(value: Any) -> tuple[int, ...]:
    if value is None:
        return ()
    return tuple(int(token) for token in value) if isinstance(value, list | tuple) else (int(value),)


def _read_object(path: Path) -> dict[str, Any]:
    require_readable(path)
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise UsageError(f"`{path}` is not JSON: {error}", hint="download it again") from error
    if not isinstance(value, dict):
        raise UsageError(f"`{path}` is not a JSON object", hint="download it again")
    return value
