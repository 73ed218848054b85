"""Rotary positions as config.json describes them, in old and new spellings."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from specq.errors import UnsupportedError, UsageError
from specq.families import supported_families

ROPE_KINDS = ("default", "linear", "llama3", "yarn")


@dataclass(frozen=True)
class RopeSpec:
    """Rotary positions: the kind, its base, and every other number the kind needs, already resolved."""

    kind: str
    theta: float
    params: tuple[tuple[str, float], ...] = ()

    def __getitem__(self, name: str) -> float:
        return dict(self.params)[name]

    @classmethod
    def from_config(cls, config: Mapping[str, Any], *, max_positions: int) -> RopeSpec:
        """The positions of a config whose model was made for `max_positions`; plain ones when it says nothing.

        Reads `rope_scaling` and `rope_parameters`, the latter also given once a kind of layer if all agree.
        Raises UnsupportedError for other kinds, UsageError for a number that is missing.
        Source: transformers' modeling_rope_utils for what the keys mean.
        """
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
        return cls(kind, theta, tuple(sorted(numbers.items())))


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
