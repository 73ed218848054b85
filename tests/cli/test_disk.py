"""The verbs that look at this machine and its files: cache and recipe; and the reference page."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from specq.cli import reference
from specq.cli.recipe import comments_of


@pytest.fixture
def cache(tmp_path: Path, monkeypatch) -> Path:
    folder = tmp_path / "cache"
    (folder / "demo").mkdir(parents=True)
    (folder / "demo" / "weights").write_bytes(bytes(3_000_000))
    (folder / "chat_history").write_bytes(bytes(10))
    (folder / ".demo.lock").touch()
    monkeypatch.setenv("SPECQ_CACHE", str(folder))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    return folder


def test_ls_lists_entries_with_their_sizes(call, cache) -> None:
    done = call("cache", "ls")
    assert [line.split()[:3] for line in done.out.splitlines()] == [
        ["chat_history", "10", "bytes"],
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


def test_ls_also_names_the_cache_of_the_hub(call, cache, tmp_path) -> None:
    blobs = tmp_path / "hub" / "models--org--name" / "blobs"
    blobs.mkdir(parents=True)
    (blobs / "weights").write_bytes(bytes(2500))
    assert call("cache", "ls").err.splitlines() == [
        f"{cache}: 3.0 MB",
        f"{tmp_path}/hub: 2.5 kB, the Hub's own cache, where fetched models lie",
    ]
    document = json.loads(call("cache", "ls", "--json").out)
    assert document["hub"] == {"folder": f"{tmp_path}/hub", "bytes": 2500}


def test_an_empty_cache_is_no_error(call, cache, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("SPECQ_CACHE", str(tmp_path / "none"))
    done = call("cache", "ls")
    assert (done.code, done.out) == (0, "")
    assert done.err.startswith(f"{tmp_path}/none is empty\n{tmp_path}/hub: 0 bytes, ")


@pytest.mark.parametrize("group", ["cache", "recipe"])
def test_a_group_without_a_verb_lists(group, call, cache) -> None:
    assert call(group) == call(group, "ls")
    assert call(group, "--json") == call(group, "ls", "--json")
    assert call(group).code == 0
    assert call(group, "--help").out.startswith(f"Usage: specq {group} [OPTIONS] COMMAND")


def test_every_shipped_recipe_is_right_and_says_how_to_run_it(call) -> None:
    recipes = json.loads(call("recipe", "ls", "--json").out)
    assert recipes
    assert all(recipe["command"].startswith("specq ") for recipe in recipes)
    assert all(len(recipe["about"]) > 20 for recipe in recipes)
    lines = [line.strip() for line in call("recipe", "ls").out.splitlines()]
    for recipe in recipes:
        assert lines[lines.index(recipe["about"]) - 1].split() == [recipe["name"], *recipe["command"].split()]
    assert call("recipe", "check", *(recipe["name"] for recipe in recipes)).code == 0


def test_show_prints_a_recipe_that_means_the_same(call, tmp_path) -> None:
    shown = call("recipe", "show", "demo", "--set", "pipeline.draft_length=7").out
    (tmp_path / "copy.yaml").write_text(shown)
    again = call("recipe", "show", tmp_path / "copy.yaml").out
    assert again == shown
    assert "draft_length: 7" in shown


def test_show_leaves_out_what_is_not_set_unless_all_is_wanted(call) -> None:
    text = """{target: {model: specq:demo}, drafter: {model: specq:demo-head}, pipeline: {name: plain}, context: 64,
    intermediate: {model: specq:demo-intermediate, drafter: {model: specq:demo-intermediate-head}}}"""
    shown = yaml.safe_load(call("recipe", "show", "demo", "--set", "pipeline=plain", "--set", "context=64").out)
    assert {key: shown[key] for key in shown if key != "distill"} == yaml.safe_load(text)
    every = yaml.safe_load(call("recipe", "show", "demo", "--all").out)
    assert every["pipeline"]["draft_length"] is None
    assert every["pipeline"]["min_draft"] == 6
    assert every["sampling"]["top_k"] is None


def test_a_recipe_without_comments_is_described_by_nothing(tmp_path) -> None:
    (tmp_path / "bare.yaml").write_text("target: x\n")
    assert comments_of(tmp_path / "bare.yaml") == ("", "")


def test_check_says_what_is_wrong_with_each_recipe(call, tmp_path) -> None:
    (tmp_path / "bad.yaml").write_text("target: x\npipeline: {draft_lenght: 3}\n")
    done = call("recipe", "check", "demo", tmp_path / "bad.yaml", "--json")
    good, bad = json.loads(done.out)
    assert (done.code, good["ok"], bad["ok"]) == (2, True, False)
    assert "draft_lenght" in bad["reason"]


def test_the_reference_page_is_current() -> None:
    assert reference.main(["--check"]) == 0


def test_an_old_reference_page_is_noticed(tmp_path, monkeypatch, capsys) -> None:
    (tmp_path / "cli.md").write_text(reference.render().replace("--seed", "--sead"))
    monkeypatch.setattr(reference, "PAGE", tmp_path / "cli.md")
    assert reference.main(["--check"]) == 1
    assert "hint: python -m specq.cli.reference" in capsys.readouterr().err
    assert (reference.main([]), reference.main(["--check"])) == (0, 0)
