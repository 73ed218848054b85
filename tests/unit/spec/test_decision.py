"""Where a profile's choice lies, what it is keyed by, and when it is stale."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from factories import tiny_config, write_model

from specq.checkpoint import model_digest
from specq.recipe import Recipe
from specq.spec import decision
from specq.spec.decision import (
    FORMAT,
    Decision,
    Level,
    ProfileKey,
    answer_rounds,
    answer_tps,
    whole_accept_len,
    with_settings,
)

CHOSEN = Decision(
    pipeline="sequence",
    settings=(("pipeline.draft_length", 7), ("drafter.nodes", 24)),
    levels=(Level(7, ((64, 1.5), (512, 1.75))), Level(None, ((64, 1.25),))),
    plain_tps=50.0,
    gain=1.4,
    threads=1,
    measured_at="2026-11-30 04:00+00:00",
)


def store(key: ProfileKey, **changes: object) -> None:
    record = {"format": FORMAT, "is_complete": True, "key": key.record(), "decision": CHOSEN.record()} | changes
    key.path.parent.mkdir(parents=True, exist_ok=True)
    key.path.write_text(json.dumps(record))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SPECQ_CACHE", str(tmp_path / "cache"))
    return write_model(tmp_path / "model", tiny_config())


def key_of(folder: Path, *, dtype: str = "auto") -> ProfileKey:
    return ProfileKey.here({"target": folder}, device="cpu", dtype=dtype)


def test_a_decision_survives_the_file() -> None:
    assert Decision.from_record(json.loads(json.dumps(CHOSEN.record()))) == CHOSEN


def test_a_stored_decision_is_found_again_and_by_a_copy_of_the_model(folder: Path, tmp_path: Path) -> None:
    assert key_of(folder).find() == (None, None)
    store(key_of(folder))
    assert key_of(folder).find() == (CHOSEN, None)
    copy = write_model(tmp_path / "elsewhere", tiny_config())
    assert key_of(copy).find() == (CHOSEN, None)


def test_other_weights_have_no_profile(folder: Path, tmp_path: Path) -> None:
    store(key_of(folder))
    other = write_model(tmp_path / "other", tiny_config(), seed=1)
    assert key_of(other).find() == (None, None)
    with_drafter = ProfileKey.here({"target": folder, "intermediate": other}, device="cpu", dtype="auto")
    assert with_drafter.find() == (None, None)


def test_a_profile_of_another_version_is_stale_and_says_what_changed(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store(key_of(folder))
    here = decision.describe_environment("cpu")
    monkeypatch.setattr(decision, "describe_environment", lambda device: here | {"torch": "9.9"})
    found, why = key_of(folder).find()
    assert found is None
    assert why == f"the profile of {CHOSEN.measured_at} is stale: torch was `{here['torch']}` and is `9.9`"


def test_another_number_format_is_another_profile(folder: Path) -> None:
    store(key_of(folder))
    found, why = key_of(folder, dtype="float32").find()
    assert found is None
    assert "dtype was `auto` and is `float32`" in str(why)


@pytest.mark.parametrize("changes", [{"is_complete": False}, {"format": 0}])
def test_incomplete_profiles_and_those_of_other_formats_are_not_used(folder: Path, changes: dict[str, object]) -> None:
    store(key_of(folder), **changes)
    assert key_of(folder).find() == (None, None)


def test_a_file_that_is_no_profile_is_none(folder: Path) -> None:
    key_of(folder).path.parent.mkdir(parents=True)
    key_of(folder).path.write_text("{")
    assert key_of(folder).find() == (None, None)


def test_the_digest_sees_a_change_in_the_middle_of_large_weights(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    content = bytearray(10_000)
    file.write_bytes(content)
    before = model_digest(file)
    content[5000] = 1
    file.write_bytes(content)
    assert model_digest(file) != before


def test_chosen_sizes_go_into_the_recipe_and_count_as_set() -> None:
    recipe = Recipe.model_validate({"target": "tiny"})
    changed = CHOSEN.apply(recipe)
    assert (changed.pipeline.draft_length, changed.drafter.nodes) == (7, 24)
    assert recipe.pipeline.draft_length is None
    written = with_settings(recipe, [("pipeline.name", "plain")]).model_dump(exclude_unset=True)
    assert written == {"target": {"model": "tiny"}, "pipeline": {"name": "plain"}}


def test_the_accept_length_of_whole_rounds_is_that_which_gives_the_rounds_of_cut_ones() -> None:
    for accept_len, tokens in ((1.0, 64), (1.7, 64), (3.4, 20)):
        measured = (tokens - 1) / answer_rounds(accept_len, tokens)
        assert measured <= accept_len
        assert whole_accept_len(measured, tokens) == pytest.approx(accept_len)
    assert whole_accept_len(2.0, math.inf) == 2.0


def test_a_rate_is_that_of_tokens_over_the_first_round_and_the_others() -> None:
    assert answer_tps(accept_len=1.0, round_ms=10.0, first_ms=0.0, tokens=11) == pytest.approx(100.0)
    assert answer_tps(accept_len=1.0, round_ms=10.0, first_ms=100.0, tokens=11) == pytest.approx(50.0)
    assert answer_rounds(3.0, 11) == pytest.approx(11 / 3)
