"""The definitions: what a rate, a speedup and an accept length are, and the tables and files they end in."""

from __future__ import annotations

import csv
import io
import sys
from collections.abc import Callable
from dataclasses import replace

import pytest

from specq.bench.contestants import Answer
from specq.bench.files import csv_text, markdown_text, plot, require_plot
from specq.bench.prompts import Prompt
from specq.bench.report import all_tables, figures, paired_ratios, report_rows
from specq.bench.run import Sample
from specq.errors import UsageError
from specq.spec.lossless import Verdict
from specq.spec.session import Generation


def generation(tokens: int, e2e_s: float, decode_s: float, *, rounds: int = 1, **changes: object) -> Generation:
    return replace(
        Generation(
            text="",
            token_ids=tuple(range(tokens)),
            tokens_out=tokens,
            finish_reason="length",
            prompt_tokens=3,
            reused_tokens=0,
            ttft_s=e2e_s - decode_s,
            decode_tps=(tokens - 1) / decode_s if tokens > 1 else None,
            e2e_tps=tokens / e2e_s,
            accept_len=(tokens - 1) / rounds if rounds else None,
            accept_len_inner=None,
            rounds=rounds,
            draft_ms=0.0,
            intermediate_ms=0.0,
            verify_ms=0.0,
            overhead_ms=0.0,
            pipeline="x",
            seed=0,
        ),
        **changes,  # type: ignore[arg-type]
    )


def sample(
    row: str, prompt: str, run: Generation, *, category: str = "qa", turn: int = 0, repeat: int = 0, order: int = 0
) -> Sample:
    return Sample(row, Prompt(prompt, category, ("x", "y")), turn, repeat, order, (1, 2, 3), 0, Answer(run, 1_000_000))


def test_rates_are_all_tokens_over_all_seconds() -> None:
    runs = [sample("a", "p", generation(11, 2.0, 1.0)), sample("a", "q", generation(41, 3.0, 2.0))]
    found = figures(runs, runs)
    assert found.e2e_tps == pytest.approx(52 / 5)
    assert found.decode_tps == pytest.approx(50 / 3)
    assert found.ttft_s == pytest.approx(1.0)
    assert found.tokens_out == 52


def test_accept_length_is_over_decode_rounds_and_times_are_for_each_later_token() -> None:
    times = {"draft_ms": 5.0, "intermediate_ms": 10.0, "verify_ms": 20.0, "overhead_ms": 1.0}
    runs = [
        sample("a", "p", generation(11, 2.0, 1.0, rounds=4, accept_len_inner=2.0, **times)),
        sample("a", "q", generation(31, 2.0, 1.0, rounds=6, accept_len_inner=3.0, **times)),
    ]
    found = figures(runs, runs)
    assert found.accept_len == pytest.approx(40 / 10)
    read_before = sample("a", "r", generation(12, 2.0, 1.0, rounds=12, accept_len=1.0))  # its first token too
    assert figures([*runs, read_before], runs).accept_len == pytest.approx(52 / 22)
    assert found.accept_len_inner == pytest.approx(2.5)
    assert (found.draft_ms, found.intermediate_ms) == (10 / 40, 20 / 40)
    assert (found.verify_ms, found.overhead_ms) == (40 / 40, 2 / 40)


def test_ratios_pair_prompts_by_the_median_of_repeats_and_the_mean_of_turns() -> None:
    base, own = [], []
    for turn, (slow, fast) in enumerate([(2.0, 1.0), (8.0, 1.0)]):
        for repeat, noise in enumerate([1.0, 50.0, 1.0]):  # one repeat of three is an outlier
            base.append(sample("plain", "p", generation(10, slow * noise, 0.1), turn=turn, repeat=repeat))
            own.append(sample("a", "p", generation(10, fast * noise, 0.1), turn=turn, repeat=repeat))
    base.append(sample("plain", "only plain", generation(10, 1.0, 0.1)))
    assert paired_ratios(own, base, lambda run: run.e2e_tps) == pytest.approx({"p": 4.0})


def test_an_answer_of_one_token_has_no_decode_rate_and_counts_end_to_end() -> None:
    base = [sample("plain", "p", generation(1, 2.0, 0.0)), sample("plain", "q", generation(5, 2.0, 1.0))]
    own = [sample("a", "p", generation(1, 1.0, 0.0)), sample("a", "q", generation(5, 1.0, 0.5))]
    found = figures(own, base)
    assert (found.speedup.prompts, found.decode_speedup.prompts) == (2, 1)
    assert found.speedup.mean == pytest.approx(2.0)


@pytest.fixture
def make_rows() -> Callable[[], list]:
    def make() -> list:
        samples = []
        for i, (prompt, category) in enumerate([("p", "qa"), ("q", "math"), ("r", "math")]):
            samples.append(sample("plain", prompt, generation(11, 2.0, 1.0), category=category, order=2 * i))
            faster = generation(11, 0.5 + i, 0.25 + i, rounds=2)
            samples.append(sample("lookup", prompt, faster, category=category, order=2 * i + 1))
        samples.append(sample("transformers float32", "p", generation(11, 4.0, 3.0, rounds=0), order=6))
        exact, bug = (
            Verdict("exact", 11),
            Verdict("bug", 11, "token 3 is no choice of the target", 2, 1, 4, 0.5, 0.7, 3),
        )
        verdicts = {0: exact, 2: exact, 4: exact, 1: exact, 3: bug, 5: None}
        names = ["plain", "lookup", "transformers float32"]
        return report_rows(names, samples, verdicts=verdicts, right={3: True, 5: False})

    return make


def test_a_row_counts_verdicts_and_right_answers(make_rows) -> None:
    plain, lookup, other = make_rows()
    assert plain.verdicts == {"exact": 3, "tie": 0, "bug": 0}
    assert lookup.verdicts == {"exact": 1, "tie": 0, "bug": 1, "unjudged": 1}
    assert [each["kind"] for each in lookup.differences] == ["bug", "unjudged"]
    assert lookup.differences[0]["prompt"] == "q"
    assert (lookup.right, lookup.scored, plain.right) == (1, 2, None)
    assert other.verdicts is None
    assert lookup.overall.speedup.slower == 1
    assert lookup.overall.speedup.worst_prompt == "r"
    assert set(lookup.categories) == {"qa", "math"}
    assert lookup.categories["math"].answers == 2


def test_tables_leave_out_what_says_nothing(make_rows) -> None:
    tables = all_tables(make_rows())
    assert [lines[0][0] for lines in tables] == ["", "speedup", "end to end (accept)", "ms a token", "right answers"]
    assert all(len({len(line) for line in lines}) == 1 for lines in tables)
    assert "1 exact, 1 bug, 1 unjudged" in tables[0][2]
    assert [line[0] for line in tables[1][1:]] == ["lookup", "transformers float32"]  # the baseline is no speedup
    only_plain = all_tables(make_rows()[:1])
    assert [lines[0][0] for lines in only_plain] == ["", "ms a token"]


def test_csv_has_a_line_for_each_row_and_category(make_rows) -> None:
    lines = list(csv.DictReader(io.StringIO(csv_text(make_rows()))))
    assert [(line["row"], line["category"]) for line in lines[3:6]] == [
        ("lookup", "all"),
        ("lookup", "qa"),
        ("lookup", "math"),
    ]
    whole = lines[3]
    assert float(whole["speedup_mean"]) == pytest.approx((4 * (2 / 1.5) * (2 / 2.5)) ** (1 / 3))
    assert (whole["bug"], whole["right"], whole["scored"]) == ("1", "1", "2")
    assert lines[4]["bug"] == ""
    assert None not in whole  # no more cells than columns


def test_markdown_holds_the_facts_and_every_table(make_rows) -> None:
    facts = {
        "command": "specq bench",
        "suite": {"name": "bundled", "prompts": 3},
        "recipe": {"target": {"model": "m", "revision": None}, "context": 64},
        "precision": {"rounding_error_logits": None},
        "environment": {"torch": "2.13.0", "models": {"m": None, "n": "abc"}},
    }
    text = markdown_text(make_rows(), facts, closing=["off by 3 %"])
    lines = [
        *("- command: `specq bench`", "- suite: name bundled, prompts 3"),
        *("- recipe:", "  - target: model m", "  - context: 64", "- precision: none"),
        *("- environment:", "  - torch: 2.13.0", "  - models: m, n (abc)"),
    ]
    assert text.startswith("\n".join(lines) + "\n\n|")
    assert text.endswith("|\n\n- off by 3 %\n")
    assert text.count("|---|") >= 5


def test_a_plot_is_a_picture(make_rows, tmp_path) -> None:
    pytest.importorskip("matplotlib")
    for name, start in (("a.png", b"\x89PNG"), ("a.svg", b"<?xml")):
        require_plot(tmp_path / name)
        plot(make_rows(), tmp_path / name, title="tiny")
        assert (tmp_path / name).read_bytes().startswith(start)
    with pytest.raises(UsageError, match="names no format for a plot"):
        require_plot(tmp_path / "a.xyz")


def test_a_plot_without_matplotlib_names_it(tmp_path, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(UsageError, match="`--plot` needs the package `matplotlib`") as caught:
        require_plot(tmp_path / "a.png")
    assert caught.value.hint == 'pip install "specq[plot]"'
