"""Keys of a recipe: what is unknown is named with what is known there, however deep."""

from __future__ import annotations

from pathlib import Path

import pytest

from specq.errors import UsageError
from specq.recipe import is_model_name, load_recipe, resolve


@pytest.mark.parametrize(
    ("override", "hint"),
    [
        ("foo=1", "known keys: target, quantize, intermediate, drafter, pipeline, sampling, distill, context"),
        ("drafter.nods=3", "did you mean `nodes`?"),
        ("intermediate.modl=a/b", "did you mean `model`?"),
        ("intermediate.drafter.modl=a/b", "did you mean `model`?"),
        ("sampling.temp=1", "known keys: temperature, top_p, top_k, repetition_penalty, seed"),
    ],
)
def test_an_unknown_key_is_named_with_those_known_beside_it(override: str, hint: str) -> None:
    known = ["intermediate.model=c/d", "intermediate.drafter.model=e/f"]
    with pytest.raises(UsageError, match="unknown key") as caught:
        resolve("a/b", overrides=[*known, override])
    assert caught.value.hint == hint


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("foo: 1", "unknown key `foo`"),
        ("context: 64", "`target` is missing"),
        ("- a", "holds no keys"),
        ("a: {", "is not YAML"),
        ("a: 2020-13-45", "is not YAML: month must be in"),
        ("[" * 3000, "is not YAML"),
        ("target: null", "`target` = `null`: must be a section"),
        ("target: &a [*a]", r"`target` = `\[\[...\]\]`: must be a section"),
        (
            "tagret: x\ncontext: 1\npipeline: {name: fast, draft_length: 5.5}",
            "unknown key `tagret`; `target` is missing; `pipeline.name` = `fast`: must be one of auto, plain, .*; "
            "`pipeline.draft_length` = `5.5`: must be a whole number; `context` = `1`: must be at least 2",
        ),
    ],
)
def test_a_recipe_that_is_none_is_told_why(tmp_path: Path, text: str, problem: str) -> None:
    (tmp_path / "bad.yaml").write_text(text)
    with pytest.raises(UsageError, match=problem) as caught:
        load_recipe(tmp_path / "bad.yaml")
    assert caught.value.hint


def test_a_folder_is_no_recipe(tmp_path: Path) -> None:
    (tmp_path / "folder.yaml").mkdir()
    with pytest.raises(UsageError, match="cannot be read"):
        load_recipe(tmp_path / "folder.yaml")


def test_any_text_may_be_asked_whether_it_names_a_model(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    for text in ("word " * 100, "a" * 300, "~20 people came", "why?\0", "/etc and /usr: what are they?"):
        assert not is_model_name(text)
    (tmp_path / "my model").mkdir()
    (tmp_path / "my model" / "config.json").touch()
    (tmp_path / "my recipe.yaml").touch()
    for name in ("my model", "my recipe.yaml", "./none", "org/name", "demo"):
        assert is_model_name(name)
