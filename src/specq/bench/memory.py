"""Bytes: what tensors take, and the most that was taken while something ran."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from specq.models.cache import KVCache

RESET_PEAK = "5"
"""What Linux takes in clear_refs to begin a new peak of resident memory."""


def storages(value: Any) -> dict[int, int]:
    """Bytes by address of every tensor below a value, shared ones once.

    On a CPU caches count nothing: their pages are taken only when they are written.
    """
    found: dict[int, int] = {}
    for tensor in _tensors(value, set()):
        storage = tensor.untyped_storage()
        found[storage.data_ptr()] = storage.nbytes()
    return found


def _tensors(value: Any, seen: set[int]) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
        return
    if id(value) in seen:
        return
    seen.add(id(value))
    children: list[Any] = []
    if isinstance(value, nn.Module):
        children = list(vars(value).values())
    elif isinstance(value, KVCache):
        children = [] if value.k.device.type == "cpu" else list(vars(value).values())
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        children = [getattr(value, field.name) for field in dataclasses.fields(value)]
    elif isinstance(value, Mapping):
        children = list(value.values())
    elif isinstance(value, (list, tuple)):
        children = list(value)
    for child in children:
        yield from _tensors(child, seen)


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
