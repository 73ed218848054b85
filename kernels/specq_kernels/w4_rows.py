"""The 4-bit product for few rows: weights go straight from memory to registers, all of K inside one program.

The same numbers as `_w4a16_kernel` bit for bit: `mma.sync` adds like `wgmma`, and the parts of K, which others spread
over programs, lie with the warps of one (several in a row with each). They meet in shared memory and are added in the
same order, so nothing is exchanged between programs. x comes in lane order (`sides`), so that a warp reads it as it
multiplies it; programs on one multiprocessor share it in the L1. Groups of 128, one level. Triton's gluon, sm_80 up.
"""

from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from specq_kernels import configs
from specq_kernels.group_sums import Sides
from specq_kernels.launch import num_multiprocessors
from specq_kernels.w4_gluon import add_group, gdc_launch_dependents, gdc_wait, pair, store_columns, unpack
from specq_kernels.w4_layout import FORMS, STEP, W4Weight


def launch(
    sides: Sides,
    weight: W4Weight,
    bias: Tensor | None,
    residual: Tensor | None,
    out: Tensor,
    config: configs.Config,
    *,
    rows: int,
    early: bool,
) -> None:
    """Fill `out` with the product of x, whose `sides` have lanes; arguments as `w4a16` prepares them."""
    sums, lanes = sides.sums, sides.lanes
    assert lanes is not None
    padded_n, padded_k = weight.padded
    k_warps, n_warps = config["k_warps"], config["n_warps"]
    split, _, _ = configs.split_of(config, n=padded_n, k=padded_k)
    parts, _ = configs.parts_of(config, n=padded_n, k=padded_k)
    options = {"maxnreg": config["registers"]} if config.get("registers") else {}
    programs = padded_n // (16 * config["blocks"] * n_warps)
    late = programs > num_multiprocessors(lanes.device.index)  # else the next kernel's find room beside these
    _w4_rows_kernel[(programs,)](
        lanes.view(torch.int32), weight.packed, weight.meta, sums, bias if bias is not None else out,
        residual if residual is not None else out, out, rows, out.shape[-1], padded_n, padded_k,
        BLOCKS=config["blocks"], BLOCK_M=config["block_m"], K_WARPS=k_warps, N_WARPS=n_warps, PARTS=parts // k_warps,
        SPLIT=split, STRIDE=sums.shape[1], FORM=FORMS.index(weight.form),
        SCALE_FP16=weight.scale_dtype == torch.float16, HAS_BIAS=bias is not None, HAS_RESIDUAL=residual is not None,
        SILU=weight.is_gate_up, EVEN=padded_k // STEP % k_warps == 0, FEW=rows < config["block_m"],
        HOLD=bool(config.get("hold", 1)), POLICY="evict_first" if config.get("once") else "",
        DTYPE=gl.bfloat16 if lanes.dtype == torch.bfloat16 else gl.float16, EARLY=early, LATE=late,
        FMA=bool(config.get("fma")), num_warps=k_warps * n_warps, launch_pdl=early, **options,
    )  # fmt: skip


@gluon.constexpr_function
def _bases(count, rank, axis, unit=1):
    """Bases of a layout that count in units up to `count` along an axis; zeros where `axis` is None."""
    found, at = [], 1
    while at < count:
        base = [0] * rank
        if axis is not None:
            base[axis] = at * unit
        found.append(base)
        at *= 2
    return found


@gluon.constexpr_function
def _words_layout(blocks, n_warps, k_warps):
    """Of a chunk's words [k_warps, blocks * n_warps, 128]: four in a row with each lane."""
    return gl.DistributedLinearLayout(
        [[0, 0, 1], [0, 0, 2], *_bases(blocks, 3, 1, n_warps)],
        [[0, 0, 4], [0, 0, 8], [0, 0, 16], [0, 0, 32], [0, 0, 64]],
        _bases(n_warps, 3, 1) + _bases(k_warps, 3, 0), [], [k_warps, blocks * n_warps, 128],
    )  # fmt: skip


@gluon.constexpr_function
def _x_layout(row_blocks, n_warps, k_warps):
    """Of a chunk's pairs of x [k_warps, row_blocks * 256]; warps of other columns hold the same."""
    return gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 128], *_bases(row_blocks, 2, 1, 256)],
        [[0, 4], [0, 8], [0, 16], [0, 32], [0, 64]],
        _bases(n_warps, 2, None) + _bases(k_warps, 2, 0), [], [k_warps, row_blocks * 256],
    )  # fmt: skip


@gluon.jit
def _codes(
    q, dtype: gl.constexpr, FMA: gl.constexpr, K_WARPS: gl.constexpr, BLOCKS: gl.constexpr, OPERAND: gl.constexpr
):
    """Words [K_WARPS, BLOCKS, 128] to codes [K_WARPS, BLOCKS * 16, 64] plus the magic power of two."""
    w = unpack(q, dtype, FMA).reshape([K_WARPS, BLOCKS, 8, 4, 4, 2, 2, 2])  # part nb g t kb j h r
    w = w.permute([0, 1, 6, 2, 4, 7, 3, 5]).reshape([K_WARPS, BLOCKS * 16, 64])  # part (nb h g) (kb r t j)
    return gl.convert_layout(w, OPERAND, assert_trivial=True)


@gluon.jit
def _x_tile(x, dtype: gl.constexpr, K_WARPS: gl.constexpr, ROW_BLOCKS: gl.constexpr, OPERAND: gl.constexpr):
    """Pairs of x [K_WARPS, ROW_BLOCKS * 256] in lane order to [K_WARPS, 64, ROW_BLOCKS * 8]."""
    x = pair(x, dtype).reshape([K_WARPS, ROW_BLOCKS, 2, 8, 4, 2, 2, 2])  # part mt kb1 g t kb0 r j
    x = x.permute([0, 2, 5, 6, 4, 7, 1, 3]).reshape([K_WARPS, 64, ROW_BLOCKS * 8])  # part (kb1 kb0 r t j) (mt g)
    return gl.convert_layout(x, OPERAND, assert_trivial=True)


@gluon.jit
def _words(meta, step, count, padded_n, FORM: gl.constexpr):
    """The two groups' words at a step of 256 k; symmetric scales of both share one."""
    inside = step < count
    if FORM == 0:
        word = gl.load(meta + step * padded_n, mask=inside, other=0)
        return word, word
    at = meta + step * 2 * padded_n
    return gl.load(at, mask=inside, other=0), gl.load(at + padded_n, mask=inside, other=0)


@gluon.jit
def _hold():
    """Loads asked for before are asked for here: the compiler would move them down to where they are used."""
    gl.inline_asm_elementwise("bar.warp.sync 0xffffffff; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit(do_not_specialize=["rows"])
def _w4_rows_kernel(
    x_ptr, w_ptr, meta_ptr, sums_ptr, bias_ptr, residual_ptr, out_ptr, rows, n_out, padded_n, padded_k,
    BLOCKS: gl.constexpr, BLOCK_M: gl.constexpr, K_WARPS: gl.constexpr, N_WARPS: gl.constexpr, PARTS: gl.constexpr,
    SPLIT: gl.constexpr, STRIDE: gl.constexpr, FORM: gl.constexpr, SCALE_FP16: gl.constexpr, HAS_BIAS: gl.constexpr,
    HAS_RESIDUAL: gl.constexpr, SILU: gl.constexpr, EVEN: gl.constexpr, FEW: gl.constexpr, HOLD: gl.constexpr,
    POLICY: gl.constexpr, DTYPE: gl.constexpr, EARLY: gl.constexpr, LATE: gl.constexpr, FMA: gl.constexpr,
):  # fmt: skip
    """BLOCKS * N_WARPS * 16 columns of W x.T a program; x int32 pairs in lane order, w and meta as in w4_layout.

    A warp takes BLOCKS blocks of 16 columns over one of K_WARPS equal shares of K, PARTS parts one after another. The
    words of 256 k and the x of 64 k ahead are under way while it multiplies.
    """
    ROW_BLOCKS: gl.constexpr = BLOCK_M // 8
    COLUMNS: gl.constexpr = BLOCKS * N_WARPS * 16
    MMA: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [K_WARPS, N_WARPS, 1], [1, 16, 8])
    A: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    B: gl.constexpr = gl.DotOperandLayout(1, MMA, 2)
    WORDS: gl.constexpr = _words_layout(BLOCKS, N_WARPS, K_WARPS)
    PAIRS: gl.constexpr = _x_layout(ROW_BLOCKS, N_WARPS, K_WARPS)
    MAGIC: gl.constexpr = 128.0 if gl.bfloat16 == DTYPE else 1024.0
    HIGH_ROWS: gl.constexpr = 1.0 if gl.bfloat16 == DTYPE else 16.0
    META_WORDS: gl.constexpr = 1 if FORM == 0 else 2
    if EARLY and not LATE:
        gdc_launch_dependents()
    tile = gl.program_id(0)
    steps = padded_k // 256
    most = gl.cdiv(steps, K_WARPS)

    share_w = gl.arange(0, K_WARPS, gl.SliceLayout(1, gl.SliceLayout(2, WORDS)))
    block = gl.arange(0, COLUMNS // 16, gl.SliceLayout(0, gl.SliceLayout(2, WORDS)))
    word = gl.arange(0, 128, gl.SliceLayout(0, gl.SliceLayout(1, WORDS)))
    w_at = (block * (padded_k * 2)).expand_dims(0).expand_dims(2) + word.expand_dims(0).expand_dims(1)
    w_at += (share_w * steps // K_WARPS * 512).expand_dims(1).expand_dims(2)
    w_ptrs = w_ptr + tile.to(gl.int64) * (COLUMNS // 8) * padded_k + w_at

    share_x = gl.arange(0, K_WARPS, gl.SliceLayout(1, PAIRS))
    pair = gl.arange(0, ROW_BLOCKS * 256, gl.SliceLayout(0, PAIRS))
    if FEW:  # rows beyond the last, in its block of eight, are read from its place
        row = pair // 16 % 8
        pair += (gl.minimum(pair // 256 * 8 + row, rows - 1) % 8 - row) * 16
    x_ptrs = x_ptr + (share_x * steps // K_WARPS * (1024 * ROW_BLOCKS)).expand_dims(1) + pair.expand_dims(0)

    share_n = gl.arange(0, K_WARPS, gl.SliceLayout(1, gl.SliceLayout(2, MMA)))
    column = gl.arange(0, COLUMNS, gl.SliceLayout(0, gl.SliceLayout(2, MMA)))
    meta = meta_ptr + (share_n * steps // K_WARPS * (padded_n * META_WORDS)).expand_dims(1)
    meta += (tile * COLUMNS + column).expand_dims(0)
    is_low = (column % 16 < 8).expand_dims(0) & (share_n >= 0).expand_dims(1)
    factor = gl.where(is_low, 1.0, HIGH_ROWS)
    inverse = gl.where(is_low, 1.0, 1.0 / HIGH_ROWS)

    share_m = gl.arange(0, K_WARPS, gl.SliceLayout(1, gl.SliceLayout(1, MMA)))
    offs_m = gl.arange(0, BLOCK_M, gl.SliceLayout(0, gl.SliceLayout(1, MMA)))
    sums_ptrs = sums_ptr + (share_m * steps // K_WARPS * (2 * STRIDE)).expand_dims(1) + offs_m.expand_dims(0)
    if EVEN:
        count_w, count_x, count_n, count_m = most, most, most, most
    else:  # shares of `most` steps and of one less
        count_w = _count(share_w, steps, K_WARPS).expand_dims(1).expand_dims(2) + w_at * 0
        count_x = _count(share_x, steps, K_WARPS).expand_dims(1) + (pair * 0).expand_dims(0)
        count_n = _count(share_n, steps, K_WARPS).expand_dims(1) + (column * 0).expand_dims(0)
        count_m = _count(share_m, steps, K_WARPS).expand_dims(1) + (offs_m * 0).expand_dims(0)

    q0 = gl.load(w_ptrs, eviction_policy=POLICY)  # weights do not depend on the kernel before
    q1 = gl.load(w_ptrs + 128, eviction_policy=POLICY)
    q2 = gl.load(w_ptrs + 256, eviction_policy=POLICY)
    q3 = gl.load(w_ptrs + 384, eviction_policy=POLICY)
    m0, n0 = _words(meta, 0, count_n, padded_n, FORM)
    m1, n1 = _words(meta, 1, count_n, padded_n, FORM)
    if EARLY:
        gdc_wait()
    x = gl.load(x_ptrs)
    sums = gl.load(sums_ptrs)
    zero = gl.zeros([K_WARPS, COLUMNS, BLOCK_M], gl.float32, MMA)
    acc = zero
    part0 = zero
    part1 = zero
    part2 = zero
    no_step = gl.zeros([K_WARPS, COLUMNS, BLOCK_M], gl.int32, MMA)
    for step in range(0, most):
        m2, n2 = _words(meta, step + 2, count_n, padded_n, FORM)
        d = zero
        for i in gl.static_range(4):  # chunks of 64 k
            q = q0 if i == 0 else q1 if i == 1 else q2 if i == 2 else q3
            chunk = step * 4 + i + 1
            if EVEN:
                next_x = gl.load(x_ptrs + gl.minimum(chunk, most * 4 - 1) * (256 * ROW_BLOCKS))
                next_q = gl.load(w_ptrs + gl.minimum(step + 1, most - 1) * 512 + i * 128, eviction_policy=POLICY)
            else:
                next_x = gl.load(x_ptrs + chunk * (256 * ROW_BLOCKS), mask=chunk < count_x * 4, other=0)
                next_q = gl.load(
                    w_ptrs + (step + 1) * 512 + i * 128, mask=step + 1 < count_w, other=0, eviction_policy=POLICY
                )
            if i == 0:
                q0 = next_q
            elif i == 1:
                q1 = next_q
            elif i == 2:
                q2 = next_q
            else:
                q3 = next_q
            if i % 2 == 0:
                group = step * 2 + i // 2 + 1
                if EVEN:
                    next_sums = gl.load(sums_ptrs + gl.minimum(group, most * 2 - 1) * STRIDE)
                else:
                    next_sums = gl.load(sums_ptrs + group * STRIDE, mask=group < count_m * 2, other=0.0)
            if HOLD:
                _hold()
            tile_x = _x_tile(x, DTYPE, K_WARPS, ROW_BLOCKS, B)
            d = mma_v2(_codes(q, DTYPE, FMA, K_WARPS, COLUMNS // 16, A), tile_x, zero if i % 2 == 0 else d)
            x = next_x
            if i % 2 == 1:
                meta_word = m0 if i == 1 else n0 >> 16 if FORM == 0 else n0
                acc = add_group(acc, d, meta_word, factor, inverse, sums, MAGIC, FORM, SCALE_FP16, 1)
                sums = next_sums
        m0, n0, m1, n1 = m1, n1, m2, n2
        if PARTS > 1:  # parts of a share end at steps of their own
            done = _first(share_n, steps, K_WARPS, 0, PARTS) + step + 1
            ends = (done == _first(share_n, steps, K_WARPS, 1, PARTS)).expand_dims(1).expand_dims(2) & (no_step == 0)
            part0 = gl.where(ends, acc, part0)
            acc = gl.where(ends, 0.0, acc)
            if PARTS > 2:
                ends = (done == _first(share_n, steps, K_WARPS, 2, PARTS)).expand_dims(1).expand_dims(2)
                ends = ends & (no_step == 0)
                part1 = gl.where(ends, acc, part1)
                acc = gl.where(ends, 0.0, acc)
            if PARTS > 3:
                ends = (done == _first(share_n, steps, K_WARPS, 3, PARTS)).expand_dims(1).expand_dims(2)
                ends = ends & (no_step == 0)
                part2 = gl.where(ends, acc, part2)
                acc = gl.where(ends, 0.0, acc)
    if EARLY and LATE:
        gdc_launch_dependents()
    _finish(acc, part0, part1, part2, out_ptr, bias_ptr, residual_ptr, tile, rows, n_out, COLUMNS, BLOCK_M, K_WARPS,
            N_WARPS, PARTS, SPLIT, HAS_BIAS, HAS_RESIDUAL, SILU)  # fmt: skip


@gluon.jit
def _first(share, steps, K_WARPS: gl.constexpr, part: gl.constexpr, PARTS: gl.constexpr):
    """The step at which a part of a warp's share begins."""
    return (share * PARTS + part) * steps // (K_WARPS * PARTS)


@gluon.jit
def _count(share, steps, K_WARPS: gl.constexpr):
    """Steps of a share."""
    return (share + 1) * steps // K_WARPS - share * steps // K_WARPS


@gluon.jit
def _shared(acc):
    """acc [K_WARPS, columns, rows] in shared memory, to be read a share at a time."""
    smem = gl.allocate_shared_memory(gl.float32, acc.shape, gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0]), acc)
    return smem._reinterpret(gl.float32, acc.shape, gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))


@gluon.jit
def _pick(i: gl.constexpr, PARTS: gl.constexpr, first, second, third, last):
    """The i-th part of every share."""
    return last if i == PARTS - 1 else first if i == 0 else second if i == 1 else third


@gluon.jit
def _finish(
    acc, part0, part1, part2, out_ptr, bias_ptr, residual_ptr, tile, rows, n_out,
    COLUMNS: gl.constexpr, BLOCK_M: gl.constexpr, K_WARPS: gl.constexpr, N_WARPS: gl.constexpr, PARTS: gl.constexpr,
    SPLIT: gl.constexpr, HAS_BIAS: gl.constexpr, HAS_RESIDUAL: gl.constexpr, SILU: gl.constexpr,
):  # fmt: skip
    """The parts added in order, runs of K_WARPS * PARTS / SPLIT first; bias, SiLU, residual, rounding, the store."""
    RUN: gl.constexpr = K_WARPS * PARTS // SPLIT
    wide: gl.constexpr = gl.BlockedLayout([2, 1], [8, 4], [1, K_WARPS * N_WARPS], [0, 1])
    last = _shared(acc)
    first = _shared(part0) if PARTS > 1 else last
    second = _shared(part1) if PARTS > 2 else last
    third = _shared(part2) if PARTS > 3 else last
    total = gl.zeros([COLUMNS, BLOCK_M], gl.float32, wide)
    for run in gl.static_range(SPLIT):
        part = gl.zeros([COLUMNS, BLOCK_M], gl.float32, wide)
        for i in gl.static_range(RUN):
            shared = _pick((run * RUN + i) % PARTS, PARTS, first, second, third, last)
            part = part + shared.index((run * RUN + i) // PARTS).load(wide)
        total = total + part
    width: gl.constexpr = COLUMNS // 2 if SILU else COLUMNS
    y = total
    if SILU:
        pairs: gl.constexpr = gl.BlockedLayout([1, 2, 1, 1], [1, 1, 8, 4], [1, 1, 1, K_WARPS * N_WARPS], [2, 3, 0, 1])
        total = gl.convert_layout(total.reshape([COLUMNS // 16, 2, 8, BLOCK_M]), pairs)
        gate, up = gl.split(total.permute([0, 2, 3, 1]))
        y = gl.convert_layout((gate / (1.0 + gl.exp(-gate)) * up).reshape([width, BLOCK_M]), wide)
    store_columns(y, out_ptr, bias_ptr, residual_ptr, tile * width, rows, n_out, HAS_BIAS, HAS_RESIDUAL, wide)
