"""What the programs of w4_hopper do between loads and products, in Triton's gluon: codes, scales, the end of a tile."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from specq_kernels.w4_gluon import add_group, store_columns, unpack


@gluon.jit
def codes(q, dtype: gl.constexpr, FMA: gl.constexpr, OPERAND: gl.constexpr):
    """Words [4, 256] of 64 rows and 128 k as the A operand [64, 128], codes plus the magic power of two."""
    w = unpack(q, dtype, FMA).reshape([4, 2, 8, 4, 4, 2, 2, 2])  # nb kc g t kb j h r
    w = w.permute([0, 6, 2, 1, 4, 7, 3, 5]).reshape([64, 128])  # (nb h g), (kc kb r t j)
    return gl.convert_layout(w, OPERAND, assert_trivial=True)


@gluon.jit
def scaled(
    acc, d, word, sums, group: gl.constexpr, dtype: gl.constexpr, FORM: gl.constexpr, SCALE_FP16: gl.constexpr,
    MMA: gl.constexpr,
):  # fmt: skip
    """acc [64, BLOCK_M] plus a group's product d, by its words of scales [64] and the sums of x [BLOCK_M]."""
    MAGIC: gl.constexpr = 128.0 if dtype == gl.bfloat16 else 1024.0
    HIGH_ROWS: gl.constexpr = 1.0 if dtype == gl.bfloat16 else 16.0
    offs_row = gl.arange(0, 64, gl.SliceLayout(1, MMA))
    factor = gl.where(offs_row % 16 < 8, 1.0, HIGH_ROWS)
    inverse = gl.where(offs_row % 16 < 8, 1.0, 1.0 / HIGH_ROWS)
    if FORM == 0:
        word = word >> (group % 2 * 16)
    return add_group(acc, d, word, factor, inverse, sums, MAGIC, FORM, SCALE_FP16, 0)


@gluon.jit
def _here(value):
    """int32 `value`; what follows from it is computed here, not kept in registers over a loop of products."""
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [value], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def run_places(partial_ptr, run, rows, column, padded_n, BLOCK_M: gl.constexpr, ADDS: gl.constexpr, MMA: gl.constexpr):
    """(pointers, mask): where a run's sums [64, BLOCK_M] of 64 columns from `column` on lie.

    In partials [runs, padded_n / 64, BLOCK_M / 8, 64, 8]; where the runs are left in parts, in [runs, rows, padded_n].
    """
    offs_row = gl.arange(0, 64, gl.SliceLayout(1, MMA)).expand_dims(1)
    offs_m = gl.arange(0, BLOCK_M, gl.SliceLayout(0, MMA)).expand_dims(0)
    column, padded_n, rows = _here(column), _here(padded_n), _here(rows)
    if ADDS:
        base = partial_ptr + run * (BLOCK_M * padded_n) + column * BLOCK_M
        places = base + (offs_row * 8 + (offs_m // 8 * 512 + offs_m % 8))
        has_place = (offs_row >= 0) & (offs_m >= 0)
    else:
        places = partial_ptr + run * rows * padded_n + column + (offs_m * padded_n + offs_row)
        has_place = (offs_row >= 0) & (offs_m < rows)
    return places, has_place


@gluon.jit
def _by_thread(acc):
    """acc [64, BLOCK_M] of a group of four warps as [BLOCK_M / 8, 128, 4]: what a thread holds, four at a time."""
    pieces = acc.reshape([4, 2, 8, acc.shape[1] // 8, 4, 2]).permute([3, 0, 2, 4, 1, 5])  # m8 w g t h p
    return pieces.reshape([acc.shape[1] // 8, 128, 4])


@gluon.jit
def keep(smem, acc):
    """Put acc [64, BLOCK_M] aside in shared memory, each thread what it holds."""
    smem.store(_by_thread(acc))


@gluon.jit
def recall(smem, acc):
    """What was kept, plus acc [64, BLOCK_M]."""
    pieces = _by_thread(acc)
    pieces = smem.load(pieces.type.layout) + pieces
    pieces = pieces.reshape([acc.shape[1] // 8, 4, 8, 4, 2, 2]).permute([1, 4, 2, 0, 3, 5])  # w h g m8 t p
    return gl.convert_layout(pieces.reshape(acc.shape), acc.type.layout, assert_trivial=True)


@gluon.jit
def add_runs(partial_ptr, runs, column, padded_n, BLOCK_M: gl.constexpr, MOST: gl.constexpr, MMA: gl.constexpr):
    """The runs' sums [64, BLOCK_M] of 64 columns, added in order."""
    places, has_place = run_places(partial_ptr, 0, 0, column, padded_n, BLOCK_M, True, MMA)
    acc = gl.zeros([64, BLOCK_M], gl.float32, MMA)
    for run in gl.static_range(MOST):
        acc += gl.load(places + run * (BLOCK_M * padded_n), mask=has_place & (run < runs), other=0.0)
    return acc


@gluon.jit
def add_together(
    run, runs, counter, column, bias_ptr, residual_ptr, out_ptr, partial_ptr, rows, n_out, padded_n,
    BLOCK_M: gl.constexpr, MOST: gl.constexpr, HAS_BIAS: gl.constexpr, HAS_RESIDUAL: gl.constexpr, SILU: gl.constexpr,
    HALVES: gl.constexpr,
):  # fmt: skip
    """Each program of a tile adds and ends the runs of every so manieth block of 8 rows of x, once all have arrived.

    They wait for each other without bound: all of them run, since the kernel has no more units than run at once and
    its dependents start only after all its programs have. The counter goes up to `runs` as sums arrive and on to twice
    that as programs leave; who leaves last sets it back, when none waits any more.
    """
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 8, 16])
    gl.inline_asm_elementwise(
        """{
        .reg .pred p;
        AGAIN: ld.acquire.gpu.global.u32 $0, [$1];
        setp.lt.u32 p, $0, $2;
        @p bra AGAIN;
        }""",
        "=&r,l,r", [counter, runs], dtype=gl.int32, is_pure=False, pack=1)  # fmt: skip
    for block in range(run, HALVES * (BLOCK_M // 8), runs):
        n0 = column + block // (BLOCK_M // 8) * 64
        m0 = block % (BLOCK_M // 8) * 8
        places, has_place = run_places(partial_ptr, 0, 0, 0, padded_n, 8, True, MMA)
        places += n0 * BLOCK_M + m0 * 64
        acc = gl.zeros([64, 8], gl.float32, MMA)
        for p in gl.static_range(MOST):
            acc += gl.load(places + p * (BLOCK_M * padded_n), mask=has_place & (p < runs), other=0.0)
        finish(acc, out_ptr + m0 * n_out, bias_ptr, residual_ptr + m0 * n_out, n0, rows - m0, n_out,
               8, HAS_BIAS, HAS_RESIDUAL, SILU)  # fmt: skip
    gl.thread_barrier()  # none of these threads waits any more
    left = gl.atomic_add(counter, 1, sem="relaxed")
    if left == runs * 2 - 1:
        gl.store(counter, 0)


@gluon.jit
def finish(
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
    store_columns(y, out_ptr, bias_ptr, residual_ptr, row0 * WIDTH // 64, rows, n_out, HAS_BIAS, HAS_RESIDUAL, wide)


@gluon.jit
def finish_rows(
    acc, out_ptr, bias_ptr, residual_ptr, row0, rows, n_out,
    BLOCK_M: gl.constexpr, HAS_BIAS: gl.constexpr, HAS_RESIDUAL: gl.constexpr, SILU: gl.constexpr,
):  # fmt: skip
    """`finish` 16 rows of x at a time, which takes less shared memory."""
    if BLOCK_M == 16:
        finish(acc, out_ptr, bias_ptr, residual_ptr, row0, rows, n_out, 16, HAS_BIAS, HAS_RESIDUAL, SILU)
    else:
        HALF: gl.constexpr = BLOCK_M // 2
        low, high = gl.split(acc.reshape([64, 2, HALF]).permute([0, 2, 1]))
        finish_rows(low, out_ptr, bias_ptr, residual_ptr, row0, rows, n_out, HALF, HAS_BIAS, HAS_RESIDUAL, SILU)
        finish_rows(high, out_ptr + HALF * n_out, bias_ptr, residual_ptr + HALF * n_out, row0, rows - HALF, n_out,
                     HALF, HAS_BIAS, HAS_RESIDUAL, SILU)  # fmt: skip
