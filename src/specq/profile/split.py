"""What a step spends its time on: products, attention, the rest; from torch's own profiler."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from specq.profile.measure import step_job
from specq.spec.pipelines import Seat
from specq.spec.sampling import Sampler

SPLIT_NODES = (1, 8, 32)
REPEATS = {"cpu": 1, "cuda": 3}
"""Steps that are looked into; on a CPU they are long, and the profiler makes them longer."""

ATTENTION = ("attention", "flash", "fmha", "sdpa", "bmm")
PRODUCTS = ("mm", "gemm", "gemv", "linear", "w4a16", "w4a8", "w16a16", "int4", "cutlass", "splitk", "nvjet", "xmma")
"""Parts of the names of operators and kernels; attention is looked for first."""


def split_steps(seat: Seat, sampler: Sampler, text: Sequence[int], context: int) -> list[dict[str, Any]]:
    """Shares of products, attention and the rest in steps of several node counts after `context` tokens."""
    verifier = seat.verifier(sampler)
    found = []
    for nodes in SPLIT_NODES:
        job = step_job(verifier, text, context, nodes)
        with torch.inference_mode():
            job()
            found.append({"nodes": nodes, "context": context, **_shares(job, seat.model.device)})
    seat.cache.truncate(0)
    return found


def kind_of(name: str) -> str:
    """`attention`, `products` or `rest`, by the name of an operator or a kernel."""
    lower = name.lower()
    if any(part in lower for part in ATTENTION):
        return "attention"
    return "products" if any(part in lower for part in PRODUCTS) else "rest"


def _shares(job: Any, device: torch.device) -> dict[str, float]:
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else the profiler writes to standard error when it starts
    is_gpu = device.type == "cuda"
    activities = [ProfilerActivity.CUDA] if is_gpu else [ProfilerActivity.CPU]
    with profile(activities=activities) as profiler:
        for _ in range(REPEATS[device.type]):
            job()
    times = {"products": 0.0, "attention": 0.0, "rest": 0.0}
    for event in profiler.key_averages():
        times[kind_of(event.key)] += event.self_device_time_total if is_gpu else event.self_cpu_time_total
    total = sum(times.values()) or 1.0
    return {kind: spent / total for kind, spent in times.items()}
