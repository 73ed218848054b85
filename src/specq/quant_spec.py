"""How 4 and 8-bit weights are stored, as a config's `quantization_config` describes it, whoever wrote it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from specq.errors import UnsupportedError

FORMATS_HINT = (
    "specq reads GPTQ (v1, v2) and compressed-tensors (pack-quantized) of 4 or 8 bits, AWQ (gemm) and GGUF of 4, "
    "or 16-bit weights"
)

HEAD_PATTERNS = ("lm_head", "^lm_head$", ".*lm_head", ".*lm_head$", r".*\.?lm_head$")
"""How settings of their own name the output head; no pattern of a config is ever run as an expression."""


@dataclass(frozen=True)
class QuantSpec:
    """How a checkpoint's packed matrices are stored; `group_size` is -1 for one scale a row.

    `head` is how the output head is stored where it has settings of its own.
    """

    method: str
    bits: int
    group_size: int
    symmetric: bool
    desc_act: bool
    checkpoint_format: str
    skip: tuple[str, ...] = ()
    head: QuantSpec | None = None

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
        widths = {"gptq": (4, 8), "compressed-tensors": (4, 8), "awq": (4,), "gguf": (4, 16)}[method]
        for part in (spec, spec.head or spec):
            if part.bits not in widths:
                raise UnsupportedError(f"{part.bits}-bit `{method}` weights are not read", hint=FORMATS_HINT)
        return spec


def _gptq(config: Mapping[str, Any]) -> QuantSpec:
    stored = str(config.get("checkpoint_format") or config.get("format") or "gptq")
    if stored not in ("gptq", "gptq_v2"):
        raise UnsupportedError(f"GPTQ weights stored as `{stored}` are not read", hint=FORMATS_HINT)
    spec = QuantSpec(
        method="gptq",
        bits=int(config.get("bits", 4)),
        group_size=int(config.get("group_size", 128)),
        symmetric=bool(config.get("sym", True)),
        desc_act=bool(config.get("desc_act", False)),
        checkpoint_format=stored,
    )
    for pattern, values in (config.get("dynamic") or {}).items():
        if pattern.startswith("-:"):
            continue
        if pattern.removeprefix("+:") not in HEAD_PATTERNS:
            raise UnsupportedError(
                f"GPTQ settings that differ by layer (`{pattern}`) are not read", hint="only those of `lm_head` may"
            )
        head = replace(
            spec,
            bits=int(values.get("bits", spec.bits)),
            group_size=int(values.get("group_size", spec.group_size)),
            symmetric=bool(values.get("sym", spec.symmetric)),
            desc_act=bool(values.get("desc_act", spec.desc_act)),
        )
        spec = replace(spec, head=head)
    return spec


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
    if any(group.get("input_activations") for group in groups):
        raise UnsupportedError("compressed-tensors with quantized activations is not read", hint=FORMATS_HINT)
    heads = [group for group in groups if len(groups) > 1 and _names_head(group.get("targets"))]
    others = [group for group in groups if group not in heads]
    if len(heads) > 1 or any(group.get("weights") != others[0].get("weights") for group in others):
        raise UnsupportedError("compressed-tensors with several schemes is not read", hint=FORMATS_HINT)
    spec = _scheme(others[0].get("weights") or {}, stored, tuple(config.get("ignore") or ()))
    return replace(spec, head=_scheme(heads[0].get("weights") or {}, stored, spec.skip)) if heads else spec


def _names_head(targets: Any) -> bool:
    return bool(targets) and all(str(target).removeprefix("re:") in HEAD_PATTERNS for target in targets)


def _scheme(weights: Mapping[str, Any], stored: str, skip: tuple[str, ...]) -> QuantSpec:
    strategy = weights.get("strategy")
    if strategy not in ("group", "channel") or weights.get("type", "int") != "int":
        raise UnsupportedError(
            f"compressed-tensors of type `{weights.get('type')}`, strategy `{strategy}` is not read",
            hint=FORMATS_HINT,
        )
    return QuantSpec(
        method="compressed-tensors",
        bits=int(weights.get("num_bits", 4)),
        group_size=-1 if strategy == "channel" else int(weights["group_size"]),
        symmetric=bool(weights.get("symmetric", True)),
        desc_act=weights.get("actorder") == "group",
        checkpoint_format=stored,
        skip=skip,
    )


def _gguf(config: Mapping[str, Any]) -> QuantSpec:
    """Blocks of 32; 16 bits where no matrix keeps four, since every other type is dequantised."""
    bits = int(config.get("bits", 4))
    return QuantSpec(method="gguf", bits=bits, group_size=32, symmetric=False, desc_act=False, checkpoint_format="gguf")
