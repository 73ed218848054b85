"""Where a call runs (kernel or definition), and the checks every public function shares."""

from __future__ import annotations

import functools
import os
from pathlib import Path

import torch
from torch import Tensor

MAX_ROWS = 64  # rows of a decoding step; more is a prefill
ROW_BUCKETS = (16, 32, 64)  # tile heights; 16 is the least a matrix instruction takes
MIN_CAPABILITY = (8, 0)


def interpreted() -> bool:
    """Whether Triton's interpreter runs the kernels (TRITON_INTERPRET=1 set before they were imported)."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def runs_kernel(x: Tensor) -> bool:
    """Whether a call on `x` takes the Triton kernel; otherwise the definition in torch runs.

    Raises ValueError on a GPU older than sm_80.
    """
    if not x.is_cuda:
        return interpreted()
    capability = device_capability(x.device.index)
    if capability < MIN_CAPABILITY:
        raise ValueError(f"x: device `{device_name(x.device.index)}` is sm_{capability[0]}{capability[1]}, "
                         f"the kernels need sm_80 or newer")  # fmt: skip
    return True


def wide(x: Tensor) -> Tensor:
    """x in the dtype of definitions: float32, float64 where it is that."""
    return x if x.dtype == torch.float64 else x.float()


def row_bucket(rows: int) -> int:
    """The least tile height that holds `rows`."""
    return next(bucket for bucket in ROW_BUCKETS if rows <= bucket)


@functools.cache
def device_capability(index: int) -> tuple[int, int]:
    return torch.cuda.get_device_capability(index)


@functools.cache
def device_name(index: int) -> str:
    return torch.cuda.get_device_name(index)


@functools.cache
def num_multiprocessors(index: int) -> int:
    return torch.cuda.get_device_properties(index).multi_processor_count


@functools.cache
def may_share_device() -> bool:
    """Whether another process' kernels may run beside ours on the GPU: NVIDIA's multi-process service is there."""
    return "CUDA_MPS_PIPE_DIRECTORY" in os.environ or Path("/tmp/nvidia-mps").exists()


def has_dependent_launch(x: Tensor) -> bool:
    """Whether programmatic dependent launch (sm_90) can overlap this kernel's start with its predecessor's end."""
    return x.is_cuda and device_capability(x.device.index)[0] >= 9


def check_tensor(
    name: str,
    tensor: Tensor,
    *,
    shape: tuple[int | None, ...],
    dtype: torch.dtype | tuple[torch.dtype, ...] | None = None,
    device: torch.device | None = None,
) -> None:
    """Raise ValueError naming `name` unless `tensor` is contiguous and has this shape (None = any), dtype, device."""
    fits = tensor.dim() == len(shape) and all(
        want is None or have == want for have, want in zip(tensor.shape, shape, strict=True)
    )
    if not fits:
        wanted = ", ".join("any" if size is None else str(size) for size in shape)
        raise ValueError(f"{name}: shape is {tuple(tensor.shape)}, expected ({wanted})")
    dtypes = (dtype,) if isinstance(dtype, torch.dtype) else dtype
    if dtypes is not None and tensor.dtype not in dtypes:
        raise ValueError(f"{name}: dtype is {tensor.dtype}, expected {' or '.join(map(str, dtypes))}")
    if device is not None and tensor.device != device:
        raise ValueError(f"{name}: device is {tensor.device}, expected {device}")
    if not tensor.is_contiguous():
        raise ValueError(f"{name}: not contiguous")
