"""The prompts acceptance is measured on: bundled ones of several kinds, or the person's own file."""

from __future__ import annotations

import json
from importlib.resources import files
from pathlib import Path
from typing import Any

from specq.errors import UsageError
from specq.files import read_text


def read_prompts(file: Path | None) -> list[str]:
    """The prompts of a file, one a line, or in .jsonl each line's `prompt`; None reads the bundled ones.

    Raises UsageError naming the file and the line.
    """
    if file is None:
        text = (files("specq.profile") / "prompts.jsonl").read_text(encoding="utf-8")
        return [json.loads(line)["prompt"] for line in text.splitlines()]
    lines = read_text(file, hint="--prompts takes a .txt or .jsonl file").splitlines()
    is_json = file.suffix == ".jsonl"
    found = [_prompt(file, number, line) if is_json else line for number, line in enumerate(lines, 1) if line.strip()]
    if not found:
        raise UsageError(f"`{file}` holds no prompts", hint="one a line, or .jsonl with `prompt`")
    return found


def _prompt(file: Path, number: int, line: str) -> str:
    try:
        record: Any = json.loads(line)
    except ValueError:
        record = None
    prompt = record.get("prompt") if isinstance(record, dict) else None
    if not isinstance(prompt, str) or not prompt.strip():
        raise UsageError(f"line {number} of `{file}` has no text `prompt`", hint='for example {"prompt": "Why?"}')
    return prompt
