"""`specq profile` and `bench` on a GPU: every part measured, the time split, device state, graphs before the clock."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from factories import tiny_config, write_model
from unit.models.test_eagle_loader import tiny_tensors, write_head

from specq.cli.app import main
from specq.profile.acceptance import parse_by_hand
from specq.profile.result import save
from specq.profile.run import profile
from specq.profile.subject import Request
from specq.recipe import Recipe
from specq.spec.decision import FORMAT, Decision, Level, ProfileKey
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


def test_a_study_on_the_gpu_plans_draft_heads_of_every_precision(tmp_path: Path) -> None:
    shape = tmp_path / "shape.json"
    sizes = {"hidden_size": 512, "intermediate_size": 1024, "num_attention_heads": 8, "vocab_size": 4096}
    shape.write_text(json.dumps(tiny_config(**sizes, max_position_embeddings=2048)))
    recipe = Recipe.model_validate({"target": str(shape), "intermediate": str(shape), "drafter": {"depth": 2}})
    given = parse_by_hand(["sequence=0.8", "eagle2=0.8", "inner=0.8", "lookup=0.1", "qspec=0.8"])
    found = profile(Request(recipe, [], device="cuda", seconds=5.0, by_hand=given, is_random=True, compare_fp16=True))
    assert found.plan is not None
    assert found.plan.refused == ()
    assert set(found.costs.extra_ms) == {"sequence", "eagle2", "hierarchical", "qspec"}
    assert {dict(p.candidate.settings).get("drafter.head_bits") for p in found.plan.ranking} >= {16, 4}
    assert {"target", "intermediate", "target_unquantized"} == set(found.costs.steps)


def test_a_benchmark_on_the_gpu_splits_time_and_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SPECQ_CACHE", str(tmp_path / "cache"))
    folder = str(write_model(tmp_path / "model", tiny_config(torch_dtype="bfloat16")))
    small = str(write_model(tmp_path / "small", tiny_config(torch_dtype="bfloat16", num_hidden_layers=1)))
    head = str(write_head(tmp_path / "head", tiny_tensors()))
    command = ["bench", folder, "--device", "cuda", "--intermediate", small, "--drafter", head, "--json", "--quiet"]
    assert main([*command, "--pipeline", "lookup,sequence,eagle2", "--limit", "2", "--max-new-tokens", "24"]) == 0
    document = json.loads(capsys.readouterr().out)
    rows = {row["row"]: row for row in document["rows"]}
    assert set(rows) == {"plain", "lookup", "sequence", "eagle2"}
    assert all(row["match"]["bug"] == 0 for row in rows.values())
    assert rows["eagle2"]["draft_ms"] > 0
    assert rows["sequence"]["peak_memory_bytes"] > rows["plain"]["peak_memory_bytes"] > 0
    assert all(state["clock_mhz"] > 0 for state in document["machine"])
    # a graph captured inside the clock would take a hundred times what a round does
    slowest = max(s["ttft_s"] for s in document["samples"])
    assert slowest < min(document["warmup_s"]["eagle2"])


@pytest.mark.parametrize("name", ["sequence", "eagle2", "hierarchical"])
def test_auto_on_the_gpu_leaves_drafts_that_lose_and_tries_them_again(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SPECQ_CACHE", str(tmp_path / "cache"))
    folders = {
        "target": write_model(tmp_path / "model", tiny_config(torch_dtype="bfloat16", max_position_embeddings=512)),
        "intermediate": write_model(tmp_path / "small", tiny_config(torch_dtype="bfloat16", num_hidden_layers=1)),
        "target_head": write_head(tmp_path / "head", tiny_tensors()),
        "intermediate_head": write_head(tmp_path / "inner", tiny_tensors()),
    }
    key = ProfileKey.here(folders, device="cuda:0", dtype="auto")
    key.path.parent.mkdir(parents=True)
    parts = ["--intermediate", str(folders["intermediate"]), "--drafter", str(folders["target_head"])]
    parts += ["--set", f"intermediate.drafter={folders['intermediate_head']}"]
    rounds = {}
    for cost in (0.01, 50.0):
        chosen = Decision(name, (), (Level(None, ((0, cost),)),), 50.0, 1.5, None, "2026-01-01")
        plan = {"context": 64, "answer_tokens": 32, "candidates": []}
        record = {"format": FORMAT, "is_complete": True, "key": key.record(), "decision": chosen.record(), "plan": plan}
        key.path.write_text(json.dumps(record | {"sampling": {}, "measured_at": "2026-01-01"}))
        command = ["bench", str(folders["target"]), *parts, "--pipeline", "auto", "--device", "cuda", "--json"]
        assert main([*command, "--limit", "1", "--max-new-tokens", "160", "--forced-length", "--raw"]) == 0
        out, err = capsys.readouterr()
        document = json.loads(out)
        assert document["rows"][1]["match"]["bug"] == 0
        assert ("times plain on this text: plain decoding for now" in err) == (cost > 1)
        rounds[cost] = [s["rounds"] for s in document["samples"] if s["row"] == "auto"]
    assert all(losing > winning for losing, winning in zip(rounds[50.0], rounds[0.01], strict=True))


def test_the_first_prompt_of_a_length_takes_no_longer_than_the_next(tmp_path: Path) -> None:
    """A plan of attention made for every new length cost 72 ms a model on an H200."""
    pipeline = load_pipeline(
        Recipe.model_validate({"target": str(write_model(tmp_path / "model", tiny_config()))}), device="cuda"
    )

    def wait_s(length: int) -> float:
        pipeline.parts.rollback(0)
        stream = pipeline.stream([1 + i % 200 for i in range(length)], max_new_tokens=1, ignore_stop_ids=True)
        for _ in stream:
            pass
        return stream.result.ttft_s or 0.0

    wait_s(100)  # what every first prompt pays
    lengths = range(101, 121)
    first, again = [wait_s(n) for n in lengths], [wait_s(n) for n in lengths]
    assert min(first) < 5 * min(again)
