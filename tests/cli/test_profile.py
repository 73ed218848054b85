"""`specq profile`: what it prints and stores, who uses that, and how it refuses."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import yaml
from factories import tiny_config, write_model
from unit.models.test_eagle_loader import tiny_tensors, write_head

from specq.profile import run as profile_run
from specq.spec.decision import ProfileKey
from specq.storage import cache_dir

QUICK = ("--seconds", "30", "--threads", "1", "--device", "cpu")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SPECQ_CACHE", str(tmp_path / "cache"))
    return cache_dir()


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    file = tmp_path / "prompts.txt"
    file.write_text("hello there\n\nand the other one\n")
    return file


@pytest.fixture
def quick(prompts: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[str, ...]:
    """Options and defaults that keep a profile of a tiny model at about a second."""
    monkeypatch.setitem(profile_run.ANSWER, "cpu", 12)
    return (*QUICK, "--prompts", str(prompts))


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("models") / "small", tiny_config(num_hidden_layers=1))


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_head(tmp_path_factory.mktemp("heads") / "head", tiny_tensors())


def stored(cache: Path) -> dict:
    (file,) = (cache / "profiles").glob("*.json")
    return json.loads(file.read_text())


def choose(cache: Path, pipeline: str, settings: dict[str, int], levels: list) -> None:
    """Let the stored profile have chosen this."""
    (file,) = (cache / "profiles").glob("*.json")
    record = json.loads(file.read_text())
    record["decision"] |= {"pipeline": pipeline, "settings": settings, "levels": levels}
    file.write_text(json.dumps(record))


def test_a_profile_of_every_part_is_shown_stored_and_saved_as_a_recipe(
    call, model, small, head, quick, cache, tmp_path
) -> None:
    recipe = tmp_path / "chosen.yaml"
    inner = f"intermediate.drafter={head}"
    parts = ("--intermediate", small, "--drafter", head, "--set", inner)
    done = call("profile", model, *parts, *quick, "--json", "--save", recipe, "--compare-fp16")
    assert done.code == 0, done.err
    record = json.loads(done.out)
    assert record == stored(cache)
    assert record["is_complete"]
    assert {c["pipeline"] for c in record["plan"]["candidates"]} == {
        "plain",
        "lookup",
        "sequence",
        "eagle2",
        "hierarchical",
    } - set(record["plan"]["not_considered"])
    assert set(record["costs"]["models"]) == {"target", "intermediate", "target_unquantized"}
    steps = record["costs"]["models"]["target"]["steps"]
    assert {(s["form"], s["nodes"]) for s in steps} >= {("sequence", 1), ("sequence", 8), ("tree", 12)}
    assert record["measured"][0]["pipeline"] == "plain"
    heads = {f"{model}_head{bits}" for model in ("target", "intermediate") for bits in ("", "_8", "_4")}
    assert set(record["memory_bytes"]) == {"target", "intermediate", *heads}
    drafted = {c["settings"]["drafter.head_bits"] for c in record["plan"]["candidates"] if c["pipeline"] == "eagle2"}
    assert drafted == {16, 8, 4}
    assert record["environment"]["torch"]
    assert record["reason"]
    written = yaml.safe_load(recipe.read_text())
    assert written["pipeline"]["name"] == record["decision"]["pipeline"]
    assert recipe.read_text().startswith(f"# specq chat {recipe}\n")
    assert call("recipe", "check", recipe).code == 0


def test_the_table_has_curves_ranking_losers_and_the_sentence(call, model, small, quick) -> None:
    done = call("profile", model, "--intermediate", small, *quick)
    assert done.code == 0, done.err
    for text in ("a step of the target; prefill", "a step of the intermediate", "sequence @64", "not considered"):
        assert text in done.out
    assert "needs an EAGLE head of the target (--drafter HEAD)" in done.out
    assert "qspec         needs a target with 4-bit matrices" in done.out
    assert "wins: " in done.out or "runs, though the prediction chose otherwise" in done.out
    assert "stored in " in done.err


def test_little_time_on_a_cpu_means_fewer_sizes_and_one_rival(call, model, small, head, prompts, cache) -> None:
    parts = ("--intermediate", small, "--drafter", head)
    options = ("--threads", "1", "--device", "cpu", "--prompts", prompts, "--max-new-tokens", "12")
    done = call("profile", model, *parts, "--seconds", "29", *options, "--json")
    assert done.code == 0, done.err
    record = json.loads(done.out)
    steps = record["costs"]["models"]["target"]["steps"]
    assert {step["context"] for step in steps} == {64}
    assert max(step["nodes"] for step in steps) == 8
    assert {c["settings"].get("drafter.head_bits", 16) for c in record["plan"]["candidates"]} == {16}
    assert {c["pipeline"] for c in record["plan"]["candidates"]} >= {"plain", "sequence", "eagle2"}
    assert len(record["measured"]) == 2
    assert record["splits"] == {}
    assert stored(cache)["is_complete"]


def test_how_long_it_will_take_is_said_where_that_is_much_longer(call, model, quick, monkeypatch) -> None:
    assert "this will take" not in call("profile", model, *quick).err
    monkeypatch.setattr(profile_run, "shortest_s", lambda step_s, **counts: 600.0)
    (line,) = [line for line in call("profile", model, *quick).err.splitlines() if "this will take" in line]
    assert line.startswith("this will take about 10 minutes, not 30 s: a plain step takes ")
    assert line.endswith("with --seconds below 30 fewer sizes are timed")


def test_auto_runs_what_the_profile_chose_and_says_nothing(call, model, small, quick, cache) -> None:
    parts = ("--intermediate", small)
    assert call("profile", model, *parts, *quick, "--quiet").code == 0
    level = {"max_depth": 3, "costs": [[64, 0.1]]}
    choose(cache, "sequence", {"pipeline.draft_length": 3}, [level])
    done = call("run", model, "hello", *parts, "--max-new-tokens", "12", "--json")
    record = json.loads(done.out)
    assert (record["pipeline"], done.err) == ("sequence", "")
    plain = json.loads(
        call("run", model, "hello", *parts, "--max-new-tokens", "12", "--pipeline", "plain", "--json").out
    )
    assert record["token_ids"] == plain["token_ids"]
    assert record["rounds"] < 11


def test_auto_says_in_one_line_that_speculation_lost_and_the_text_stays(call, model, small, quick, cache) -> None:
    """lmstudio-ai/mlx-engine#103: a drafter that does not fit the text is switched off by itself."""
    parts = ("--intermediate", small, "--max-new-tokens", "60", "--json")
    assert call("profile", model, "--intermediate", small, *quick, "--quiet").code == 0
    level = {"max_depth": 3, "costs": [[64, 50.0]]}
    choose(cache, "sequence", {"pipeline.draft_length": 3}, [level])
    done = call("run", model, "hello", *parts)
    (line,) = done.err.splitlines()
    assert line.startswith("auto: sequence runs at 0.0")
    assert line.endswith("times plain on this text: plain decoding for now")
    plain = call("run", model, "hello", *parts, "--pipeline", "plain")
    assert json.loads(done.out)["token_ids"] == json.loads(plain.out)["token_ids"]


def test_auto_without_a_profile_runs_plain_and_names_the_command_once(call, model) -> None:
    done = call("run", model, "hello", "--max-new-tokens", "4", "--json")
    assert json.loads(done.out)["pipeline"] == "plain"
    (line,) = done.err.splitlines()
    assert "no profile on this device" in line
    assert "`specq profile`" in line


def test_auto_in_a_chat_that_began_with_another_pipeline_adapts(call, model, small, quick, cache) -> None:
    parts = ("--intermediate", small)
    assert call("profile", model, *parts, *quick, "--quiet").code == 0
    choose(cache, "sequence", {"pipeline.draft_length": 3}, [{"max_depth": 3, "costs": [[64, 50.0]]}])
    lines = "hello\n/spec auto\n/retry\n/spec sequence\n/retry\n"
    options = ("--pipeline", "plain", "--max-new-tokens", "60", "--json")
    done = call("chat", model, *parts, *options, stdin=lines)
    plain, auto, named = json.loads(done.out)["answers"]
    assert (plain["pipeline"], auto["pipeline"], named["pipeline"]) == ("plain", "sequence", "sequence")
    assert plain["token_ids"] == auto["token_ids"] == named["token_ids"]
    assert "*  sequence      available (auto: a profile chose it)" in done.err
    gains = [
        line.split("accept length")[1].split(" · ")[1] for line in done.err.splitlines() if "accept length" in line
    ]
    gain = auto["decode_tps"] / stored(cache)["decision"]["plain_tps"]
    assert gains[0] == f"{gain:.2f} times plain"
    assert len(gains) == 2  # plain decoding gains nothing over itself
    (line,) = [line for line in done.err.splitlines() if line.startswith("auto: ")]
    assert line.endswith("times plain on this text: plain decoding for now")
    assert named["rounds"] < auto["rounds"]  # nothing stops the drafts of a pipeline that is named


def test_auto_after_a_named_start_has_room_for_the_tree_that_was_chosen(call, model, head, quick, cache) -> None:
    parts = ("--drafter", head)
    assert call("profile", model, *parts, *quick, "--quiet").code == 0
    tree = {"drafter.nodes": 60, "drafter.depth": 8, "drafter.top_k": 12}
    choose(cache, "eagle2", tree, [{"max_depth": None, "costs": [[64, 0.1]]}])
    # the prompt fills the context but for the answer, so the tree's rows lie at the very end of the head's cache
    lines = f"/spec auto\n{'a' * 90}\n"
    shape = ("--set", "drafter.nodes=2", "--set", "drafter.depth=1", "--set", "drafter.top_k=1")
    options = ("--pipeline", "plain", "--context", "128", "--json", "--quiet")
    done = call("chat", model, *parts, *shape, *options, stdin=lines)
    assert done.code == 0, done.err
    assert json.loads(done.out)["answers"][0]["pipeline"] == "eagle2"


def test_auto_in_a_chat_without_a_profile_says_so(call, model) -> None:
    done = call("chat", model, "--pipeline", "plain", "--json", stdin="/spec auto\n")
    assert "these models have no profile on this device, so plain decoding runs" in done.err


def test_a_stale_profile_is_not_used_and_said_to_be_stale(call, model, quick, cache, monkeypatch) -> None:
    assert call("profile", model, *quick, "--quiet").code == 0
    original = ProfileKey.here.__func__

    def other_driver(cls, *args, **options):
        key = original(cls, *args, **options)
        changed = dict(key.environment) | {"driver": "999.1"}
        return ProfileKey(key.models, tuple(sorted(changed.items())))

    monkeypatch.setattr(ProfileKey, "here", classmethod(other_driver))
    done = call("run", model, "hello", "--max-new-tokens", "4", "--json")
    (line,) = done.err.splitlines()
    assert "is stale: driver was `None` and is `999.1`" in line
    assert "plain decoding runs" in line


def test_rates_given_by_hand_plan_without_running_and_are_not_stored(call, model, small, quick, cache) -> None:
    given = ("--acceptance", "sequence=0.9,0.8", "--acceptance", "lookup=0")
    done = call("profile", model, "--intermediate", small, *quick, *given, "--json")
    record = json.loads(done.out)
    assert record["acceptance"]["sequence"]["rates"][:3] == [0.9, 0.8, 0.8]
    assert record["acceptance_by_hand"] == ["sequence", "lookup"]
    assert record["measured"] == []
    assert "not stored" in done.err
    assert not (cache / "profiles").exists()


@pytest.fixture
def shapes(tmp_path: Path) -> tuple[Path, Path]:
    """Two files of shapes, of a target and of an intermediate."""
    files = tmp_path / "wide.json", tmp_path / "narrow.json"
    for file, layers in zip(files, (2, 1), strict=True):
        sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": layers}
        file.write_text(json.dumps(tiny_config(**sizes)))
    return files


def test_a_study_plans_every_pipeline_for_shapes_without_weights(call, shapes, cache, monkeypatch) -> None:
    monkeypatch.setitem(profile_run.ANSWER, "cpu", 8)
    given = ("sequence=0.9,0.8", "eagle2=0.7", "inner=0.75,0.6", "lookup=0.1", "qspec=0.8")
    rates = [text for each in given for text in ("--acceptance", each)]
    study = ("--random-weights", "--intermediate", shapes[1], *rates, "--compare-fp16")
    done = call("profile", shapes[0], *study, *QUICK, "--json")
    assert done.code == 0, done.err
    record = json.loads(done.out)
    assert record["random_weights"]
    assert record["plan"]["not_considered"] == {}
    assert set(record["costs"]["models"]) == {"target", "intermediate", "target_unquantized"}
    assert record["memory_bytes"]["target"] > record["memory_bytes"]["intermediate"] > 0
    assert record["measured"] == []  # what random weights accept says nothing, but their rounds are timed
    assert set(record["costs"]["extra_ms"]) == {"sequence", "eagle2", "hierarchical", "qspec"}
    trees = [c["settings"] for c in record["plan"]["candidates"] if c["pipeline"] == "eagle2"]
    assert {t["drafter.depth"] for t in trees} == {2, 3, 5}  # the tree the rates are for, and shallower ones
    assert {t["drafter.nodes"] for t in trees} == {30}
    assert "not stored: weights are random" in done.err
    assert not (cache / "profiles").exists()


def test_a_study_plans_only_what_it_was_given_an_acceptance_for(call, shapes, monkeypatch) -> None:
    monkeypatch.setitem(profile_run.ANSWER, "cpu", 8)
    done = call("profile", shapes[0], "--random-weights", "--acceptance", "eagle2=0.7", *QUICK)
    assert done.code == 0, done.err
    assert "random weights: the times are measured, acceptance is as given" in done.out
    assert "lookup        needs the acceptance of random weights by hand (--acceptance lookup=P)" in done.out
    assert "sequence      needs an intermediate model" in done.out


def test_shapes_of_different_vocabularies_are_exit_6(call, shapes, tmp_path) -> None:
    other = tmp_path / "other.json"
    other.write_text(json.dumps(tiny_config(vocab_size=500)))
    given = ("--random-weights", "--intermediate", other, "--acceptance", "sequence=0.5")
    done = call("profile", shapes[0], *given, *QUICK)
    assert (done.code, done.out) == (6, "")
    assert "vocabularies of 320 and 500 ids" in done.err


def test_a_study_that_does_not_fit_is_exit_7_before_anything_is_made(call, monkeypatch) -> None:
    monkeypatch.setattr("specq.profile.study.free_bytes", lambda device: 10**9)
    done = call("profile", "70b", "--random-weights", "--intermediate", "8b", *QUICK)
    assert done.code == 7
    assert "are needed" in done.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "`--random-weights` needs a shape"),
        (("9b",), "`9b` is no shape for random weights"),
        (("8b", "--prompts", "x.txt"), "`--prompts` does not go with `--random-weights`"),
        (("8b", "--drafter", "x"), "`--drafter` does not go with `--random-weights`"),
        (("8b", "--save", "x.yaml"), "`--save` does not go with `--random-weights`"),
        (("8b", "--acceptance", "inner=0.5"), "`--acceptance inner=...` is that of an intermediate model"),
    ],
)
def test_a_study_that_makes_no_sense_is_refused(call, arguments, message) -> None:
    done = call("profile", *arguments, "--random-weights")
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith(f"error: {message}")


def test_an_interrupt_keeps_what_was_measured_where_auto_does_not_look(call, model, quick, cache, monkeypatch) -> None:
    def interrupted(*args: object, **options: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(profile_run, "observe", interrupted)
    done = call("profile", model, *quick)
    assert (done.code, done.out) == (130, "")
    (file,) = (cache / "profiles").iterdir()
    assert str(file) in done.err
    record = json.loads(file.read_text())
    assert (record["is_complete"], record["decision"]) == (False, None)
    assert record["costs"]["models"]["target"]["steps"]
    assert "no profile" in call("run", model, "hello", "--max-new-tokens", "2").err


@pytest.mark.skipif(sys.platform == "win32", reason="no signals to send")
def test_sigterm_keeps_what_ctrl_c_keeps(specq, model, prompts, cache) -> None:
    script = (
        "import os, signal, sys\nfrom specq.profile import run\n"
        "def stop(*args, **options):\n"
        "    os.kill(os.getpid(), signal.SIGTERM)\n    os.kill(os.getpid(), signal.SIGTERM)\n"
        "run.observe = stop\n"
        "from specq.cli.app import main\nsys.argv = ['specq', *sys.argv[1:]]\nsys.exit(main())"
    )
    done = specq("profile", model, *QUICK, "--prompts", prompts, "--max-new-tokens", "12", script=script)
    assert (done.code, done.out) == (143, "")
    (file,) = (cache / "profiles").iterdir()
    assert file.suffix == ".partial"
    assert str(file) in done.err


def test_a_picture_without_matplotlib_is_refused_before_anything_is_measured(call, model, monkeypatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    done = call("profile", model, "--plot", "x.png")
    assert (done.code, done.out) == (2, "")
    assert "pip install 'specq[plot]'" in done.err


@pytest.mark.parametrize("suffix", ["png", "svg", "html"])
def test_a_picture_is_drawn(call, model, quick, tmp_path, suffix) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / f"profile.{suffix}"
    assert call("profile", model, *quick, "--plot", picture).code == 0
    assert picture.stat().st_size > 1000


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--acceptance", "sequence=2"), "--acceptance `sequence=2` is not NAME=P[,P...]"),
        (("--plot", "x.pdf"), "--plot `x.pdf` is not of a kind that is drawn"),
        (("--save", "x.txt"), "--save `x.txt` is no recipe's name"),
        (("--prompts", "/nonexistent.txt"), "`/nonexistent.txt` cannot be read"),
        (("--device", "cuda:7"), "device `cuda:7` is not there"),
        (("--context", "40"), "no calibration prompt fits a context of 40 tokens"),
    ],
)
def test_wrong_usage_is_one_message(call, model, arguments, message) -> None:
    done = call("profile", model, *arguments)
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith(f"error: {message}")


def test_a_cache_that_cannot_be_written_is_said_before_measuring(call, model, quick, tmp_path, monkeypatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("SPECQ_CACHE", str(tmp_path / "file"))
    monkeypatch.setattr(profile_run, "profile", lambda *arguments, **options: pytest.fail("measured"))
    done = call("profile", model, *quick)
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith(
        f"error: `{tmp_path}/file` cannot be written: it is not a folder\n\nhint: set SPECQ_CACHE"
    )


def test_models_that_do_not_fit_each_other_are_exit_6(call, model, tmp_path) -> None:
    other = write_model(tmp_path / "other", tiny_config())
    data = json.loads((other / "tokenizer.json").read_text())
    vocab = data["model"]["vocab"]
    first, second = list(vocab)[:2]
    vocab[first], vocab[second] = vocab[second], vocab[first]
    (other / "tokenizer.json").write_text(json.dumps(data))
    done = call("profile", model, "--intermediate", other, *QUICK)
    assert done.code == 6
    assert "target and intermediate do not fit" in done.err


def test_models_that_do_not_fit_the_memory_are_exit_7(call, model, monkeypatch) -> None:
    monkeypatch.setattr("specq.models.loader.free_bytes", lambda device: 1_000_000)
    done = call("profile", model, *QUICK)
    assert done.code == 7
    assert "are needed" in done.err
