"""`specq fetch`: lists without a network, and the real client against a small Hub that holds tiny models."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from factories import tiny_config, write_model
from safetensors.torch import save_file
from stub_hub import COMMIT, StubHub, serve

from specq.cli.app import VERBS
from specq.recipe import build_recipe

TARGET, HEAD, SMALLER = "Qwen/Qwen3-32B", "AngelSlim/Qwen3-32B_eagle3", "Qwen/Qwen3-1.7B"


def write_head(folder: Path, hidden: int = 64) -> Path:
    shapes = {f"layers.0.self_attn.{name}_proj.weight": (hidden, hidden) for name in "qkvo"}
    shapes |= {f"layers.0.mlp.{name}_proj.weight": (96, hidden) for name in ("gate", "up")}
    shapes |= {"fc.weight": (hidden, 2 * hidden), "layers.0.mlp.down_proj.weight": (hidden, 96)}
    shapes |= {"layers.0.post_attention_layernorm.weight": (hidden,)}
    folder.mkdir()
    save_file({name: torch.zeros(shape) for name, shape in shapes.items()}, folder / "model.safetensors")
    config = tiny_config(hidden_size=hidden, num_key_value_heads=4, num_hidden_layers=1)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[StubHub]:
    models = {
        TARGET: write_model(tmp_path / "target", tiny_config()),
        HEAD: write_head(tmp_path / "head"),
        SMALLER: write_model(tmp_path / "smaller", tiny_config(num_hidden_layers=1)),
    }
    with serve(StubHub({name: contents(folder) for name, folder in models.items()})) as stub:
        yield stub


@pytest.fixture
def fetch(hub: StubHub, specq: Callable, tmp_path: Path) -> Callable:
    """Runs `specq fetch` in a process of its own: the Hub's client reads its environment at import."""
    settings = {
        "HF_ENDPOINT": hub.url,
        "HF_HOME": str(tmp_path / "home"),
        "HF_HUB_OFFLINE": "0",
        "HF_HUB_DISABLE_XET": "1",
    }
    return lambda *arguments: specq("fetch", *arguments, **settings)


def test_head_is_fetched_checked_and_explained(fetch: Callable, hub: StubHub) -> None:
    done = fetch(TARGET)
    assert done.code == 0, done.err
    folder = Path(done.out.rstrip("\n"))
    assert (folder.name, (folder / "model.safetensors").is_file()) == (COMMIT, True)
    assert f"specq chat {TARGET} --drafter {HEAD} --pipeline eagle2" in done.err
    assert f"revision: {COMMIT}" in done.err
    assert f"pins no commit of {HEAD}: fetched was `main`, today {COMMIT}" in done.err
    hub.status = 503
    assert fetch(TARGET, "--offline").out == done.out


def test_intermediate_comes_with_a_recipe_that_is_right(fetch: Callable) -> None:
    done = fetch(TARGET, "--kind", "intermediate", "--json")
    assert done.code == 0, done.err
    found = json.loads(done.out)
    assert (found["model"], found["revision"], found["fits"]) == (SMALLER, COMMIT, True)
    assert (found["target_revision"], found["is_pinned"]) == (COMMIT, False)
    assert {test["status"] for test in found["tests"]} <= {"pass", "warn"}
    recipe = build_recipe(found["recipe"])
    assert recipe.intermediate is not None
    assert (recipe.target.model, recipe.intermediate.revision, recipe.pipeline.name) == (TARGET, COMMIT, "sequence")
    assert f"hierarchical: specq fetch {SMALLER}" in done.err


def test_drafter_that_does_not_fit_is_refused(fetch: Callable, hub: StubHub, tmp_path: Path) -> None:
    hub.repos[HEAD] = contents(write_head(tmp_path / "narrow", hidden=32))
    done = fetch(TARGET, "--json")
    assert (done.code, json.loads(done.out)["fits"]) == (6, False)
    assert f"`{HEAD}` does not fit `{TARGET}`: hidden size" in done.err
    assert f"hint: specq check {TARGET} {HEAD}" in done.err


def test_gated_target_says_where_to_ask_and_nothing_is_printed(fetch: Callable, hub: StubHub) -> None:
    hub.gated.add(TARGET)
    done = fetch(TARGET)
    assert (done.code, done.out) == (4, "")
    assert f"{hub.url}/{TARGET}" in done.err


def test_copy_on_the_hub_is_known_by_its_card_without_its_weights(fetch: Callable, hub: StubHub) -> None:
    config = tiny_config(quantization_config={"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True})
    card = f"---\nbase_model: {TARGET}\n---\n# A copy\n"
    hub.repos["someone/my-copy"] = {
        "config.json": json.dumps(config).encode(),
        "README.md": card.encode(),
        "model.safetensors": bytes(9),
    }
    done = fetch("someone/my-copy", "--list", "--json")
    assert [drafter["model"] for drafter in json.loads(done.out)][:2] == [HEAD, SMALLER]
    assert f"quantized from `{TARGET}`" in done.err
    assert [path for _, path, _ in hub.requests if path.endswith("model.safetensors")] == []


def test_list_shows_each_target_with_its_drafters(call: Callable) -> None:
    rows = json.loads(call("fetch", "--list", "--json").out)
    assert {"target", "kind", "model", "form", "gb", "licence", "revision", "note"} == set(rows[0])
    assert {row["kind"] for row in rows} == {"eagle", "intermediate"}
    lines = call("fetch", "--list", "--kind", "eagle").out.splitlines()
    assert len([line for line in lines if line.startswith("  ")]) == len([r for r in rows if r["kind"] == "eagle"])
    assert "licence unknown" in lines[lines.index(TARGET) + 1]
    assert "2 MB" in next(line for line in lines if "specq:demo-head" in line)


def test_local_copy_is_known_by_the_model_it_was_quantized_from(call: Callable, tmp_path: Path) -> None:
    config = tiny_config(
        _name_or_path="/somewhere/Qwen3-8B", quantization_config={"quant_method": "awq", "bits": 4, "group_size": 32}
    )
    (tmp_path / "config.json").write_text(json.dumps(config))
    done = call("fetch", tmp_path, "--list", "--json")
    assert {drafter["target"] for drafter in json.loads(done.out)} == {"Qwen/Qwen3-8B"}


def write_config(folder: Path, **changes: object) -> Path:
    (folder / "config.json").write_text(json.dumps(tiny_config(**changes)))
    return folder


def test_unknown_model_of_a_known_shape_is_offered_what_may_fit(call: Callable, tmp_path: Path) -> None:
    write_config(tmp_path, hidden_size=4096, num_hidden_layers=32, vocab_size=128256)
    done = call("fetch", tmp_path, "--kind", "eagle")
    assert (done.code, done.out) == (1, "")
    assert f"`{tmp_path}` is not in the registry" in done.err
    assert "yuhuili/EAGLE-LLaMA3-Instruct-8B (made for meta-llama/Meta-Llama-3-8B-Instruct)" in done.err
    assert f"specq check {tmp_path} yuhuili/" in done.err


@pytest.mark.parametrize("has_distill", [True, False])
def test_unknown_model_is_told_of_its_family_and_of_distillation(
    has_distill: bool, call: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not has_distill:
        # not delitem, which puts it back at the end: the order of verbs is that of the reference page
        others = {verb: about for verb, about in VERBS.items() if verb != "distill"}
        monkeypatch.setattr("specq.cli.app.VERBS", others)
    done = call("fetch", write_config(tmp_path, family="qwen3", head_dim=16), "--kind", "intermediate")
    assert "drafters are known for Qwen3:" in done.err
    assert (f"specq distill {tmp_path} --kind intermediate -o DIR" in done.err) == has_distill


def test_family_without_any_drafter_is_not_praised(call: Callable, tmp_path: Path) -> None:
    done = call("fetch", write_config(tmp_path, family="mistral"))
    assert (done.code, "nothing is known for its family either" in done.err) == (1, True)


def test_target_without_a_drafter_of_this_kind_names_the_other(call: Callable) -> None:
    done = call("fetch", "Qwen/Qwen2.5-7B-Instruct", "--kind", "eagle")
    assert done.code == 1
    assert "no EAGLE head is known for `Qwen/Qwen2.5-7B-Instruct`" in done.err
    assert "specq fetch Qwen/Qwen2.5-7B-Instruct --kind intermediate" in done.err


def test_architecture_that_specq_does_not_run_is_refused(call: Callable, tmp_path: Path) -> None:
    write_config(tmp_path, model_type="mixtral", architectures=["MixtralForCausalLM"])
    done = call("fetch", tmp_path)
    assert (done.code, "mixtral" in done.err.lower()) == (6, True)


def test_unknown_hub_model_offline_is_named(call: Callable) -> None:
    done = call("fetch", "org/absent", "--offline")
    assert (done.code, done.out) == (5, "")
    assert "`org/absent`" in done.err
