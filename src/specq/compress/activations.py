"""Activations of the calibration text, in chunks, on the device or in the host's memory."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


class Activations:
    """Chunks [sequences, tokens, width] that are read and replaced one at a time.

    Where they do not fit the device they stay on the host, pinned if there is a GPU to copy to.
    """

    def __init__(self, device: torch.device, *, on_host: bool) -> None:
        self._device = device
        self._on_host = on_host and device.type != "cpu"
        self._chunks: dict[int, Tensor] = {}

    def read(self, index: int) -> Tensor:
        """Chunk `index`, on the device."""
        return self._chunks[index].to(self._device, non_blocking=True)

    def write(self, index: int, chunk: Tensor) -> None:
        """Put `chunk` in the place of chunk `index`."""
        if not self._on_host:
            self._chunks[index] = chunk
            return
        if index not in self._chunks:
            self._chunks[index] = torch.empty(chunk.shape, dtype=chunk.dtype, pin_memory=True)
        self._chunks[index].copy_(chunk)

    def indices(self) -> Iterable[int]:
        """The chunks there are."""
        return range(len(self._chunks))
