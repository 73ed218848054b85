"""Activations as bytes: x on its grid (`round_rows`), in the order in which the 8-bit product's lanes have their codes.

`round_codes` takes x in 16 bits, `norm_codes` what goes into an RMSNorm.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from specq_kernels.launch import check_tensor, has_dependent_launch, interpreted, row_bucket
from specq_kernels.norm_rope import rms_norm_ref
from specq_kernels.round_rows import GROUP, MOST, SCALE_BITS, grid_of, integers_ref

BLOCK = 1024

Codes = tuple[Tensor, Tensor, Tensor]


def round_codes(x: Tensor, padded_k: int, *, bits: int) -> Codes:
    """(codes, scales, sums) of x [rows, K] on its grid, as the product of a weight of so many columns reads them.

    codes int8 [bucket, padded K]: of every 64 columns that of 16b + 8r + 2t + j lies at 16b + 4t + 2j + r, where the
    matrix instruction has a lane's codes of the packed weight; of one row at 16t + 4b + 2j + r, as lanes load them.
    Scales, and sums of what x is rounded to, are fp32 [groups, bucket]. Rows beyond x's hold nothing of meaning.
    """
    rows = x.shape[0]
    codes, scales, sums = _empty(rows, padded_k, x.device)
    early = has_dependent_launch(x)
    options = {} if interpreted() else {"num_warps": 4, "launch_pdl": early}
    _round_codes_kernel[(rows, triton.cdiv(padded_k, BLOCK))](
        x, codes, scales, sums, x.shape[1], padded_k, MOST=MOST[bits], SCALE_BITS=SCALE_BITS[bits],
        STRIDE=codes.shape[0], BY_LANE=rows == 1, BLOCK=BLOCK, EARLY=early, **options,
    )  # fmt: skip
    return codes, scales, sums


def round_codes_ref(x: Tensor, padded_k: int, *, bits: int) -> Codes:
    """The definition, for x's rows only: codes [rows, padded K], scales and sums [groups, rows]."""
    padded = torch.nn.functional.pad(x, (0, padded_k - x.shape[1]))
    integers, scales = integers_ref(padded, bits=bits)
    order = integers.flatten(1).unflatten(1, (-1, 4, 2, 4, 2))  # of 64: kb r t j
    order = order.permute(0, 1, 4, 2, 5, 3) if x.shape[0] == 1 else order.permute(0, 1, 2, 4, 5, 3)
    return order.flatten(1).to(torch.int8), scales[..., 0].T, (integers.sum(-1) * scales[..., 0]).T


def norm_codes(x: Tensor, weight: Tensor, padded_k: int, *, eps: float, bits: int) -> Codes:
    """`round_codes` of x / rms(x) * weight, rounded to x's dtype first; x [rows, K], weight [K].

    Raises ValueError naming the argument.
    """
    check_tensor("x", x, shape=(None, None))
    if bits not in MOST:
        raise ValueError(f"bits: {bits} is not 8 or 4")
    rows, k = x.shape
    check_tensor("weight", weight, shape=(k,), device=x.device)
    codes, scales, sums = _empty(rows, padded_k, x.device)
    block = max(256, triton.next_power_of_2(padded_k))
    early = has_dependent_launch(x)
    options = {} if interpreted() else {"num_warps": min(16, max(4, block // 512)), "launch_pdl": early}
    _norm_codes_kernel[(rows,)](
        x, weight, codes, scales, sums, k, padded_k, eps, MOST=MOST[bits], SCALE_BITS=SCALE_BITS[bits],
        STRIDE=codes.shape[0], BY_LANE=rows == 1, BLOCK=block, EARLY=early, **options,
    )  # fmt: skip
    return codes, scales, sums


def norm_codes_ref(x: Tensor, weight: Tensor, padded_k: int, *, eps: float, bits: int) -> Codes:
    """The definition, for x's rows only."""
    return round_codes_ref(rms_norm_ref(x, weight, eps=eps)[0], padded_k, bits=bits)


def _empty(rows: int, padded_k: int, device: torch.device) -> Codes:
    bucket = 1 if rows == 1 else row_bucket(rows)
    codes = torch.empty(bucket, padded_k, dtype=torch.int8, device=device)
    scales, sums = torch.empty(2, padded_k // GROUP, bucket, dtype=torch.float32, device=device).unbind()
    return codes, scales, sums


@triton.jit
def _round_codes_kernel(
    x_ptr, code_ptr, scale_ptr, sums_ptr, k, padded_k,
    MOST: tl.constexpr, SCALE_BITS: tl.constexpr, STRIDE: tl.constexpr, BY_LANE: tl.constexpr, BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """BLOCK columns of one row a program; x [rows, k], codes [STRIDE, padded_k], scales and sums [groups, STRIDE]."""
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0)
    block = tl.program_id(1)
    offs = block * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row.to(tl.int64) * k + offs, mask=offs < k, other=0.0).to(tl.float32)
    _store_codes(x, code_ptr, scale_ptr, sums_ptr, row, block, padded_k, MOST, SCALE_BITS, STRIDE, BY_LANE, BLOCK)


@triton.jit
def _norm_codes_kernel(
    x_ptr, weight_ptr, code_ptr, scale_ptr, sums_ptr, k, padded_k, eps,
    MOST: tl.constexpr, SCALE_BITS: tl.constexpr, STRIDE: tl.constexpr, BY_LANE: tl.constexpr, BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """One row a program, its norm rounded to x's type first; the rest as above."""
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0)
    offs = tl.arange(0, BLOCK)
    weight = tl.load(weight_ptr + offs, mask=offs < k, other=0.0).to(tl.float32)
    if EARLY:
        tl.extra.cuda.gdc_wait()
    x = tl.load(x_ptr + row.to(tl.int64) * k + offs, mask=offs < k, other=0.0).to(tl.float32)
    y = x * (1.0 / tl.sqrt(tl.sum(x * x, 0) / k + eps)) * weight
    y = y.to(x_ptr.dtype.element_ty).to(tl.float32)
    _store_codes(y, code_ptr, scale_ptr, sums_ptr, row, 0, padded_k, MOST, SCALE_BITS, STRIDE, BY_LANE, BLOCK)


@triton.jit
def _store_codes(
    x, code_ptr, scale_ptr, sums_ptr, row, block, padded_k,
    MOST: tl.constexpr, SCALE_BITS: tl.constexpr, STRIDE: tl.constexpr, BY_LANE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Round x fp32 [BLOCK], a row's columns from block * BLOCK on, and store what `round_codes` says of it."""
    offs = block * BLOCK + tl.arange(0, BLOCK)
    integers, scale = grid_of(tl.reshape(x, (BLOCK // 128, 128)), MOST, SCALE_BITS)
    order = tl.reshape(integers, (BLOCK // 64, 4, 2, 4, 2))  # of 64: kb r t j
    order = tl.trans(order, 0, 3, 1, 4, 2) if BY_LANE else tl.trans(order, 0, 1, 3, 4, 2)
    tl.store(
        code_ptr + row.to(tl.int64) * padded_k + offs, tl.reshape(order, (BLOCK,)).to(tl.int8), mask=offs < padded_k
    )
    offs_g = block * (BLOCK // 128) + tl.arange(0, BLOCK // 128)
    at = offs_g * STRIDE + row
    scale = tl.reshape(scale, (BLOCK // 128,))
    tl.store(scale_ptr + at, scale, mask=offs_g < padded_k // 128)
    tl.store(sums_ptr + at, tl.sum(integers, 1) * scale, mask=offs_g < padded_k // 128)
