"""What the README shows runs as it stands there."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

README = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
PYTHON = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
COMMANDS = [line.partition("#")[0].strip() for line in README.splitlines() if re.match(r"(cat .* \| )?specq ", line)]


def test_the_python_example_runs(model, capsys) -> None:
    [example] = PYTHON
    exec(compile(example.replace('"demo"', repr(model)), "README.md", "exec"), {})
    assert "tokens/s" in capsys.readouterr().out


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_is_one_the_parser_takes(command: str, call) -> None:
    words = shlex.split(command.partition("specq ")[2].partition(" | ")[0])
    known = [word for word in words if word.startswith("--")]
    shown = call(words[0], *(words[1:2] if words[0] == "recipe" else []), "--help").out
    assert all(option in shown for option in known)
