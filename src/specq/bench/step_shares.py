"""Where a step's time goes: kernels of a GPU trace by kind, and the gaps between them."""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch

PRODUCTS = ("w4", "w8a16", "w16a16", "dequantize", "gemm", "cutlass", "nvjet", "splitk")
ATTENTION = ("attention",)
TRACED = 2  # runs of a trace
PLACES = 3  # kernels ahead that tell the places of one in a layer apart


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
    for name, time, gap in _in_turn(kernels):
        times["gaps"] += gap
        times[_kind(name)] += time
    return Shares(**{name: time / runs / 1e3 for name, time in times.items()})


def kernel_lines(kernels: Iterable[Kernel], *, runs: int = 1) -> list[str]:
    """A line for each kernel and the three it runs behind: microseconds a run, times a run, microseconds each."""
    times: dict[tuple[str, ...], list[float]] = {}
    place: tuple[str, ...] = ()
    for name, time, _ in _in_turn(kernels):
        place = (name, *place[:PLACES])
        times.setdefault(place, []).append(time)
    lines = []
    for place, found in sorted(times.items(), key=lambda item: -sum(item[1])):
        total, count, each = sum(found) / runs, len(found) / runs, statistics.median(found)
        lines.append(f"  {total:>9.1f} us {count:>6.1f} x {each:>7.2f}  {' < '.join(place)}")
    return lines


def _in_turn(kernels: Iterable[Kernel]) -> Iterator[tuple[str, float, float]]:
    """(name, microseconds, the gap before) of each kernel, without what overlaps the one ahead."""
    ended: float | None = None
    for kernel in sorted(kernels, key=lambda each: (each.start, each.end)):
        begun = kernel.start if ended is None else max(kernel.start, ended)
        gap = 0.0 if ended is None else max(0.0, kernel.start - ended)
        yield kernel.name, max(0.0, kernel.end - begun), gap
        ended = kernel.end if ended is None else max(ended, kernel.end)


def traced_shares(run: Callable[[], object], *, runs: int = TRACED) -> Shares:
    """The shares of `run`, which asks a GPU for one step and does not wait."""
    return share_out(traced(run, runs=runs), runs=runs)


def traced(run: Callable[[], object], *, runs: int = TRACED) -> list[Kernel]:
    """The kernels of `runs` calls of `run`."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else the profiler writes to standard error when it starts
    run()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as trace:
        for _ in range(runs):
            run()
        torch.cuda.synchronize()
    return [
        Kernel(event.name, event.time_range.start, event.time_range.end)
        for event in trace.events() or []
        if event.device_type == torch.autograd.DeviceType.CUDA
    ]


def _kind(name: str) -> str:
    name = name.lower()
    if any(part in name for part in ATTENTION):
        return "attention"
    return "products" if any(part in name for part in PRODUCTS) else "small"
