"""What a GPU has left for a training run, and the error where that is too little."""

from __future__ import annotations

import torch

from specq.errors import NotEnoughMemoryError
from specq.models.memory import free_bytes

TRAINED_BYTES = 16
"""A trained parameter beside the one that computes: its fp32 weight, gradient and two moments."""

MEMORY_HINT = "end what else runs on that GPU, or take another one with --device cuda:N"

KEPT_PART, KEPT_FREE_PART = 4, 2
"""States of the target may take a quarter of a GPU, and half of what is free."""


def left_on(device: torch.device) -> int | None:
    """Bytes that this process can still use on a GPU, what torch holds without a use included; None on a CPU."""
    if device.type != "cuda":
        return None
    idle = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return (free_bytes(str(device)) or 0) + idle


def require_left(needed: int, what: str, *, device: torch.device, left: int | None, hint: str) -> None:
    """Raise NotEnoughMemoryError when `what` takes more bytes than are `left` (None: unknown)."""
    if left is not None and needed > left:
        raise NotEnoughMemoryError(
            f"{what} need `{needed / 2**30:.2f} GiB` and `{device}` has {left / 2**30:.2f} GiB free", hint=hint
        )


def states_budget(device: torch.device) -> int:
    """Bytes that kept states may take there. A CPU keeps none, and computes the same after a resumed run."""
    left = left_on(device)
    return 0 if left is None else budget(torch.cuda.mem_get_info(device)[1], left)


def budget(total: int, left: int) -> int:
    """Bytes for kept states on a GPU of `total` bytes with so many `left`."""
    return min(total // KEPT_PART, left // KEPT_FREE_PART)
