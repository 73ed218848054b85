"""How 4-bit weights are stored, as a config's `quantization_config` describes it, whoever wrote it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from specq.errors import UnsupportedError

FORMATS_HINT = (
    "specq reads 4-bit GPTQ (v1, v2), AWQ (gemm), compressed-tensors (pack-quantized) and GGUF, or 16-bit weights"
)


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
