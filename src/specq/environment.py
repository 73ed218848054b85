"""What ran a measurement: device, driver and versions, as every run record carries them."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

CPU_CLOCK = Path("/sys/devices/system/cpu/cpu0/cpufreq/scaling_cur_freq")
IDLE_REASON = 1
"""The bit of the throttle reasons that only says that nothing runs."""

GPU_FIELDS: tuple[tuple[str, str, Callable[[str], Any]], ...] = (
    ("clock_mhz", "clocks.sm", float),
    ("max_clock_mhz", "clocks.max.sm", float),
    ("temperature_c", "temperature.gpu", float),
    ("power_w", "power.draw", float),
    ("is_throttled", "clocks_event_reasons.active", lambda text: bool(int(text, 16) & ~IDLE_REASON)),
)
"""Our name of what nvidia-smi tells, its name of it, and how its text is read."""


def describe_environment(device: str) -> dict[str, Any]:
    """Device name, driver, and versions of specq, torch and triton; `device` is `cpu` or `cuda[:N]`."""
    import torch

    return {
        "device": device_name(device),
        "driver": gpu_driver() if device.startswith("cuda") else None,
        "torch": torch.__version__,
        "triton": package_version("triton"),
        "specq": package_version("specq"),
        "python": platform.python_version(),
        "threads": torch.get_num_threads() if device == "cpu" else None,
    }


def device_name(device: str) -> str:
    """The device as a person would name it."""
    import torch

    if device.startswith("cuda"):
        return torch.cuda.get_device_name(device)
    return f"{cpu_name()} ({torch.backends.cpu.get_cpu_capability()})"


def cpu_name() -> str:
    """The processor's own name where the system tells it, else its architecture."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            for line in file:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def num_processors() -> int:
    """Those that this process may run on, as far as the system tells."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def gpu_driver() -> str | None:
    """The NVIDIA driver's version, or None when its tool does not answer."""
    found = _ask_gpu(["driver_version"])
    return found[0] if found else None


def device_state(device: str) -> dict[str, Any]:
    """Load, clock, and of a GPU also temperature, power and throttling, as far as the system tells."""
    state: dict[str, Any] = {}
    with suppress(OSError, AttributeError):
        state["load"] = os.getloadavg()[0]
    if not device.startswith("cuda"):
        with suppress(OSError, ValueError):
            state["clock_mhz"] = int(CPU_CLOCK.read_text(encoding="ascii")) / 1e3
        return state
    for (name, _, read), text in zip(GPU_FIELDS, _ask_gpu([field for _, field, _ in GPU_FIELDS], device), strict=False):
        with suppress(ValueError):  # what the GPU does not tell
            state[name] = read(text)
    return state


def _ask_gpu(fields: Sequence[str], device: str | None = None) -> list[str]:
    """What nvidia-smi says of these fields, of this torch device or of the first GPU; empty when it does not answer."""
    chosen = [] if device is None else [f"--id={gpu_id(device)}"]
    command = ["nvidia-smi", *chosen, f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    lines = done.stdout.splitlines()
    return [value.strip() for value in lines[0].split(",")] if lines else []


def gpu_id(device: str) -> str:
    """How nvidia-smi knows a torch device, whose number CUDA_VISIBLE_DEVICES changes."""
    import torch

    return f"GPU-{torch.cuda.get_device_properties(device).uuid}"


def package_version(name: str) -> str | None:
    """The installed version, or None."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
