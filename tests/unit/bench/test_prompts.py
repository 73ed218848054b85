"""The shipped suite, and the public files in their own formats."""

from __future__ import annotations

import gzip
import json
import sys
from collections import Counter
from pathlib import Path

import pytest

from specq.bench.prompts import CONVERSATION, Prompt, Suite, load_suite
from specq.errors import OfflineError, UsageError

KINDS = {"multi-turn", "translation", "summarization", "qa", "math", "rag", "code"}


def test_the_bundled_suite_has_six_prompts_of_every_kind() -> None:
    suite = load_suite("bundled")
    counts = Counter(prompt.category for prompt in suite.prompts)
    assert set(counts) == KINDS
    assert all(count == 6 for count in counts.values())
    assert all(len(prompt.turns) == 2 for prompt in suite.prompts if prompt.category == "multi-turn")
    assert all(prompt.number for prompt in suite.prompts if prompt.category == "math")


@pytest.mark.parametrize("file", ["train/text/prompts.txt", "profile/prompts.jsonl"])
def test_no_bundled_prompt_is_one_that_drafters_or_plans_are_made_with(file: str) -> None:
    text = (Path(__file__).parents[3] / "src" / "specq" / file).read_text(encoding="utf-8").replace("\\n", "\n")
    assert len(text) > 1000
    lines = {line for p in load_suite("bundled").prompts for turn in p.turns for line in turn.splitlines()}
    shared = [line for line in lines if len(line) > 40 and line in text]
    assert len(lines) > 80
    assert shared == []


SPEC_BENCH = [
    {"question_id": 81, "category": "writing", "turns": ["Write.", "Rewrite."]},
    {"question_id": 160, "category": "humanities", "turns": ["Suggest.", "Sketch."]},
    {"question_id": 200, "category": "rag", "turns": ["Passage. Question?"], "reference": ["x"]},
]
HUMAN_EVAL = {
    "task_id": "HumanEval/0",
    "prompt": "def double(x):\n    ...\n",
    "entry_point": "double",
    "canonical_solution": "    return 2 * x\n",
    "test": "def check(candidate):\n    assert candidate(2) == 4\n",
}
GSM8K = {"question": "What is 1000 + 234?", "answer": "1000 + 234 = <<1000+234=1234>>1,234\n#### 1,234"}


def lines(rows: list[dict]) -> list[str]:
    return [json.dumps(row) for row in rows]


def test_spec_bench_counts_the_kinds_of_mt_bench_as_one(suite_file) -> None:
    prompts = load_suite(str(suite_file(lines(SPEC_BENCH)))).prompts
    assert [(p.id, p.category) for p in prompts] == [("81", CONVERSATION), ("160", CONVERSATION), ("200", "rag")]
    assert prompts[0].turns == ("Write.", "Rewrite.")


def test_mt_bench_alone_keeps_its_kinds(suite_file) -> None:
    prompts = load_suite(str(suite_file(lines(SPEC_BENCH[:2])))).prompts
    assert [p.category for p in prompts] == ["writing", "humanities"]


@pytest.mark.parametrize("is_packed", [False, True])
def test_human_eval_plain_and_packed(is_packed: bool, tmp_path) -> None:
    data = (json.dumps(HUMAN_EVAL) + "\n").encode()
    path = tmp_path / ("HumanEval.jsonl" + ".gz" * is_packed)
    path.write_bytes(gzip.compress(data) if is_packed else data)
    (prompt,) = load_suite(str(path)).prompts
    assert (prompt.id, prompt.category, prompt.raw) == ("HumanEval/0", "code", HUMAN_EVAL["prompt"])
    assert HUMAN_EVAL["prompt"] in prompt.turns[0]
    assert prompt.code.entry_point == "double"


def test_gsm8k_lines_give_the_number_after_the_marks(suite_file) -> None:
    (prompt,) = load_suite(str(suite_file(lines([GSM8K])))).prompts
    assert (prompt.id, prompt.number) == ("gsm8k-1", "1234")
    assert prompt.turns[0].startswith("What is 1000 + 234?")
    assert prompt.raw == "Question: What is 1000 + 234?\nAnswer:"


def test_gsm8k_parquet_is_the_same_as_its_lines(tmp_path, suite_file) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    table = pytest.importorskip("pyarrow").Table.from_pylist([GSM8K, GSM8K | {"question": "Other?"}])
    parquet.write_table(table, tmp_path / "test.parquet")
    from_lines = load_suite(str(suite_file(lines([GSM8K, GSM8K | {"question": "Other?"}]))))
    assert load_suite(str(tmp_path / "test.parquet")).prompts == from_lines.prompts


def test_a_broken_parquet_file_is_one_message(tmp_path) -> None:
    pytest.importorskip("pyarrow")
    (tmp_path / "test.parquet").write_bytes(b"PAR1 not really")
    with pytest.raises(UsageError, match="cannot be read as parquet"):
        load_suite(str(tmp_path / "test.parquet"))


def test_parquet_without_its_package_names_it(tmp_path, monkeypatch) -> None:
    (tmp_path / "test.parquet").write_bytes(b"PAR1")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(UsageError, match="`pyarrow` is not installed") as caught:
        load_suite(str(tmp_path / "test.parquet"))
    assert caught.value.hint == 'pip install "specq[parquet]", or convert the file to .jsonl'


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], "is empty"),
        (["nonsense"], "line 1 is no JSON object"),
        (['{"turns": ["a"]}', "[1]"], "line 2 is no JSON object"),
        (['{"turns": []}'], "row 1 is not a prompt, it has turns"),
        (['{"turns": [3]}'], "row 1 is not a prompt"),
        (['{"text": "a"}'], "row 1 is not a prompt, it has text"),
        (['{"entry_point": "f", "prompt": "x"}'], "row 1 is not a prompt"),
        (['{"id": "x", "turns": ["a"]}', '{"id": "x", "turns": ["b"]}'], "two prompts have the id `x`"),
    ],
)
def test_a_wrong_file_says_which_row(rows: list[str], message: str, suite_file) -> None:
    with pytest.raises(UsageError) as caught:
        load_suite(str(suite_file(rows)))
    assert message in caught.value.message


@pytest.mark.parametrize("data", [b"\x1f\x8b broken", b"\xff\xfe\x00"])
def test_a_damaged_file_is_a_usage_error(data: bytes, tmp_path) -> None:
    path = tmp_path / "suite.jsonl.gz"
    path.write_bytes(data)
    with pytest.raises(UsageError, match=r"neither text in UTF-8|cannot be read"):
        load_suite(str(path))


def test_unknown_names_and_unfetched_datasets_say_what_to_do() -> None:
    with pytest.raises(UsageError, match="there is no suite `spec-bnech`"):
        load_suite("spec-bnech")
    with pytest.raises(UsageError, match="names no file of a dataset"):
        load_suite("hub:openai/gsm8k")
    with pytest.raises(OfflineError, match=r"`main/test\.parquet` of dataset `openai/gsm8k` is not in the cache"):
        load_suite("hub:openai/gsm8k/main/test.parquet", offline=True)


def test_a_limit_takes_from_every_category_in_turn() -> None:
    prompts = (*(Prompt(f"{c}{i}", c, ("x",)) for c in "ab" for i in range(4)), Prompt("c0", "c", ("x",)))
    suite = Suite("s", prompts)
    assert [p.id for p in suite.take(5).prompts] == ["a0", "a1", "b0", "b1", "c0"]
    assert [p.id for p in suite.take(2).prompts] == ["a0", "b0"]
    assert suite.take(None) is suite
    assert suite.take(99).prompts == prompts
    assert suite.take(5).digest != suite.digest
