"""How much host memory a run takes, without the files it has mapped: the system takes those back when it needs to."""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from types import TracebackType

INTERVAL_S = 0.05
TAKEN = ("RssAnon:", "RssShmem:")


class HostMemory:
    """Watches the memory of this process while entered; `peak` is the most seen."""

    def __init__(self, *, status: Path = Path("/proc/self/status")) -> None:
        self._status = status
        self._peak = 0
        self._done = threading.Event()
        self._watcher = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> HostMemory:
        self._watcher.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._done.set()
        self._watcher.join()

    @property
    def peak(self) -> int | None:
        """Bytes; of the whole process with its mapped files where the system tells no more, None where not that."""
        self._look()
        return self._peak or _resident_peak()

    def _watch(self) -> None:
        while not self._done.wait(INTERVAL_S):
            self._look()

    def _look(self) -> None:
        try:
            lines = self._status.read_text(encoding="ascii", errors="replace").splitlines()
        except OSError:
            return
        taken = sum(int(line.split()[1]) for line in lines if line.startswith(TAKEN))
        self._peak = max(self._peak, 1024 * taken)


def _resident_peak() -> int | None:
    try:
        import resource
    except ImportError:  # Windows
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
