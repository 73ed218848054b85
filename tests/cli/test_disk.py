"""The verbs that look at this machine and its files: cache, recipe, doctor; and the reference page."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from specq.cli import reference


@pytest.fixture
def cache(tmp_path: Path, monkeypatch) -> Path:
    folder = tmp_path / "cache"
    (folder / "demo").mkdir(parents=True)
    (folder / "demo" / "weights").write_bytes(bytes(3_000_000))
    (folder / "chat_history").write_bytes(bytes(10))
    (folder / ".demo.lock").touch()
    monkeypatch.setenv("SPECQ_CACHE", str(folder))
    return folder


def test_ls_lists_entries_with_their_sizes(call, cache) -> None:
    done = call("cache", "ls")
    assert [line.split()[:3] for line in done.out.splitlines()] == [
        ["chat_history", "0.0", "MB"],
        ["demo", "3.0", "MB"],
    ]
    entries = json.loads(call("cache", "ls", "--json").out)["entries"]
    assert {entry["name"]: entry["bytes"] for entry in entries} == {"demo": 3_000_000, "chat_history": 10}


def test_rm_removes_what_is_named_and_nothing_else(call, cache) -> None:
    assert call("cache", "rm", "demo").code == 0
    assert sorted(path.name for path in cache.iterdir()) == [".demo.lock", "chat_history"]
    assert json.loads(call("cache", "rm", "--all", "--json").out)["removed"] == ["chat_history"]


@pytest.mark.parametrize("arguments", [[], ["demo", "--all"], ["demo", "nothing"], ["../cache"], ["demo/weights"]])
def test_rm_refuses_what_is_no_entry_and_removes_nothing(arguments, call, cache) -> None:
    assert call("cache", "rm", *arguments).code == 2
    assert (cache / "demo" / "weights").is_file()


def test_an_empty_cache_is_no_error(call, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("SPECQ_CACHE", str(tmp_path / "none"))
    assert call("cache", "ls") == (0, "", f"{tmp_path}/none is empty\n")


def test_every_shipped_recipe_is_right_and_says_how_to_run_it(call) -> None:
    recipes = json.loads(call("recipe", "ls", "--json").out)
    assert recipes
    assert all(recipe["command"].startswith("specq ") for recipe in recipes)
    assert call("recipe", "check", *(recipe["name"] for recipe in recipes)).code == 0


def test_show_prints_a_recipe_that_means_the_same(call, tmp_path) -> None:
    shown = call("recipe", "show", "demo", "--set", "pipeline.draft_length=7").out
    (tmp_path / "copy.yaml").write_text(shown)
    again = call("recipe", "show", tmp_path / "copy.yaml").out
    assert again == shown
    assert "draft_length: 7" in shown


def test_check_says_what_is_wrong_with_each_recipe(call, tmp_path) -> None:
    (tmp_path / "bad.yaml").write_text("target: x\npipeline: {draft_lenght: 3}\n")
    done = call("recipe", "check", "demo", tmp_path / "bad.yaml", "--json")
    good, bad = json.loads(done.out)
    assert (done.code, good["ok"], bad["ok"]) == (2, True, False)
    assert "draft_lenght" in bad["reason"]


def test_doctor_tells_what_the_machine_has(call) -> None:
    found = json.loads(call("doctor", "--json").out)
    assert set(found) == {"system", "gpu", "packages", "disk"}
    assert found["system"]["cores"] >= 1
    assert found["packages"]["torch"]
    assert found["disk"]["specq_cache_disk_free_bytes"] > 0
    text = call("doctor").out
    assert re.search(r"^  specq cache disk free +[\d.]+ GB$", text, re.MULTILINE)


def test_doctor_shows_what_a_model_is_and_the_prompt_it_reads(call, model) -> None:
    about = json.loads(call("doctor", model, "--json").out)["model"]
    assert about["family"] == "llama"
    assert about["prompt"].startswith("<|im_start|>user\nWhy")
    assert about["needs_bytes"] > about["needs_weights_bytes"] + about["needs_cache_bytes"] > 0
    assert about["pipeline_plain"] == "available"
    assert about["pipeline_sequence"].startswith("needs an intermediate model")
    both = call("doctor", model, "--json", "--set", f"intermediate={model}").out
    assert json.loads(both)["model"]["pipeline_sequence"] == "available"


def test_the_reference_page_is_current() -> None:
    assert reference.main(["--check"]) == 0


def test_an_old_reference_page_is_noticed(tmp_path, monkeypatch, capsys) -> None:
    (tmp_path / "cli.md").write_text(reference.render().replace("--seed", "--sead"))
    monkeypatch.setattr(reference, "PAGE", tmp_path / "cli.md")
    assert reference.main(["--check"]) == 1
    assert "hint: python -m specq.cli.reference" in capsys.readouterr().err
    assert (reference.main([]), reference.main(["--check"])) == (0, 0)
