"""`specq doctor`: what the machine has, and with a MODEL what its parts are, need and can run."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from factories import tiny_config, write_model, write_tokenizer
from heads import write_head


@pytest.fixture
def about(call):
    """What doctor says of a model under these flags."""

    def about(*arguments: Any) -> dict[str, Any]:
        done = call("doctor", *arguments, "--json")
        assert done.code == 0, done.err
        return json.loads(done.out)["model"]

    return about


def test_doctor_tells_what_the_machine_has(call) -> None:
    found = json.loads(call("doctor", "--json").out)
    assert set(found) == {"system", "gpu", "packages", "disk"}
    assert found["system"]["cores"] >= 1
    assert found["packages"]["torch"]
    assert found["disk"]["specq_cache_disk_free_bytes"] > 0
    text = call("doctor").out
    assert re.search(r"^  specq cache disk free +[\d.]+ GB$", text, re.MULTILINE)


def test_doctor_shows_what_a_model_is_and_the_prompt_it_reads(about, model) -> None:
    found = about(model)
    assert found["family"] == "llama"
    assert found["prompt"].startswith("<|im_start|>user\nWhy")
    assert found["needs_bytes"] > found["needs_weights_bytes"] + found["needs_cache_bytes"] > 0
    assert found["pipeline_plain"] == "available"
    assert found["pipeline_sequence"].startswith("needs an intermediate model")
    assert about(model, "--set", f"intermediate={model}")["pipeline_sequence"] == "available"


def test_the_model_comes_first_and_its_prompt_line_by_line(call, model) -> None:
    lines = call("doctor", model).out.splitlines()
    assert [line for line in lines if not line.startswith(" ")] == ["model", "system", "gpu", "packages", "disk"]
    start = next(i for i, line in enumerate(lines) if line.startswith("  prompt "))
    column = lines[start].index("<")
    assert [line[column:] for line in lines[start : start + 3]] == [
        r"<|im_start|>user\n",
        r"Why is the sky blue?<|im_end|>\n",
        r"<|im_start|>assistant\n",
    ]


def test_a_long_prompt_is_wrapped_and_shows_what_it_holds(call, tmp_path) -> None:
    folder = write_model(tmp_path / "long")
    words = " ".join(f"word{i}" for i in range(40))
    write_tokenizer(folder, chat_template="\x1b[31m\tbe brief\n\n" + words)
    text = call("doctor", folder).out
    assert "\x1b" not in text
    prompt = text[text.index("  prompt ") : text.index("\nsystem\n")].removeprefix("  prompt ").splitlines()
    assert max(map(len, prompt)) < 120
    assert [line.strip() for line in prompt[:2]] == [r"\x1b[31m\tbe brief\n", r"\n"]
    assert " ".join(line.strip() for line in prompt[2:]) == words


def test_a_head_that_fits_is_available_and_counted_by_its_file(about, model, tmp_path) -> None:
    head = write_head(tmp_path / "head")
    with_head, without = about(model, "--drafter", head), about(model)
    assert with_head["pipeline_eagle2"] == "available"
    assert with_head["drafter"] == str(head)
    size = (head / "model.safetensors").stat().st_size
    assert with_head["needs_heads_bytes"] == size
    assert with_head["needs_bytes"] == without["needs_bytes"] + size


@pytest.mark.parametrize("flag", ["--drafter", "--set"])
def test_a_head_that_does_not_fit_is_not_available(flag, about, model, tmp_path) -> None:
    head = write_head(tmp_path / "head", hidden=32)
    found = about(model, flag, f"drafter.model={head}" if flag == "--set" else head)
    assert found["pipeline_eagle2"].startswith(f"`{head}` does not fit: hidden size: the head's fc is [32, 64]")
    assert found["pipeline_plain"] == "available"
    assert "needs_heads_bytes" not in found


def test_a_whole_model_is_no_head(about, model) -> None:
    assert "no EAGLE head" in about(model, "--drafter", model)["pipeline_eagle2"]


def test_an_intermediate_is_checked_and_counted(about, model, tmp_path) -> None:
    small = write_model(tmp_path / "small", tiny_config(num_hidden_layers=1))
    found, alone = about(model, "--intermediate", small), about(small)
    assert found["pipeline_sequence"] == "available"
    assert found["needs_bytes"] == about(model)["needs_bytes"] + alone["needs_bytes"]
    narrow = write_model(tmp_path / "narrow", tiny_config(vocab_size=290))
    found = about(model, "--intermediate", narrow)
    assert found["pipeline_sequence"].startswith(f"`{narrow}` does not fit: vocabulary: ")
    assert found["needs_bytes"] == about(model)["needs_bytes"]


def test_the_pair_of_the_hierarchical_pipeline_is_checked(about, model, tmp_path) -> None:
    small = write_model(tmp_path / "small", tiny_config(hidden_size=32))
    head = write_head(tmp_path / "head", hidden=32)
    found = about(model, "--intermediate", small, "--drafter", head)
    assert found["pipeline_hierarchical"] == "available"
    assert "does not fit" in found["pipeline_eagle2"]


def test_doctor_estimates_for_the_context_and_number_format_asked_for(about, model) -> None:
    assert about(model, "--context", "64")["context"] == "64 of 512 tokens"
    assert about(model, "--dtype", "bfloat16")["needs_weights_bytes"] * 2 == about(model)["needs_weights_bytes"]


@pytest.mark.parametrize("flag", [["--drafter", "x"], ["--set", "context=3"], ["--device", "cpu"]])
def test_flags_without_a_model_are_refused(flag, call) -> None:
    done = call("doctor", *flag)
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith("error: the flags of a pipeline need a MODEL\n")


def test_the_demo_model_is_told_by_all_its_names(about, model, monkeypatch) -> None:
    monkeypatch.setattr("specq.demo.demo_folder", lambda **options: Path(model))
    for arguments in (["specq:demo"], ["demo", "--set", "drafter={}"]):
        assert about(*arguments)["same_model"] == (
            "`demo`, `specq:demo` and HuggingFaceTB/SmolLM2-135M-Instruct (4-bit) are the same model"
        )
    assert "same_model" not in about(model)


@pytest.mark.parametrize(
    "arguments", [["gpt2"], ["Llama-3.2-1B"], ["qwen2.5-coder-1.5"], ["MODEL", "--drafter", "gpt2"]]
)
def test_an_id_without_an_organisation_is_told_the_form(arguments, call, model) -> None:
    done = call("doctor", *(model if argument == "MODEL" else argument for argument in arguments))
    assert (done.code, done.out) == (2, "")
    assert "Hub ids have the form org/name" in done.err
