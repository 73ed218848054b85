"""What ran a measurement: device, driver and versions, as every run record carries them."""

from __future__ import annotations

import importlib.metadata
import platform
import subprocess
from typing import Any


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


def gpu_driver() -> str | None:
    """The NVIDIA driver's version, or None when its tool does not answer."""
    try:
        done = subprocess.run(
            ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.splitlines()[0].strip() if done.stdout.strip() else None


def package_version(name: str) -> str | None:
    """The installed version, or None."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
