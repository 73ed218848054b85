"""The model families specq runs, as data: what each reads from config.json and how its layers differ.

It stands below `checkpoint`, which every layer may import, and imports neither torch nor transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal

# A bias is always there, never there, or there when the named key of config.json is true.
Bias = bool | str


@dataclass(frozen=True)
class Family:
    """One architecture: a pre-norm decoder with RMSNorm, rotary positions, grouped queries and a SwiGLU MLP."""

    architecture: str
    models: str  # what people call them, for messages
    qkv_bias: Bias = False
    o_bias: Bias = False
    mlp_bias: Bias = False
    qk_norm: bool = False
    # Which layers see only a window: none, every one when `sliding_window` is set, or those `layer_types` or
    # `max_window_layers` name when `use_sliding_window` is true.
    windows: Literal["none", "all", "listed"] = "none"
    # What a key missing from config.json means (transformers' configuration classes).
    defaults: Mapping[str, int | float | None] = field(default_factory=dict)


def _defaults(**values: int | float | None) -> Mapping[str, int | float | None]:
    return MappingProxyType(values)


FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "llama": Family(
            "LlamaForCausalLM",
            "Llama 2, 3, 3.1, 3.2, 3.3, SmolLM2",
            qkv_bias="attention_bias",
            o_bias="attention_bias",
            mlp_bias="mlp_bias",
            defaults=_defaults(max_position_embeddings=2048, bos_token_id=1, eos_token_id=2),
        ),
        "mistral": Family(
            "MistralForCausalLM",
            "Mistral 7B, Nemo, Small (text only)",
            windows="all",
            defaults=_defaults(
                max_position_embeddings=131072,
                num_key_value_heads=8,
                sliding_window=4096,
                bos_token_id=1,
                eos_token_id=2,
            ),
        ),
        "qwen2": Family(
            "Qwen2ForCausalLM",
            "Qwen2, Qwen2.5",
            qkv_bias=True,
            windows="listed",
            defaults=_defaults(
                max_position_embeddings=32768,
                num_key_value_heads=32,
                sliding_window=4096,
                max_window_layers=28,
            ),
        ),
        "qwen3": Family(
            "Qwen3ForCausalLM",
            "Qwen3 (dense)",
            qkv_bias="attention_bias",
            o_bias="attention_bias",
            qk_norm=True,
            windows="listed",
            defaults=_defaults(
                max_position_embeddings=32768,
                num_key_value_heads=32,
                head_dim=128,
                sliding_window=4096,
                max_window_layers=28,
            ),
        ),
    }
)


def supported_families() -> str:
    """The hint that lists what works, for every refusal of an architecture."""
    return "specq runs " + "; ".join(f"{name} ({family.models})" for name, family in FAMILIES.items())
