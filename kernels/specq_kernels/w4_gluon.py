"""Pieces that the 4-bit kernels in Triton's gluon share: dependent launch, words to codes, a group with its scales."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def gdc_wait():
    gl.inline_asm_elementwise("griddepcontrol.wait; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def gdc_launch_dependents():
    gl.inline_asm_elementwise(
        "griddepcontrol.launch_dependents; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def unpack(q, dtype: gl.constexpr):
    """Words [...] to codes [..., 2, 2, 2] (j, h, r) plus the magic power of two."""
    if dtype == gl.bfloat16:
        w0, w1, w2, w3 = gl.inline_asm_elementwise(
            """{
            .reg .b32 a, b, c;
            shr.b32 a, $4, 4;
            shr.b32 b, $4, 8;
            shr.b32 c, $4, 12;
            lop3.b32 $0, $4, 0x000f000f, 0x43004300, 0xea;
            lop3.b32 $1, a, 0x000f000f, 0x43004300, 0xea;
            lop3.b32 $2, b, 0x000f000f, 0x43004300, 0xea;
            lop3.b32 $3, c, 0x000f000f, 0x43004300, 0xea;
            }""",
            "=r,=r,=r,=r,r", [q], dtype=(gl.int32, gl.int32, gl.int32, gl.int32), is_pure=True, pack=1)  # fmt: skip
    else:
        w0, w1, w2, w3 = gl.inline_asm_elementwise(
            """{
            .reg .b32 a;
            shr.b32 a, $4, 8;
            lop3.b32 $0, $4, 0x000f000f, 0x64006400, 0xea;
            lop3.b32 $1, $4, 0x00f000f0, 0x64006400, 0xea;
            lop3.b32 $2, a, 0x000f000f, 0x64006400, 0xea;
            lop3.b32 $3, a, 0x00f000f0, 0x64006400, 0xea;
            }""",
            "=r,=r,=r,=r,r", [q], dtype=(gl.int32, gl.int32, gl.int32, gl.int32), is_pure=True, pack=1)  # fmt: skip
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
