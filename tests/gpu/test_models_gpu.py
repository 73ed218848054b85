"""The forward pass of torch on a GPU against the same weights on the CPU in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from factories import WeightsInMemory, random_weights, tiny_config
from step_cases import plain_model
from torch import Tensor

from specq.checkpoint import ModelSpec
from specq.models.causal_lm import CausalLM
from specq.spec.tree import DraftTree, chain

pytestmark = pytest.mark.gpu

CASES: dict[str, dict[str, Any]] = {
    "llama": tiny_config("llama", hidden_size=72, num_attention_heads=9, num_key_value_heads=3),
    "mistral": tiny_config("mistral", sliding_window=16, num_key_value_heads=1, head_dim=64),
    "qwen2": tiny_config("qwen2", tie_word_embeddings=True, num_key_value_heads=4),
    "qwen3": tiny_config("qwen3", head_dim=128),
}
# On logits of about unit size: fp32 sums in another order; bf16 keeps 8 bits through two layers.
TOLERANCE = {"float32": 1e-4, "bfloat16": 0.15}
PARENTS = [-1, 0, 0, 2, 2, 3, 1, 5, 5, 8, 6, 4, 9]


@torch.inference_mode()
def every_kind_of_forward(model: CausalLM) -> Tensor:
    """Logits of two long chunks, a step, a short chain and a tree, one after the other."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, 320, (230,), generator=generator).tolist()
    cache = model.new_cache(250)
    parts = []
    for size in (100, 100, 1, 8):
        parts.append(model(chain(tokens[cache.length : cache.length + size], device=model.device), cache).logits)
        cache.keep(range(size))
    tree = DraftTree.from_lists(tokens[: len(PARENTS)], PARENTS, device=model.device)
    parts.append(model(tree, cache).logits)
    cache.keep([0, 2, 3, 5])
    parts.append(model(chain([7], device=model.device), cache).logits)
    return torch.cat(parts).double().cpu()


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("case", CASES)
def test_gpu_logits_equal_those_of_the_cpu(case: str, dtype: str) -> None:
    spec = ModelSpec.from_config(CASES[case])
    source = WeightsInMemory(random_weights(CASES[case]))
    expected = every_kind_of_forward(plain_model(spec, source, dtype="float64"))
    found = every_kind_of_forward(plain_model(spec, source, device="cuda", dtype=dtype))
    if dtype == "float32":
        torch.testing.assert_close(found, expected, atol=TOLERANCE[dtype], rtol=0)
    else:
        assert (found - expected).abs().mean() < TOLERANCE[dtype] * expected.std()
