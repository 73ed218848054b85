"""Pieces that the 4-bit kernels in Triton's gluon share: dependent launch, words to codes, a group with its scales."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from specq_kernels.w4_device import UNPACK_BF16, UNPACK_BF16_FMA, UNPACK_FP16


@gluon.jit
def gdc_wait():
    gl.inline_asm_elementwise("griddepcontrol.wait; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def gdc_launch_dependents():
    gl.inline_asm_elementwise(
        "griddepcontrol.launch_dependents; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def unpack(q, dtype: gl.constexpr, FMA: gl.constexpr):
    """Words [...] to codes [..., 2, 2, 2] (j, h, r) plus the magic power of two."""
    w0, w1, w2, w3 = gl.inline_asm_elementwise(
        UNPACK_FP16 if dtype == gl.float16 else UNPACK_BF16_FMA if FMA else UNPACK_BF16, "=r,=r,=r,=r,r", [q],
        dtype=(gl.int32, gl.int32, gl.int32, gl.int32), is_pure=True, pack=1,
    )  # fmt: skip
    return gl.join(gl.join(pair(w0, dtype), pair(w1, dtype)), gl.join(pair(w2, dtype), pair(w3, dtype)))


@gluon.jit
def pair(words, dtype: gl.constexpr):
    """The two 16-bit floats of each word."""
    low = words.to(gl.int16).to(dtype, bitcast=True)
    high = (words >> 16).to(gl.int16).to(dtype, bitcast=True)
    return gl.join(low, high)


@gluon.jit
def half(bits, SCALE_FP16: gl.constexpr):
    """fp32 of the 16-bit float in the low half of int32 `bits`."""
    if SCALE_FP16:
        return (bits & 0xFFFF).to(gl.int16).to(gl.float16, bitcast=True).to(gl.float32)
    return (bits << 16).to(gl.float32, bitcast=True)


@gluon.jit
def add_group(
    acc, d, word, factor, inverse, sums,
    MAGIC: gl.constexpr, FORM: gl.constexpr, SCALE_FP16: gl.constexpr, AXIS: gl.constexpr,
):  # fmt: skip
    """acc [..., columns, rows] plus a group's product d, whose codes carry MAGIC, by its word of scales.

    `word`, `factor` and `inverse` [..., columns], sums of x [..., rows]; columns are axis AXIS.
    """
    scale = half(word, SCALE_FP16) * inverse
    if FORM == 0:
        shift = MAGIC + 8.0 * factor
    elif FORM == 1:
        shift = MAGIC + ((word >> 16) & 0xFFFF).to(gl.float32) * factor
    else:
        shift = MAGIC + 0.0 * factor
    sums = sums.expand_dims(AXIS)
    acc = acc + (d - shift.expand_dims(AXIS + 1) * sums) * scale.expand_dims(AXIS + 1)
    if FORM == 2:
        acc = acc + half(word >> 16, SCALE_FP16).expand_dims(AXIS + 1) * sums
    return acc


@gluon.jit
def store_columns(
    y, out_ptr, bias_ptr, residual_ptr, first, rows, n_out,
    HAS_BIAS: gl.constexpr, HAS_RESIDUAL: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """y [columns, rows], in LAYOUT, to the columns from `first` on of the result: bias, residual, rounding, store."""
    offs_n = first + gl.arange(0, y.shape[0], gl.SliceLayout(1, LAYOUT))
    offs_m = gl.arange(0, y.shape[1], gl.SliceLayout(0, LAYOUT))
    mask = (offs_n < n_out).expand_dims(1) & (offs_m < rows).expand_dims(0)
    if HAS_BIAS:
        y += gl.load(bias_ptr + offs_n, mask=offs_n < n_out, other=0.0).to(gl.float32).expand_dims(1)
    at = offs_m.expand_dims(0) * n_out + offs_n.expand_dims(1)
    if HAS_RESIDUAL:
        y += gl.load(residual_ptr + at, mask=mask, other=0.0).to(gl.float32)
    gl.store(out_ptr + at, y.to(out_ptr.dtype.element_ty), mask=mask)
