"""The 4-bit product on Hopper with warps of separate roles (sm_90): one loads, one or two groups of four multiply.

The same numbers as `_w4a16_kernel` bit for bit: same parts of K, same instruction, same form of the scales. A program
takes tiles of 256 columns (or of 128 with one multiplying group, two programs a multiprocessor); the loader brings
codes and x into shared memory, also those of the next tile while one ends, and each group of four warps unpacks and
multiplies 128 columns in two halves. Groups of 128, one level.
"""

from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from specq_kernels import configs
from specq_kernels.launch import num_multiprocessors
from specq_kernels.w4_layout import FORMS, W4Weight

CODES_SWIZZLE = 0  # a warp reads 512 bytes in a row, which meets no bank twice; without, 8 KB are one copy


def launch(
    x: Tensor,
    weight: W4Weight,
    sums: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    out: Tensor,
    partials: Tensor,
    units: tuple[int, int, int, int],
    parts: tuple[int, int],
    config: configs.Config,
    *,
    adds: bool,
) -> None:
    """Fill `out` with the product; arguments as `w4a16` prepares them."""
    (rows, k), (padded_n, padded_k), block_m = x.shape, weight.padded, config["block_m"]
    tiles, tail_tiles, split, tail_split = units
    x_layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    w_layout = gl.NVMMASharedLayout(swizzle_byte_width=CODES_SWIZZLE, element_bitwidth=32, rank=2)
    codes = weight.packed.view(padded_n // 16, padded_k * 2)
    multipliers = config["block_n"] // 128
    slots = num_multiprocessors(x.device.index) * (1 if multipliers == 2 else 2)
    programs = min(tiles * split + tail_tiles * tail_split, slots)
    _w4a16_hopper_kernel[(programs,)](
        TensorDescriptor(x, [rows, k], [k, 1], [block_m, 128], x_layout),
        TensorDescriptor(codes, list(codes.shape), [padded_k * 2, 1], [8, 256], w_layout),
        weight.meta, sums, bias if bias is not None else out, residual if residual is not None else out, out,
        partials, weight.counters, rows, out.shape[-1], padded_n, padded_k, *units, *parts,
        BLOCK_M=block_m, STAGES=config["stages"], MOST=configs.split_bound(max(split, tail_split)),
        FORM=FORMS.index(weight.form), SCALE_FP16=weight.scale_dtype == torch.float16, HAS_BIAS=bias is not None,
        HAS_RESIDUAL=residual is not None, SILU=weight.is_gate_up, MULTIPLIERS=multipliers, ADDS=adds,
        FOLDS=parts[0] > split or parts[1] > tail_split,
        num_warps=4, launch_pdl=True, maxnreg=168 if multipliers == 2 else 128,
    )  # fmt: skip


@gluon.jit
def _gdc_wait():
    gl.inline_asm_elementwise("griddepcontrol.wait; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def _gdc_launch_dependents():
    gl.inline_asm_elementwise(
        "griddepcontrol.launch_dependents; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def _unit_range(unit, tiles, tail_tiles, split, tail_split, padded_k):
    """(tile, run of parts, runs, first step, last step) of a program, as in w4_device."""
    is_tail = unit >= tiles * split
    unit = gl.where(is_tail, unit - tiles * split, unit)
    across = gl.where(is_tail, tail_tiles, tiles)
    runs = gl.where(is_tail, tail_split, split)
    run = unit // across
    steps = padded_k // 256
    return gl.where(is_tail, tiles, 0) + unit % across, run, runs, run * steps // runs, (run + 1) * steps // runs


@gluon.jit
def _load_codes(
    w_desc, meta_ptr, w_smem, full, stage, tile, group, padded_n,
    BLOCK_M: gl.constexpr, FORM: gl.constexpr, MULTIPLIERS: gl.constexpr,
):  # fmt: skip
    """Ask 128 k of codes into a stage, whose barrier then waits for them and x, and their scales into the L2."""
    words: gl.constexpr = 1 if FORM == 0 else 2  # of a step of 256 k
    scales = meta_ptr + (group * words // 2) * padded_n + tile * (MULTIPLIERS * 128)
    num_bytes = gl.where((FORM == 0) & (group % 2 == 1), 0, MULTIPLIERS * 512)
    gl.inline_asm_elementwise(
        """{
        .reg .pred p;
        .reg .u32 lane;
        mov.u32 lane, %laneid;
        setp.eq.u32 p, lane, 0;
        setp.ne.and.u32 p, $2, 0, p;
        @p cp.async.bulk.prefetch.L2.global [$1], $2;
        mov.u32 $0, 0;
        }""",
        "=r,l,r", [scales, num_bytes], dtype=gl.int32, is_pure=False, pack=1)  # fmt: skip
    mbarrier.expect(full.index(stage), MULTIPLIERS * 8192 + BLOCK_M * 256)
    for i in gl.static_range(MULTIPLIERS):
        at = [(tile * MULTIPLIERS + i) * 8, group * 256]
        tma.async_copy_global_to_shared(w_desc, at, full.index(stage), w_smem.index(stage * MULTIPLIERS + i))


@gluon.jit
def _load(
    x_desc, w_desc, meta_ptr, x_smem, w_smem, full, empty, padded_n, tiles, tail_tiles, split, tail_split, padded_k,
    BLOCK_M: gl.constexpr, STAGES: gl.constexpr, FORM: gl.constexpr, MULTIPLIERS: gl.constexpr,
):  # fmt: skip
    """Codes of the first stages before the kernel ahead has ended, x after it; then both as stages become free."""
    units = tiles * split + tail_tiles * tail_split
    tile, _, _, first, last = _unit_range(gl.program_id(0), tiles, tail_tiles, split, tail_split, padded_k)
    count = gl.minimum((last - first) * 2, STAGES)
    for i in range(count):
        _load_codes(w_desc, meta_ptr, w_smem, full, i, tile, first * 2 + i, padded_n, BLOCK_M, FORM, MULTIPLIERS)
    _gdc_wait()
    for i in range(count):
        tma.async_copy_global_to_shared(x_desc, [0, first * 256 + i * 128], full.index(i), x_smem.index(i))
    done = 0  # groups of earlier units
    for unit in range(gl.program_id(0), units, gl.num_programs(0)):
        tile, _, _, first, last = _unit_range(unit, tiles, tail_tiles, split, tail_split, padded_k)
        begin = gl.where(unit == gl.program_id(0), count, 0)
        for i in range(begin, (last - first) * 2):
            stage = (done + i) % STAGES
            mbarrier.wait(empty.index(stage), ((done + i) // STAGES + 1) & 1)
            group = first * 2 + i
            _load_codes(w_desc, meta_ptr, w_smem, full, stage, tile, group, padded_n, BLOCK_M, FORM, MULTIPLIERS)
            at = [0, first * 256 + i * 128]
            tma.async_copy_global_to_shared(x_desc, at, full.index(stage), x_smem.index(stage))
        done += (last - first) * 2


@gluon.jit
def _codes(q, dtype: gl.constexpr, OPERAND: gl.constexpr):
    """Words [4, 256] of 64 rows and 128 k as the A operand [64, 128], codes plus the magic power of two."""
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
    first = gl.join(_pair(w0, dtype), _pair(w1, dtype))
    second = gl.join(_pair(w2, dtype), _pair(w3, dtype))
    w = gl.join(first, second).reshape([4, 2, 8, 4, 4, 2, 2, 2])  # nb kc g t kb j h r
    w = w.permute([0, 6, 2, 1, 4, 7, 3, 5]).reshape([64, 128])  # (nb h g), (kc kb r t j)
    return gl.convert_layout(w, OPERAND, assert_trivial=True)


@gluon.jit
def _pair(words, dtype: gl.constexpr):
    low = words.to(gl.int16).to(dtype, bitcast=True)
    high = (words >> 16).to(gl.int16).to(dtype, bitcast=True)
    return gl.join(low, high)


@gluon.jit
def _half(bits, SCALE_FP16: gl.constexpr):
    """fp32 of the 16-bit float in the low half of int32 `bits`."""
    if SCALE_FP16:
        return (bits & 0xFFFF).to(gl.int16).to(gl.float16, bitcast=True).to(gl.float32)
    return (bits << 16).to(gl.float32, bitcast=True)


@gluon.jit
def _words(meta, at, padded_n, FORM: gl.constexpr):
    """The two groups' words of 64 columns at a step of 256 k; symmetric scales of both share one."""
    word = gl.load(meta + at)
    if FORM == 0:
        return word, word >> 16
    return word, gl.load(meta + at + padded_n)


@gluon.jit
def _add(acc, d, word, factor, inverse, sums, MAGIC: gl.constexpr, FORM: gl.constexpr, SCALE_FP16: gl.constexpr):
    """acc [64, BLOCK_M] plus a group's product d, whose codes carry MAGIC, by its word of scales."""
    scale = _half(word, SCALE_FP16) * inverse
    if FORM == 0:
        shift = MAGIC + 8.0 * factor
    elif FORM == 1:
        shift = MAGIC + ((word >> 16) & 0xFFFF).to(gl.float32) * factor
    else:
        shift = MAGIC + 0.0 * factor
    sums = sums.expand_dims(0)
    acc = acc + (d - shift.expand_dims(1) * sums) * scale.expand_dims(1)
    if FORM == 2:
        acc = acc + _half(word >> 16, SCALE_FP16).expand_dims(1) * sums
    return acc


@gluon.jit
def _store_part(acc, part_ptr, column, rows, padded_n, BLOCK_M: gl.constexpr):
    """One part's 64 columns from `column` on, [rows, padded_n]."""
    wide: gl.constexpr = gl.BlockedLayout([4, 1], [16, 2], [1, 4], [0, 1])
    acc = gl.convert_layout(acc, wide)
    offs_n = column + gl.arange(0, 64, gl.SliceLayout(1, wide))
    offs_m = gl.arange(0, BLOCK_M, gl.SliceLayout(0, wide))
    at = offs_m.expand_dims(0) * padded_n + offs_n.expand_dims(1)
    gl.store(part_ptr + at, acc, mask=(offs_n >= 0).expand_dims(1) & (offs_m < rows).expand_dims(0))


@gluon.jit
def _finish(
    acc, out_ptr, bias_ptr, residual_ptr, row0, rows, n_out,
    BLOCK_M: gl.constexpr, HAS_BIAS: gl.constexpr, HAS_RESIDUAL: gl.constexpr, SILU: gl.constexpr,
):  # fmt: skip
    """Bias, SiLU, residual, rounding and the store of 64 columns from `row0` on."""
    WIDTH: gl.constexpr = 32 if SILU else 64
    y = acc
    if SILU:
        gate, up = gl.split(acc.reshape([4, 2, 8, BLOCK_M]).permute([0, 2, 3, 1]))
        y = (gate / (1.0 + gl.exp(-gate)) * up).reshape([32, BLOCK_M])
    wide: gl.constexpr = gl.BlockedLayout([4, 1], [WIDTH // 4, 128 // WIDTH], [1, 4], [0, 1])
    y = gl.convert_layout(y, wide)
    offs_n = row0 * WIDTH // 64 + gl.arange(0, WIDTH, gl.SliceLayout(1, wide))
    offs_m = gl.arange(0, BLOCK_M, gl.SliceLayout(0, wide))
    mask = (offs_n < n_out).expand_dims(1) & (offs_m < rows).expand_dims(0)
    if HAS_BIAS:
        y += gl.load(bias_ptr + offs_n, mask=offs_n < n_out, other=0.0).to(gl.float32).expand_dims(1)
    at = offs_m.expand_dims(0) * n_out + offs_n.expand_dims(1)
    if HAS_RESIDUAL:
        y += gl.load(residual_ptr + at, mask=mask, other=0.0).to(gl.float32)
    gl.store(out_ptr + at, y.to(out_ptr.dtype.element_ty), mask=mask)


@gluon.jit
def _multiply(
    WG: gl.constexpr, x_smem, w_smem, full, empty, meta_ptr, sums_ptr, bias_ptr, residual_ptr, out_ptr, partial_ptr,
    counter_ptr, rows, n_out, padded_n, tiles, tail_tiles, split, tail_split, parts, tail_parts, padded_k,
    BLOCK_M: gl.constexpr, STAGES: gl.constexpr, MOST: gl.constexpr, FORM: gl.constexpr, SCALE_FP16: gl.constexpr,
    HAS_BIAS: gl.constexpr, HAS_RESIDUAL: gl.constexpr, SILU: gl.constexpr, MULTIPLIERS: gl.constexpr,
    ADDS: gl.constexpr, FOLDS: gl.constexpr,
):  # fmt: skip
    """128 columns of each of a program's units; where K is split, the last to arrive adds the runs."""
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 16])
    offs_row = gl.arange(0, 64, gl.SliceLayout(1, MMA))
    offs_m = gl.arange(0, BLOCK_M, gl.SliceLayout(0, MMA))
    units = tiles * split + tail_tiles * tail_split
    done = 0  # groups of earlier units
    for unit in range(gl.program_id(0), units, gl.num_programs(0)):
        tile, run, runs, first, last = _unit_range(unit, tiles, tail_tiles, split, tail_split, padded_k)
        place = tile * MULTIPLIERS + WG  # of these 128 columns
        column = place * 128
        of_tile = gl.where(tile < tiles, parts, tail_parts)
        acc_a, acc_b = _sum_groups(
            WG, x_smem, w_smem, full, empty, meta_ptr + column + offs_row, sums_ptr + offs_m, padded_n, first, last,
            done, run * of_tile // runs, of_tile, padded_k // 256, BLOCK_M, STAGES, FORM, SCALE_FP16, MULTIPLIERS, MMA,
            FOLDS,
        )  # fmt: skip
        done += (last - first) * 2
        is_last = True
        if not ADDS:  # partials [runs, rows, padded_n]
            part_at = partial_ptr + run * rows * padded_n
            _store_part(acc_a, part_at, column, rows, padded_n, BLOCK_M)
            _store_part(acc_b, part_at, column + 64, rows, padded_n, BLOCK_M)
            if run == runs - 1:  # tiles of fewer runs than others
                for missing in range(runs, gl.maximum(split, tail_split)):
                    part_at = partial_ptr + missing * rows * padded_n
                    zeros = gl.zeros([64, BLOCK_M], gl.float32, MMA)
                    _store_part(zeros, part_at, column, rows, padded_n, BLOCK_M)
                    _store_part(zeros, part_at, column + 64, rows, padded_n, BLOCK_M)
        elif MOST > 1:  # noqa: SIM102 - decided when compiling, the next one when running
            if runs > 1:
                # partials [runs, padded_n, BLOCK_M]
                at = offs_row.expand_dims(1) * BLOCK_M + offs_m.expand_dims(0)
                tile_ptr = partial_ptr + place * (BLOCK_M * 128)
                gl.store(tile_ptr + run * (BLOCK_M * padded_n) + at, acc_a)
                gl.store(tile_ptr + run * (BLOCK_M * padded_n) + at + 64 * BLOCK_M, acc_b)
                gl.thread_barrier()  # every thread's partials are written before the arrival is counted
                arrived = gl.atomic_add(counter_ptr + place, 1, sem="acq_rel")
                is_last = arrived == runs - 1
                if is_last:
                    gl.store(counter_ptr + place, 0)
                    acc_a = gl.zeros([64, BLOCK_M], gl.float32, MMA)
                    acc_b = gl.zeros([64, BLOCK_M], gl.float32, MMA)
                    for p in gl.static_range(MOST):
                        is_run = (offs_row >= 0).expand_dims(1) & (p < runs)
                        acc_a += gl.load(tile_ptr + at, mask=is_run, other=0.0)
                        acc_b += gl.load(tile_ptr + at + 64 * BLOCK_M, mask=is_run, other=0.0)
                        tile_ptr += BLOCK_M * padded_n
        if ADDS and is_last:
            _finish(acc_a, out_ptr, bias_ptr, residual_ptr, column, rows, n_out,
                    BLOCK_M, HAS_BIAS, HAS_RESIDUAL, SILU)  # fmt: skip
            _finish(acc_b, out_ptr, bias_ptr, residual_ptr, column + 64, rows, n_out,
                    BLOCK_M, HAS_BIAS, HAS_RESIDUAL, SILU)  # fmt: skip


@gluon.jit
def _sum_groups(
    WG: gl.constexpr, x_smem, w_smem, full, empty, meta, sums_ptrs, padded_n, first, last, done,
    part, parts, steps, BLOCK_M: gl.constexpr, STAGES: gl.constexpr, FORM: gl.constexpr, SCALE_FP16: gl.constexpr,
    MULTIPLIERS: gl.constexpr, MMA: gl.constexpr, FOLDS: gl.constexpr,
):  # fmt: skip
    """The sums [64, BLOCK_M] of both halves of 128 columns over a unit's run of parts, from `part` on of `parts`."""
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    WORDS: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 128], [4, 0]], [[0, 4], [0, 8], [0, 16], [0, 32], [0, 64]], [[1, 0], [2, 0]], [], [8, 256]
    )
    dtype: gl.constexpr = x_smem.dtype
    MAGIC: gl.constexpr = 128.0 if dtype == gl.bfloat16 else 1024.0
    HIGH_ROWS: gl.constexpr = 1.0 if dtype == gl.bfloat16 else 16.0
    offs_row = gl.arange(0, 64, gl.SliceLayout(1, MMA))
    factor = gl.where(offs_row % 16 < 8, 1.0, HIGH_ROWS)
    inverse = gl.where(offs_row % 16 < 8, 1.0, 1.0 / HIGH_ROWS)
    acc_a = gl.zeros([64, BLOCK_M], gl.float32, MMA)
    acc_b = gl.zeros([64, BLOCK_M], gl.float32, MMA)
    zero = gl.zeros([64, BLOCK_M], gl.float32, MMA)
    total_a = zero
    total_b = zero
    row_words = padded_n * (1 if FORM == 0 else 2)  # of a step
    next_a = _words(meta, first * row_words, padded_n, FORM)
    next_b = _words(meta, first * row_words + 64, padded_n, FORM)
    _gdc_wait()  # sums of x are the kernel ahead's
    for step in range(first, last):
        words_a = next_a
        words_b = next_b
        ahead = gl.minimum(step + 1, last - 1) * row_words
        next_a = _words(meta, ahead, padded_n, FORM)
        next_b = _words(meta, ahead + 64, padded_n, FORM)
        for j in gl.static_range(2):
            i = done + (step - first) * 2 + j
            stage = i % STAGES
            sums = gl.load(sums_ptrs + (step * 2 + j) * BLOCK_M)
            mbarrier.wait(full.index(stage), (i // STAGES) & 1)
            q = w_smem.index(stage * MULTIPLIERS + WG).load(WORDS)
            q_a, q_b = gl.split(q.reshape([2, 4, 256]).permute([1, 2, 0]))
            x = x_smem.index(stage).permute([1, 0])
            w_a = _codes(q_a, dtype, OPERAND)
            d_a = warpgroup_mma(w_a, x, zero, use_acc=False, is_async=True)
            w_b = _codes(q_b, dtype, OPERAND)
            d_b = warpgroup_mma(w_b, x, zero, use_acc=False, is_async=True)
            d_a = warpgroup_mma_wait(1, deps=[d_a])
            acc_a = _add(acc_a, d_a, words_a[j], factor, inverse, sums, MAGIC, FORM, SCALE_FP16)
            d_b, acc_a = warpgroup_mma_wait(0, deps=[d_b, acc_a])  # acc_a is added while the second half multiplies
            mbarrier.arrive(empty.index(stage), count=1)
            acc_b = _add(acc_b, d_b, words_b[j], factor, inverse, sums, MAGIC, FORM, SCALE_FP16)
        if FOLDS:  # noqa: SIM102 - decided when compiling, the next one when running
            if step + 1 == (part + 1) * steps // parts:
                total_a += acc_a
                total_b += acc_b
                acc_a = zero
                acc_b = zero
                part += 1
    if FOLDS:
        return total_a, total_b
    return acc_a, acc_b


@gluon.jit(do_not_specialize=["rows", "tiles", "tail_tiles", "split", "tail_split", "parts", "tail_parts"])
def _w4a16_hopper_kernel(
    x_desc, w_desc, meta_ptr, sums_ptr, bias_ptr, residual_ptr, out_ptr, partial_ptr, counter_ptr,
    rows, n_out, padded_n, padded_k, tiles, tail_tiles, split, tail_split, parts, tail_parts,
    BLOCK_M: gl.constexpr, STAGES: gl.constexpr, MOST: gl.constexpr, FORM: gl.constexpr, SCALE_FP16: gl.constexpr,
    HAS_BIAS: gl.constexpr, HAS_RESIDUAL: gl.constexpr, SILU: gl.constexpr, MULTIPLIERS: gl.constexpr,
    ADDS: gl.constexpr, FOLDS: gl.constexpr,
):  # fmt: skip
    """Units, tiles [128 * MULTIPLIERS, BLOCK_M] of W x.T over one run of K, one after another in each program; as many
    programs as run at once. Arguments and units as in `_w4a16_kernel`."""
    dtype: gl.constexpr = x_desc.dtype
    _gdc_launch_dependents()
    w_smem = gl.allocate_shared_memory(gl.int32, [MULTIPLIERS * STAGES, 8, 256], w_desc.layout)
    x_smem = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_M, 128], x_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=MULTIPLIERS)
    fence_async_shared()
    if MULTIPLIERS == 2:
        gl.warp_specialize(
            [
                (_multiply, (0, x_smem, w_smem, full, empty, meta_ptr, sums_ptr, bias_ptr, residual_ptr, out_ptr,
                             partial_ptr, counter_ptr, rows, n_out, padded_n, tiles, tail_tiles, split, tail_split,
                             parts, tail_parts, padded_k, BLOCK_M, STAGES, MOST, FORM, SCALE_FP16, HAS_BIAS,
                             HAS_RESIDUAL, SILU, 2, ADDS, FOLDS)),
                (_multiply, (1, x_smem, w_smem, full, empty, meta_ptr, sums_ptr, bias_ptr, residual_ptr, out_ptr,
                             partial_ptr, counter_ptr, rows, n_out, padded_n, tiles, tail_tiles, split, tail_split,
                             parts, tail_parts, padded_k, BLOCK_M, STAGES, MOST, FORM, SCALE_FP16, HAS_BIAS,
                             HAS_RESIDUAL, SILU, 2, ADDS, FOLDS)),
                (_load, (x_desc, w_desc, meta_ptr, x_smem, w_smem, full, empty, padded_n, tiles, tail_tiles, split,
                         tail_split, padded_k, BLOCK_M, STAGES, FORM, 2)),
            ],
            [4, 1],
            [240, 24],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (_multiply, (0, x_smem, w_smem, full, empty, meta_ptr, sums_ptr, bias_ptr, residual_ptr, out_ptr,
                             partial_ptr, counter_ptr, rows, n_out, padded_n, tiles, tail_tiles, split, tail_split,
                             parts, tail_parts, padded_k, BLOCK_M, STAGES, MOST, FORM, SCALE_FP16, HAS_BIAS,
                             HAS_RESIDUAL, SILU, 1, ADDS, FOLDS)),
                (_load, (x_desc, w_desc, meta_ptr, x_smem, w_smem, full, empty, padded_n, tiles, tail_tiles, split,
                         tail_split, padded_k, BLOCK_M, STAGES, FORM, 1)),
            ],
            [1],
            [24],
        )  # fmt: skip
