"""Prompts to measure on: the suite specq ships, and the public files in their own formats.

A file's format is recognised by the keys of its rows: `turns` (Spec-Bench, MT-bench, specq's own), `entry_point`
(HumanEval), `question` and `answer` (GSM8K). What is asked is this module's; how an answer is scored is accuracy.py's.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from specq.errors import UsageError
from specq.files import named_path, reason
from specq.storage import is_offline

BUNDLED = "bundled"
HUB_PREFIX = "hub:"
CONVERSATION = "multi-turn"
MT_BENCH_KINDS = frozenset(
    {"writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities"},
)
"""The kinds of MT-bench; in a file that has other kinds as well (Spec-Bench) they are one, as its authors count."""


@dataclass(frozen=True)
class Code:
    """A function to be written, and the program that tests it (HumanEval)."""

    stub: str
    entry_point: str
    test: str


@dataclass(frozen=True)
class Prompt:
    """One conversation to be answered: the user's turns, and what the last answer is checked against, if anything.

    `number` is the right result of a sum. `raw` is what a base model continues instead of the first turn.
    """

    id: str
    category: str
    turns: tuple[str, ...]
    number: str | None = None
    code: Code | None = None
    raw: str | None = None


@dataclass(frozen=True)
class Suite:
    """Prompts, where they come from, and a hash of their text."""

    name: str
    prompts: tuple[Prompt, ...]

    @property
    def digest(self) -> str:
        """sha256 over ids and turns: two runs with the same digest asked the same."""
        text = json.dumps([[prompt.id, *prompt.turns] for prompt in self.prompts], ensure_ascii=False)
        return hashlib.sha256(text.encode()).hexdigest()

    def take(self, limit: int | None) -> Suite:
        """At most `limit` prompts, in turn from every category, in the suite's order."""
        if limit is None or limit >= len(self.prompts):
            return self
        place: dict[str, int] = {}
        ranked = []
        for index, prompt in enumerate(self.prompts):
            rank = place[prompt.category] = place.get(prompt.category, -1) + 1
            ranked.append((rank, index))
        chosen = sorted(index for _, index in sorted(ranked)[:limit])
        return replace(self, prompts=tuple(self.prompts[index] for index in chosen))


def load_suite(source: str, *, offline: bool | None = None) -> Suite:
    """The prompts of "bundled", of a file, or of a file of a Hub dataset (hub:ORG/DATASET/FILE).

    Raises UsageError when there is no such file or a row of it is not a prompt.
    """
    if source == BUNDLED:
        return Suite(BUNDLED, _prompts(_rows(Path(__file__).parent / "suites" / "bundled.jsonl"), BUNDLED))
    if source.startswith(HUB_PREFIX):
        path, name = _hub_file(source.removeprefix(HUB_PREFIX), offline), source
    else:
        path = named_path(source)
        name = path.name
        if not path.is_file():
            hint = f"give `{BUNDLED}`, a .jsonl, .jsonl.gz or .parquet file, or {HUB_PREFIX}ORG/DATASET/FILE"
            raise UsageError(f"there is no suite `{source}`", hint=hint)
    return Suite(name, _prompts(_rows(path), str(source)))


def _rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a .parquet, .jsonl or .jsonl.gz file."""
    if path.suffix == ".parquet":
        return _parquet_rows(path)
    try:
        data = path.read_bytes()
        text = (gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data).decode("utf-8")
    except OSError as error:
        raise UsageError(f"`{path}` cannot be read: {reason(error)}") from None
    except (EOFError, zlib.error, UnicodeDecodeError):
        hint = "give a .jsonl, .jsonl.gz or .parquet file"
        raise UsageError(f"`{path}` is neither text in UTF-8 nor such a text packed by gzip", hint=hint) from None
    rows = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError:
            row = None
        if not isinstance(row, dict):
            raise UsageError(f"`{path}` line {number} is no JSON object", hint="a suite has one JSON object a line")
        rows.append(row)
    return rows


def _parquet_rows(path: Path) -> list[dict[str, Any]]:
    try:
        import pyarrow.parquet
    except ImportError:
        raise UsageError(
            f"`{path}` is a parquet file, and the package `pyarrow` is not installed",
            hint='pip install "specq[parquet]", or convert the file to .jsonl',
        ) from None
    try:
        rows: list[dict[str, Any]] = pyarrow.parquet.read_table(path).to_pylist()
    except (OSError, pyarrow.lib.ArrowException) as error:
        raise UsageError(f"`{path}` cannot be read as parquet: {' '.join(str(error).split())}") from None
    return rows


def _prompts(rows: Sequence[Mapping[str, Any]], source: str) -> tuple[Prompt, ...]:
    if not rows:
        raise UsageError(f"suite `{source}` is empty")
    prompts = [_prompt(row, number, source) for number, row in enumerate(rows, 1)]
    if {prompt.category for prompt in prompts} - MT_BENCH_KINDS:
        prompts = [
            replace(p, category=CONVERSATION) if "question_id" in row and p.category in MT_BENCH_KINDS else p
            for p, row in zip(prompts, rows, strict=True)
        ]
    repeated = next((p.id for i, p in enumerate(prompts) if p.id in {q.id for q in prompts[:i]}), None)
    if repeated is not None:
        raise UsageError(f"suite `{source}`: two prompts have the id `{repeated}`")
    return tuple(prompts)


def _prompt(row: Mapping[str, Any], number: int, source: str) -> Prompt:
    """The prompt of one row, whichever known form it has."""
    try:
        if "turns" in row:
            return _conversation(row, number)
        if "entry_point" in row:
            return _human_eval(row)
        if "question" in row and "answer" in row:
            return _gsm8k(row, number)
    except (KeyError, TypeError, ValueError):
        pass
    hint = "known rows: `turns` (Spec-Bench, MT-bench), `prompt` and `entry_point` (HumanEval), `question` and `answer`"
    raise UsageError(f"suite `{source}`: row {number} is not a prompt, it has {', '.join(row) or 'no keys'}", hint=hint)


def _conversation(row: Mapping[str, Any], number: int) -> Prompt:
    turns = tuple(row["turns"])
    if not turns or not all(isinstance(turn, str) and turn.strip() for turn in turns):
        raise ValueError("turns")
    answer = row.get("answer")
    return Prompt(
        id=str(row.get("id", row.get("question_id", number))),
        category=str(row.get("category", "prompts")),
        turns=turns,
        number=None if answer is None else str(answer),
    )


def _human_eval(row: Mapping[str, Any]) -> Prompt:
    stub = str(row["prompt"])
    task = f"Complete this Python function. Answer with the whole function in one code block.\n\n```python\n{stub}```"
    code = Code(stub, str(row["entry_point"]), str(row["test"]))
    return Prompt(str(row["task_id"]), "code", (task,), code=code, raw=stub)


def _gsm8k(row: Mapping[str, Any], number: int) -> Prompt:
    question, answer = str(row["question"]), str(row["answer"])
    task = f"{question}\n\nThink step by step, and give nothing but the final number in the last line."
    result = answer.rpartition("####")[2].strip().replace(",", "")
    return Prompt(f"gsm8k-{number}", "math", (task,), number=result, raw=f"Question: {question}\nAnswer:")


def _hub_file(name: str, offline: bool | None) -> Path:
    """A file of a Hub dataset in the Hub's cache."""
    from specq.hub_download import dataset_file

    parts = name.split("/", 2)
    if len(parts) < 3 or not all(parts):
        raise UsageError(
            f"`{HUB_PREFIX}{name}` names no file of a dataset",
            hint=f"for example {HUB_PREFIX}openai/gsm8k/main/test-00000-of-00001.parquet",
        )
    return dataset_file("/".join(parts[:2]), parts[2], offline=is_offline(offline))
