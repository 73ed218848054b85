"""Pieces of the 4-bit kernels: words to operands, scales, which part of K a program takes, the end of a tile."""

from __future__ import annotations

import triton
import triton.language as tl

# What both languages, Triton and its gluon, take a word of eight codes apart with.
UNPACK_BF16 = tl.constexpr("""{
    .reg .b32 a, b, c;
    shr.b32 a, $4, 4;
    shr.b32 b, $4, 8;
    shr.b32 c, $4, 12;
    lop3.b32 $0, $4, 0x000f000f, 0x43004300, 0xea;
    lop3.b32 $1, a, 0x000f000f, 0x43004300, 0xea;
    lop3.b32 $2, b, 0x000f000f, 0x43004300, 0xea;
    lop3.b32 $3, c, 0x000f000f, 0x43004300, 0xea;
}""")
# The same with fewer integer instructions, which start half as often as others: a byte of two codes under 0x67 is
# 1792 + byte in fp16; times 2^-13 (1 - 2^-8), plus 3.28125, that is 3.5 + (byte - 7 - byte / 256) * 2^-13 and rounds to
# 3.5 + upper code * 2^-9, whose bits in fp16 are those of 128 + upper code in bf16.
UNPACK_BF16_FMA = tl.constexpr("""{
    .reg .b32 low, high, scale, base;
    mov.b32 scale, 0x07f807f8;
    mov.b32 base, 0x42904290;
    lop3.b32 low, $4, 0x00ff00ff, 0x67006700, 0xea;
    prmt.b32 high, $4, 0x67006700, 0x5351;
    lop3.b32 $0, $4, 0x000f000f, 0x43004300, 0xea;
    fma.rn.f16x2 $1, low, scale, base;
    lop3.b32 $2, high, 0x000f000f, 0x43004300, 0xea;
    fma.rn.f16x2 $3, high, scale, base;
}""")
UNPACK_FP16 = tl.constexpr("""{
    .reg .b32 a;
    shr.b32 a, $4, 8;
    lop3.b32 $0, $4, 0x000f000f, 0x64006400, 0xea;
    lop3.b32 $1, $4, 0x00f000f0, 0x64006400, 0xea;
    lop3.b32 $2, a, 0x000f000f, 0x64006400, 0xea;
    lop3.b32 $3, a, 0x00f000f0, 0x64006400, 0xea;
}""")


@triton.jit
def _unpack_bf16(q, FMA: tl.constexpr):
    """Eight codes of a word to four words of two bf16 each, 128 + code, exact: (h, r) = 00, 10, 01, 11; FMA: how."""
    return tl.inline_asm_elementwise(
        asm=UNPACK_BF16_FMA if FMA else UNPACK_BF16,
        constraints="=r,=r,=r,=r,r", args=[q], dtype=(tl.int32, tl.int32, tl.int32, tl.int32), is_pure=True, pack=1,
    )  # fmt: skip


@triton.jit
def _unpack_fp16(q):
    """As `_unpack_bf16` in fp16: 1024 + code in rows h = 0, 1024 + 16 * code in rows h = 1 (one shift for all)."""
    return tl.inline_asm_elementwise(
        asm=UNPACK_FP16,
        constraints="=r,=r,=r,=r,r", args=[q], dtype=(tl.int32, tl.int32, tl.int32, tl.int32), is_pure=True, pack=1,
    )  # fmt: skip


@triton.jit
def _pair(words, dtype: tl.constexpr, PTX: tl.constexpr):
    """The two values (j = 0, 1) of each word: 16-bit floats, or codes in bits 0 and 16 of the portable form."""
    if PTX:
        low = words.to(tl.int16).to(dtype, bitcast=True)
        high = (words >> 16).to(tl.int16).to(dtype, bitcast=True)
    else:
        low = (words & 15).to(dtype)
        high = ((words >> 16) & 15).to(dtype)
    return tl.join(low, high)


@triton.jit
def codes_tile(
    q, dtype: tl.constexpr, PTX: tl.constexpr, NB: tl.constexpr, KC: tl.constexpr, KB: tl.constexpr, FMA: tl.constexpr
):
    """Words [NB, KC*32*KB] to codes [16*NB, 16*KC*KB] in `dtype`; the PTX forms add a power of two (MAGIC)."""
    if PTX:
        if dtype == tl.bfloat16:
            w0, w1, w2, w3 = _unpack_bf16(q, FMA)
        else:
            w0, w1, w2, w3 = _unpack_fp16(q)
    else:
        w0, w1, w2, w3 = q, q >> 4, q >> 8, q >> 12
    first = tl.join(_pair(w0, dtype, PTX), _pair(w1, dtype, PTX))
    second = tl.join(_pair(w2, dtype, PTX), _pair(w3, dtype, PTX))
    w = tl.reshape(tl.join(first, second), (NB, KC, 8, 4, KB, 2, 2, 2))  # nb kc g t kb j h r
    return tl.reshape(tl.trans(w, 0, 6, 2, 1, 4, 7, 3, 5), (NB * 16, KC * KB * 16))  # (nb h g), (kc kb r t j)


@triton.jit
def two_chunks(a, b, NB: tl.constexpr):
    """Words of two neighbouring chunks of 64 k, [NB, 2*128]."""
    return tl.reshape(tl.trans(tl.join(a, b), 0, 2, 1), (NB, 256))


@triton.jit
def half_chunk(a, half: tl.constexpr, NB: tl.constexpr):
    """Words of the first or second 32 k of a chunk, [NB, 64]."""
    first, second = tl.split(tl.trans(tl.reshape(a, (NB, 32, 2, 2)), 0, 1, 3, 2))
    return tl.reshape(first if half == 0 else second, (NB, 64))


@triton.jit
def half_to_float(bits, FP16: tl.constexpr):
    """fp32 of the 16-bit float in the low half of int32 `bits`."""
    if FP16:
        return (bits & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    return (bits << 16).to(tl.float32, bitcast=True)


@triton.jit
def load_chunks(w_ptrs, step, STEP: tl.constexpr, DIRECT: tl.constexpr):
    """The words of a pass, chunks of 64 k; volatile keeps the compiler from staging them in shared memory."""
    at = w_ptrs + step * (STEP * 2)
    c0 = tl.load(at, volatile=DIRECT)
    c1 = tl.load(at + 128, volatile=DIRECT)
    if STEP == 128:
        return c0, c1, c0, c1
    return c0, c1, tl.load(at + 256, volatile=DIRECT), tl.load(at + 384, volatile=DIRECT)


@triton.jit
def unit_range(unit, tiles, tail_tiles, split, tail_split, padded_k):
    """(tile, run of parts, runs, first step, last step) of a program."""
    is_tail = unit >= tiles * split
    unit = tl.where(is_tail, unit - tiles * split, unit)
    across = tl.where(is_tail, tail_tiles, tiles)
    runs = tl.where(is_tail, tail_split, split)
    run = unit // across
    steps = padded_k // 256
    return tl.where(is_tail, tiles, 0) + unit % across, run, runs, run * steps // runs, (run + 1) * steps // runs


@triton.jit
def sum_parts(parts_ptr, at, mask, stride, PARTS: tl.constexpr):
    """The entries `at` of a product left in parts of `stride` entries each, added in order as `w4a16` adds them."""
    total = tl.load(parts_ptr + at, mask=mask, other=0.0)
    for part in tl.static_range(1, PARTS):
        total += tl.load(parts_ptr + part * stride + at, mask=mask, other=0.0)
    return total


@triton.jit
def store_tile(
    acc, out_ptr, bias_ptr, residual_ptr, tile, rows, n_out,
    BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
    SILU: tl.constexpr,
):  # fmt: skip
    """Bias, SiLU, residual, rounding and the store of one tile."""
    width: tl.constexpr = BLOCK_N // 2 if SILU else BLOCK_N
    offs_n = tile * width + tl.arange(0, width)
    offs_m = tl.arange(0, BLOCK_M)
    mask = (offs_n < n_out)[:, None] & (offs_m < rows)[None, :]
    if SILU:
        pair = tl.trans(tl.reshape(acc, (BLOCK_N // 16, 2, 8, BLOCK_M)), 0, 2, 3, 1)
        gate, up = tl.split(pair)
        y = tl.reshape(gate / (1.0 + tl.exp(-gate)) * up, (width, BLOCK_M))
    else:
        y = acc
    if HAS_BIAS:
        y += tl.load(bias_ptr + offs_n, mask=offs_n < n_out, other=0.0).to(tl.float32)[:, None]
    at = offs_m[None, :] * n_out + offs_n[:, None]
    if HAS_RESIDUAL:
        y += tl.load(residual_ptr + at, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + at, y.to(out_ptr.dtype.element_ty), mask=mask)
