"""Splits a round's time between drafting and verifying, without a wait: what a GPU was asked to draft it does later."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter

import torch


class Stopwatch:
    """`start`, then `drafted`, then `stop` when the host has read what the verification decided."""

    def __init__(self) -> None:
        self._began = self._drafted = 0.0
        self._device: torch.device | None = None
        self._events: tuple[torch.cuda.Event, torch.cuda.Event] | None = None

    def start(self) -> None:
        """A round begins; one without a draft is all verification."""
        self._began = self._drafted = perf_counter()
        self._device = None

    def drafted(self, device: torch.device) -> None:
        """The draft was asked for; it lies on `device`, and on a GPU it may not be there yet."""
        self._drafted = perf_counter()
        self._device = device if device.type == "cuda" else None
        if self._device is not None:
            if self._events is None:
                self._events = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            self._events[0].record(torch.cuda.current_stream(self._device))

    def stop(self) -> tuple[float, float]:
        """Milliseconds of drafting and of verifying."""
        ended = perf_counter()
        total_ms, verify_ms = (ended - self._began) * 1e3, (ended - self._drafted) * 1e3
        if self._device is not None and self._events is not None:
            between, end = self._events
            end.record(torch.cuda.current_stream(self._device))
            end.synchronize()  # at once: all that was asked for has been read
            verify_ms = min(between.elapsed_time(end), total_ms)
        return total_ms - verify_ms, verify_ms


@contextmanager
def quiet_heap() -> Iterator[None]:
    """Garbage collections meanwhile pass over what exists now: looking through loaded models takes tens of ms each."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
