"""What travels between host and device in a round: one block up, one down, through pinned memory."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class Upload:
    """A block of int32 that is written on the host and sent to `device` [size]."""

    def __init__(self, size: int, device: torch.device) -> None:
        is_cuda = device.type == "cuda"
        self._pinned = torch.zeros(size, dtype=torch.int32, pin_memory=is_cuda)
        self._host = self._pinned.numpy()
        self._sent = torch.cuda.Event() if is_cuda else None
        self.device = torch.zeros(size, dtype=torch.int32, device=device)

    def write(self) -> Any:
        """The block as a numpy array to write to, once what was sent last has left it."""
        if self._sent is not None:
            self._sent.synchronize()
        return self._host

    def send(self) -> None:
        """Copy what was written, without waiting."""
        self.device.copy_(self._pinned, non_blocking=True)
        if self._sent is not None:
            self._sent.record()


class Download:
    """An int32 tensor on the device that is read on the host."""

    def __init__(self, source: Tensor) -> None:
        self._source = source
        is_cuda = source.device.type == "cuda"
        self._pinned = torch.zeros(source.shape, dtype=torch.int32, pin_memory=is_cuda)
        self._host = self._pinned.numpy()
        self._done = torch.cuda.Event() if is_cuda else None

    def read(self) -> list[int]:
        """The values, waiting for what was asked of the device before: the one place where a round does."""
        self._pinned.copy_(self._source, non_blocking=True)
        if self._done is not None:
            self._done.record()
            self._done.synchronize()
        values: list[int] = self._host.tolist()
        return values
