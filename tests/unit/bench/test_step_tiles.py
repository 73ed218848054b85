"""Choosing tiles in a step: candidates keep the law, a faster tile is taken, the user's own table waits until then."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("triton")

from specq.bench.step_tiles import Trials, choose, main, trials, tuned_entries
from specq_kernels import configs, tune

DEVICE = "NVIDIA H200"


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SPECQ_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(tune, "runs_roles", lambda group: True)
    for cached in (configs.lookup, configs.read):
        cached.cache_clear()
    return tmp_path / "cache"


@pytest.mark.parametrize("nodes", [4, 8, 16, 30, 60])
def test_candidates_are_other_tiles_of_the_same_law(nodes: int) -> None:
    for key, entry in tuned_entries(DEVICE, "8b").items():
        found = trials(key, entry, nodes)
        assert len({json.dumps(trial.tile, sort_keys=True) for trial in found}) == len(found) > 2
        for trial in found:
            assert int(trial.rows) >= nodes
            assert not {"split", "parts", "tail_split", "tail_from", "block_m"} & set(trial.tile)
            assert trial.tile != {name: value for name, value in entry["rows"][trial.rows].items() if name != "us"}
            if trial.tile.get("lanes"):
                assert entry["parts"] % trial.tile["k_warps"] == 0


def test_a_faster_tile_is_taken_and_one_within_the_noise_is_not() -> None:
    entries = tuned_entries(DEVICE, "8b")
    first, second, *rest = entries
    found = [trial for key in entries for trial in trials(key, entries[key], 16)]
    wanted = [next(trial for trial in found if trial.key == key) for key in (first, second)]
    with Trials(DEVICE, entries) as table:

        def measure(nodes: int) -> float:
            rows = {
                key: configs.lookup(DEVICE, "w4a16", key)["rows"]["16"] for key in entries
            }  # what kernels would see
            return 2.0 - 0.1 * (rows[first] == wanted[0].tile) - 0.001 * (rows[second] == wanted[1].tile)

        lines = list(choose(table, found, 16, measure))
        assert ["not taken" in line for line in lines] == [False, True, True, True]
        assert table.entries[first]["rows"]["16"] == wanted[0].tile
        for key in (second, *rest):
            assert table.entries[key] == entries[key]
    assert configs.lookup(DEVICE, "w4a16", first) == entries[first]  # not left behind


def test_what_is_found_joins_the_rest_of_the_table(own_cache: Path) -> None:
    path = own_cache / "kernels" / "table.json"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps({"w16a16": {"1x2": {}}, "w4a16": {"8x8": {"split": 1}}}))
    tune.save(path, "w4a16", {"9x9": {"split": 2}})
    assert json.loads(path.read_text()) == {
        "w16a16": {"1x2": {}},
        "w4a16": {"8x8": {"split": 1}, "9x9": {"split": 2}},
    }


def test_an_untuned_device_is_told_what_comes_first() -> None:
    with pytest.raises(SystemExit, match=r"run `python -m specq_kernels\.tune 8b` first"):
        tuned_entries("Some GPU", "8b")


def test_other_models_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["9b"])
    assert "`9b` is none of 8b, 70b" in capsys.readouterr().err
