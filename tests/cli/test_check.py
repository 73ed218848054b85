"""`specq check`: two models, or the pairs of a recipe; a verdict at the end of each, and one error after all."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from factories import tiny_config, write_model
from heads import write_head

from specq.models.eagle_files import HeadFiles
from specq.models.loader import model_spec


@pytest.fixture
def head(tmp_path: Path) -> Path:
    return write_head(tmp_path / "head")


@pytest.fixture
def misfit(tmp_path: Path) -> Path:
    return write_head(tmp_path / "misfit", hidden=32)


@pytest.fixture
def small(tmp_path: Path) -> Path:
    return write_model(tmp_path / "small", tiny_config(num_hidden_layers=1))


def write_recipe(tmp_path: Path, **keys: object) -> Path:
    path = tmp_path / "pair.yaml"
    path.write_text(json.dumps(keys, default=str))
    return path


def test_a_pair_that_fits_ends_in_a_verdict(call, model, head) -> None:
    done = call("check", model, head)
    assert (done.code, done.err) == (0, "")
    first, *_, last = done.out.splitlines()
    assert first == f"{head} drafts for {model}"
    assert last == "fits: 10 tests passed"
    document = json.loads(call("check", model, head, "--json").out)
    assert (document["fits"], document["verdict"]) == (True, last)
    assert document["drafter"] == str(head)
    same = call("check", model, model).out
    assert same.endswith("\nfits: 15 tests passed, 1 of them with a warning\n")


def test_a_pair_that_does_not_fit_ends_in_a_verdict_too(call, model, misfit) -> None:
    done = call("check", model, misfit)
    assert done.code == 6
    assert done.out.splitlines()[-1] == "does not fit: hidden size"
    assert done.err == f"error: `{misfit}` does not fit `{model}`: hidden size\n"
    document = json.loads(call("check", model, misfit, "--json").out)
    assert (document["fits"], document["verdict"]) == (False, "does not fit: hidden size")


def test_the_error_comes_after_the_table_in_a_pipe(model, misfit) -> None:
    command = [sys.executable, "-m", "specq", "check", model, str(misfit)]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=120)
    assert done.stdout.splitlines()[-2:] == [
        "does not fit: hidden size",
        f"error: `{misfit}` does not fit `{model}`: hidden size",
    ]


def test_a_head_is_counted_in_the_memory(call, model, head, monkeypatch) -> None:
    def memory() -> str:
        tests = json.loads(call("check", model, head, "--json").out)["tests"]
        return next(f"{test['status']}: {test['detail']}" for test in tests if test["name"] == "memory")

    assert memory().startswith("pass: both fit `cpu`")
    enough = _needed(call, model)
    monkeypatch.setattr("specq.models.loader.free_bytes", lambda device: enough)
    assert "are needed" in memory()
    monkeypatch.setattr("specq.models.loader.free_bytes", lambda device: enough + _size(head))
    assert "are needed" in memory()
    monkeypatch.setattr("specq.models.loader.free_bytes", lambda device: enough + _size(head) + _kept(model, head))
    assert memory().startswith("pass: ")


def test_a_head_counts_when_models_are_loaded_too(call, model, head, monkeypatch) -> None:
    enough = _needed(call, model)
    command = ["run", model, "hi", "--drafter", str(head), "--pipeline", "eagle2", "--max-new-tokens", "2"]
    monkeypatch.setattr("specq.models.loader.free_bytes", lambda device: enough)
    assert call(*command).code == 7
    monkeypatch.setattr("specq.models.loader.free_bytes", lambda device: enough + _size(head) + _kept(model, head, 50))
    assert call(*command).code == 0


def _needed(call, model: str) -> int:
    return json.loads(call("doctor", model, "--json").out)["model"]["needs_bytes"]


def _size(head: Path) -> int:
    return (head / "model.safetensors").stat().st_size


def _kept(model: str, head: Path, scratch: int = 0) -> int:
    """What a head keeps of the context: its own K and V and the target's features, in fp32 on a CPU."""
    spec, files = model_spec(Path(model)), HeadFiles(head)
    own = files.spec(spec.layers)
    return (spec.max_context + scratch) * (2 * own.kv_heads * own.head_dim + spec.hidden) * 4


def test_one_layer_is_singular(call, model, small) -> None:
    out = call("check", model, small).out
    assert "llama, 1 layer of 64" in out
    assert "1 layer of 64 drafts for 2 of 64" in out
    assert "1 layers" not in out


def test_the_pairs_of_a_recipe_are_checked(call, model, small, head, tmp_path) -> None:
    inner = {"model": str(small), "drafter": str(head)}
    recipe = write_recipe(tmp_path, target=model, intermediate=inner, drafter=head)
    done = call("check", recipe)
    assert done.code == 0, done.err
    heads = [line for line in done.out.splitlines() if " drafts for /" in line]
    assert heads == [f"{small} drafts for {model}", f"{head} drafts for {model}", f"{head} drafts for {small}"]
    document = json.loads(call("check", recipe, "--json").out)
    assert [(pair["target"], pair["drafter"], pair["fits"]) for pair in document["pairs"]] == [
        (model, str(small), True),
        (model, str(head), True),
        (str(small), str(head), True),
    ]
    assert (document["recipe"], document["fits"]) == (str(recipe), True)


def test_one_pair_of_a_recipe_that_does_not_fit_fails_it(call, model, small, misfit, tmp_path) -> None:
    done = call("check", write_recipe(tmp_path, target=model, intermediate=small, drafter=misfit))
    assert done.code == 6
    assert done.err == f"error: `{misfit}` does not fit `{model}`: hidden size\n"
    assert "fits: " in done.out


@pytest.mark.parametrize(("part", "words"), [("drafter", "no EAGLE head"), ("intermediate", "an EAGLE head")])
def test_a_drafter_in_the_wrong_place_of_a_recipe_does_not_fit(part, words, call, model, small, head, tmp_path) -> None:
    done = call("check", write_recipe(tmp_path, target=model, **{part: small if part == "drafter" else head}))
    assert (done.code, words in done.out) == (6, True)


def test_a_recipe_without_a_drafter_is_a_usage_error(call, model) -> None:
    done = call("check", model)
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith(f"error: `{model}` names no drafter and no intermediate to check\n")
    assert f"hint: specq check {model} DRAFTER" in done.err


def test_the_demo_model_is_told_by_all_its_names(call, model, monkeypatch, head) -> None:
    monkeypatch.setattr("specq.demo.demo_folder", lambda **options: Path(model))
    for name in ("demo", "specq:demo"):
        done = call("check", name, head)
        assert "`demo`, `specq:demo` and HuggingFaceTB/SmolLM2-135M-Instruct (4-bit) are the same model" in done.out
    assert "are the same model" not in call("check", model, head).out


def test_an_id_without_an_organisation_is_told_the_form(call, model) -> None:
    for arguments in (["gpt2", model], [model, "Llama-3.2-1B"]):
        done = call("check", *arguments)
        assert done.code == 2
        assert "Hub ids have the form org/name" in done.err
