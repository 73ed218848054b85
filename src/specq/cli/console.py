"""What goes where: standard output carries the answer and nothing else, standard error all the rest."""

from __future__ import annotations

import json
import logging
import os
import shutil
import signal
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any, TextIO

from specq.errors import SpecqError, UsageError
from specq.files import is_text

SECONDS_BETWEEN_LINES = 10.0

TEXT_HINT = "convert it, for example with iconv -t UTF-8"


class ClosedOutput(Exception):
    """The reader of standard output went away, as `head` does; no failure."""


class Console:
    """The two streams of a command. Inside `working()` whatever else prints lands on standard error."""

    def __init__(self, *, quiet: bool = False) -> None:
        self.quiet = quiet
        self._data: TextIO | None = None
        self._progress: Progress | None = None
        self.can_redraw = not quiet and is_terminal(sys.stderr)

    @contextmanager
    def working(self, *, divert: bool = True) -> Iterator[Console]:
        """Shows the log of specq while this runs, and keeps standard output for `write` and `document` alone.

        Without `divert` standard output stays as it is, which line editing on a terminal needs.
        """
        with _shown_log(self):
            if not divert:
                yield self
                return
            with _diverted_stdout() as self._data:
                try:
                    yield self
                finally:
                    self._data = None

    @property
    def data(self) -> TextIO:
        return self._data if self._data is not None else sys.stdout

    def write(self, text: str) -> None:
        """Puts text on standard output at once."""
        self.data.write(text)
        self.data.flush()

    def line(self, text: str = "") -> None:
        self.write(text + "\n")

    def document(self, value: Any) -> None:
        """Puts one JSON document on standard output."""
        self.write(json.dumps(value, ensure_ascii=False, indent=2, default=str) + "\n")

    def event(self, value: Mapping[str, Any]) -> None:
        """Puts one JSON object on a line of its own."""
        self.write(json.dumps(value, ensure_ascii=False, default=str) + "\n")

    def note(self, text: str) -> None:
        """Says something on standard error, unless --quiet."""
        if not self.quiet:
            self.reply(text)

    def reply(self, text: str) -> None:
        """Says on standard error what the person just asked for, --quiet or not."""
        self.clear_progress()
        print(text, file=sys.stderr, flush=True)

    def dim(self, text: str, stream: TextIO | None = None) -> str:
        """The text in grey where the stream shows colours (default: standard error)."""
        return f"\x1b[2m{text}\x1b[22m" if text and has_colour(stream or sys.stderr) else text

    def progress(self) -> Progress:
        """Where to say how far something is."""
        self._progress = Progress(self)
        return self._progress

    def clear_progress(self) -> None:
        """Takes the line of progress away, so that another can be written there."""
        if self._progress is not None:
            self._progress.clear()


class Progress:
    """How far something is: one redrawn line on a terminal, else at most a line every ten seconds.

    There the last thing said comes when its time has come, so that a long step is not a silent one.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._last = time.monotonic()
        self._is_drawn = False
        self._waiting = ""
        self._timer: threading.Timer | None = None

    def __call__(self, what: str) -> None:
        if self._console.quiet:
            return
        if self._console.can_redraw:
            width = shutil.get_terminal_size().columns - 1
            sys.stderr.write(f"\r\x1b[K{self._console.dim(what[:width])}")
            sys.stderr.flush()
            self._is_drawn = True
        elif (left := SECONDS_BETWEEN_LINES - (time.monotonic() - self._last)) <= 0:
            self._print(what)
        else:
            self._waiting = what
            if self._timer is None:
                self._timer = threading.Timer(left, self._print_waiting)
                self._timer.daemon = True
                self._timer.start()

    def _print(self, what: str) -> None:
        self._forget()
        print(what, file=sys.stderr, flush=True)
        self._last = time.monotonic()

    def _print_waiting(self) -> None:
        if self._timer is not None:  # not cleared meanwhile
            self._print(self._waiting)

    def _forget(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def clear(self) -> None:
        self._forget()
        if self._is_drawn:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()
            self._is_drawn = False


class Terminated(KeyboardInterrupt):
    """SIGTERM came: what keeps its work at Ctrl-C keeps it then too."""


@contextmanager
def raised_at_sigterm() -> Iterator[None]:
    """SIGTERM raises Terminated, but only once: `timeout` sends two, and what is kept takes a moment."""

    def terminate(signum: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise Terminated

    is_ours = threading.current_thread() is threading.main_thread()  # no other can set a handler
    if not is_ours or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:  # whoever has it ignored means that
        yield
        return
    signal.signal(signal.SIGTERM, terminate)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


class Interrupt:
    """What asked for an end while `watch` ran: `cause` is KeyboardInterrupt for Ctrl-C, Terminated for SIGTERM."""

    cause: type[KeyboardInterrupt] | None = None

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Either only sets `cause`, so an answer ends between two tokens; a second Ctrl-C interrupts at once."""
        before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

        def interrupt(signum: int, frame: FrameType | None) -> None:
            if self.cause is not None:
                raise self.cause
            self.cause = KeyboardInterrupt

        def terminate(signum: int, frame: FrameType | None) -> None:
            self.cause, before[signal.SIGTERM] = Terminated, signal.SIG_IGN

        signal.signal(signal.SIGINT, interrupt)
        if before[signal.SIGTERM] is not signal.SIG_IGN:
            signal.signal(signal.SIGTERM, terminate)
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def report(error: SpecqError) -> None:
    """Says on standard error what is wrong and what to type instead; with SPECQ_DEBUG where it came from, too."""
    sys.stdout.flush()
    if is_debugging():
        traceback.print_exc()
    hint = f"\n\nhint: {error.hint}" if error.hint else ""
    print(f"error: {error.message}{hint}", file=sys.stderr)


def is_debugging() -> bool:
    return os.environ.get("SPECQ_DEBUG", "") not in ("", "0")


def read_text(read: Callable[[], str]) -> str:
    """What `read` takes from standard input. Raises UsageError for bytes that are no text.

    In some locales Python refuses them, in others they come as halves of surrogate pairs.
    """
    try:
        text = read()
    except UnicodeDecodeError as error:
        raise UsageError(f"standard input is not text in {error.encoding}", hint=TEXT_HINT) from None
    if not is_text(text):
        raise UsageError("standard input is not UTF-8 text", hint=TEXT_HINT)
    return text


def is_terminal(stream: TextIO) -> bool:
    """Whether the stream is a terminal that redraws lines."""
    return stream.isatty() and os.environ.get("TERM") != "dumb"


def has_colour(stream: TextIO) -> bool:
    return is_terminal(stream) and not os.environ.get("NO_COLOR")


def table(rows: Sequence[Sequence[str]], *, indent: str = "") -> str:
    """The rows as aligned columns, the last one as long as it is."""
    if not rows:
        return ""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]) - 1)]
    lines = []
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=False)]
        lines.append((indent + "  ".join([*cells, row[-1]])).rstrip())
    return "\n".join(lines)


def size_text(num_bytes: float) -> str:
    """The size in the largest unit, from bytes to GB, of which there is one."""
    if num_bytes < 1e3:
        return f"{num_bytes:.0f} bytes"
    factor, unit = next((each for each in ((1e9, "GB"), (1e6, "MB")) if num_bytes >= each[0]), (1e3, "kB"))
    return f"{num_bytes / factor:.1f} {unit}"


def discard_output() -> None:
    """Points standard output at nothing, so that what is left in its buffer fails nowhere."""
    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, 1)
    os.close(nothing)


def open_missing_streams() -> None:
    """Standard output and error that were closed before the start lead to nothing, and no file takes their place."""
    for number, name in ((1, "stdout"), (2, "stderr")):
        if getattr(sys, name) is None:
            nothing = os.open(os.devnull, os.O_WRONLY)
            if nothing != number:
                os.dup2(nothing, number)
                os.close(nothing)
            setattr(sys, name, os.fdopen(number, "w", encoding="utf-8", closefd=False))


@contextmanager
def _diverted_stdout() -> Iterator[TextIO]:
    """The true standard output, while descriptor 1 and sys.stdout lead to standard error."""
    shown = sys.stdout
    try:
        shown.flush()
        descriptor, errors = shown.fileno(), sys.stderr.fileno()
    except (OSError, ValueError, AttributeError):  # streams without a descriptor, in a notebook or a test
        sys.stdout = sys.stderr
        try:
            yield shown
        finally:
            sys.stdout = shown
        return
    saved = os.dup(descriptor)
    data = open(saved, "w", encoding=shown.encoding, errors="replace", newline="")  # noqa: SIM115 - closed below
    os.dup2(errors, descriptor)
    sys.stdout = sys.stderr
    try:
        yield data
    finally:
        sys.stdout = shown
        os.dup2(saved, descriptor)
        try:
            data.close()
        except BrokenPipeError:
            discard_output()


@contextmanager
def _shown_log(console: Console) -> Iterator[None]:
    """The log of specq's modules as lines on standard error; quiet shows errors only, no Python warnings."""
    handler = _NoteHandler(console)
    logger = logging.getLogger("specq")
    level, propagate = logger.level, logger.propagate
    logger.addHandler(handler)
    logger.setLevel(logging.ERROR if console.quiet else logging.INFO)
    logger.propagate = False
    try:
        with warnings.catch_warnings():
            if console.quiet:
                warnings.simplefilter("ignore")
            yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
        logger.propagate = propagate


class _NoteHandler(logging.Handler):
    """`warning: ...` on standard error; what is only information comes without a word before it."""

    def __init__(self, console: Console) -> None:
        super().__init__()
        self._console = console

    def emit(self, record: logging.LogRecord) -> None:
        level = f"{record.levelname.lower()}: " if record.levelno > logging.INFO else ""
        self._console.reply(level + record.getMessage())
