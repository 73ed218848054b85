"""`specq verify`: exact is 0, a bug is 3, and what was compared is said."""

from __future__ import annotations

import json
from collections.abc import Sequence

import pytest
from factories import tiny_config, write_model

from specq.spec.tree import DraftTree
from specq.spec.verifier import Verifier

ARGUMENTS = ("--limit", "3", "--max-new-tokens", "16", "--threads", "1", "--quiet")


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    folder = tmp_path_factory.mktemp("pair")
    long = {"max_position_embeddings": 2048}
    target = write_model(folder / "target", tiny_config(**long))
    return str(target), "--intermediate", str(write_model(folder / "small", tiny_config(num_hidden_layers=1, **long)))


def test_lossless_pipelines_are_exact_and_0(call, pair) -> None:
    done = call("verify", *pair, *ARGUMENTS)
    assert (done.code, done.err) == (0, "")
    head, plain, lookup, sequence, _, last = done.out.splitlines()
    assert head.split() == ["answers", "tokens", "exact", "tie", "bug", "accept"]
    tokens = plain.split()[2]
    assert 4 < int(tokens) <= 64
    assert [line.split()[:6] for line in (plain, lookup, sequence)] == [
        [name, "4", tokens, "4", "0", "0"] for name in ("plain", "lookup", "sequence")
    ]
    assert last == "decoded in float32, judged in float64: no scores were needed"


def test_above_temperature_0_every_answer_is_drawn_twice(call, pair) -> None:
    done = call("verify", *pair, *ARGUMENTS, "--temperature", "1", "--seed", "3", "--json")
    assert done.code == 0
    document = json.loads(done.out)
    assert [row["match"] for row in document["rows"]] == [{"exact": 8, "tie": 0, "bug": 0}] * 3
    assert document["sampling"] == {
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": 0,
        "repetition_penalty": 1.0,
        "seed": 3,
    }


def wrong_bonus_token(monkeypatch: pytest.MonkeyPatch) -> None:
    original = Verifier.verify

    def verify(self: Verifier, context: Sequence[int], tree: DraftTree) -> list[int]:
        decided = original(self, context, tree)
        return [*decided[:-1], (decided[-1] + 1) % 250] if len(tree) else decided

    monkeypatch.setattr(Verifier, "verify", verify)


@pytest.mark.parametrize("dtype", ["auto", "float32", "bfloat16"])
def test_a_wrong_bonus_token_is_a_bug_and_3(dtype: str, call, pair, monkeypatch) -> None:
    wrong_bonus_token(monkeypatch)
    done = call("verify", *pair, *ARGUMENTS, "--pipeline", "sequence", "--dtype", dtype, "--json")
    assert done.code == 3
    assert done.err.startswith("error: `sequence` is not lossless: 4 of 4 answers are bugs, the first to prompt `")
    document = json.loads(done.out)
    plain, sequence = document["rows"]
    assert plain["match"] == {"exact": 4, "tie": 0, "bug": 0}
    assert sequence["match"] == {"exact": 0, "tie": 0, "bug": 4}
    precision = document["precision"]
    judging = "float32" if dtype == "bfloat16" else "float64"
    assert (precision["decoding"], precision["judging"]) == ("float32" if dtype == "auto" else dtype, judging)
    for each in sequence["differences"]:
        assert each["shortfall"] > precision["tolerance_logits"] >= 2 * precision["rounding_error_logits"] > 0
        assert each["margin"] >= 0
        assert each["plain_token"] != each["pipeline_token"]


def test_bench_counts_bugs_too(call, pair, monkeypatch) -> None:
    wrong_bonus_token(monkeypatch)
    done = call("bench", *pair, *ARGUMENTS, "--pipeline", "sequence", "--warmup", "0")
    assert done.code == 3
    assert "4 bug" in done.out
    assert "is no choice of the target" in done.out


def test_statistics_hold_and_their_controls_are_rejected(call, pair, monkeypatch) -> None:
    monkeypatch.setattr("specq.bench.chi_square.DRAWS", 20_000)
    monkeypatch.setattr("specq.bench.chi_square.TREE_DRAWS", 300)
    arguments = ("--limit", "1", "--pipeline", "lookup", "--statistics", "--seed", "7")
    document = json.loads(call("verify", *pair, *ARGUMENTS, *arguments, "--json").out)
    tests = document["statistics"]
    assert all(test["is_passed"] for test in tests)
    assert sum(test["is_control"] for test in tests) == 2
    monkeypatch.setattr("specq.bench.chi_square.REJECTED", 0.0)  # nothing is rejected any more, so the controls fail
    done = call("verify", *pair, *ARGUMENTS, *arguments)
    assert done.code == 3
    assert "error: the sampler's test `control: draws at temperature 0.9` went wrong" in done.err
    assert "WRONG" in done.out
