"""Whether products and decoding steps run on our Triton kernels: on a GPU they do, unless SPECQ_KERNELS says no.

Imports no Triton, which not every platform has.
"""

from __future__ import annotations

import os
from importlib.util import find_spec

import torch

from specq.errors import UsageError

VARIABLE = "SPECQ_KERNELS"
VALUES = ("reference", "triton")
MIN_CAPABILITY = (8, 0)
CUDA_DTYPES = (torch.float16, torch.bfloat16)
INTERPRETER_DTYPES = (torch.float16, torch.float32)  # bf16 arithmetic is wrong there


def asks_for_kernels(device: torch.device | str) -> bool:
    """Whether models on this device are to run on kernels: as SPECQ_KERNELS says, else on CUDA.

    On a CPU kernels run in Triton's interpreter only, which is for tests. Raises UsageError for a value that names
    nothing.
    """
    value = os.environ.get(VARIABLE) or ("triton" if torch.device(device).type == "cuda" else "reference")
    if value not in VALUES:
        raise UsageError(f"{VARIABLE} is `{value}`", hint=f"set it to {' or '.join(VALUES)}, or unset it")
    return value == "triton"


def why_no_kernels(dtype: torch.dtype, device: torch.device | str) -> str | None:
    """The reason why activations of this dtype do not run on our kernels there, or None."""
    device = torch.device(device)
    if device.type == "cuda":
        capability = torch.cuda.get_device_capability(device)
        if capability < MIN_CAPABILITY:
            return f"the GPU is sm_{capability[0]}{capability[1]}, they need sm_80 or newer"
        if find_spec("triton") is None:
            return "Triton is not installed"
        return None if dtype in CUDA_DTYPES else f"they do not run {dtype} on a GPU"
    if os.environ.get("TRITON_INTERPRET") != "1":
        return f"they do not run on `{device.type}` outside Triton's interpreter"
    return None if dtype in INTERPRETER_DTYPES else f"they do not run {dtype} in Triton's interpreter"
