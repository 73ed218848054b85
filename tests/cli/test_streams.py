"""Standard output holds the document alone, whatever else prints; progress and colour keep to terminals."""

from __future__ import annotations

import io
import json
import logging
import subprocess
import sys
import threading
import time

import pytest

from specq.cli import console as module
from specq.cli.console import Console, size_text, table

# a library that prints from Python, from C and from a process of its own while it is imported
NOISE = """
import os, subprocess, sys
class Noisy:
    def find_spec(self, name, path=None, target=None):
        if name in {"yaml", "torch", "tokenizers", "jinja2", "specq.spec.load"}:
            print("noise from", name)
            os.write(1, b"noise from C\\n")
            subprocess.run(["sh", "-c", "echo noise of a process"])
sys.meta_path.insert(0, Noisy())
from specq.cli.app import entry
entry()
"""


@pytest.mark.parametrize(
    "arguments",
    [
        ["run", "MODEL", "hello", "--max-new-tokens", "3", "--json"],
        ["chat", "MODEL", "--max-new-tokens", "3", "--json"],
        ["doctor", "MODEL", "--json"],
        ["check", "MODEL", "MODEL", "--json"],
        ["recipe", "ls", "--json"],
        ["recipe", "show", "demo", "--json"],
        ["recipe", "check", "demo", "--json"],
        ["cache", "ls", "--json"],
        ["--version", "--json"],
    ],
    ids=lambda arguments: " ".join(arguments[:2]),
)
def test_json_is_all_of_standard_output_though_a_library_prints(arguments, specq, model) -> None:
    arguments = [model if argument == "MODEL" else argument for argument in arguments]
    done = specq(*arguments, script=NOISE, stdin="hello\n")
    assert done.code == 0, done.err
    json.loads(done.out)


def test_what_others_print_is_not_lost(capfd) -> None:
    with Console().working() as console:
        print("noise")
        console.document({"a": 1})
    out, err = capfd.readouterr()
    assert json.loads(out) == {"a": 1}
    assert err == "noise\n"


def test_quiet_keeps_errors_only(call, model) -> None:
    assert "pipeline auto" in call("run", model, "hi", "--max-new-tokens", "2").err
    assert call("run", model, "hi", "--max-new-tokens", "2", "--quiet").err == ""


class Screen(io.StringIO):
    def isatty(self) -> bool:
        return True


def use_screen(monkeypatch) -> Screen:
    """Standard error as a terminal that shows colours."""
    screen = Screen()
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    return screen


def test_a_terminal_redraws_one_line(monkeypatch) -> None:
    screen = use_screen(monkeypatch)
    progress = Console().progress()
    progress("loading 1 of 2")
    progress("loading 2 of 2")
    progress.clear()
    assert screen.getvalue().count("\r\x1b[K") == 3
    assert screen.getvalue().endswith("\r\x1b[K")


def test_a_log_line_takes_the_place_of_the_progress(monkeypatch) -> None:
    screen = use_screen(monkeypatch)
    with Console().working(divert=False) as console:
        console.progress()("loading")
        logging.getLogger("specq").warning("look out")
    assert screen.getvalue().endswith("loading\x1b[22m\r\x1b[Kwarning: look out\n")


@pytest.mark.parametrize("variable", ["NO_COLOR", "TERM"])
def test_no_colour_where_it_is_not_wanted(variable, monkeypatch) -> None:
    use_screen(monkeypatch)
    assert Console().dim("x") == "\x1b[2mx\x1b[22m"
    monkeypatch.setenv(variable, "dumb")
    assert Console().dim("x") == "x"


def test_without_a_terminal_at_most_a_line_every_ten_seconds(monkeypatch, capsys) -> None:
    now = [100.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    progress = Console().progress()
    for second in range(25):
        now[0] = 100.0 + second
        progress(f"second {second}")
    progress.clear()
    assert capsys.readouterr().err == "second 10\nsecond 20\n"


def test_a_long_steps_line_comes_without_another_one(monkeypatch, capsys) -> None:
    monkeypatch.setattr(module, "SECONDS_BETWEEN_LINES", 0.2)
    progress = Console().progress()
    progress("a short step")
    progress("a long step")
    said, deadline = "", time.monotonic() + 30
    while not said.endswith("a long step\n") and time.monotonic() < deadline:
        time.sleep(0.01)
        said += capsys.readouterr().err
    assert said.endswith("a long step\n")


def test_what_was_not_said_when_progress_ends_is_never_said(monkeypatch, capsys) -> None:
    before = threading.active_count()
    progress = Console().progress()
    progress("over at once")
    progress.clear()
    while threading.active_count() > before:
        time.sleep(0.01)
    assert capsys.readouterr().err == ""


def test_columns_are_aligned_and_sizes_read_well() -> None:
    assert table([("a", "b"), ("long", "c")]) == "a     b\nlong  c"
    assert table([]) == ""
    assert (size_text(92_871_040), size_text(2.5e9)) == ("92.9 MB", "2.5 GB")
    assert (size_text(4200), size_text(999), size_text(0)) == ("4.2 kB", "999 bytes", "0 bytes")


def test_streams_closed_before_the_start_change_neither_output_nor_exit_code() -> None:
    def run(arguments: str) -> subprocess.CompletedProcess[str]:
        command = f"'{sys.executable}' -m specq {arguments}"
        return subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=False)

    listed = run("recipe ls")
    assert (run("recipe ls 2>&-").stdout, listed.returncode) == (listed.stdout, 0)
    failed = run("recipe show nowhere 2>&-")
    assert (failed.stdout, failed.returncode) == ("", run("recipe show nowhere").returncode)
    assert run("recipe ls >&-").returncode == 0
