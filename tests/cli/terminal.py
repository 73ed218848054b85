"""A pseudo-terminal with `specq` on it: what a person sees and types."""

from __future__ import annotations

import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from contextlib import suppress

# the terminal has to be the process's own before Ctrl-C typed on it becomes a signal, which a background job ignores
START = (
    "import fcntl, signal, termios; signal.signal(signal.SIGINT, signal.default_int_handler); "
    "fcntl.ioctl(0, termios.TIOCSCTTY, 0); from specq.cli.app import entry; entry()"
)


class Terminal:
    """Type with `type`, read with `wait_for`; `seen` is everything shown so far."""

    def __init__(self, *arguments: str, **environment: str) -> None:
        self._master, slave = pty.openpty()
        self.process = subprocess.Popen(
            [sys.executable, "-c", START, *arguments],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            start_new_session=True,
            env={**os.environ, "TERM": "xterm", "NO_COLOR": "1", **environment},
        )
        os.close(slave)
        self.seen = ""

    def type(self, text: str) -> None:
        os.write(self._master, text.encode())

    def press_ctrl_c(self) -> None:
        """Ctrl-C at a prompt; again when nothing comes of it, since readline misses one while it handles a key."""
        for _ in range(10):
            self.type("\x03")
            if select.select([self._master], [], [], 2.0)[0]:
                return
        raise AssertionError(f"nothing came of Ctrl-C; shown: {self.seen!r}")

    def terminate(self) -> int:
        """The exit code after SIGTERM; again when nothing comes of it, as with Ctrl-C."""
        for _ in range(10):
            self.process.send_signal(signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                return self.process.wait(3)
        raise AssertionError(f"nothing came of SIGTERM; shown: {self.seen!r}")

    def wait_for(self, pattern: str, *, seconds: float = 60) -> str:
        """What is shown until the pattern has come; it is not looked at again. Fails when it does not come."""
        end = time.monotonic() + seconds
        while (match := re.search(pattern, self.seen)) is None:
            ready, _, _ = select.select([self._master], [], [], max(0.0, end - time.monotonic()))
            try:
                read = os.read(self._master, 65536) if ready else b""
            except OSError:  # the other side is gone
                read = b""
            if not read:
                raise AssertionError(f"{pattern!r} did not come; shown: {self.seen!r}")
            self.seen += read.decode("utf-8", "replace")
        shown, self.seen = self.seen[: match.end()], self.seen[match.end() :]
        return shown

    def exit_code(self) -> int:
        return self.process.wait(30)

    def close(self) -> None:
        self.process.kill()
        self.process.wait(30)
        os.close(self._master)
