"""Group-wise 4-bit product with activations of 8 bits: 1 to 64 rows of x on its grid times a packed 4-bit matrix.

x is rounded as in `round_rows`, by a kernel of its own that writes the integers; the matrix instruction multiplies
them by the codes of the same packed weight that `w4a16` reads, 32-bit integers a group of 128, and the scales of both
enter in fp32. One row, which is what a chain is drafted with, needs no matrix instruction: lanes multiply four bytes
at a time. So the result is that of `w4a16` on the rounded x but for the order of fp32 sums. Groups of 128, one
level. Split-K writes fp32 partials and the last program of a tile adds them in order. The engine runs one row only
(`is_faster`); 2 to 64 rows are kept for the measurement of r in docs/qspec.md.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from specq_kernels import configs
from specq_kernels.act_codes import Codes, round_codes
from specq_kernels.launch import (
    MAX_ROWS,
    check_tensor,
    has_dependent_launch,
    num_multiprocessors,
    row_bucket,
    runs_kernel,
)
from specq_kernels.round_rows import GROUP, MOST, round_rows_ref
from specq_kernels.w4_device import half_to_float, store_tile
from specq_kernels.w4_layout import FORMS, W4Weight
from specq_kernels.w4a8_row import w4a8_row_kernel
from specq_kernels.w4a16 import w4a16_ref


def takes(weight: W4Weight) -> bool:
    """Whether the kernel runs this weight: groups of 128 (or multiples, or rows) of one level."""
    return weight.group_size == GROUP and weight.form != "two-level"


def is_faster(x: Tensor, weight: W4Weight) -> bool:
    """Whether `w4a8` beats `w4a16` on rounded x: for one row, which needs no matrix instruction.

    A layer of 70B's shapes on an H200: 121 us against 139, rounding included; of 8B's 43 against 51. For more rows what
    it gains is less than rounding takes (`bench_w4a8`).
    """
    return x.shape[0] == 1 and takes(weight) and runs_kernel(x)


def w4a8(
    x: Tensor,
    weight: W4Weight,
    *,
    bits: int = 8,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    config: configs.Config | None = None,
) -> Tensor:
    """round_rows(x, bits) @ W.T + bias + residual, [rows, N], in `out_dtype` (x's when None); SiLU of a gate and up.

    x fp16 or bf16 [rows, K]; bias [N] and residual [rows, N] in x's dtype. `config` is for tuning.
    Raises ValueError naming the argument.
    """
    n, k = weight.shape
    n_out = n // 2 if weight.is_gate_up else n
    check_tensor("x", x, shape=(None, k), device=weight.device)
    rows = x.shape[0]
    for name, term, shape in (("bias", bias, (n_out,)), ("residual", residual, (rows, n_out))):
        if term is not None:
            check_tensor(name, term, shape=shape, dtype=x.dtype, device=x.device)
    if bits not in MOST:
        raise ValueError(f"bits: {bits} is not 8 or 4")
    if not takes(weight):
        raise ValueError(f"weight: groups of {weight.group_size}, {weight.form}, which the kernel does not run")
    if not runs_kernel(x):
        return w4a8_ref(x, weight, bits=bits, bias=bias, residual=residual, out_dtype=out_dtype)
    if not 1 <= rows <= MAX_ROWS:
        raise ValueError(f"x: {rows} rows, the kernel takes 1 to {MAX_ROWS}")
    out = torch.empty(rows, n_out, dtype=out_dtype or x.dtype, device=x.device)
    product_of(round_codes(x, weight.padded[1], bits=bits), weight, out, bias=bias, residual=residual, config=config)
    return out


def w4a8_ref(
    x: Tensor,
    weight: W4Weight,
    *,
    bits: int = 8,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """The definition: the product of dequantised weight and rounded x."""
    rounded, _ = round_rows_ref(x, bits=bits)
    return w4a16_ref(rounded, weight, bias=bias, residual=residual, out_dtype=out_dtype)


def product_of(
    x: Codes,
    weight: W4Weight,
    out: Tensor,
    *,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    config: configs.Config | None = None,
) -> None:
    """Fill `out` [rows, N] with the product of x's codes."""
    (codes, scales, sums), (padded_n, padded_k) = x, weight.padded
    bucket = codes.shape[0]
    terms = (bias if bias is not None else out, residual if residual is not None else out)
    flags: dict[str, Any] = {
        "HAS_BIAS": bias is not None,
        "HAS_RESIDUAL": residual is not None,
        "SILU": weight.is_gate_up,
    }
    flags |= {"FORM": FORMS.index(weight.form), "SCALE_FP16": weight.scale_dtype == torch.float16}
    flags |= {"PTX": out.is_cuda and torch.version.cuda is not None, "EARLY": has_dependent_launch(out)}
    if bucket == 1:
        chosen = config or row_config(padded_n, padded_k)
        w4a8_row_kernel[(padded_n // 16,)](
            codes.view(torch.int32), weight.packed, weight.meta, scales, sums, *terms, out, out.shape[1], padded_n,
            padded_k, GROUPS=chosen["groups"], STRIDE=1, **flags,
            **configs.launch_options(chosen, early=flags["EARLY"]),
        )  # fmt: skip
        return
    chosen = config or default_config(out, padded_n, padded_k)
    block_n, split = chosen["block_n"], max(1, min(chosen["split"], padded_k // 256))
    tiles = padded_n // block_n
    partials = torch.empty(split * bucket * padded_n if split > 1 else 1, dtype=torch.float32, device=out.device)
    _w4a8_kernel[(tiles * split,)](
        codes, weight.packed.view(torch.int8), weight.meta, scales, sums, *terms, out, partials, weight.counters,
        out.shape[0], out.shape[1], padded_n, padded_k, tiles, split, BLOCK_N=block_n, BLOCK_M=bucket,
        MOST=configs.split_bound(split), STAGES=chosen["stages"], **flags,
        **configs.launch_options(chosen, early=flags["EARLY"]),
    )  # fmt: skip


def row_config(n: int, k: int) -> configs.Config:
    """Groups a pass and warps of a program for one row: the fewer programs there are, the more each has under way."""
    programs = n // 16
    groups, warps = (32, 8) if programs <= 256 else (16, 8) if programs <= 2048 else (8, 4)
    return {"groups": min(groups, triton.next_power_of_2(k // 128)), "warps": warps}


def default_config(out: Tensor, n: int, k: int) -> configs.Config:
    """Tiles that fit 48 KB of shared memory, and K in as many parts as fill the device."""
    bucket = row_bucket(out.shape[0])
    split = 2 if not out.is_cuda else configs.default_split(n, k, num_multiprocessors(out.device.index))
    return {"split": split, "block_n": 64, "warps": 4, "stages": {16: 4, 32: 3, 64: 2}[bucket]}


@triton.jit
def _nibbles(q, PTX: tl.constexpr):
    """The low and the high nibbles of bytes, four a register."""
    if PTX:
        return tl.inline_asm_elementwise(
            asm="""{
            .reg .b32 a;
            shr.b32 a, $2, 4;
            and.b32 $0, $2, 0x0f0f0f0f;
            and.b32 $1, a, 0x0f0f0f0f;
            }""",
            constraints="=r,=r,r", args=[q], dtype=(tl.int8, tl.int8), is_pure=True, pack=4,
        )  # fmt: skip
    return q & 15, (q >> 4) & 15


@triton.jit
def _codes_of(q, NB: tl.constexpr, PTX: tl.constexpr):
    """Bytes [NB, 1024] of 128 k to codes [16*NB, 128], columns in the order of `round_codes`."""
    low, high = _nibbles(q, PTX)
    w = tl.reshape(tl.join(low, high), (NB, 2, 8, 4, 4, 4, 2))  # nb kc g t kb byte h
    return tl.reshape(tl.trans(w, 0, 6, 2, 1, 4, 3, 5), (NB * 16, 128))  # (nb h g), (kc kb t byte)


@triton.jit(do_not_specialize=["rows", "tiles", "split"])
def _w4a8_kernel(
    x_ptr, w_ptr, meta_ptr, scale_ptr, sums_ptr, bias_ptr, residual_ptr, out_ptr, partial_ptr, counter_ptr,
    rows, n_out, padded_n, padded_k, tiles, split,
    FORM: tl.constexpr, SCALE_FP16: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, MOST: tl.constexpr,
    STAGES: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, SILU: tl.constexpr,
    PTX: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """One tile [BLOCK_N, BLOCK_M] of W x.T over one part of K; layout of `w` and `meta` in w4_layout."""
    NB: tl.constexpr = BLOCK_N // 16
    WORDS: tl.constexpr = 1 if FORM == 0 else 2  # of a step of 256 k
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    tile = tl.program_id(0) % tiles
    part = tl.program_id(0) // tiles
    steps = padded_k // 256
    first = part * steps // split
    last = (part + 1) * steps // split
    w_ptrs = w_ptr + (tile * NB + tl.arange(0, NB)).to(tl.int64)[:, None] * (padded_k * 8) + tl.arange(0, 1024)[None, :]
    if EARLY:
        tl.extra.cuda.gdc_wait()
    offs_row = tl.arange(0, BLOCK_N)
    offs_m = tl.arange(0, BLOCK_M)
    x_ptrs = x_ptr + offs_m[:, None] * padded_k + tl.arange(0, 128)[None, :]
    acc = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
    for step in tl.range(first, last, num_stages=STAGES):
        meta_ptrs = meta_ptr + step * (WORDS * padded_n) + tile * BLOCK_N + offs_row
        word = tl.load(meta_ptrs)
        for j in tl.static_range(2):
            if FORM > 0 and j == 1:
                word = tl.load(meta_ptrs + padded_n)
            group = step * 2 + j
            w = _codes_of(tl.load(w_ptrs + group * 1024), NB, PTX)
            x = tl.load(x_ptrs + group * 128)
            d = tl.dot(w, tl.trans(x), out_dtype=tl.int32).to(tl.float32)
            sums = tl.load(sums_ptr + group * BLOCK_M + offs_m)
            x_scale = tl.broadcast_to(tl.load(scale_ptr + group * BLOCK_M + offs_m)[None, :], (BLOCK_N, BLOCK_M))
            scale = half_to_float(word >> (16 * j) if FORM == 0 else word, SCALE_FP16)
            scale = tl.broadcast_to(scale[:, None], (BLOCK_N, BLOCK_M))
            if FORM == 0:
                d = tl.fma(d, x_scale, tl.broadcast_to((-8.0 * sums)[None, :], (BLOCK_N, BLOCK_M)))
            elif FORM == 1:
                zero = ((word >> 16) & 0xFFFF).to(tl.float32)
                d = tl.fma(d, x_scale, -(zero[:, None] * sums[None, :]))
            else:
                d = d * x_scale
            acc = tl.fma(d, scale, acc)
            if FORM == 2:
                acc += half_to_float(word >> 16, SCALE_FP16)[:, None] * sums[None, :]

    is_last = True
    if MOST > 1:  # noqa: SIM102 - decided when compiling, the next one when running
        if split > 1:
            at = offs_m[None, :] * BLOCK_N + offs_row[:, None]
            tile_ptr = partial_ptr + tile * (BLOCK_M * BLOCK_N)
            tl.store(tile_ptr + part * (BLOCK_M * padded_n) + at, acc)
            tl.debug_barrier()  # every thread's partials are written before the arrival is counted
            is_last = tl.atomic_add(counter_ptr + tile, 1, sem="acq_rel") == split - 1
            if is_last:
                tl.store(counter_ptr + tile, 0)
                acc = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
                for p in tl.static_range(MOST):
                    acc += tl.load(tile_ptr + at, mask=(offs_m >= 0)[None, :] & (p < split), other=0.0)
                    tile_ptr += BLOCK_M * padded_n
    if is_last:
        store_tile(acc, out_ptr, bias_ptr, residual_ptr, tile, rows, n_out,
                    BLOCK_N, BLOCK_M, HAS_BIAS, HAS_RESIDUAL, SILU)  # fmt: skip
