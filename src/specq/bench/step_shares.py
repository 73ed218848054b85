"""Where a step's time goes: kernels of a GPU trace by kind, and the gaps between them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

PRODUCTS = ("w4", "w8a16", "w16a16", "dequantize", "gemm", "cutlass", "nvjet", "splitk")
ATTENTION = ("attention",)


@dataclass(frozen=True)
class Kernel:
    """A kernel of a trace, in microseconds."""

    name: str
    start: float
    end: float


@dataclass(frozen=True)
class Shares:
    """Milliseconds of one run: matrix products, attention, everything else that runs, and nothing running."""

    products: float
    attention: float
    small: float
    gaps: float

    def __str__(self) -> str:
        total = self.products + self.attention + self.small + self.gaps
        parts = (self.products, self.attention, self.small, self.gaps)
        return " ".join(f"{part / total:>5.0%}" for part in parts)


def share_out(kernels: Iterable[Kernel], *, runs: int = 1) -> Shares:
    """What each kind takes of `runs` runs traced together.

    A kernel that starts before the one ahead of it ends (dependent launch) counts from that end on, since until then
    it waits.
    """
    times = {"products": 0.0, "attention": 0.0, "small": 0.0, "gaps": 0.0}
    ended: float | None = None
    for kernel in sorted(kernels, key=lambda each: (each.start, each.end)):
        if ended is not None:
            times["gaps"] += max(0.0, kernel.start - ended)
        begun = kernel.start if ended is None else max(kernel.start, ended)
        times[_kind(kernel.name)] += max(0.0, kernel.end - begun)
        ended = kernel.end if ended is None else max(ended, kernel.end)
    return Shares(**{name: time / runs / 1e3 for name, time in times.items()})


def traced_shares(run: Callable[[], object], *, runs: int = 2) -> Shares:
    """The shares of `run`, which asks a GPU for one step and does not wait."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else the profiler writes to standard error when it starts
    run()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as trace:
        for _ in range(runs):
            run()
        torch.cuda.synchronize()
    found = [
        Kernel(event.name, event.time_range.start, event.time_range.end)
        for event in trace.events() or []
        if event.device_type == torch.autograd.DeviceType.CUDA
    ]
    return share_out(found, runs=runs)


def _kind(name: str) -> str:
    name = name.lower()
    if any(part in name for part in ATTENTION):
        return "attention"
    return "products" if any(part in name for part in PRODUCTS) else "small"
