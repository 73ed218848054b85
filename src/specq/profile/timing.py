"""Timing that shows its own noise: jobs interleaved in alternating order, quartiles, drift between halves."""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Hashable, Mapping, Sequence
from time import perf_counter
from typing import Any, TypeVar

import torch

from specq.profile.cost import Timing

Key = TypeVar("Key", bound=Hashable)

FEWEST_ROUNDS = 3


def wait_for(device: torch.device) -> None:
    """Return when the device has done all it was asked to."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class Samples(dict[Key, list[float]]):
    """Milliseconds of every job, in the order of measurement."""

    def timings(self) -> dict[Key, Timing]:
        return {key: Timing.of(samples) for key, samples in self.items() if samples}

    def drift(self) -> float:
        """How far the second half of the measurement is from the first, over all jobs (0.02: two per cent)."""
        ratios = []
        for samples in self.values():
            half = len(samples) // 2
            if half:
                ratios.append(statistics.median(samples[-half:]) / statistics.median(samples[:half]))
        return abs(statistics.median(ratios) - 1) if ratios else 0.0

    def spread(self) -> float:
        """The median over all jobs of the interquartile range as a share of the median."""
        return statistics.median([t.spread for t in self.timings().values()]) if self else 0.0


def measure(
    jobs: Mapping[Key, Callable[[], object]],
    samples: Samples[Key],
    *,
    device: torch.device,
    seconds: float,
    rounds: int,
    on_round: Callable[[int], None] = lambda done: None,
) -> None:
    """Fill `samples`: every job once unmeasured, then all jobs in turn, forwards and backwards, up to `rounds` times.

    Ends early when `seconds` after the unmeasured calls are over, but not before each job has FEWEST_ROUNDS samples.
    What was measured when it is interrupted stays in `samples`.
    """
    for job in jobs.values():
        job()
    wait_for(device)
    began = perf_counter()
    for done in range(rounds):
        if done >= FEWEST_ROUNDS and perf_counter() - began > seconds:
            break
        order = list(jobs) if done % 2 == 0 else list(jobs)[::-1]
        for key in order:
            wait_for(device)
            start = perf_counter()
            jobs[key]()
            wait_for(device)
            samples.setdefault(key, []).append((perf_counter() - start) * 1e3)
        on_round(done + 1)


def warm_s(job: Callable[[], object], device: torch.device) -> float:
    """Seconds of a job that ran before: the shorter of two calls after the first."""
    times = []
    for _ in range(3):
        began = perf_counter()
        job()
        wait_for(device)
        times.append(perf_counter() - began)
    return min(times[1:])


def stability_notes(states: Sequence[Mapping[str, Any]], *, drift: float, spread: float) -> list[str]:
    """What makes the numbers doubtful, in sentences with the range they may lie in."""
    notes = []
    if any(state.get("is_throttled") for state in states):
        notes.append("the GPU reports that its clock was throttled during the measurement")
    clocks = [state["clock_mhz"] for state in states if "clock_mhz" in state]
    if clocks and max(clocks) > 1.1 * min(clocks):
        notes.append(f"the clock moved between {min(clocks):.0f} and {max(clocks):.0f} MHz")
    loads, processors = [state["load"] for state in states if state.get("load") is not None], os.cpu_count() or 1
    if loads and max(loads) > processors + 1:
        notes.append(
            f"other work ran beside (a load of up to {max(loads):.0f} on {processors} processors): the times are those "
            "of a busy machine, and forecasts hold for one"
        )
    if spread > 0.1 or drift > 0.05:
        notes.append(
            f"the times are unsteady: half of the samples lie within ± {50 * spread:.0f} % of their median, and the "
            f"second half of the measurement differs from the first by {100 * drift:.0f} %"
        )
    return notes
