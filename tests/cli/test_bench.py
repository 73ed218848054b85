"""`specq bench` from flags to files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from factories import tiny_config, write_model

from specq.spec.decision import FORMAT, Decision, Level, ProfileKey

ARGUMENTS = ("--limit", "3", "--max-new-tokens", "10", "--threads", "1", "--warmup", "0", "--quiet")
"""Few tokens of few prompts: these tests are about what is run and reported, not about speed."""


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    """A target with a long context and an intermediate that is half as deep."""
    folder = tmp_path_factory.mktemp("pair")
    long = {"max_position_embeddings": 2048, "vocab_size": 292}  # no padding ids, which transformers would choose too
    target = write_model(folder / "target", tiny_config(**long))
    small = write_model(folder / "small", tiny_config(num_hidden_layers=1, **long))
    return str(target), "--intermediate", str(small)


def bench(call, pair, *arguments: str | Path) -> dict:
    done = call("bench", *pair, *ARGUMENTS, *arguments, "--json")
    assert (done.code, done.err) == (0, "")
    return json.loads(done.out)


def test_the_document_has_rows_raw_samples_and_what_a_referee_asks_for(call, pair) -> None:
    document = bench(call, pair, "--pipeline", "sequence", "--warmup", "1", "--seed", "5")
    assert [row["row"] for row in document["rows"]] == ["plain", "sequence"]
    assert document["baseline"] == "plain"
    sequence = document["rows"][1]
    assert sequence["match"] == {"exact": 4, "tie": 0, "bug": 0}  # three prompts, one of two turns
    assert {"mean", "low", "high", "median", "worst", "worst_prompt", "slower", "prompts"} == set(sequence["speedup"])
    assert set(sequence["categories"]) == {"multi-turn", "translation", "summarization"}
    assert len(document["samples"]) == 8
    assert all(1 < len(sample["token_ids"]) == sample["tokens_out"] <= 10 for sample in document["samples"])
    assert {"e2e_tps", "decode_tps", "ttft_s", "token_ids", "row", "order"} <= set(document["samples"][0])
    assert document["sampling"]["temperature"] == 0.0
    assert document["sampling"]["seed"] == 5
    assert document["length"] == "natural"
    assert set(document["warmup_s"]) == {"plain", "sequence"}
    assert document["suite"]["prompts"] == 3
    assert {"device", "torch", "specq", "models"} <= set(document["environment"])
    assert all(row["peak_memory_bytes"] > 1e6 for row in document["rows"])


def test_only_the_models_of_the_rows_are_listed(call, pair) -> None:
    assert set(bench(call, pair, "--pipeline", "lookup")["environment"]["models"]) == {"target"}
    assert set(bench(call, pair, "--pipeline", "sequence")["environment"]["models"]) == {"target", "small"}


def test_without_names_every_pipeline_runs_that_can(call, pair) -> None:
    assert [row["row"] for row in bench(call, pair)["rows"]] == ["plain", "lookup", "sequence"]
    assert [row["row"] for row in bench(call, pair[:1])["rows"]] == ["plain", "lookup"]


def test_each_combination_of_swept_values_is_a_row(call, pair) -> None:
    sweep = ["--pipeline", "sequence,lookup", "--set", "pipeline.draft_length=2,6", "--set", "pipeline.max_ngram=3"]
    document = bench(call, pair, *sweep)
    assert [row["row"] for row in document["rows"]] == [
        "plain",
        "sequence draft_length=2",
        "sequence draft_length=6",
        "lookup draft_length=2",
        "lookup draft_length=6",
    ]
    by_row = {row["row"]: row for row in document["rows"]}
    assert by_row["sequence draft_length=2"]["accept_len"] <= 3.0
    assert document["recipe"]["pipeline"]["max_ngram"] == 3


@pytest.fixture
def profiled(pair, monkeypatch, tmp_path) -> None:
    """A stored profile of the pair that chose sequences of 2, though it predicted those of 9 to be the fastest."""
    monkeypatch.setenv("SPECQ_CACHE", str(tmp_path))
    models = {"target": Path(pair[0]), "intermediate": Path(pair[2])}
    key = ProfileKey.here(models, device="cpu", dtype="auto")
    level = Level(None, ((0, 1.0), (2048, 1.0)))
    chosen = Decision("sequence", (("pipeline.draft_length", 2),), (level,), 50.0, 1.5, None, "2026-01-01")
    key.path.parent.mkdir(parents=True)
    rates = {"predicted_tps": 90.0, "gain": 1.8, "uncertainty": 0.2, "accept_len": 1.5, "round_ms": 16.0}
    rates["first_ms"] = 0.0
    candidates = [
        {"pipeline": "sequence", "settings": {"pipeline.draft_length": 9}, **rates},
        {"pipeline": "sequence", "settings": {"pipeline.draft_length": 2}, **rates, "accept_len": 2.0},
        {"pipeline": "plain", "settings": {}, **rates, "gain": 1.0, "uncertainty": 0.0},
    ]
    record = {
        "format": FORMAT,
        "is_complete": True,
        "key": key.record(),
        "decision": chosen.record(),
        "plan": {"context": 64, "answer_tokens": 32, "candidates": candidates},
        "sampling": {"temperature": 0.5, "top_p": 1.0, "repetition_penalty": 1.0},
        "measured_at": "2026-01-01",
    }
    key.path.write_text(json.dumps(record), encoding="utf-8")


def test_auto_is_the_row_a_profile_chose(call, pair, profiled) -> None:
    document = bench(call, pair, "--pipeline", "auto,lookup", "--limit", "1")
    assert [row["row"] for row in document["rows"]] == ["plain", "auto", "lookup"]
    auto = document["rows"][1]
    assert auto["match"]["exact"] == 2
    assert 1.0 < auto["accept_len"] <= 3.0
    assert {s["pipeline"] for s in document["samples"] if s["row"] == "auto"} == {"sequence"}


def test_what_a_profile_predicted_stands_beside_what_was_measured(call, pair, profiled) -> None:
    document = bench(call, pair, "--pipeline", "auto,lookup", "--limit", "1")
    plain, auto = document["profile"]["predictions"]  # the profile planned no lookup
    assert (plain["row"], auto["row"]) == ("plain", "auto")
    measured = document["rows"][1]
    later = measured["tokens_out"] / measured["answers"] - 1
    predicted = 1e3 * later / ((later + 0.5) / 2.0 * 16.0)  # of its last round half is cut off
    assert auto["predicted_tps"] == pytest.approx(predicted)
    assert auto["off"] == pytest.approx(predicted / measured["decode_tps"] - 1)
    assert (auto["predicted_accept_len"], auto["measured_accept_len"]) == (2.0, measured["accept_len"])
    assert auto["measured_round_ms"] == pytest.approx(1e3 * measured["accept_len"] / measured["decode_tps"])
    done = call("bench", *pair, *ARGUMENTS, "--pipeline", "auto", "--limit", "1")
    assert "on average for the fastest 2: " in done.out
    assert " % by what was accepted, " in done.out
    both = call("bench", *pair, *ARGUMENTS, "--pipeline", "auto,sequence", "--set", "pipeline.draft_length=2,4")
    assert "on average for the fastest 2: " in both.out  # auto is the sequence of 2 again, that of 4 was not planned
    assert "its times hold for 64 tokens of context\n" in done.out
    assert done.out.rstrip().endswith(
        "not comparable: the profile was measured at temperature 0.5, this run at temperature 0"
    )


def test_profiled_sizes_are_those_predicted_to_be_the_fastest(call, pair, profiled) -> None:
    document = bench(call, pair, "--pipeline", "sequence,lookup", "--limit", "1", "--profiled")
    assert [row["row"] for row in document["rows"]] == ["plain", "sequence draft_length=9", "lookup"]
    assert [each["row"] for each in document["profile"]["predictions"]] == ["plain", "sequence draft_length=9"]
    done = call("bench", *pair, "--profiled", "--set", "pipeline.draft_length=2,3")
    assert (done.code, done.out) == (2, "")
    assert "`--profiled` sets `pipeline.draft_length` itself" in done.err


def test_profiled_without_a_profile_is_refused(call, pair) -> None:
    done = call("bench", *pair, "--profiled")
    assert (done.code, done.out) == (2, "")
    assert "`--profiled` cannot run: these models have no profile on this device" in done.err


def test_tables_and_files(call, pair, tmp_path) -> None:
    files = ["--csv", tmp_path / "a.csv", "--md", tmp_path / "a.md"]
    done = call("bench", *pair, *ARGUMENTS, *files, "--forced-length", "--pipeline", "lookup")
    assert (done.code, done.err) == (0, "")
    assert "end-to-end tok/s" in done.out
    assert "exactly 10 tokens each" in done.out
    assert (tmp_path / "a.csv").read_text(encoding="utf-8").startswith("row,category,answers,")
    text = (tmp_path / "a.md").read_text(encoding="utf-8")
    assert "| lookup |" in text
    assert "- length: forced" in text


def test_a_speedup_below_the_gate_is_exit_3_after_the_numbers(call, pair) -> None:
    done = call("bench", *pair, *ARGUMENTS, "--pipeline", "lookup", "--min-speedup", "50", "--json")
    assert done.code == 3
    assert json.loads(done.out)["rows"]
    assert "error: `lookup` is " in done.err
    assert "below `--min-speedup 50`" in done.err
    assert call("bench", *pair, *ARGUMENTS, "--pipeline", "lookup", "--min-speedup", "0.001").code == 0


def test_sums_are_scored(call, pair, tmp_path) -> None:
    suite = tmp_path / "gsm8k.jsonl"
    rows = [{"question": f"How much is {i} + 1?", "answer": f"#### {i + 1}"} for i in range(2)]
    suite.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    document = bench(call, pair, "--suite", suite, "--pipeline", "plain")
    assert document["rows"][0]["accuracy"] == {"right": 0, "of": 2}
    assert document["suite"]["name"] == "gsm8k.jsonl"


@pytest.mark.parametrize("is_allowed", [False, True])
def test_generated_code_is_run_only_with_leave(is_allowed: bool, call, pair, tmp_path) -> None:
    suite = tmp_path / "code.jsonl"
    seen = tmp_path / "seen"
    test = f"open({str(seen)!r}, 'w').close()\ndef check(candidate):\n    pass\n"
    row = {"task_id": "t/0", "prompt": "x = 1  # ", "entry_point": "int", "test": test}
    suite.write_text(json.dumps(row) + "\n", encoding="utf-8")
    leave = ["--allow-code-execution"] if is_allowed else []
    document = bench(call, pair, "--suite", suite, "--pipeline", "plain", "--raw", "--max-new-tokens", "1", *leave)
    assert (document["rows"][0]["accuracy"] is not None) is is_allowed
    if not is_allowed:
        assert not seen.exists()


def test_transformers_runs_the_same_prompts_alone_and_assisted(call, pair) -> None:
    document = bench(call, pair, "--pipeline", "plain", "--against", "transformers", "--limit", "1")
    rows = {row["row"]: row for row in document["rows"]}
    assert list(rows) == [
        "plain",
        "transformers float32",
        "transformers float32 assisted",
        "transformers bfloat16",
        "transformers bfloat16 assisted",
    ]
    assert rows["transformers float32"]["match"] is None
    samples = {(s["row"], s["turn"]): s for s in document["samples"]}
    for turn in (0, 1):
        ours = samples["plain", turn]
        for name in ("transformers float32", "transformers float32 assisted"):
            assert samples[name, turn]["token_ids"] == ours["token_ids"]
            assert samples[name, turn]["prompt_tokens"] == ours["prompt_tokens"]
            assert samples[name, turn]["e2e_tps"] > 0


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--pipeline", "sequnce"], 2, "there is no pipeline `sequnce`"),
        (["--pipeline", "eagle2"], 6, "pipeline `eagle2` cannot run: it needs an EAGLE head of the target"),
        (["--set", "target.model=a,b"], 2, "`target.model` cannot take several values"),
        (["--set", "drafter.nodes=8,16"], 2, "`drafter.nodes` changes nothing in plain, lookup, sequence"),
        (["--set", "pipeline.draft_length=4,500"], 2, "{target}: `pipeline.draft_length` = `500`"),
        (["--suite", "spec-bench"], 2, "there is no suite `spec-bench`"),
        (["--csv", "/nonexistent/a.csv"], 2, "`/nonexistent/a.csv` cannot be written"),
        (["--limit", "1", "--min-speedup", "1"], 2, "`--min-speedup` needs at least two prompts"),
        (["--against", "vllm"], 2, "invalid value for `--against`"),
        (["--pipeline", "auto"], 2, "`auto` cannot run: these models have no profile on this device"),
        (["--raw", "--system", "be brief"], 2, "`--raw` uses no chat template, so `--system` would change nothing"),
    ],
)
def test_what_cannot_run_is_said_at_once(arguments: list[str], code: int, message: str, call, pair) -> None:
    done = call("bench", *pair, *ARGUMENTS, *arguments)
    assert (done.code, done.out) == (code, "")
    assert done.err.startswith(f"error: {message.format(target=pair[0])}")


def test_prompts_too_long_are_named(call, pair, tmp_path) -> None:
    suite = tmp_path / "own.jsonl"
    rows = [{"id": "long", "turns": ["word " * 100]}, {"id": "short", "turns": ["word"]}]
    suite.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    document = bench(call, pair, "--suite", suite, "--context", "100", "--pipeline", "plain")
    assert document["skipped"] == ["long"]
    assert [sample["prompt"] for sample in document["samples"]] == ["short"]
