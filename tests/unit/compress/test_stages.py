"""The layer taken apart is the layer of the forward pass."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from factories import WeightsInMemory, random_weights, tiny_config, tiny_model

from specq.checkpoint import ModelSpec
from specq.compress.evaluation import dense_product
from specq.compress.stages import PRODUCTS, StagedLayer
from specq.models.rope import RopeTable
from specq.spec.tree import chain

CONFIGS: dict[str, dict[str, Any]] = {
    "llama": tiny_config(),
    "llama with biases": tiny_config(attention_bias=True, mlp_bias=True),
    "llama with wide heads": tiny_config(head_dim=32),
    "mistral with a window": tiny_config("mistral", sliding_window=16),
    "qwen2": tiny_config("qwen2"),
    "qwen3": tiny_config("qwen3"),
}


@pytest.mark.parametrize("tokens", [24, 80])
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_staged_layers_make_the_models_hidden_states(config: dict[str, Any], tokens: int) -> None:
    spec, weights = ModelSpec.from_config(config), random_weights(config)
    model = tiny_model(config, dtype="float32", weights=weights)
    ids = torch.randint(0, spec.vocab, (2, tokens), generator=torch.Generator().manual_seed(3))
    expected = []
    for row in ids:
        cache = model.new_cache(tokens, features=(spec.layers,))
        expected.append(model.forward(chain(row.tolist()), cache).features)
    rope = RopeTable(spec.rope, spec.head_dim, dtype=torch.float32, device=torch.device("cpu"))
    rope.grow(tokens)
    source = WeightsInMemory(weights)
    x = F.embedding(ids, weights["model.embed_tokens.weight"])
    for index in range(spec.layers):
        layer = StagedLayer(spec, index, source, rope)
        layer.weights = {product: dense_product(source, index, product, device="cpu") for product in PRODUCTS}
        x = layer.run(x)
    torch.testing.assert_close(x, torch.stack(expected), rtol=1e-4, atol=1e-4)
