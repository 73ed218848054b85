"""Whole rounds in the interpreter: every kernel of a verification and of a drafting, one after the other."""

from __future__ import annotations

import pytest
import torch
from factories import tiny_config
from round_cases import SAMPLERS, decode, make_parts, make_recipe, reference
from step_cases import random_chain

from specq.spec.device_draft import DeviceEagleTree
from specq.spec.device_round import DeviceVerifier
from specq.spec.pipelines import PIPELINES, Parts

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
CONFIG = tiny_config(num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1, head_dim=16)
RECIPE = make_recipe(nodes=8, depth=2, top_k=3, draft_length=3)


@pytest.fixture(scope="module")
def parts() -> Parts:
    """In float32, so that no draft hangs on a rounding."""
    return make_parts(CONFIG, dtype="float32")


@pytest.mark.parametrize("name", SAMPLERS)
def test_trees_are_those_of_their_definition(parts: Parts, name: str) -> None:
    prompt = random_chain(3, seed=2).tokens.tolist()
    trees = []
    pipeline = PIPELINES["eagle2"].build(parts, SAMPLERS[name], RECIPE)
    assert isinstance(pipeline.drafter, DeviceEagleTree)
    for speculator in (pipeline, reference(parts, SAMPLERS[name], RECIPE)):
        parts.rollback(0)
        context = [*prompt, *speculator.verifier.prefill(prompt)]
        with torch.inference_mode():
            tree = speculator.drafter.propose(context, max_nodes=60, max_depth=9)
        kept = tree.tokens >= 0
        trees.append((tree.tokens[kept].tolist(), tree.parents[kept].tolist()))
    assert len(trees[0][0]) >= 2
    assert trees[0] == trees[1]


def test_eagle_rounds_give_the_text_of_plain_ones(parts: Parts) -> None:
    prompt = random_chain(3, seed=1).tokens.tolist()
    found, plain = (decode(parts, kind, SAMPLERS["top-p"], RECIPE, prompt, 3).tokens for kind in ("eagle2", "plain"))
    assert found == plain


def test_the_hierarchical_pipeline_runs_on_kernels_throughout(parts: Parts) -> None:
    sampler, recipe = SAMPLERS["noise"], RECIPE
    speculator = PIPELINES["hierarchical"].build(parts, sampler, recipe)
    assert all(isinstance(level.verifier, DeviceVerifier) for level in speculator.levels())
    assert isinstance(list(speculator.levels())[-1].drafter, DeviceEagleTree)
    prompt = random_chain(3, seed=3).tokens.tolist()
    found = decode(parts, "hierarchical", sampler, recipe, prompt, 4)
    assert found.tokens == decode(parts, "plain", sampler, recipe, prompt, 4).tokens
