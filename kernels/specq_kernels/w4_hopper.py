"""The 4-bit product on Hopper with warps of separate roles (sm_90): one loads, one to four groups of four multiply.

The same numbers as `_w4a16_kernel` bit for bit: same parts of K, same form of the scales, instructions that add alike.
A program takes tiles of 256 columns, or of 128 columns and then two programs run on a multiprocessor; the loader brings
codes, scales, x and its sums into shared memory, 256 k a stage, also those of the next tile while one ends, and each of
the `groups` of four warps unpacks and multiplies its share of the columns, 64 or two halves of 64. Where a run has
several parts of K, their sums so far wait in shared memory. Groups of 128 k, one level.
"""

from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from specq_kernels import configs
from specq_kernels.launch import may_share_device, num_multiprocessors
from specq_kernels.w4_gluon import gdc_launch_dependents, gdc_wait
from specq_kernels.w4_hopper_device import (
    add_runs,
    add_together,
    codes,
    finish_rows,
    keep,
    recall,
    run_places,
    scaled,
)
from specq_kernels.w4_layout import FORMS, W4Weight

REGISTERS = {  # by (groups, halves): a thread's as launched, and then those of each group but the first
    (1, 2): (128, 0),
    (2, 2): (168, 240),
    (2, 1): (80, 104),
    (4, 1): (96, 112),
}
X_LAYOUT = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
CODES_LAYOUT = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)  # warps read 512 bytes in a row
LINE_LAYOUT = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=1)
KEPT_LAYOUT = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0]))  # of the sums of a run's parts so far
LEAST_SUMS = gl.constexpr(32)  # of a copy: its place in shared memory is a multiple of 128 bytes
SHARED = 228 * 1024  # bytes of a multiprocessor, of which each program takes 1 KB beside its own
ENDS = 5 * 1024  # bytes in which a group turns its end of a tile, of programs of 128 columns at most


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
    folds: bool,
) -> None:
    """Fill `out` with the product; arguments as `w4a16` prepares them.

    `config` says block_n (128 or 256), stages, `groups` (block_n / 128 where it does not say), `sync`: whether to
    multiply by `mma.sync`, which pays up to 16 rows, and `together`: whether all programs of a tile add its runs, each
    some rows, instead of the one that ends last. They wait for each other, so this is done only where all units run at
    once, one stream at a time and no other process beside. Raises ValueError where no program has such groups.
    """
    (rows, k), (padded_n, padded_k), block_m, block_n = x.shape, weight.padded, config["block_m"], config["block_n"]
    tiles, tail_tiles, split, tail_split = units
    groups, halves = groups_of(config)
    registers, later = REGISTERS[groups, halves]
    words, meta = weight.packed.view(padded_n // 16, padded_k * 2), weight.meta.view(-1)
    count = tiles * split + tail_tiles * tail_split
    slots = num_multiprocessors(x.device.index) * programs_at_once(config)
    most = max(split, tail_split)
    at_once = count <= slots and not may_share_device()
    together = adds and most > 1 and bool(config.get("together")) and at_once
    _w4a16_hopper_kernel[(min(count, slots),)](
        TensorDescriptor(x, [rows, k], [k, 1], [block_m, 128], X_LAYOUT),
        TensorDescriptor(words, list(words.shape), [padded_k * 2, 1], [block_n // 16, 256], CODES_LAYOUT),
        TensorDescriptor(meta, [meta.numel()], [1], [block_n], LINE_LAYOUT),
        TensorDescriptor(sums.view(-1), [sums.numel()], [1], [max(block_m, LEAST_SUMS.value)], LINE_LAYOUT),
        bias if bias is not None else out, residual if residual is not None else out, out,
        partials, weight.counters, rows, out.shape[-1], padded_n, padded_k, *units, *parts,
        BLOCK_M=block_m, STAGES=stages_of(config, folds=folds), MOST=configs.split_bound(most),
        FORM=FORMS.index(weight.form), SCALE_FP16=weight.scale_dtype == torch.float16, HAS_BIAS=bias is not None,
        HAS_RESIDUAL=residual is not None, SILU=weight.is_gate_up, GROUPS=groups, HALVES=halves, LATER=later, ADDS=adds,
        FOLDS=folds, TOGETHER=together, SYNC=bool(config.get("sync")), FMA=bool(config.get("fma")),
        num_warps=4, launch_pdl=True, maxnreg=registers,
    )  # fmt: skip


def groups_of(config: configs.Config) -> tuple[int, int]:
    """(multiplying groups of a program, halves of 64 columns of each); ValueError where no program has such."""
    groups = config.get("groups", config["block_n"] // 128)
    halves = config["block_n"] // 64 // groups
    if (groups, halves) not in REGISTERS or groups * halves * 64 != config["block_n"]:
        raise ValueError(f"config: {groups} groups do not share {config['block_n']} columns in w4_hopper")
    return groups, halves


def programs_at_once(config: configs.Config) -> int:
    """Programs that one multiprocessor holds."""
    return 2 if config["block_n"] == 128 else 1


def stages_of(config: configs.Config, *, folds: bool) -> int:
    """Stages of a program: as many as it asks for and shared memory has room for, with or without sums put aside."""
    block_m, block_n = config["block_m"], config["block_n"]
    stage = 2 * (block_n * 64 + block_n * 4 + block_m * 256 + max(block_m, LEAST_SUMS.value) * 4) + 16
    kept = block_n * block_m * 4 if folds else 0
    room = SHARED // programs_at_once(config) - 1024 - groups_of(config)[0] * ENDS - kept
    return min(config["stages"], room // stage)


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
    w_desc, meta_desc, w_smem, meta_smem, full, stage, tile, step, padded_n,
    BLOCK_M: gl.constexpr, FORM: gl.constexpr, BLOCKS: gl.constexpr,
):  # fmt: skip
    """Ask 256 k of codes and their scales into a stage, whose barrier then waits for them, x and its sums."""
    SUMS: gl.constexpr = BLOCK_M if BLOCK_M > LEAST_SUMS else LEAST_SUMS
    WORDS: gl.constexpr = 1 if FORM == 0 else 2  # symmetric scales of two groups share a word
    mbarrier.expect(full.index(stage), BLOCKS * (2048 + 64 * WORDS) + BLOCK_M * 512 + SUMS * 8)
    for j in gl.static_range(2):
        to = w_smem.index(stage * 2 + j)
        tma.async_copy_global_to_shared(w_desc, [tile * BLOCKS, step * 512 + j * 256], full.index(stage), to)
    for j in gl.static_range(WORDS):
        at = (step * WORDS + j) * padded_n + tile * (BLOCKS * 16)
        tma.async_copy_global_to_shared(meta_desc, [at], full.index(stage), meta_smem.index(stage * WORDS + j))


@gluon.jit
def _load_x(x_desc, sums_desc, x_smem, sums_smem, full, stage, step, BLOCK_M: gl.constexpr):
    """Ask 256 k of x and their sums into a stage."""
    for j in gl.static_range(2):
        group = step * 2 + j
        tma.async_copy_global_to_shared(x_desc, [0, group * 128], full.index(stage), x_smem.index(stage * 2 + j))
        to = sums_smem.index(stage * 2 + j)
        tma.async_copy_global_to_shared(sums_desc, [group * BLOCK_M], full.index(stage), to)


@gluon.jit
def _load(
    x_desc, w_desc, meta_desc, sums_desc, x_smem, w_smem, meta_smem, sums_smem, full, empty,
    padded_n, tiles, tail_tiles, split, tail_split, padded_k,
    BLOCK_M: gl.constexpr, STAGES: gl.constexpr, FORM: gl.constexpr, BLOCKS: gl.constexpr,
):  # fmt: skip
    """Codes of the first stages before the kernel ahead has ended, x after it; then both as stages become free."""
    units = tiles * split + tail_tiles * tail_split
    tile, _, _, first, last = _unit_range(gl.program_id(0), tiles, tail_tiles, split, tail_split, padded_k)
    count = gl.minimum(last - first, STAGES)
    for i in range(count):
        _load_codes(w_desc, meta_desc, w_smem, meta_smem, full, i, tile, first + i, padded_n, BLOCK_M, FORM, BLOCKS)
    gdc_wait()
    for i in range(count):
        _load_x(x_desc, sums_desc, x_smem, sums_smem, full, i, first + i, BLOCK_M)
    done = 0  # steps of earlier units
    for unit in range(gl.program_id(0), units, gl.num_programs(0)):
        tile, _, _, first, last = _unit_range(unit, tiles, tail_tiles, split, tail_split, padded_k)
        begin = gl.where(unit == gl.program_id(0), count, 0)
        for i in range(begin, last - first):
            stage = (done + i) % STAGES
            mbarrier.wait(empty.index(stage), ((done + i) // STAGES + 1) & 1)
            step = first + i
            _load_codes(w_desc, meta_desc, w_smem, meta_smem, full, stage, tile, step, padded_n, BLOCK_M, FORM, BLOCKS)
            _load_x(x_desc, sums_desc, x_smem, sums_smem, full, stage, step, BLOCK_M)
        done += last - first


@gluon.jit
def _multiply(
    GROUP: gl.constexpr, x_smem, w_smem, meta_smem, sums_smem, kept_smem, full, empty, bias_ptr, residual_ptr,
    out_ptr, partial_ptr, counter_ptr, rows, n_out, padded_n, tiles, tail_tiles, split, tail_split, parts, tail_parts,
    padded_k,
    BLOCK_M: gl.constexpr, STAGES: gl.constexpr, MOST: gl.constexpr, FORM: gl.constexpr, SCALE_FP16: gl.constexpr,
    HAS_BIAS: gl.constexpr, HAS_RESIDUAL: gl.constexpr, SILU: gl.constexpr, GROUPS: gl.constexpr, HALVES: gl.constexpr,
    ADDS: gl.constexpr, FOLDS: gl.constexpr, TOGETHER: gl.constexpr, SYNC: gl.constexpr, FMA: gl.constexpr,
):  # fmt: skip
    """64 * HALVES columns of each of a program's units; a run's parts are added where its sums lie, then the runs."""
    MMA: gl.constexpr = (
        gl.NVMMADistributedLayout([2, 0], [4, 1], [16, 8]) if SYNC
        else gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 16])
    )  # fmt: skip
    units = tiles * split + tail_tiles * tail_split
    done = 0  # steps of earlier units
    gdc_wait()  # x, partials and counters are the kernel ahead's until then
    for unit in range(gl.program_id(0), units, gl.num_programs(0)):
        tile, run, runs, first, last = _unit_range(unit, tiles, tail_tiles, split, tail_split, padded_k)
        place = tile * GROUPS + GROUP  # of these columns
        column = place * (64 * HALVES)
        if FOLDS:
            of_tile = gl.where(tile < tiles, parts, tail_parts)
            begin = run * of_tile // runs
            end = (run + 1) * of_tile // runs
            acc_a = gl.zeros([64, BLOCK_M], gl.float32, MMA)
            acc_b = gl.zeros([64, BLOCK_M], gl.float32, MMA)
            for part in range(begin, end):
                start = part * (padded_k // 256) // of_tile
                acc_a, acc_b = _sum_groups(
                    GROUP, x_smem, w_smem, meta_smem, sums_smem, full, empty, start,
                    (part + 1) * (padded_k // 256) // of_tile, done + start - first,
                    BLOCK_M, STAGES, FORM, SCALE_FP16, HALVES, SYNC, FMA, MMA,
                )  # fmt: skip
                if part > begin:
                    acc_a = recall(kept_smem.index(GROUP * HALVES), acc_a)
                    if HALVES == 2:
                        acc_b = recall(kept_smem.index(GROUP * HALVES + 1), acc_b)
                if part + 1 < end:
                    keep(kept_smem.index(GROUP * HALVES), acc_a)
                    if HALVES == 2:
                        keep(kept_smem.index(GROUP * HALVES + 1), acc_b)
        else:
            acc_a, acc_b = _sum_groups(
                GROUP, x_smem, w_smem, meta_smem, sums_smem, full, empty, first, last, done,
                BLOCK_M, STAGES, FORM, SCALE_FP16, HALVES, SYNC, FMA, MMA,
            )  # fmt: skip
        done += last - first
        if GROUP == 0:  # noqa: SIM102 - decided when compiling, the next one when running
            if unit + gl.num_programs(0) >= units:  # before, the next kernel's programs would be in the way
                gdc_launch_dependents()
        is_last = True
        if not ADDS:
            _store(acc_a, acc_b, partial_ptr, run, rows, column, padded_n, BLOCK_M, HALVES, False, MMA)
            if run == runs - 1:  # tiles of fewer runs than others
                zero = gl.zeros([64, BLOCK_M], gl.float32, MMA)
                for missing in range(runs, gl.maximum(split, tail_split)):
                    _store(zero, zero, partial_ptr, missing, rows, column, padded_n, BLOCK_M, HALVES, False, MMA)
        elif MOST > 1:  # noqa: SIM102 - decided when compiling, the next one when running
            if runs > 1:
                _store(acc_a, acc_b, partial_ptr, run, rows, column, padded_n, BLOCK_M, HALVES, True, MMA)
                gl.thread_barrier()  # every thread's sums are written before the arrival is counted
                arrived = gl.atomic_add(counter_ptr + place, 1, sem="acq_rel")
                if TOGETHER:
                    is_last = False
                    add_together(
                        run, runs, counter_ptr + place, column, bias_ptr, residual_ptr, out_ptr, partial_ptr, rows,
                        n_out, padded_n, BLOCK_M, MOST, HAS_BIAS, HAS_RESIDUAL, SILU, HALVES,
                    )  # fmt: skip
                else:
                    is_last = arrived == runs - 1
                    if is_last:
                        gl.store(counter_ptr + place, 0)
                        acc_a = add_runs(partial_ptr, runs, column, padded_n, BLOCK_M, MOST, MMA)
                        if HALVES == 2:
                            acc_b = add_runs(partial_ptr, runs, column + 64, padded_n, BLOCK_M, MOST, MMA)
        if ADDS and is_last:
            finish_rows(acc_a, out_ptr, bias_ptr, residual_ptr, column, rows, n_out,
                        BLOCK_M, HAS_BIAS, HAS_RESIDUAL, SILU)  # fmt: skip
            if HALVES == 2:
                finish_rows(acc_b, out_ptr, bias_ptr, residual_ptr, column + 64, rows, n_out,
                            BLOCK_M, HAS_BIAS, HAS_RESIDUAL, SILU)  # fmt: skip


@gluon.jit
def _store(
    acc_a, acc_b, partial_ptr, run, rows, column, padded_n,
    BLOCK_M: gl.constexpr, HALVES: gl.constexpr, ADDS: gl.constexpr, MMA: gl.constexpr,
):  # fmt: skip
    """A run's sums of one or two halves of 64 columns to their places."""
    places, has_place = run_places(partial_ptr, run, rows, column, padded_n, BLOCK_M, ADDS, MMA)
    gl.store(places, acc_a, mask=has_place)
    if HALVES == 2:
        gl.store(places + (64 * BLOCK_M if ADDS else 64), acc_b, mask=has_place)


@gluon.jit
def _product(w, x, zero, SYNC: gl.constexpr):
    """w [64, 128] times x [128, BLOCK_M] of registers, done (`mma.sync`), or of shared memory, begun (`wgmma`)."""
    if SYNC:
        return mma_v2(w, x, zero)
    else:
        return warpgroup_mma(w, x, zero, use_acc=False, is_async=True)


@gluon.jit
def _before(stage, STAGES: gl.constexpr):
    """The stage used before this one."""
    return gl.where(stage == 0, STAGES - 1, stage - 1)


@gluon.jit
def _sum_groups(
    GROUP: gl.constexpr, x_smem, w_smem, meta_smem, sums_smem, full, empty, first, last, done,
    BLOCK_M: gl.constexpr, STAGES: gl.constexpr, FORM: gl.constexpr, SCALE_FP16: gl.constexpr,
    HALVES: gl.constexpr, SYNC: gl.constexpr, FMA: gl.constexpr, MMA: gl.constexpr,
):  # fmt: skip
    """The sums [64, BLOCK_M] of one or two halves of 64 columns over some steps of a unit, `done` groups before.

    A stage is given back a turn later, when all that was read from it has been used: a barrier lets reads under way
    pass, and the copy of the next contents can overtake them.
    """
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    WORDS: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 128]], [[0, 4], [0, 8], [0, 16], [0, 32], [0, 64]], [[1, 0], [2, 0]], [], [4, 256]
    )
    COLUMNS: gl.constexpr = gl.SliceLayout(1, MMA)
    ROWS: gl.constexpr = gl.SliceLayout(0, MMA)
    BLOCK: gl.constexpr = GROUP * HALVES * 4  # of 16 columns
    dtype: gl.constexpr = x_smem.dtype
    acc_a = gl.zeros([64, BLOCK_M], gl.float32, MMA)
    acc_b = gl.zeros([64, BLOCK_M], gl.float32, MMA)
    zero = gl.zeros([64, BLOCK_M], gl.float32, MMA)
    stage = done % STAGES
    phase = (done // STAGES) & 1
    for step in range(first, last):
        mbarrier.arrive(empty.index(_before(stage, STAGES)), count=1, pred=step > first)
        mbarrier.wait(full.index(stage), phase)
        for j in gl.static_range(2):
            words = w_smem.index(stage * 2 + j)
            scales = meta_smem.index(stage if FORM == 0 else stage * 2 + j)
            x = x_smem.index(stage * 2 + j).permute([1, 0])
            if SYNC:
                x = x.load(gl.DotOperandLayout(1, MMA, 2))
            scale_a = scales.slice(BLOCK * 16, 64).load(COLUMNS)  # read before the product, not behind it
            sums = sums_smem.index(stage * 2 + j).slice(0, BLOCK_M).load(ROWS)
            d_a = _product(codes(words.slice(BLOCK, 4, 0).load(WORDS), dtype, FMA, OPERAND), x, zero, SYNC)
            if HALVES == 2:
                scale_b = scales.slice(BLOCK * 16 + 64, 64).load(COLUMNS)
                d_b = _product(codes(words.slice(BLOCK + 4, 4, 0).load(WORDS), dtype, FMA, OPERAND), x, zero, SYNC)
                if not SYNC:
                    d_a = warpgroup_mma_wait(1, deps=[d_a])
                acc_a = scaled(acc_a, d_a, scale_a, sums, j, dtype, FORM, SCALE_FP16, MMA)
                if not SYNC:  # acc_a is added while the second half multiplies
                    d_b, acc_a = warpgroup_mma_wait(0, deps=[d_b, acc_a])
                acc_b = scaled(acc_b, d_b, scale_b, sums, j, dtype, FORM, SCALE_FP16, MMA)
            else:
                if not SYNC:
                    d_a = warpgroup_mma_wait(0, deps=[d_a])
                acc_a = scaled(acc_a, d_a, scale_a, sums, j, dtype, FORM, SCALE_FP16, MMA)
        stage += 1
        wraps = stage == STAGES
        stage = gl.where(wraps, 0, stage)
        phase = gl.where(wraps, phase ^ 1, phase)
    mbarrier.arrive(empty.index(_before(stage, STAGES)), count=1, pred=last > first)
    return acc_a, acc_b


@gluon.jit(do_not_specialize=["rows", "tiles", "tail_tiles", "split", "tail_split", "parts", "tail_parts"])
def _w4a16_hopper_kernel(
    x_desc, w_desc, meta_desc, sums_desc, bias_ptr, residual_ptr, out_ptr, partial_ptr, counter_ptr,
    rows, n_out, padded_n, padded_k, tiles, tail_tiles, split, tail_split, parts, tail_parts,
    BLOCK_M: gl.constexpr, STAGES: gl.constexpr, MOST: gl.constexpr, FORM: gl.constexpr, SCALE_FP16: gl.constexpr,
    HAS_BIAS: gl.constexpr, HAS_RESIDUAL: gl.constexpr, SILU: gl.constexpr, GROUPS: gl.constexpr, HALVES: gl.constexpr,
    LATER: gl.constexpr, ADDS: gl.constexpr, FOLDS: gl.constexpr, TOGETHER: gl.constexpr, SYNC: gl.constexpr,
    FMA: gl.constexpr,
):  # fmt: skip
    """Units, tiles [64 * HALVES * GROUPS, BLOCK_M] of W x.T over one run of K, one after another in each program; as
    many programs as run at once. Arguments and units as in `_w4a16_kernel`."""
    BLOCKS: gl.constexpr = GROUPS * HALVES * 4  # of 16 columns
    SUMS: gl.constexpr = BLOCK_M if BLOCK_M > LEAST_SUMS else LEAST_SUMS
    w_smem = gl.allocate_shared_memory(gl.int32, [STAGES * 2, BLOCKS, 256], w_desc.layout)
    x_smem = gl.allocate_shared_memory(x_desc.dtype, [STAGES * 2, BLOCK_M, 128], x_desc.layout)
    WORDS: gl.constexpr = STAGES if FORM == 0 else STAGES * 2
    meta_smem = gl.allocate_shared_memory(gl.int32, [WORDS, BLOCKS * 16], meta_desc.layout)
    sums_smem = gl.allocate_shared_memory(gl.float32, [STAGES * 2, SUMS], sums_desc.layout)
    kept_smem = sums_smem  # not read where no parts are folded
    if FOLDS:
        kept_smem = gl.allocate_shared_memory(gl.float32, [GROUPS * HALVES, BLOCK_M // 8, 128, 4], KEPT_LAYOUT)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=GROUPS)
    fence_async_shared()
    if GROUPS == 4:
        gl.warp_specialize(
            [
                (_multiply, (0, x_smem, w_smem, meta_smem, sums_smem, kept_smem, full, empty, bias_ptr, residual_ptr,
                             out_ptr, partial_ptr, counter_ptr, rows, n_out, padded_n, tiles, tail_tiles, split,
                             tail_split, parts, tail_parts, padded_k, BLOCK_M, STAGES, MOST, FORM, SCALE_FP16, HAS_BIAS,
                             HAS_RESIDUAL, SILU, GROUPS, HALVES, ADDS, FOLDS, TOGETHER, SYNC, FMA)),
                (_multiply, (1, x_smem, w_smem, meta_smem, sums_smem, kept_smem, full, empty, bias_ptr, residual_ptr,
                             out_ptr, partial_ptr, counter_ptr, rows, n_out, padded_n, tiles, tail_tiles, split,
                             tail_split, parts, tail_parts, padded_k, BLOCK_M, STAGES, MOST, FORM, SCALE_FP16, HAS_BIAS,
                             HAS_RESIDUAL, SILU, GROUPS, HALVES, ADDS, FOLDS, TOGETHER, SYNC, FMA)),
                (_multiply, (2, x_smem, w_smem, meta_smem, sums_smem, kept_smem, full, empty, bias_ptr, residual_ptr,
                             out_ptr, partial_ptr, counter_ptr, rows, n_out, padded_n, tiles, tail_tiles, split,
                             tail_split, parts, tail_parts, padded_k, BLOCK_M, STAGES, MOST, FORM, SCALE_FP16, HAS_BIAS,
                             HAS_RESIDUAL, SILU, GROUPS, HALVES, ADDS, FOLDS, TOGETHER, SYNC, FMA)),
                (_multiply, (3, x_smem, w_smem, meta_smem, sums_smem, kept_smem, full, empty, bias_ptr, residual_ptr,
                             out_ptr, partial_ptr, counter_ptr, rows, n_out, padded_n, tiles, tail_tiles, split,
                             tail_split, parts, tail_parts, padded_k, BLOCK_M, STAGES, MOST, FORM, SCALE_FP16, HAS_BIAS,
                             HAS_RESIDUAL, SILU, GROUPS, HALVES, ADDS, FOLDS, TOGETHER, SYNC, FMA)),
                (_load, (x_desc, w_desc, meta_desc, sums_desc, x_smem, w_smem, meta_smem, sums_smem, full, empty,
                         padded_n, tiles, tail_tiles, split, tail_split, padded_k, BLOCK_M, STAGES, FORM, BLOCKS)),
            ],
            [4, 4, 4, 1],
            [LATER, LATER, LATER, 24],
        )  # fmt: skip
    elif GROUPS == 2:
        gl.warp_specialize(
            [
                (_multiply, (0, x_smem, w_smem, meta_smem, sums_smem, kept_smem, full, empty, bias_ptr, residual_ptr,
                             out_ptr, partial_ptr, counter_ptr, rows, n_out, padded_n, tiles, tail_tiles, split,
                             tail_split, parts, tail_parts, padded_k, BLOCK_M, STAGES, MOST, FORM, SCALE_FP16, HAS_BIAS,
                             HAS_RESIDUAL, SILU, GROUPS, HALVES, ADDS, FOLDS, TOGETHER, SYNC, FMA)),
                (_multiply, (1, x_smem, w_smem, meta_smem, sums_smem, kept_smem, full, empty, bias_ptr, residual_ptr,
                             out_ptr, partial_ptr, counter_ptr, rows, n_out, padded_n, tiles, tail_tiles, split,
                             tail_split, parts, tail_parts, padded_k, BLOCK_M, STAGES, MOST, FORM, SCALE_FP16, HAS_BIAS,
                             HAS_RESIDUAL, SILU, GROUPS, HALVES, ADDS, FOLDS, TOGETHER, SYNC, FMA)),
                (_load, (x_desc, w_desc, meta_desc, sums_desc, x_smem, w_smem, meta_smem, sums_smem, full, empty,
                         padded_n, tiles, tail_tiles, split, tail_split, padded_k, BLOCK_M, STAGES, FORM, BLOCKS)),
            ],
            [4, 1],
            [LATER, 24],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (_multiply, (0, x_smem, w_smem, meta_smem, sums_smem, kept_smem, full, empty, bias_ptr, residual_ptr,
                             out_ptr, partial_ptr, counter_ptr, rows, n_out, padded_n, tiles, tail_tiles, split,
                             tail_split, parts, tail_parts, padded_k, BLOCK_M, STAGES, MOST, FORM, SCALE_FP16, HAS_BIAS,
                             HAS_RESIDUAL, SILU, GROUPS, HALVES, ADDS, FOLDS, TOGETHER, SYNC, FMA)),
                (_load, (x_desc, w_desc, meta_desc, sums_desc, x_smem, w_smem, meta_smem, sums_smem, full, empty,
                         padded_n, tiles, tail_tiles, split, tail_split, padded_k, BLOCK_M, STAGES, FORM, BLOCKS)),
            ],
            [1],
            [24],
        )  # fmt: skip
