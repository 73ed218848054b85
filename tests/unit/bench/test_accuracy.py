"""Right numbers, and programs run with limits."""

from __future__ import annotations

import pytest

from specq.bench import accuracy
from specq.bench.accuracy import has_number, is_right, passes, program_of
from specq.bench.prompts import Code, Prompt

DOUBLE = Code(
    "from math import pi\n\ndef double(x):\n", "double", "def check(candidate):\n    assert candidate(2) == 4\n"
)


@pytest.mark.parametrize(
    ("answer", "expected", "is_right"),
    [
        ("So it is 18 and then 42.", "42", True),
        ("42 is what I got from 18", "42", False),
        ("#### 1,234", "1234", True),
        ("108.00 euros", "108", True),
        ("the result is -3", "-3", True),
        ("no number at all", "3", False),
        ("", "3", False),
    ],
)
def test_the_last_number_counts(answer: str, expected: str, is_right: bool) -> None:
    assert has_number(answer, expected) is is_right


@pytest.mark.parametrize(
    "answer",
    [
        "Here it is:\n```python\ndef double(x):\n    return 2 * x\n```\nIt doubles.",
        "```\ndef double(x):\n    return int(2 * x * pi / pi)\n",  # no end of the block, and an import of the stub
        "    return 2 * x\n\nprint(double(1))\n",  # a base model goes on after the function
        "def double(x):\n    return x + x",
    ],
)
def test_right_programs_pass_in_whatever_form(answer: str) -> None:
    assert passes(DOUBLE, answer)


@pytest.mark.parametrize(
    "answer",
    [
        "    return 3 * x\n",
        "    return (\n",
        "    import os; os._exit(0)\n",
        "    raise SystemExit(0)\n",
        "    return [0] * 10**10 and 4\n",  # 80 GB
        "",
    ],
)
def test_wrong_programs_fail(answer: str) -> None:
    assert not passes(DOUBLE, answer)


def test_an_endless_program_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accuracy, "SECONDS", 1)
    assert not passes(DOUBLE, "    while True:\n        pass\n")


def test_code_is_not_run_without_leave() -> None:
    prompt = Prompt("p", "code", ("x",), code=DOUBLE)
    assert is_right(prompt, "    return 2 * x\n", allow_code=False) is None
    assert is_right(prompt, "    return 2 * x\n", allow_code=True) is True
    assert is_right(Prompt("p", "qa", ("x",)), "anything", allow_code=True) is None
    assert is_right(Prompt("p", "math", ("x",), number="4"), "4", allow_code=False) is True


def test_a_continuation_ends_where_the_margin_is_reached() -> None:
    program = program_of(DOUBLE, "    y = 2 * x\n\n    return y\nassert False\n")
    assert program == DOUBLE.stub + "    y = 2 * x\n\n    return y"
