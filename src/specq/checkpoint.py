"""What a model is, read from its config.json alone, and the one way files are written.

Reading tensors is `tensors`' business; this module imports no torch, so a command can refuse a model at once.
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import secrets
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specq.errors import DiskFullError, UnsupportedError, UsageError
from specq.families import FAMILIES, Family, supported_families

ROPE_KINDS = ("default", "linear", "llama3", "yarn")
DTYPES = ("float32", "float16", "bfloat16")
FORMATS_HINT = (
    "specq reads 4-bit GPTQ (v1, v2), AWQ (gemm), compressed-tensors (pack-quantized) and GGUF, or 16-bit weights"
)


@dataclass(frozen=True)
class RopeSpec:
    """Rotary positions: the kind, its base, and every other number the kind needs, already resolved."""

    kind: str
    theta: float
    params: tuple[tuple[str, float], ...] = ()

    def __getitem__(self, name: str) -> float:
        return dict(self.params)[name]


@dataclass(frozen=True)
class QuantSpec:
    """How a checkpoint's 4-bit matrices are stored; `group_size` is -1 for one scale a row."""

    method: str
    bits: int
    group_size: int
    symmetric: bool
    desc_act: bool
    checkpoint_format: str
    skip: tuple[str, ...] = ()

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> QuantSpec:
        """The storage named by a `quantization_config`.

        Raises UnsupportedError for a method, width or variant without a reader.
        """
        method = str(config.get("quant_method", ""))
        readers = {"gptq": _gptq, "awq": _awq, "compressed-tensors": _compressed_tensors, "gguf": _gguf}
        if method not in readers:
            raise UnsupportedError(f"weights quantized by `{method}` are not read", hint=FORMATS_HINT)
        spec = readers[method](config)
        if spec.bits != 4:
            raise UnsupportedError(f"{spec.bits}-bit `{method}` weights are not read", hint=FORMATS_HINT)
        return spec


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
            raise UnsupportedError(f"{heads} attention heads cannot share {kv_heads} key-value heads evenly")
        if head_dim % 2:
            raise UnsupportedError(f"a head_dim of {head_dim} cannot be rotated", hint="it has to be even")
        max_positions = int(keys.get("max_sequence_length") or keys.count("max_position_embeddings"))
        rope = _rope(config, max_positions)
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


@contextlib.contextmanager
def write_atomically(path: Path) -> Iterator[Path]:
    """Yields a temporary path beside `path`; what was written there becomes `path` whole, or not at all.

    Raises DiskFullError when the disk has no room; `path` is then as it was before.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        yield temporary
        with open(temporary, "rb+") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
        _sync_folder(path.parent)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise DiskFullError(
                f"no room left to write `{path}`", hint="free some space or choose another folder"
            ) from error
        raise
    finally:
        temporary.unlink(missing_ok=True)


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


def _rope(config: Mapping[str, Any], max_positions: int) -> RopeSpec:
    """Source: transformers' modeling_rope_utils, both spellings (`rope_scaling`, `rope_parameters`)."""
    given = dict(config.get("rope_scaling") or config.get("rope_parameters") or {})
    by_layer = [value for value in given.values() if isinstance(value, Mapping)]
    if by_layer:
        if any(value != by_layer[0] for value in by_layer):
            raise UnsupportedError("rotary positions that differ by layer are not run", hint=supported_families())
        given = dict(by_layer[0])
    kind = str(given.get("rope_type", given.get("type", "default")))
    if kind not in ROPE_KINDS:
        raise UnsupportedError(
            f"rotary positions of type `{kind}` are not run",
            hint=f"the types run are {', '.join(ROPE_KINDS)}",
        )
    theta = float(given.get("rope_theta") or config.get("rope_theta") or 10000.0)
    original = config.get("original_max_position_embeddings") or given.get("original_max_position_embeddings")
    numbers: dict[str, float] = {}
    if kind == "linear":
        numbers = {"factor": _number(given, "factor")}
    elif kind == "llama3":
        numbers = {key: _number(given, key) for key in ("factor", "low_freq_factor", "high_freq_factor")}
        numbers["original_max_position_embeddings"] = float(original or max_positions)
    elif kind == "yarn":
        numbers = _yarn(given, float(original or max_positions), max_positions)
    return RopeSpec(kind, theta, tuple(sorted(numbers.items())))


def _yarn(given: Mapping[str, Any], original: float, max_positions: int) -> dict[str, float]:
    """Every number of YaRN, with the attention factor worked out. Source: arXiv 2309.00071, section 3.4."""
    factor = max_positions / original if given.get("factor") is None else _number(given, "factor")

    def magnitude(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    attention_factor = given.get("attention_factor")
    if attention_factor is None:
        attention_factor = magnitude(1.0)
        if given.get("mscale") and given.get("mscale_all_dim"):
            attention_factor = magnitude(given["mscale"]) / magnitude(given["mscale_all_dim"])
    return {
        "factor": factor,
        "original_max_position_embeddings": original,
        "attention_factor": float(attention_factor),
        "beta_fast": float(given.get("beta_fast") or 32),
        "beta_slow": float(given.get("beta_slow") or 1),
        "truncate": float(given.get("truncate", True)),
    }


def _number(given: Mapping[str, Any], key: str) -> float:
    value = given.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
        raise UsageError(
            f"`{key}` of the rotary positions in config.json is `{value}`",
            hint="it has to be a number above 0",
        )
    return float(value)


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


def _gptq(config: Mapping[str, Any]) -> QuantSpec:
    stored = str(config.get("checkpoint_format") or config.get("format") or "gptq")
    if stored not in ("gptq", "gptq_v2"):
        raise UnsupportedError(f"GPTQ weights stored as `{stored}` are not read", hint=FORMATS_HINT)
    overrides = [key for key in config.get("dynamic") or () if not key.startswith("-:")]
    if overrides:
        raise UnsupportedError(f"GPTQ settings that differ by layer (`{overrides[0]}`) are not read")
    return QuantSpec(
        method="gptq",
        bits=int(config.get("bits", 4)),
        group_size=int(config.get("group_size", 128)),
        symmetric=bool(config.get("sym", True)),
        desc_act=bool(config.get("desc_act", False)),
        checkpoint_format=stored,
    )


def _awq(config: Mapping[str, Any]) -> QuantSpec:
    stored = str(config.get("version") or config.get("format") or "gemm").lower()
    if stored != "gemm":
        raise UnsupportedError(f"AWQ weights stored as `{stored}` are not read", hint=FORMATS_HINT)
    return QuantSpec(
        method="awq",
        bits=int(config.get("bits", config.get("w_bit", 4))),
        group_size=int(config.get("group_size", config.get("q_group_size", 128))),
        symmetric=not config.get("zero_point", True),
        desc_act=False,
        checkpoint_format="gemm",
        skip=tuple(config.get("modules_to_not_convert") or ()),
    )


def _compressed_tensors(config: Mapping[str, Any]) -> QuantSpec:
    stored = str(config.get("format", "pack-quantized"))
    groups = list((config.get("config_groups") or {}).values())
    if stored != "pack-quantized" or not groups:
        raise UnsupportedError(f"compressed-tensors weights stored as `{stored}` are not read", hint=FORMATS_HINT)
    weights = [group.get("weights") or {} for group in groups]
    first = weights[0]
    strategy = first.get("strategy")
    if any(group.get("input_activations") for group in groups) or any(other != first for other in weights):
        raise UnsupportedError(
            "compressed-tensors with quantized activations or several schemes is not read", hint=FORMATS_HINT
        )
    if strategy not in ("group", "channel") or first.get("type", "int") != "int":
        raise UnsupportedError(
            f"compressed-tensors of type `{first.get('type')}`, strategy `{strategy}` is not read",
            hint=FORMATS_HINT,
        )
    return QuantSpec(
        method="compressed-tensors",
        bits=int(first.get("num_bits", 4)),
        group_size=-1 if strategy == "channel" else int(first["group_size"]),
        symmetric=bool(first.get("symmetric", True)),
        desc_act=first.get("actorder") == "group",
        checkpoint_format=stored,
        skip=tuple(config.get("ignore") or ()),
    )


def _gguf(config: Mapping[str, Any]) -> QuantSpec:
    """Blocks of 32; which of them keep four bits is decided tensor by tensor when they are read."""
    return QuantSpec(method="gguf", bits=4, group_size=32, symmetric=False, desc_act=False, checkpoint_format="gguf")


def _read_object(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"`{path}` cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise UsageError(f"`{path}` is not a JSON object")
    return value


def _sync_folder(folder: Path) -> None:
    """Makes the rename itself durable, where the platform lets a folder be opened."""
    if os.name == "posix":
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
