"""The command line in this process (`call`) and in one of its own (`specq`), and a tiny model to run."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
from factories import tiny_config, write_model

from specq.cli.app import main


class Done(NamedTuple):
    """How a command ended."""

    code: int
    out: str
    err: str


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder of a tiny Llama with a chat template; what it says is noise, but the same noise each time."""
    return str(write_model(tmp_path_factory.mktemp("models") / "tiny", tiny_config()))


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Done]:
    """Runs a command line in this process; `stdin` is what is piped in. Slow machines say no progress either."""
    monkeypatch.setattr("specq.cli.console.SECONDS_BETWEEN_LINES", 3600.0)

    def call(*arguments: str | Path, stdin: str = "") -> Done:
        monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
        code = main([str(argument) for argument in arguments])
        return Done(code, *capsys.readouterr())

    return call


@pytest.fixture
def specq() -> Callable[..., Done]:
    """Runs a command line in a process of its own."""

    def run(*arguments: str | Path, stdin: str = "", script: str | None = None, **environment: str) -> Done:
        command = [sys.executable, *(["-c", script] if script else ["-m", "specq"]), *map(str, arguments)]
        done = subprocess.run(
            command, input=stdin, capture_output=True, text=True, timeout=120, env={**os.environ, **environment}
        )
        return Done(done.returncode, done.stdout, done.stderr)

    return run
