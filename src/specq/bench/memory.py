"""The most memory that was taken while something ran; what tensors take is models/storages.py's to say."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import torch

RESET_PEAK = "5"
"""What Linux takes in clear_refs to begin a new peak of resident memory."""


class PeakMemory:
    """The most memory taken since `restart`: of the device's allocator, or resident memory of this process."""

    def __init__(self, device: torch.device, *, process: Path = Path("/proc/self")) -> None:
        self._device, self._process = device, process

    def restart(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
            return
        with suppress(OSError):  # not Linux, or not allowed: then the peak is that of the whole process
            (self._process / "clear_refs").write_text(RESET_PEAK, encoding="ascii")

    def bytes(self) -> int | None:
        """None where the system does not tell."""
        if self._device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._device)
        try:
            lines = (self._process / "status").read_text(encoding="ascii").splitlines()
        except OSError:
            return None
        found = next((line for line in lines if line.startswith("VmHWM:")), None)
        return None if found is None else int(found.split()[1]) * 1024
