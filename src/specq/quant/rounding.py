"""The one law by which low-precision activations are rounded: symmetric, one scale for each row and 128 columns.

`a16` leaves activations as they are; `a8` and `a4` are what QSpec drafts with (arXiv 2410.11305). The kernel of the
same law is specq_kernels/round_rows.py, which has its own definition because this file needs no Triton.
"""

from __future__ import annotations

from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

Act = Literal["a16", "a8", "a4"]
"""Precision of the activations inside 4-bit products."""

FULL: Act = "a16"
MOST = {"a8": 127, "a4": 7}
"""The largest integer of each."""

SCALE_BITS = {"a8": 1, "a4": 5}
"""Significant bits of a scale: with those of the integer 8, so that their product is exact in bf16 and in fp16."""

GROUP = 128


def low_act(bits: int) -> Act:
    """The low precision of so many bits. Raises ValueError when there is none."""
    for act in get_args(Act)[1:]:
        if act == f"a{bits}":
            return act
    raise ValueError(f"bits: {bits} is not 8 or 4")


def round_rows(x: Tensor, act: str) -> Tensor:
    """x [..., K] as products of precision `act` read it, in x's dtype: integer times scale in groups of 128 columns.

    The scale is the group's largest |x| over 127 (or 7), rounded up to so few significant bits that every multiple of
    it is a number of x's dtype (fp16 below 2**-14 apart); integers are rounded half to even. The last group may be
    shorter. At the top of the dtype's range rounding up can leave it: in fp16, values of a group whose largest is over
    65024 (a8) or 64512 (a4) may become infinite, which only a draft ever reads. Raises ValueError for an unknown
    precision.
    """
    if act == FULL:
        return x
    if act not in MOST:
        raise ValueError(f"act: `{act}` is not one of {', '.join(get_args(Act))}")
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    columns = x.shape[-1]
    groups = F.pad(wide, (0, -columns % GROUP)).unflatten(-1, (-1, GROUP))
    largest = groups.abs().amax(-1, keepdim=True)
    # By a tensor, because a GPU multiplies by the inverse of a number.
    scale = round_up(largest / torch.full_like(largest, MOST[act]), SCALE_BITS[act])
    rounded = (groups / scale.where(scale > 0, torch.ones_like(scale))).round() * scale
    return rounded.flatten(-2)[..., :columns].to(x.dtype)


def round_up(x: Tensor, bits: int) -> Tensor:
    """Numbers x >= 0 (fp32 or fp64), each raised to the next with so many significant bits."""
    kind, mantissa = (torch.int32, 24) if x.dtype == torch.float32 else (torch.int64, 53)
    rest = (1 << (mantissa - bits)) - 1
    return ((x.contiguous().view(kind) + rest) & ~rest).view(x.dtype)
