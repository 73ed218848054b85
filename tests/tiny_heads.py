"""EAGLE heads of random weights for the tiny models, as tensors under their published names."""

from __future__ import annotations

import torch
from torch import Tensor

from specq.models.causal_lm import CausalLM
from specq.models.eagle import EagleHead
from specq.spec.tree import chain

HIDDEN, HEADS, KV_HEADS, INTERMEDIATE, VOCAB = 64, 4, 2, 176, 320
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "vocab_size": VOCAB,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 2048,
}


def shapes(
    *, hidden: int, intermediate: int, heads: int, kv_heads: int, head_dim: int | None = None, eagle3: bool = False
) -> dict[str, tuple[int, ...]]:
    head_dim = head_dim or hidden // heads
    inputs = 2 * hidden if eagle3 else hidden
    layer = "midlayer" if eagle3 else "layers.0"
    out: dict[str, tuple[int, ...]] = {
        "fc.weight": (hidden, (3 if eagle3 else 2) * hidden),
        f"{layer}.self_attn.q_proj.weight": (heads * head_dim, inputs),
        f"{layer}.self_attn.k_proj.weight": (kv_heads * head_dim, inputs),
        f"{layer}.self_attn.v_proj.weight": (kv_heads * head_dim, inputs),
        f"{layer}.self_attn.o_proj.weight": (hidden, heads * head_dim),
        f"{layer}.mlp.gate_proj.weight": (intermediate, hidden),
        f"{layer}.mlp.up_proj.weight": (intermediate, hidden),
        f"{layer}.mlp.down_proj.weight": (hidden, intermediate),
        f"{layer}.post_attention_layernorm.weight": (hidden,),
    }
    if eagle3:
        out |= {f"{layer}.hidden_norm.weight": (hidden,), f"{layer}.input_layernorm.weight": (hidden,)}
        out["norm.weight"] = (hidden,)
    return out


def tiny_tensors(*, eagle3: bool = False, seed: int = 0) -> dict[str, Tensor]:
    draws = torch.Generator().manual_seed(seed)
    sizes = shapes(hidden=HIDDEN, intermediate=INTERMEDIATE, heads=HEADS, kv_heads=KV_HEADS, eagle3=eagle3)
    return {name: torch.randn(shape, generator=draws) / shape[-1] ** 0.5 for name, shape in sizes.items()}


def run(head: EagleHead, target: CausalLM) -> Tensor:
    """Logits of the head after three rows of fixed features."""
    width = 3 * HIDDEN if head.spec.feature_layers is not None else HIDDEN
    features = torch.randn(3, width, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    with torch.inference_mode():
        return head.logits(head(chain([1, 2, 3]), head.enter(features), head.new_cache(16)))
