"""Whether an answer is right: the number of a sum, or code that passes its tests.

Weak evidence of losslessness beside equal tokens, but it shows that a model and its prompt work at all.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from decimal import Decimal, InvalidOperation
from pathlib import Path

from specq.bench.prompts import Code, Prompt

SECONDS = 10
MEMORY_BYTES = 1 << 30
OUTPUT_BYTES = 1 << 20

NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")
FENCE = re.compile(r"```[^\n]*\n(.*?)(?:```|\Z)", re.DOTALL)

PASSED = 77
"""How the process ends after the last test; an answer that leaves early ends otherwise."""

LIMITED = """
import resource, sys
for name, value in (("CPU", {seconds}), ("AS", {memory}), ("FSIZE", {output}), ("CORE", 0)):
    try:
        resource.setrlimit(getattr(resource, "RLIMIT_" + name), (value, value))
    except (ValueError, OSError):
        pass  # a limit this system does not know
source = open(sys.argv[1], encoding="utf-8").read()
exec(compile(source, "answer", "exec"), {{"__name__": "answer"}})
"""


def is_right(prompt: Prompt, answer: str, *, allow_code: bool) -> bool | None:
    """Whether the answer to the prompt's last turn is right; None when there is nothing to check it against.

    Code is run only when allowed; without leave it is not scored.
    """
    if prompt.number is not None:
        return has_number(answer, prompt.number)
    if prompt.code is not None and allow_code:
        return passes(prompt.code, answer)
    return None


def has_number(answer: str, expected: str) -> bool:
    """Whether the last number of the answer is the expected one."""
    found = NUMBER.findall(answer)
    if not found:
        return False
    try:
        return Decimal(found[-1].replace(",", "")) == Decimal(expected.replace(",", ""))
    except InvalidOperation:
        return False


def passes(code: Code, answer: str) -> bool:
    """Whether the program in an answer passes its tests, in a process with little time and memory of its own.

    The limits stop accidents, not malice: the process may still read files and use the network.
    """
    program = f"{program_of(code, answer)}\n\n{code.test}\n\ncheck({code.entry_point})\nimport os\nos._exit({PASSED})\n"
    limits = LIMITED.format(seconds=SECONDS, memory=MEMORY_BYTES, output=OUTPUT_BYTES)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "answer.py"
        file.write_text(program, encoding="utf-8", errors="replace")
        quiet = subprocess.DEVNULL
        process = subprocess.Popen(
            [sys.executable, "-I", "-c", limits, str(file)],
            cwd=folder,
            env={},
            stdin=quiet,
            stdout=quiet,
            stderr=quiet,
            start_new_session=True,
        )
        try:
            return process.wait(SECONDS) == PASSED
        except subprocess.TimeoutExpired:
            return False
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # and whatever it started
            process.wait()


def program_of(code: Code, answer: str) -> str:
    """The program an answer means: its code blocks, or the stub continued by it up to the next line at the margin."""
    blocks = FENCE.findall(answer)
    body = "\n".join(blocks) if blocks else answer
    if f"def {code.entry_point}" in body:
        imports = "\n".join(line for line in code.stub.splitlines() if line.startswith(("import ", "from ")))
        return f"{imports}\n{body}"
    kept: list[str] = []
    for line in body.splitlines():
        if kept and line.strip() and not line[0].isspace():
            break
        kept.append(line)
    return code.stub + "\n".join(kept)
