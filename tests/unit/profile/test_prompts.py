"""The calibration prompts: bundled, of several kinds, none of them a benchmark's; or a file of one's own."""

from __future__ import annotations

import json
from importlib.resources import files
from pathlib import Path

import pytest

from specq.errors import UsageError
from specq.profile.prompts import read_prompts


def test_bundled_prompts_are_of_several_kinds_and_differ() -> None:
    found = read_prompts(None)
    assert len(found) == len(set(found)) == 12
    lines = (files("specq.profile") / "prompts.jsonl").read_text(encoding="utf-8").splitlines()
    assert len({json.loads(line)["kind"] for line in lines}) == 5


def test_none_of_them_is_a_bench_prompt() -> None:
    folder = Path(str(files("specq.bench")))
    suites = list(folder.rglob("*.jsonl"))
    assert suites
    bench = "\n".join(path.read_text(encoding="utf-8") for path in suites)
    for prompt in read_prompts(None):
        assert json.dumps(prompt, ensure_ascii=False)[1:-1] not in bench
        assert json.dumps(prompt)[1:-1] not in bench


def test_a_file_has_a_prompt_a_line_or_json(tmp_path: Path) -> None:
    text, lines = tmp_path / "a.txt", tmp_path / "b.jsonl"
    text.write_text("one\n\ntwo\n", encoding="utf-8")
    lines.write_text('{"prompt": "one\\nmore", "kind": "x"}\n', encoding="utf-8")
    assert read_prompts(text) == ["one", "two"]
    assert read_prompts(lines) == ["one\nmore"]


@pytest.mark.parametrize(("content", "message"), [("", "holds no prompts"), ('{"text": "x"}\n', "line 1 of")])
def test_files_without_prompts_are_named(tmp_path: Path, content: str, message: str) -> None:
    file = tmp_path / "c.jsonl"
    file.write_text(content, encoding="utf-8")
    with pytest.raises(UsageError, match=message):
        read_prompts(file)
