"""How many bytes a model will take, known before any weight is read."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from specq.checkpoint import ModelSpec
from specq.errors import NotEnoughMemoryError

PREFILL_ROWS = 512
HEAD_ROWS = 64
"""The most rows that run at once, and the most that get logits: they size the activations."""

SCALE_BYTES = 4
"""A scale and an offset of 16 bits each, for every row and group."""


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes of the weights, of K and V, and of activations while the largest chunk runs."""

    weights: int
    kv: int
    activations: int

    @property
    def total(self) -> int:
        return self.weights + self.kv + self.activations


def estimate_bytes(
    spec: ModelSpec, *, dtype: torch.dtype, context: int, is_packed: bool | None = None
) -> MemoryEstimate:
    """What the model takes with a cache of `context` tokens.

    `is_packed` says whether 4-bit matrices stay in 4 bits (default: when the checkpoint has them) or are
    dequantised to `dtype`.
    """
    size = dtype.itemsize
    attention = 2 * spec.hidden * spec.head_dim * (spec.heads + spec.kv_heads)
    products = spec.layers * (attention + 3 * spec.hidden * spec.intermediate)
    quantization = spec.quantization
    if quantization is not None and (is_packed is None or is_packed):
        group = quantization.group_size if quantization.group_size > 0 else spec.hidden
        weights = products // 2 + products * SCALE_BYTES // group
    else:
        weights = products * size
    weights += spec.vocab * spec.hidden * size * (1 if spec.tie_embeddings else 2)
    widest = 2 * spec.intermediate + 4 * spec.hidden + 2 * spec.heads * spec.head_dim
    activations = PREFILL_ROWS * widest * size + 2 * HEAD_ROWS * spec.vocab * 4
    return MemoryEstimate(weights, context * kv_bytes_per_token(spec, dtype), activations)


def kv_bytes_per_token(spec: ModelSpec, dtype: torch.dtype) -> int:
    """Bytes of K and V of one token in all layers."""
    return 2 * spec.layers * spec.kv_heads * spec.head_dim * dtype.itemsize


def require_memory(estimates: Sequence[MemoryEstimate], context: int, *, device: str, free: int | None) -> None:
    """Raise NotEnoughMemoryError when models that share a context need more than `free` bytes (None: unknown).

    Says what is needed and, if there is one, the context that would fit.
    """
    needed = sum(estimate.total for estimate in estimates)
    if free is None or needed <= free:
        return
    kv = sum(estimate.kv for estimate in estimates)
    fitting = max(0, free - needed + kv) * context // max(kv, 1)
    fitting -= fitting % 256
    hint = f"a context of {fitting} tokens fits: --context {fitting}"
    if fitting < 256:
        hint = "no context fits: take a smaller or a 4-bit model, or another device"
    raise NotEnoughMemoryError(
        f"`{_gib(needed)}` are needed (weights {_gib(sum(estimate.weights for estimate in estimates))}, "
        f"cache of {context} tokens {_gib(kv)}) and `{device}` has {_gib(free)} free",
        hint=hint,
    )


def free_bytes(device: str) -> int | None:
    """Memory that can still be taken on the device; None where the system does not say."""
    if device.startswith("cuda"):
        return int(torch.cuda.mem_get_info(torch.device(device))[0])
    limits = [_available_of_machine(), _left_in_container()]
    known = [limit for limit in limits if limit is not None]
    return min(known) if known else None


def _available_of_machine() -> int | None:
    try:
        with open("/proc/meminfo", encoding="ascii") as lines:
            found = next((line for line in lines if line.startswith("MemAvailable:")), None)
    except OSError:
        found = None
    if found is not None:
        return int(found.split()[1]) * 1024
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError, AttributeError):
        return None


def _left_in_container() -> int | None:
    """What the control group of a container leaves, when it has a limit; cached files are given up under pressure."""
    folder = Path("/sys/fs/cgroup")
    try:
        limit = (folder / "memory.max").read_text(encoding="ascii").strip()
        used = (folder / "memory.current").read_text(encoding="ascii")
        parts = dict(line.split() for line in (folder / "memory.stat").read_text(encoding="ascii").splitlines())
    except OSError:
        return None
    if limit == "max":
        return None
    return max(0, int(limit) - int(used) + int(parts.get("inactive_file", 0)))


def _gib(count: int) -> str:
    return f"{count / 2**30:.2f} GiB"
