"""Timing that shows its own noise: jobs interleaved in alternating order, quartiles, drift between halves."""

from __future__ import annotations

import statistics
import subprocess
from collections.abc import Callable, Hashable, Mapping, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any, TypeVar

import torch

from specq.profile.cost import Timing

Key = TypeVar("Key", bound=Hashable)

FEWEST_ROUNDS = 3
GPU_FIELDS = ("clocks.sm", "clocks.max.sm", "temperature.gpu", "power.draw", "clocks_event_reasons.active")
IDLE_REASON = 1
"""The bit of the throttle reasons that only says that nothing runs."""


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

    Ends early when `seconds` are over, but not before each job has FEWEST_ROUNDS samples. What was measured when it is
    interrupted stays in `samples`.
    """
    began = perf_counter()
    for job in jobs.values():
        job()
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


def device_state(device: torch.device) -> dict[str, Any]:
    """Clock, temperature, power and throttling of a GPU, clock and load of a CPU, as far as the system tells."""
    return _gpu_state(device.index or 0) if device.type == "cuda" else _cpu_state()


def _gpu_state(index: int) -> dict[str, Any]:
    command = ["nvidia-smi", f"--id={index}", f"--query-gpu={','.join(GPU_FIELDS)}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
        clock, most, temperature, power, reasons = (value.strip() for value in done.stdout.split(","))
        return {
            "clock_mhz": float(clock),
            "max_clock_mhz": float(most),
            "temperature_c": float(temperature),
            "power_w": float(power),
            "is_throttled": bool(int(reasons, 16) & ~IDLE_REASON),
        }
    except (OSError, subprocess.SubprocessError, ValueError):
        return {}


def _cpu_state() -> dict[str, Any]:
    state: dict[str, Any] = {}
    try:
        state["load"] = float(Path("/proc/loadavg").read_text(encoding="ascii").split()[0])
        clock = Path("/sys/devices/system/cpu/cpu0/cpufreq/scaling_cur_freq")
        if clock.is_file():
            state["clock_mhz"] = int(clock.read_text(encoding="ascii")) / 1e3
    except (OSError, ValueError):
        pass
    return state


def stability_notes(states: Sequence[Mapping[str, Any]], *, drift: float, spread: float) -> list[str]:
    """What makes the numbers doubtful, in sentences with the range they may lie in."""
    notes = []
    if any(state.get("is_throttled") for state in states):
        notes.append("the GPU reports that its clock was throttled during the measurement")
    clocks = [state["clock_mhz"] for state in states if "clock_mhz" in state]
    if clocks and max(clocks) > 1.1 * min(clocks):
        notes.append(f"the clock moved between {min(clocks):.0f} and {max(clocks):.0f} MHz")
    if spread > 0.1 or drift > 0.05:
        notes.append(
            f"the times are unsteady: half of the samples lie within ± {50 * spread:.0f} % of their median, and the "
            f"second half of the measurement differs from the first by {100 * drift:.0f} %"
        )
    return notes
