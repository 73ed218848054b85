"""The registry's data holds together, and a model's name or files lead to its entry."""

from __future__ import annotations

import re
from typing import Any

import pytest
from factories import tiny_config
from pydantic import ValidationError

from specq.checkpoint import ModelSpec
from specq.families import FAMILIES
from specq.hub import SHIPPED
from specq.recipe import DEMO_NAME, HUB_ID
from specq.registry import KINDS, Registry, load_registry, quantized_from

REGISTRY = load_registry()
QUANTIZED = {"quantization_config": {"quant_method": "gptq"}}


def test_every_target_is_of_a_family_that_specq_runs() -> None:
    assert {target.family for target in REGISTRY.targets} == set(FAMILIES)


def test_every_name_is_a_hub_id_and_stands_for_one_target() -> None:
    names = [name for target in REGISTRY.targets for name in (target.model, *target.also) if name != DEMO_NAME]
    assert len(set(names)) == len(names)
    heads = [head.model for target in REGISTRY.targets for head in target.eagle]
    assert len(set(heads)) == len(heads)
    assert [name for name in names + heads if not HUB_ID.fullmatch(name) and name not in SHIPPED] == []


def test_intermediates_are_smaller_targets_of_the_same_family() -> None:
    for target in REGISTRY.targets:
        for drafter in REGISTRY.drafters(target, "intermediate"):
            found = REGISTRY.find(drafter.model)
            assert found is not None, drafter.model
            assert found.target.family == target.family
            assert found.target.gb < 0.5 * target.gb, drafter


def test_revisions_are_commits() -> None:
    records = [record for target in REGISTRY.targets for record in (target, *target.eagle)]
    assert [r for r in records if r.revision is not None and not re.fullmatch("[0-9a-f]{40}", r.revision)] == []


def test_drafters_of_a_kind_keep_their_order() -> None:
    match = REGISTRY.find("meta-llama/Llama-3.1-8B-Instruct")
    assert match is not None
    every = REGISTRY.drafters(match.target)
    by_kind = [drafter for kind in KINDS for drafter in REGISTRY.drafters(match.target, kind)]
    assert every == by_kind
    assert [(drafter.kind, drafter.form) for drafter in every] == [
        ("eagle", "EAGLE-3"),
        ("eagle", "EAGLE-3"),
        ("eagle", "EAGLE-2"),
        ("intermediate", "16 layers"),
    ]


def test_an_intermediate_nearly_as_deep_as_its_target_comes_with_a_warning() -> None:
    match = REGISTRY.find("Qwen/Qwen2.5-Coder-1.5B-Instruct")
    assert match is not None
    assert [drafter.note for drafter in REGISTRY.drafters(match.target)] == [
        "24 layers for 28: measure whether it pays"
    ]


@pytest.mark.parametrize(
    ("name", "target"),
    [
        ("qwen/qwen3-8b", "Qwen/Qwen3-8B"),
        ("specq:demo", "HuggingFaceTB/SmolLM2-135M-Instruct"),
        ("meta-llama/Meta-Llama-3.1-8B-Instruct", "meta-llama/Llama-3.1-8B-Instruct"),
        ("unsloth/Llama-3.2-1B-Instruct", "meta-llama/Llama-3.2-1B-Instruct"),
        ("TheBloke/Llama-2-7B-Chat-GPTQ", "meta-llama/Llama-2-7b-chat-hf"),
        ("Qwen/Qwen2.5-7B-Instruct-GPTQ-Int4", "Qwen/Qwen2.5-7B-Instruct"),
        ("hugging-quants/Meta-Llama-3.1-8B-Instruct-AWQ-INT4", "meta-llama/Llama-3.1-8B-Instruct"),
        ("RedHatAI/Meta-Llama-3.1-8B-Instruct-quantized.w4a16", "meta-llama/Llama-3.1-8B-Instruct"),
        ("/models/qwen2.5-coder-1.5b-instruct-q4_k_m.gguf", "Qwen/Qwen2.5-Coder-1.5B-Instruct"),
        ("./Qwen3-8B-AWQ/", "Qwen/Qwen3-8B"),
    ],
)
def test_ids_and_names_of_copies_lead_to_the_target(name: str, target: str) -> None:
    match = REGISTRY.find(name)
    assert match is not None
    assert match.target.model == target


@pytest.mark.parametrize(
    "name",
    ["Qwen/Qwen3-8B-Base", "meta-llama/Llama-3.1-8B", "org/Qwen3-8B-abliterated-AWQ", "mistralai/Mixtral-8x7B-v0.1"],
)
def test_models_that_only_resemble_a_target_are_not_taken_for_it(name: str) -> None:
    assert REGISTRY.find(name) is None


@pytest.mark.parametrize(
    ("config", "card", "names"),
    [
        ({"_name_or_path": "Qwen/Qwen3-8B"}, "", ["Qwen/Qwen3-8B"]),
        ({"base_model": "a/b", "_name_or_path": "/tmp/c"}, "", ["a/b", "/tmp/c"]),
        ({}, "---\nbase_model: Qwen/Qwen3-8B\n---\n# Copy", ["Qwen/Qwen3-8B"]),
        ({"_name_or_path": "x"}, "---\nbase_model:\n- a/b\n- c/d\n---\n", ["a/b", "c/d", "x"]),
        ({"_name_or_path": ""}, "---\nbase_model: [unclosed\n---\n", []),
        ({}, "no front matter --- at all --- here", []),
    ],
)
def test_quantized_folders_name_their_source(config: dict[str, Any], card: str, names: list[str]) -> None:
    assert quantized_from({**QUANTIZED, **config}, card) == names
    assert quantized_from(config, card) == []


def test_a_model_of_known_shape_finds_the_targets_it_may_come_from() -> None:
    config = tiny_config("llama", hidden_size=4096, num_hidden_layers=32, vocab_size=128256)
    found = [target.model for target in REGISTRY.same_shape(ModelSpec.from_config(config))]
    assert found == [
        "meta-llama/Meta-Llama-3-8B-Instruct",
        "meta-llama/Llama-3.1-8B-Instruct",
        "deepseek-ai/DeepSeek-R1-Distill-Llama-8B",
    ]
    assert REGISTRY.same_shape(ModelSpec.from_config({**config, "vocab_size": 128000})) == []


def test_unknown_keys_of_a_registry_file_are_errors(tmp_path) -> None:
    entry = "- {model: a/b, series: A, family: llama, shape: [1, 2, 3], gb: 1}\n"
    (tmp_path / "good.yaml").write_text(entry)
    assert isinstance(load_registry(tmp_path / "good.yaml"), Registry)
    (tmp_path / "bad.yaml").write_text(entry.replace("gb:", "size:"))
    with pytest.raises(ValidationError, match="size"):
        load_registry(tmp_path / "bad.yaml")
