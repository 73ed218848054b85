"""4-bit product for many rows (a prompt): chunks of the weight dequantised to x's dtype, then cuBLAS.

At 512 rows the product is bound by arithmetic, where cuBLAS is hard to beat and the dequantised chunk costs two passes
over the L2 or memory; the weight is rounded to 16 bits on the way, unlike in `w4a16`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from specq_kernels.launch import check_tensor, runs_kernel
from specq_kernels.w4_device import half_to_float
from specq_kernels.w4_layout import FORMS, W4Weight

CHUNK_BYTES = 64 << 20  # of dequantised weight at a time


def w4_prefill(x: Tensor, weight: W4Weight, *, bias: Tensor | None = None, residual: Tensor | None = None) -> Tensor:
    """x @ W.T + bias + residual in x's dtype, [rows, N] (gate and up: silu(gate) * up, [rows, N/2]), any rows.

    Raises ValueError naming the argument.
    """
    n, k = weight.shape
    check_tensor("x", x, shape=(None, k), device=weight.device)
    if weight.is_gate_up and (bias is not None or residual is not None):
        raise ValueError("bias: not taken by a gate and up matrix")
    padded_n = weight.padded[0]
    chunk = max(256, CHUNK_BYTES // (2 * k) // 256 * 256)
    if weight.is_gate_up:
        out = x.new_empty(x.shape[0], padded_n // 2)
        for first in range(0, padded_n, chunk):
            last = min(first + chunk, padded_n)
            pairs = (x @ w4_dequantize(weight, first, last, x.dtype).T).unflatten(1, (-1, 2, 8))
            gate, up = pairs.float().unbind(2)
            out[:, first // 2 : last // 2] = (torch.nn.functional.silu(gate) * up).flatten(1)
        return out[:, : n // 2].contiguous()
    out = x.new_empty(x.shape[0], n)
    for first in range(0, n, chunk):
        last = min(first + chunk, n)
        matrix = w4_dequantize(weight, first, -(-last // 128) * 128, x.dtype)[: last - first]
        out[:, first:last] = x @ matrix.T
    for term in (bias, residual):
        if term is not None:
            out += term
    return out


def w4_dequantize(weight: W4Weight, first: int, last: int, dtype: torch.dtype) -> Tensor:
    """Rows `first` to `last` (multiples of 128) in the packed order, [last - first, K] in `dtype`."""
    k = weight.shape[1]
    if not runs_kernel(weight.packed):
        return w4_dequantize_ref(weight, first, last, dtype)
    padded_n, padded_k = weight.padded
    out = torch.empty(last - first, k, dtype=dtype, device=weight.device)
    _dequantize_kernel[(triton.cdiv(last - first, 16), padded_k // 256)](
        weight.packed, weight.meta, out, first, last - first, k, padded_n, padded_k,
        GROUP=weight.group_size, FORM=FORMS.index(weight.form), SCALE_FP16=weight.scale_dtype == torch.float16,
    )  # fmt: skip
    return out


def w4_dequantize_ref(weight: W4Weight, first: int, last: int, dtype: torch.dtype) -> Tensor:
    """The definition."""
    return weight.padded_matrix()[first:last, : weight.shape[1]].to(dtype)


@triton.jit
def _dequantize_kernel(
    w_ptr, meta_ptr, out_ptr, first, num_rows, k_size, padded_n, padded_k,
    GROUP: tl.constexpr, FORM: tl.constexpr, SCALE_FP16: tl.constexpr,
):  # fmt: skip
    """16 rows by 256 k a program; layout of `w` and `meta` in w4_layout, out [num_rows, k_size]."""
    WORDS: tl.constexpr = 5 if FORM == 3 else (128 // GROUP if FORM == 0 else 256 // GROUP)
    block = tl.program_id(0)
    step = tl.program_id(1)
    row = tl.arange(0, 16)
    k = tl.arange(0, 256)
    within = k % 16
    lane = (row % 8)[:, None] * 4 + ((within % 8) // 2)[None, :]
    word_at = (k // 64)[None, :] * 128 + lane * 4 + ((k % 64) // 16)[None, :]
    bit = 4 * ((row // 8)[:, None] + 2 * (within // 8)[None, :]) + 16 * (within % 2)[None, :]
    words = tl.load(w_ptr + (first // 16 + block).to(tl.int64) * (padded_k * 2) + step * 512 + word_at)
    q = ((words >> bit) & 15).to(tl.float32)
    meta = meta_ptr + step.to(tl.int64) * (WORDS * padded_n) + (first + block * 16 + row)[:, None]
    group = (k // GROUP)[None, :]
    if FORM == 0:
        bits = tl.load(meta + (group // 2) * padded_n) >> (16 * (group % 2))
        w = half_to_float(bits, SCALE_FP16) * (q - 8.0)
    elif FORM == 3:
        top = tl.load(meta + group * 0)
        sub = (tl.load(meta + (1 + group // 4) * padded_n) >> (8 * (group % 4))) & 255
        low = (tl.load(meta + (3 + group // 4) * padded_n) >> (8 * (group % 4))) & 255
        scale = half_to_float(top, SCALE_FP16) * sub.to(tl.float32)
        w = scale * q - half_to_float(top >> 16, SCALE_FP16) * low.to(tl.float32)
    else:
        bits = tl.load(meta + group * padded_n)
        scale = half_to_float(bits, SCALE_FP16)
        if FORM == 1:
            w = scale * (q - ((bits >> 16) & 0xFFFF).to(tl.float32))
        else:
            w = scale * q + half_to_float(bits >> 16, SCALE_FP16)
    offs_k = step * 256 + k
    offs_n = block * 16 + row
    mask = (offs_n < num_rows)[:, None] & (offs_k < k_size)[None, :]
    tl.store(
        out_ptr + offs_n[:, None].to(tl.int64) * k_size + offs_k[None, :], w.to(out_ptr.dtype.element_ty), mask=mask
    )
