"""One row of bytes times a packed 4-bit matrix, without matrix unit, shared memory and split: `w4a8` launches it."""

from __future__ import annotations

import triton
import triton.language as tl

from specq_kernels.w4_device import half_to_float


@triton.jit
def w4a8_row_kernel(
    x_ptr, w_ptr, meta_ptr, scale_ptr, sums_ptr, bias_ptr, residual_ptr, out_ptr, n_out, padded_n, padded_k,
    FORM: tl.constexpr, SCALE_FP16: tl.constexpr, GROUPS: tl.constexpr, STRIDE: tl.constexpr, HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr, SILU: tl.constexpr, PTX: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """16 columns of the product with one row a program; bytes are multiplied four at a time, without matrix unit.

    x int32 [padded_k / 4] in the order of a lane (`round_codes`), w and meta as in w4_layout: of 64 k a lane has four
    words, whose low nibbles are of a column h = 0 and whose high ones of h = 1. Each pass takes GROUPS of 128 k, the
    words of the next are asked for before this one's are multiplied.
    """
    WORDS: tl.constexpr = 1 if FORM == 0 else 2  # of a step of 256 k
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    tile = tl.program_id(0)
    groups = padded_k // 128
    at = tl.arange(0, GROUPS * 128)
    w_ptrs = w_ptr + tile.to(tl.int64) * (padded_k * 2) + (at // 128) * 256 + at % 128
    x_ptrs = x_ptr + (at // 128) * 32 + at % 16
    inside = at // 128 < groups
    c0 = tl.load(w_ptrs, mask=inside, other=0)  # weights do not depend on the kernel before
    c1 = tl.load(w_ptrs + 128, mask=inside, other=0)
    if EARLY:
        tl.extra.cuda.gdc_wait()
    offs_g = tl.arange(0, GROUPS)
    column = tile * 16 + tl.arange(0, 32) // 4
    # Zeros in the layout of the sums below: others would pass through shared memory in every pass.
    acc_low = _lanes(c0.to(tl.float32) * 0.0, GROUPS)
    acc_high = acc_low
    for first in range(0, groups, GROUPS):
        inside = first + at // 128 < groups
        x0 = tl.load(x_ptrs + first * 32, mask=inside, other=0)
        x1 = tl.load(x_ptrs + first * 32 + 16, mask=inside, other=0)
        low = _dot4(c0 & 0x0F0F0F0F, x0, _dot4(c1 & 0x0F0F0F0F, x1, x0 * 0, PTX), PTX)
        high = _dot4(c0 & -0x0F0F0F10, x0, _dot4(c1 & -0x0F0F0F10, x1, x0 * 0, PTX), PTX)  # 16 times the codes
        inside = first + GROUPS + at // 128 < groups
        c0 = tl.load(w_ptrs + (first + GROUPS) * 256, mask=inside, other=0)
        c1 = tl.load(w_ptrs + (first + GROUPS) * 256 + 128, mask=inside, other=0)
        group = first + offs_g
        is_group = group < groups
        x_scale = tl.load(scale_ptr + group * STRIDE, mask=is_group, other=0.0)[None, :]
        shares = tl.load(sums_ptr + group * STRIDE, mask=is_group, other=0.0)[None, :] * 0.25  # four lanes have a group
        meta = meta_ptr + (group // 2 * (WORDS * padded_n))[None, :] + column[:, None]
        acc_low = _add_lanes(acc_low, low, meta, group, is_group, x_scale, shares, padded_n, FORM, SCALE_FP16, GROUPS)
        acc_high = _add_lanes(
            acc_high, high, meta + 8, group, is_group, x_scale * 0.0625, shares, padded_n, FORM, SCALE_FP16, GROUPS
        )
    low = tl.sum(tl.reshape(tl.sum(acc_low, 1), (8, 4)), 1)
    high = tl.sum(tl.reshape(tl.sum(acc_high, 1), (8, 4)), 1)
    offs_n = tile * (8 if SILU else 16) + tl.arange(0, 8)
    if SILU:
        _store_row(low / (1.0 + tl.exp(-low)) * high, out_ptr, bias_ptr, residual_ptr, offs_n, n_out,
                   HAS_BIAS, HAS_RESIDUAL)  # fmt: skip
    else:
        _store_row(low, out_ptr, bias_ptr, residual_ptr, offs_n, n_out, HAS_BIAS, HAS_RESIDUAL)
        _store_row(high, out_ptr, bias_ptr, residual_ptr, offs_n + 8, n_out, HAS_BIAS, HAS_RESIDUAL)


@triton.jit
def _dot4(a, b, c, PTX: tl.constexpr):
    """c plus the products of four unsigned bytes of a with four signed ones of b, all int32."""
    if PTX:
        return tl.inline_asm_elementwise(
            "dp4a.u32.s32 $0, $1, $2, $3;", "=r,r,r,r", [a, b, c], dtype=tl.int32, is_pure=True, pack=1
        )
    for i in tl.static_range(4):
        c += ((a >> (8 * i)) & 255) * ((b << (24 - 8 * i)) >> 24)
    return c


@triton.jit
def _lanes(words, GROUPS: tl.constexpr):
    """[32, GROUPS] sums of the four words that a lane has of each group."""
    return tl.sum(tl.trans(tl.reshape(words, (GROUPS, 32, 4)), 1, 0, 2), 2)


@triton.jit
def _add_lanes(
    acc, dots, meta, group, is_group, x_scale, sums, padded_n,
    FORM: tl.constexpr, SCALE_FP16: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """acc [32, GROUPS] of lanes plus their scaled share of each group's product."""
    d = _lanes(dots, GROUPS).to(tl.float32) * x_scale
    mask = is_group[None, :]
    if FORM == 0:
        word = tl.load(meta, mask=mask, other=0) >> (16 * (group % 2))[None, :]
        return acc + (d - 8.0 * sums) * half_to_float(word, SCALE_FP16)
    word = tl.load(meta + (group % 2)[None, :] * padded_n, mask=mask, other=0)
    if FORM == 1:
        return acc + (d - ((word >> 16) & 0xFFFF).to(tl.float32) * sums) * half_to_float(word, SCALE_FP16)
    return acc + d * half_to_float(word, SCALE_FP16) + half_to_float(word >> 16, SCALE_FP16) * sums


@triton.jit
def _store_row(y, out_ptr, bias_ptr, residual_ptr, offs_n, n_out, HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr):
    if HAS_BIAS:
        y += tl.load(bias_ptr + offs_n, mask=offs_n < n_out, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        y += tl.load(residual_ptr + offs_n, mask=offs_n < n_out, other=0.0).to(tl.float32)
    tl.store(out_ptr + offs_n, y.to(out_ptr.dtype.element_ty), mask=offs_n < n_out)
