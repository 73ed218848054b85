"""How many bytes a model will take, known before any weight is read."""

from __future__ import annotations

import math
import os
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from specq.checkpoint import ModelSpec
from specq.errors import NotEnoughMemoryError
from specq.models.inventory import HEAD, expected_tensors

if TYPE_CHECKING:
    from specq.models.eagle import HeadSpec

PREFILL_ROWS = 512
HEAD_ROWS = 64
"""The most rows that run at once, and the most that get logits: they size the activations."""

SCALE_BYTES = 4
"""A scale and an offset of 16 bits each, for every row and group."""

CPU_COPIES = 2
"""A CPU keeps packed codes as they are for prompts and in torch's own layout for decoding."""

GPU_SCRATCH = 64 << 20
"""What a GPU needs beside what is counted: a matrix dequantised for a prompt, workspaces of cuBLAS, what is rounded up.

Measured with a 1B-shaped 4-bit model on an H200, prompt and graphs of every bucket and three ways to sample: 1839 MB
reserved, 1877 MB said; now 1872 are, as attention keeps fewer sums.
"""

KEY_PIECES, FOLDED_PIECES = 48, 16
FEW_ROWS = 64
"""Pieces of the keys whose attention is summed apart there, in fp32: of few rows (node, head), up to FEW_ROWS a kv
head, and of many (LEAVES, and a FOLDth of them; see `attention_config` in specq_kernels/tree_attention.py)."""

HEAD_RUNS = 4
"""Runs of K in which a packed head's product may be kept, in fp32, until they are added (the most a table has)."""


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
    spec: ModelSpec,
    *,
    dtype: torch.dtype,
    context: int,
    device: str = "cpu",
    packed: Collection[str] = (),
    lent: Collection[str] = (),
) -> MemoryEstimate:
    """What the model takes with a cache of `context` tokens, the matrices named in `packed` kept in their bits.

    Tensors that are `lent` by another model count there.
    """
    is_cpu = device == "cpu"
    group = 32 if spec.quantization is None else spec.quantization.group_size
    bits = 4 if spec.quantization is None else spec.quantization.bits
    weights = 0
    for name, shape in expected_tensors(spec).items():
        if name in lent:
            continue
        count = math.prod(shape)
        if name in packed:
            groups = shape[0] * max(1, shape[1] // group if group > 0 else 1)
            weights += (CPU_COPIES if is_cpu else 1) * (count * bits // 8 + SCALE_BYTES * groups)
        else:
            weights += count * dtype.itemsize
    widest = 2 * spec.intermediate + 4 * spec.hidden + 2 * spec.heads * spec.head_dim
    activations = PREFILL_ROWS * widest * dtype.itemsize + 2 * HEAD_ROWS * spec.vocab * 4
    if not is_cpu:
        rows = HEAD_ROWS * spec.heads
        sums = max(KEY_PIECES * min(rows, FEW_ROWS * spec.kv_heads), FOLDED_PIECES * rows)
        activations += GPU_SCRATCH + sums * spec.head_dim * 4
        if HEAD in packed:
            activations += HEAD_RUNS * HEAD_ROWS * spec.vocab * 4
    return MemoryEstimate(weights, context * kv_bytes_per_token(spec, dtype), activations)


def kv_bytes_per_token(spec: ModelSpec, dtype: torch.dtype) -> int:
    """Bytes of K and V of one token in all layers."""
    return 2 * spec.layers * spec.kv_heads * spec.head_dim * dtype.itemsize


def head_bytes_per_token(head: HeadSpec, dtype: torch.dtype) -> int:
    """Bytes an EAGLE head adds a token: its own K and V, and the features that the cache of its target keeps."""
    layers = 1 if head.feature_layers is None else len(head.feature_layers)
    return (2 * head.kv_heads * head.head_dim + layers * head.hidden) * dtype.itemsize


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
