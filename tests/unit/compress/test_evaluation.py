"""Scores made layer by layer are those of whole models."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from factories import WeightsInMemory, random_weights, tiny_config, tiny_model
from torch import Tensor

from specq.checkpoint import ModelSpec
from specq.compress.evaluation import RESULT, ROUNDED, SOURCE, evaluate
from specq.compress.plan import Settings, plan_quantization
from specq.models.causal_lm import CausalLM
from specq.quant.gptq import Grid, round_to_nearest
from specq.spec.tree import chain

CONFIG = tiny_config(intermediate_size=192)
SPEC = ModelSpec.from_config(CONFIG)
TOKENS = torch.randint(0, 280, (3, 70), generator=torch.Generator().manual_seed(2))


def log_probabilities(model: CausalLM) -> Tensor:
    rows = [model.forward(chain(row.tolist()), model.new_cache(70)).logits for row in TOKENS]
    return torch.stack(rows).log_softmax(-1)[:, :-1]


def test_scores_are_those_of_the_whole_models() -> None:
    weights, other = random_weights(CONFIG), random_weights(CONFIG)
    for name in other:
        if "proj" in name:
            other[name] = other[name] * 1.05
    scores = evaluate(
        SPEC,
        WeightsInMemory(weights),
        WeightsInMemory(other),
        TOKENS,
        plan=plan_quantization(SPEC, Settings()),
        device="cpu",
    )
    rounded = {
        name: round_to_nearest(weight, Grid(64)).dequantize() if "_proj" in name else weight
        for name, weight in weights.items()
    }
    expected = log_probabilities(tiny_model(CONFIG, weights=weights))
    for name, tensors in ((SOURCE, weights), (RESULT, other), (ROUNDED, rounded)):
        found = log_probabilities(tiny_model(CONFIG, weights=tensors))
        loss = F.nll_loss(found.flatten(0, 1), TOKENS[:, 1:].flatten())
        assert scores[name].perplexity == pytest.approx(math.exp(loss), rel=1e-4)
        assert scores[name].kl == pytest.approx(float((expected.exp() * (expected - found)).sum(-1).mean()), abs=1e-4)
        same = (expected.argmax(-1) == found.argmax(-1)).double().mean()
        assert scores[name].top1 == pytest.approx(float(same), abs=0.02)
    assert scores[RESULT].kl > 1e-3


def test_matrices_left_in_16_bits_are_not_rounded() -> None:
    config = tiny_config(intermediate_size=100)
    spec = ModelSpec.from_config(config)
    weights = WeightsInMemory(random_weights(config))
    plan = plan_quantization(spec, Settings())
    scores = evaluate(spec, weights, weights, TOKENS, plan=plan, device="cpu")
    assert scores[RESULT].kl == 0
    assert scores[ROUNDED].kl > 0


def test_a_packed_head_is_read_from_the_result_and_rounded_for_comparison() -> None:
    config = tiny_config(intermediate_size=192, tie_word_embeddings=True)
    spec = ModelSpec.from_config(config)
    weights = random_weights(config)
    head = 0.7 * weights["model.embed_tokens.weight"]
    written = {**weights, "lm_head.weight": head}
    plan = plan_quantization(spec, Settings(head_bits=4))
    scores = evaluate(spec, WeightsInMemory(weights), WeightsInMemory(written), TOKENS, plan=plan, device="cpu")
    untied = tiny_config(intermediate_size=192)
    rounded = round_to_nearest(weights["model.embed_tokens.weight"], Grid(64)).dequantize()
    expected = log_probabilities(tiny_model(config, weights=weights))
    for name, table in ((RESULT, head), (ROUNDED, rounded)):
        tensors = {**weights, "lm_head.weight": table}
        if name == ROUNDED:
            tensors |= {
                name: round_to_nearest(weight, Grid(64)).dequantize()
                for name, weight in weights.items()
                if "_proj" in name
            }
        found = log_probabilities(tiny_model(untied, weights=tensors))
        kl = float((expected.exp() * (expected - found)).sum(-1).mean())
        assert scores[name].kl == pytest.approx(kl, abs=1e-4)
        assert kl > 1e-3
