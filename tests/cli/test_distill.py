"""`specq distill`: from prompts to a drafter that the pipelines load, and what stops it before it begins."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from factories import tiny_config, write_model
from safetensors.torch import load_file

from specq.hub import resolve_model
from specq.recipe import DEMO_HEAD, load_recipe

SMALL = (
    *("--set", "distill.max_prompts=8", "--set", "distill.max_new_tokens=12", "--set", "distill.length=160"),
    *("--set", "distill.batch_tokens=512", "--set", "distill.held_out=2", "--set", "distill.eval_tokens=8"),
    *("--set", "distill.learning_rate=0.003", "--set", "distill.steps=3", "--device", "cpu"),
)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_model(tmp_path_factory.mktemp("models") / "target", tiny_config(num_hidden_layers=3)))


def test_a_head_is_trained_measured_and_loads(call, target, tmp_path) -> None:
    done = call("distill", target, "--kind", "eagle", "-o", tmp_path / "head", "--steps", "5", *SMALL, "--json")
    assert (done.code, done.err) == (0, "")
    manifest = json.loads(done.out)
    assert [(r["pipeline"], r["temperature"], r["prompts"]) for r in manifest["evaluation"]] == [
        ("eagle2", 0.0, 2),
        ("eagle2", 1.0, 2),
    ]
    assert all(result["accept_len"] >= 1.0 for result in manifest["evaluation"])
    assert manifest["training"]["steps"] == 5
    assert len(manifest["training"]["curve"][0]["top1"]) == 4
    written = json.loads((tmp_path / "head" / "specq_head.json").read_text())
    assert written == {key: value for key, value in manifest.items() if key != "folder"}
    card = (tmp_path / "head" / "README.md").read_text()
    assert f"| eagle2 | 0 | 2 | 16 | {manifest['evaluation'][0]['accept_len']} |" in card
    answer = call("run", target, "hello", "--pipeline", "eagle2", "--drafter", tmp_path / "head", *ANSWER)
    plain = call("run", target, "hello", "--pipeline", "plain", *ANSWER)
    assert (answer.code, json.loads(answer.out)["token_ids"]) == (0, json.loads(plain.out)["token_ids"])
    assert call("check", target, tmp_path / "head").code == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["head"]


def test_a_head_that_diverged_is_not_written(call, target, tmp_path) -> None:
    options = ("--kind", "eagle", "-o", tmp_path / "head", "--steps", "10", *SMALL)
    done = call("distill", target, *options, "--set", "distill.learning_rate=1e30")
    assert done.code == 1
    assert "training diverged before step 10" in done.err
    assert not (tmp_path / "head").exists()


def test_an_interrupted_run_says_how_to_go_on(call, target, tmp_path, monkeypatch) -> None:
    def interrupt(*arguments: object, **options: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("specq.train.distill.train", interrupt)
    done = call("distill", target, "--kind", "eagle", "-o", tmp_path / "head", *SMALL)
    assert done.code == 130
    assert "stopped; the same command goes on" in done.err
    assert not (tmp_path / "head").exists()


def test_a_target_may_write_its_prompts_itself(call, target, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("specq.train.own_prompts.MAX_TOKENS", 300)  # random weights seldom write an end
    options = ("--kind", "eagle", "--own-prompts", "12", "-o", tmp_path / "head", "--steps", "1")
    done = call("distill", target, *options, *SMALL, "--set", "distill.length=400", "--json")
    assert done.code == 0
    training = json.loads(done.out)["training"]
    assert 0 < training["own_prompts"] < 12
    assert training["sequences"] == 2 * (8 + training["own_prompts"])


def test_a_target_that_finishes_no_prompt_is_said_and_the_others_serve(call, target, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("specq.train.own_prompts.MAX_TOKENS", 2)
    options = ("--kind", "eagle", "--own-prompts", "2", "-o", tmp_path / "head", "--steps", "1")
    done = call("distill", target, *options, *SMALL, "--json")
    assert done.code == 0
    assert "--own-prompts: 0 of the 2 that the target wrote are whole, new and short enough" in done.err
    training = json.loads(done.out)["training"]
    assert (training["own_prompts"], training["sequences"]) == (0, 16)


def test_a_run_is_not_resumed_on_other_prompts_or_from_other_weights(call, target, tmp_path, monkeypatch) -> None:
    def interrupt(*arguments: object, **options: object) -> None:
        raise KeyboardInterrupt

    head, out, files = tmp_path / "head", tmp_path / "out", (tmp_path / "train.txt", tmp_path / "eval.txt")
    files[0].write_text("sing\ndance\nplay\n")
    files[1].write_text("bark\nmeow\n")
    first = ("distill", target, "--kind", "eagle", "-o", head, *SMALL, "--steps", "1")
    assert call(*first).code == 0
    options = ("--from", head, "--prompts", files[0], "--eval-prompts", files[1], *SMALL)
    command = ("distill", target, "--kind", "eagle", "-o", out, *options)
    with monkeypatch.context() as patch:
        patch.setattr("specq.train.distill.train", interrupt)
        assert call(*command).code == 130
    for file, said in zip(files, ("text of the prompts", "text of the held-out prompts"), strict=True):
        text = file.read_text()
        file.write_text("count to 7\ncount to 8\ncount to 9\n")
        done = call(*command)
        assert (done.code, f"other settings: {said} is another" in done.err) == (2, True), done.err
        file.write_text(text)
    assert call(*first, "--overwrite", "--set", "distill.seed=3").code == 0
    done = call(*command)
    assert (done.code, "other settings: head of --from is another" in done.err) == (2, True), done.err


def test_one_recipe_serves_both_kinds(call, target, tmp_path) -> None:
    recipe = tmp_path / "r.yaml"
    recipe.write_text(f"target: {target}\ndistill:\n  width: 72\n")
    for kind, options, file, width in (
        ("eagle", ("--bits", "4"), "specq_head.json", 72),
        ("intermediate", ("--layers", "2"), "specq_intermediate.json", None),
    ):
        command = ("distill", recipe, "--kind", kind, *options, "-o", tmp_path / kind, *SMALL, "--steps", "1")
        assert call(*command).code == 0
        assert json.loads((tmp_path / kind / file).read_text())["settings"]["width"] == width


def test_steps_of_the_command_line_are_not_cut_short_by_a_recipes_minutes(call, target, tmp_path) -> None:
    recipe = tmp_path / "r.yaml"
    recipe.write_text(f"target: {target}\ndistill:\n  minutes: 0.000001\n")
    for name, options, steps in (("recipe", (), 1), ("steps", ("--steps", "3"), 3)):
        command = ("distill", recipe, "--kind", "eagle", "-o", tmp_path / name, *SMALL, *options, "--json")
        assert json.loads(call(*command).out)["training"]["steps"] == steps


def test_the_demo_recipe_trains_for_the_time_that_the_shipped_head_was() -> None:
    settings = load_recipe("demo").distill
    manifest = json.loads((resolve_model(DEMO_HEAD).path / "specq_head.json").read_text())["settings"]
    for key in ("minutes", "width", "max_new_tokens", "length", "own_prompts", "learning_rate", "unroll", "seed"):
        assert getattr(settings, key) == manifest[key], key
    assert settings.minutes is not None


ANSWER = ("--max-new-tokens", "12", "--temperature", "0", "--dtype", "float32", "--json")


def test_an_intermediate_is_an_ordinary_model(call, target, tmp_path) -> None:
    folder = tmp_path / "small"
    done = call("distill", target, "--kind", "intermediate", "--layers", "2", "-o", folder, "--steps", "5", *SMALL)
    assert done.code == 0
    assert [line.split()[:3] for line in done.out.splitlines()] == [
        ["sequence", "temperature", "0"],
        ["sequence", "temperature", "1"],
    ]
    assert json.loads((folder / "config.json").read_text())["num_hidden_layers"] == 2
    manifest = json.loads((folder / "specq_intermediate.json").read_text())
    assert manifest["layers"][0] == 0
    assert manifest["layers"][-1] == 2
    assert len(manifest["importance_kl"]) == 3
    answer = call("run", target, "hello", "--pipeline", "sequence", "--intermediate", folder, *ANSWER)
    plain = call("run", target, "hello", "--pipeline", "plain", *ANSWER)
    assert json.loads(answer.out)["token_ids"] == json.loads(plain.out)["token_ids"]
    assert call("run", folder, "hello", *ANSWER).code == 0


def test_an_intermediate_may_begin_with_an_earlier_one(call, target, tmp_path) -> None:
    first = ("--kind", "intermediate", "--layers", "2", "--share-embeddings", "-o", tmp_path / "first", "--steps", "1")
    assert call("distill", target, *first, *SMALL).code == 0
    more = ("--kind", "intermediate", "--from", tmp_path / "first", "-o", tmp_path / "more", "--steps", "2")
    done = call("distill", target, *more, *SMALL, "--json")
    assert done.code == 0
    assert json.loads(done.out)["layers"] == [0, 2]
    assert json.loads((tmp_path / "more" / "config.json").read_text())["num_hidden_layers"] == 2
    weights = [load_file(tmp_path / name / "model.safetensors") for name in ("first", "more")]
    moved = {name: float((weights[1][name] - tensor).abs().max()) for name, tensor in weights[0].items()}
    assert 0.0 < max(moved.values()) < 0.05  # two steps from the first's weights, not from the target's
    refused = call("distill", target, *more[:-4], "--layers", "1", "-o", tmp_path / "x", *SMALL)
    assert (refused.code, "`first` has 2 layers, not 1" in refused.err) == (2, True)


def test_an_intermediate_must_be_cut_from_this_target(call, target, tmp_path) -> None:
    for name, changes, said in (
        ("deep", {"num_hidden_layers": 3}, "`deep` has 3 layers and the target 3"),
        ("heads", {"num_hidden_layers": 2, "num_key_value_heads": 4}, "`heads` has key heads 4, the target 2"),
        ("wide", {"num_hidden_layers": 2, "intermediate_size": 160}, "`wide` has MLP width 160, the target"),
    ):
        start = write_model(tmp_path / name, tiny_config(**changes))
        options = ("--kind", "intermediate", "--from", start, "-o", tmp_path / "x", *SMALL)
        done = call("distill", target, *options)
        assert (done.code, said in done.err) == (2, True), done.err
        assert not (tmp_path / "x").exists()


def test_an_intermediate_may_leave_its_embedding_to_the_target(call, target, tmp_path) -> None:
    folder = tmp_path / "small"
    options = ("--kind", "intermediate", "--layers", "2", "--share-embeddings", "-o", folder, "--steps", "2")
    assert call("distill", target, *options, *SMALL).code == 0
    names = set(load_file(folder / "model.safetensors"))
    assert "model.norm.weight" in names
    assert not names & {"model.embed_tokens.weight", "lm_head.weight"}
    assert not (folder / "tokenizer.json").exists()
    answer = call("run", target, "hello", "--pipeline", "sequence", "--intermediate", folder, *ANSWER)
    plain = call("run", target, "hello", "--pipeline", "plain", *ANSWER)
    assert json.loads(answer.out)["token_ids"] == json.loads(plain.out)["token_ids"]
    assert json.loads(answer.out)["pipeline"] == "sequence"
    assert "drafter embeddings" in call("check", target, folder).out
    alone = call("run", folder, "hello", *ANSWER)
    assert alone.code == 2
    assert alone.err.startswith("error: `small` is no model of its own: it was saved without embedding and output head")
    assert "hint: run it beside that model: specq chat target --pipeline sequence --intermediate small" in alone.err


def test_an_intermediate_without_embedding_gets_a_head_where_its_target_is_found(
    call, target, tmp_path, monkeypatch
) -> None:
    small = ("--kind", "intermediate", "--layers", "2", "--share-embeddings", "-o", tmp_path / "small")
    assert call("distill", target, *small, "--steps", "1", *SMALL).code == 0
    head = ("distill", tmp_path / "small", "--kind", "eagle", "-o", tmp_path / "head", "--steps", "1", *SMALL)
    monkeypatch.chdir(tmp_path)
    lost = call(*head)
    assert lost.code == 2
    assert "`target` is neither a folder" in lost.err
    monkeypatch.chdir(Path(target).parent)
    assert call(*head).code == 0
    inner = ("--intermediate", tmp_path / "small", "--set", f"intermediate.drafter={tmp_path / 'head'}")
    answer = call("run", target, "hello", "--pipeline", "hierarchical", *inner, *ANSWER)
    plain = call("run", target, "hello", "--pipeline", "plain", *ANSWER)
    assert json.loads(answer.out)["token_ids"] == json.loads(plain.out)["token_ids"]
    again = call("distill", tmp_path / "small", "--kind", "intermediate", "--layers", "1", "-o", tmp_path / "x", *SMALL)
    assert (again.code, "is no model of its own" in again.err) == (2, True)


def test_a_head_in_4_bits_is_measured_as_it_will_draft(call, target, tmp_path) -> None:
    options = ("--kind", "eagle", "--bits", "4", "--head-bits", "8", "-o", tmp_path / "head", "--steps", "2")
    assert call("distill", target, *options, *SMALL).code == 0
    manifest = json.loads((tmp_path / "head" / "specq_head.json").read_text())
    assert (manifest["bits"], manifest["draft_head_bits"]) == (4, 8)
    assert "fc.qweight" in load_file(tmp_path / "head" / "model.safetensors")
    answer = call("run", target, "hello", "--pipeline", "eagle2", "--drafter", tmp_path / "head", *ANSWER)
    plain = call("run", target, "hello", "--pipeline", "plain", *ANSWER)
    assert json.loads(answer.out)["token_ids"] == json.loads(plain.out)["token_ids"]


def test_a_trimmed_head_drafts_only_its_ids(call, target, tmp_path) -> None:
    arguments = ("--kind", "eagle", "-o", tmp_path / "head", "--steps", "2", "--trim-vocab", "40")
    assert call("distill", target, *arguments, *SMALL).code == 0
    assert len(load_file(tmp_path / "head" / "model.safetensors")["d2t"]) == 40
    answer = call("run", target, "hello", "--pipeline", "eagle2", "--drafter", tmp_path / "head", *ANSWER)
    assert answer.code == 0


def test_training_begins_with_a_given_head(call, target, tmp_path) -> None:
    def train(name: str, *arguments: object) -> dict[str, Any]:
        done = call("distill", target, "--kind", "eagle", "-o", tmp_path / name, *arguments, *SMALL, "--json")
        return json.loads(done.out)["training"]["curve"][0]

    first = train("first", "--steps", "60")
    assert train("second", "--steps", "1", "--from", tmp_path / "first")["loss"] < first["loss"] - 0.2
    config = tmp_path / "first" / "config.json"
    wrong = write_model(tmp_path / "other", tiny_config(hidden_size=32, head_dim=16))
    done = call("distill", wrong, "--kind", "eagle", "-o", tmp_path / "third", "--from", config.parent, *SMALL)
    assert done.code == 6
    assert "the head's fc is [64, 128] and the target's hidden size is 32" in done.err


def test_what_is_of_the_wrong_kind_is_said_before_anything_is_written(call, target, tmp_path) -> None:
    head, small = tmp_path / "head", tmp_path / "small"
    assert call("distill", target, "--kind", "eagle", "-o", head, "--steps", "1", *SMALL).code == 0
    cut = ("--kind", "intermediate", "--layers", "2")
    assert call("distill", target, *cut, "-o", small, "--steps", "1", *SMALL).code == 0
    for model, arguments, code, said in (
        (head, ("--kind", "eagle"), 2, "`head` is an EAGLE head and no whole model"),
        (target, ("--kind", "eagle", "--from", small), 2, "`small` is a whole model, and what is trained is not"),
        (target, (*cut, "--from", head), 2, "`head` is an EAGLE head, and what is trained is not"),
        (target, ("--kind", "eagle", "--from", head, "--set", "distill.width=8"), 6, "training cannot begin with this"),
    ):
        done = call("distill", model, *arguments, "-o", tmp_path / "x", *SMALL)
        assert (done.code, said in done.err) == (code, True), done.err
    wrong = call("run", target, "hello", "--pipeline", "eagle2", "--drafter", small, *ANSWER)
    assert wrong.code == 6
    assert "these are the weights of a whole model, and no EAGLE head's" in wrong.err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["head", "small"]


def test_prompts_of_a_file_are_used_and_evaluation_has_its_own(call, target, tmp_path) -> None:
    (tmp_path / "train.txt").write_text("\n".join(f"count to {i}" for i in range(6)))
    (tmp_path / "eval.jsonl").write_text('{"prompt": "sing"}\n')
    files = ("--prompts", tmp_path / "train.txt", "--eval-prompts", tmp_path / "eval.jsonl")
    done = call("distill", target, "--kind", "eagle", "-o", tmp_path / "h", "--steps", "1", *files, *SMALL, "--json")
    manifest = json.loads(done.out)
    assert manifest["training"]["sequences"] == 12  # six prompts at two temperatures
    assert manifest["evaluation"][0]["prompts"] == 1
    assert (manifest["target"]["name"], manifest["settings"]["prompts"]) == ("target", "train.txt")
    written = [(tmp_path / "h" / name).read_text() for name in ("README.md", "specq_head.json")]
    assert not any(str(tmp_path) in text or target in text for text in written)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--kind", "intermediate"), "an intermediate needs a number of layers"),
        (("--kind", "intermediate", "--layers", "3"), "3 layers cannot be cut from a model of 3"),
        (("--kind", "intermediate", "--layers", "2", "--trim-vocab", "9"), "--trim-vocab is for EAGLE heads"),
        (("--kind", "intermediate", "--layers", "2", "--bits", "4"), "--bits is for EAGLE heads"),
        (("--kind", "intermediate", "--set", "distill.width=72"), "distill.width is for EAGLE heads"),
        (("--kind", "eagle", "--bits", "4", "--set", "distill.width=100"), "--set distill.width=96"),
        (("--kind", "eagle", "--bits", "4", "--set", "distill.width=9"), "--set distill.width=8"),
        (("--kind", "intermediate", "--layers", "2", "--head-bits", "4"), "--head-bits is for EAGLE heads"),
        (("--kind", "eagle", "--trim-vocab", "5000"), "--trim-vocab 5000 leaves nothing out"),
        (("--kind", "eagle", "--share-embeddings"), "--share-embeddings is for intermediates"),
        (("--kind", "eagle", "--bits", "3"), "`--bits` = `3`"),
        (("--kind", "eagle", "--head-bits", "5"), "`--head-bits` = `5`"),
        (("--kind", "eagle", "--layers", "2"), "a head has no layers to choose"),
        (("--kind", "eagle", "--prompts", "nowhere.txt"), "there is no file of prompts `nowhere.txt`"),
        (("--kind", "eagle", "--set", "distill.rate=1"), "unknown key `distill.rate`"),
        (("--kind", "tree"), "invalid value for `--kind`"),
    ],
)
def test_what_cannot_be_done_is_said_before_anything_is_written(call, target, tmp_path, arguments, message) -> None:
    done = call("distill", target, "-o", tmp_path / "out", *arguments, *SMALL)
    assert done.code == 2
    assert message in done.err
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_seen_before_training(call, target, tmp_path, monkeypatch) -> None:
    usage = SimpleNamespace(total=10**12, used=10**12 - 1000, free=1000)
    monkeypatch.setattr("specq.storage.shutil.disk_usage", lambda folder: usage)
    done = call("distill", target, "--kind", "eagle", "-o", tmp_path / "head", *SMALL)
    assert done.code == 8
    assert not (tmp_path / "head").exists()


def test_a_folder_that_holds_something_is_not_replaced_unasked(call, target, tmp_path) -> None:
    (tmp_path / "kept").write_text("mine")
    arguments = ("distill", target, "--kind", "eagle", "-o", tmp_path, "--steps", "1", *SMALL)
    done = call(*arguments)
    assert (done.code, (tmp_path / "kept").read_text()) == (2, "mine")
    assert "is not empty" in done.err
    done = call(*arguments, "--overwrite")
    assert (done.code, (tmp_path / "kept").read_text()) == (2, "mine")
    assert "holds no model for --overwrite to replace, but kept" in done.err
    (tmp_path / "config.json").write_text("{}")
    assert call(*arguments, "--overwrite").code == 0
    assert not (tmp_path / "kept").exists()
    done = call("distill", target, "--kind", "eagle", "-o", target, "--steps", "1", *SMALL, "--overwrite")
    assert done.code == 2
    assert "is or holds `target`, which is read" in done.err


def test_a_killed_run_goes_on_and_other_settings_are_refused(call, target, tmp_path) -> None:
    output = tmp_path / "head"
    workspace = tmp_path / ".head.specq"
    command = ("distill", target, "--kind", "eagle", "-o", str(output), *SMALL)
    script = (
        "import sys, specq.train.loop as loop\nloop.SAVE_SECONDS = 0.0\n"
        "from specq.cli.app import entry\nsys.argv = ['specq', *sys.argv[1:]]\nentry()"
    )
    arguments = [sys.executable, "-c", script, *command, "--steps", "100000"]
    process = subprocess.Popen(arguments, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=dict(os.environ))
    deadline = time.monotonic() + 240
    while not (workspace / "checkpoint.safetensors").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert (workspace / "checkpoint.safetensors").exists()
    assert not output.exists()
    other = call(*command, "--steps", "7")
    assert other.code == 2
    assert "has other settings: steps was `100000`, now `7`" in other.err
    done = call(*command, "--steps", "7", "--overwrite", "--json")
    assert json.loads(done.out)["training"]["steps"] == 7
    assert Path(output, "README.md").is_file()
    assert not workspace.exists()
