"""`specq profile` on a GPU: every part measured, device state read, the time split by kernels."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from factories import tiny_config, write_model

from specq.profile.result import save
from specq.profile.run import profile
from specq.profile.subject import Request
from specq.recipe import Recipe
from specq.spec.load import load_pipeline

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


def test_a_profile_holds_every_bucket_and_the_device(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model", tiny_config())
    recipe = Recipe.model_validate({"target": str(folder), "intermediate": str(folder)})
    found = profile(Request(recipe, ["hello there", "and another one"], device="cuda", seconds=10.0))
    assert found.costs is not None
    counts = found.costs.steps["target"].forms
    assert {1, 2, 4, 8, 10, 16, 32, 64} <= set(counts["sequence"][128])
    assert 64 in counts["tree"][128]
    assert found.is_complete
    assert found.environment["driver"]
    assert all(state["clock_mhz"] > 0 and state["temperature_c"] > 0 for state in found.states)
    shares = found.splits["target"][0]
    assert shares["products"] + shares["attention"] + shares["rest"] == pytest.approx(1.0)
    assert shares["products"] > 0


def test_auto_finds_what_was_stored_on_this_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECQ_CACHE", str(tmp_path / "cache"))
    folder = write_model(tmp_path / "model", tiny_config())
    recipe = Recipe.model_validate({"target": str(folder)})
    save(profile(Request(recipe, ["hello there", "and another one"], device="cuda", seconds=5.0)))
    assert load_pipeline(recipe, device="cuda").decision is not None
