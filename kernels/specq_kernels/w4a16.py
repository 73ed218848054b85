"""Group-wise 4-bit product for decoding: 1 to 64 rows of 16-bit x times a packed 4-bit matrix.

Each output row is bitwise the same whatever the number of rows: the order of K, the parts and the split of K and the
form in which scales enter depend on the weight's shape alone; only rows a tile, columns a tile, warps and the matrix
instruction (`mma.sync` and `wgmma` add alike) follow the number of rows. Split-K writes fp32 partials and the last
program of a tile adds them in order; few rows take `w4_rows`, where tuned, which has all of K in one program. More rows
than 64 (prefill) go through `w4_prefill`. `pack_w4` (w4_layout) makes the weight.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from specq_kernels import configs
from specq_kernels.group_sums import Sides, sums_shape
from specq_kernels.group_sums import sides as make_sides
from specq_kernels.lane_order import has_lanes
from specq_kernels.launch import MAX_ROWS, check_tensor, has_dependent_launch, runs_kernel, wide
from specq_kernels.w4_device import (
    codes_tile,
    half_chunk,
    half_to_float,
    load_chunks,
    store_tile,
    two_chunks,
    unit_range,
)
from specq_kernels.w4_layout import FORMS, W4Weight


def w4a16(
    x: Tensor,
    weight: W4Weight,
    *,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    sides: Sides | None = None,
    out_dtype: torch.dtype | None = None,
    config: configs.Config | None = None,
) -> Tensor:
    """x @ W.T + bias + residual, [rows, N], in `out_dtype` (x's dtype when None; float32 for logits), rounded once.

    x fp16 or bf16 [rows, K]; bias [N] and residual [rows, N] in x's dtype; `sides` is `sides(x, group)` where the
    producer of x has them already, lanes included where `reads_lanes`. `config` is for tuning. Raises ValueError naming
    the argument.
    """
    if weight.is_gate_up:
        raise ValueError("weight: gate and up are interleaved, use w4a16_silu")
    return _product(x, weight, bias, residual, sides, out_dtype, config)


def w4a16_silu(
    x: Tensor,
    weight: W4Weight,
    *,
    sides: Sides | None = None,
    config: configs.Config | None = None,
) -> Tensor:
    """silu(x @ gate.T) * (x @ up.T), [rows, N/2], of a weight packed with is_gate_up; arguments as in `w4a16`."""
    if not weight.is_gate_up:
        raise ValueError("weight: not packed with is_gate_up")
    return _product(x, weight, None, None, sides, None, config)


def w4a16_parts(
    x: Tensor, weight: W4Weight, *, sides: Sides | None = None, config: configs.Config | None = None
) -> Tensor:
    """The product with its runs of K not yet added, fp32 [runs, rows, padded N], for a kernel that adds as it reads.

    `sum_parts_ref` of it is `w4a16` bit for bit. Arguments as in `w4a16`; where no kernel runs it is one run, in the
    type of the definition. Where `count_parts` is 1 `w4a16` itself is faster.
    """
    if weight.is_gate_up:
        raise ValueError("weight: gate and up are interleaved, use w4a16_silu")
    n, padded_n = weight.shape[0], weight.padded[0]
    if not _runs(x, weight):
        return torch.nn.functional.pad(w4a16_ref(x, weight, out_dtype=wide(x).dtype), (0, padded_n - n)).unsqueeze(0)
    config = config or _config(x, weight, lanes=False)  # w4_rows leaves nothing
    _, _, split, tail_split = _units(weight, config)
    parts = x.new_empty(max(split, tail_split), x.shape[0], padded_n, dtype=torch.float32)
    _launch(x, weight, _checked(x, weight, sides, config).sums, None, None, parts, config, adds=False)
    return parts


def count_parts(x: Tensor, weight: W4Weight) -> int:
    """How many runs `w4a16_parts` leaves, 1 where the product is better left whole."""
    if not runs_kernel(x) or reads_lanes(x, weight):
        return 1
    _, _, split, tail_split = _units(weight, _config(x, weight))
    return max(split, tail_split)


def reads_lanes(x: Tensor, weight: W4Weight) -> bool:
    """Whether the product of x, of which only rows, dtype and device count, reads it in lane order (`w4_rows`)."""
    return runs_kernel(x) and x.shape[0] <= MAX_ROWS and bool(_config(x, weight).get("lanes"))


def sum_parts_ref(
    parts: Tensor,
    n: int,
    *,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """[rows, n] of what `w4a16_parts` returns: the parts in order, then bias and residual, rounded once."""
    y = torch.zeros_like(parts[0])
    for part in parts:
        y = y + part
    y = y[:, :n]
    for term in (bias, residual):
        y = y if term is None else y + term.to(y.dtype)
    return y.to(out_dtype or y.dtype)


def w4a16_ref(
    x: Tensor,
    weight: W4Weight,
    *,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """The definition: the dequantised product in fp32 (float64 for a float64 x)."""
    y = wide(x) @ weight.dequantize(wide(x).dtype).T
    if weight.is_gate_up:
        gate, up = y.chunk(2, dim=-1)
        y = torch.nn.functional.silu(gate) * up
    for term in (bias, residual):
        y = y if term is None else y + term.to(y.dtype)
    return y.to(out_dtype or x.dtype)


def _product(
    x: Tensor,
    weight: W4Weight,
    bias: Tensor | None,
    residual: Tensor | None,
    sides: Sides | None,
    out_dtype: torch.dtype | None,
    config: configs.Config | None,
) -> Tensor:
    n = weight.shape[0]
    n_out = n // 2 if weight.is_gate_up else n
    runs = _runs(x, weight)
    rows = x.shape[0]
    for name, term, shape in (("bias", bias, (n,)), ("residual", residual, (rows, n_out))):
        if term is not None:
            check_tensor(name, term, shape=shape, dtype=x.dtype, device=x.device)
    if not runs:
        return w4a16_ref(x, weight, bias=bias, residual=residual, out_dtype=out_dtype)
    config = config or _config(x, weight)
    sides = _checked(x, weight, sides, config)
    out = torch.empty(rows, n_out, dtype=out_dtype or x.dtype, device=x.device)
    if config.get("lanes"):
        from specq_kernels import w4_rows  # needs Triton's gluon

        w4_rows.launch(sides, weight, bias, residual, out, config, rows=rows, early=has_dependent_launch(x))
    else:
        _launch(x, weight, sides.sums, bias, residual, out, config)
    return out


def _runs(x: Tensor, weight: W4Weight) -> bool:
    """Whether the kernel runs x, the definition otherwise; ValueError where neither does."""
    check_tensor("x", x, shape=(None, weight.shape[1]), device=weight.device)
    if not runs_kernel(x):
        return False
    if not 1 <= x.shape[0] <= MAX_ROWS:
        raise ValueError(f"x: {x.shape[0]} rows, the kernel takes 1 to {MAX_ROWS}")
    if x.dtype not in (torch.float16, torch.bfloat16):
        raise ValueError(f"x: dtype is {x.dtype}, expected torch.float16 or torch.bfloat16")
    return True


def _checked(x: Tensor, weight: W4Weight, sides: Sides | None, config: configs.Config) -> Sides:
    """The sides of x that the kernel of this config reads, made here where not given."""
    needs_lanes = bool(config.get("lanes"))
    if sides is None or (needs_lanes and sides.lanes is None):
        made = make_sides(x, weight.group_size, lanes=needs_lanes)
        sides = made if sides is None else Sides(sides.sums, made.lanes)
    check_tensor("sides.sums", sides.sums, shape=sums_shape(x, weight.group_size), dtype=torch.float32, device=x.device)
    if needs_lanes:
        if sides.lanes is None or weight.group_size != 128 or weight.form == "two-level":
            raise ValueError("config: w4_rows takes groups of 128 of one level and columns that need no padding")
        split, tail_split, _ = configs.split_of(config, n=weight.padded[0], k=weight.padded[1])
        if split not in (1, tail_split):
            raise ValueError("config: w4_rows adds all columns in the same runs")
        entries = config["block_m"] * x.shape[1]
        check_tensor("sides.lanes", sides.lanes, shape=(entries,), dtype=x.dtype, device=x.device)
    return sides


def _config(x: Tensor, weight: W4Weight, *, lanes: bool = True) -> configs.Config:
    n, k = weight.padded
    lanes = lanes and has_lanes(weight.shape[1])
    return configs.product_config("w4a16", x, n=n, k=k, group=weight.group_size, lanes=lanes)


def _units(weight: W4Weight, config: configs.Config) -> tuple[int, int, int, int]:
    """(tiles, tail_tiles, split, tail_split): the first tiles are summed in `split` runs of parts, the others finer."""
    split, tail_split, tail_from = configs.split_of(config, n=weight.padded[0], k=weight.padded[1])
    block_n = config["block_n"]
    return tail_from // block_n, (weight.padded[0] - tail_from) // block_n, split, tail_split


def _launch(
    x: Tensor,
    weight: W4Weight,
    sums: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    out: Tensor,
    config: configs.Config,
    *,
    adds: bool = True,
) -> None:
    """Fill `out` with the product; without `adds` it holds the parts, [parts, rows, padded N]."""
    (rows, k), (padded_n, padded_k) = x.shape, weight.padded
    units = tiles, tail_tiles, split, tail_split = _units(weight, config)
    most = max(split, tail_split)
    parts, tail_parts = configs.parts_of(config, n=padded_n, k=padded_k)
    folds = parts > split or tail_parts > tail_split
    partials = out
    if adds:
        kept = most if most > 1 or (folds and not config.get("roles")) else 0  # runs that pass through memory
        partials = x.new_empty(max(1, kept * config["block_m"] * padded_n), dtype=torch.float32)
    if config.get("roles"):
        from specq_kernels import w4_hopper  # needs sm_90 and Triton's gluon

        w4_hopper.launch(x, weight, sums, bias, residual, out, partials, units, (parts, tail_parts), config,
                         adds=adds, folds=folds)  # fmt: skip
        return
    early = has_dependent_launch(x)
    _w4a16_kernel[(tiles * split + tail_tiles * tail_split,)](
        x, weight.packed, weight.meta, sums, bias if bias is not None else out,
        residual if residual is not None else out, out, partials, weight.counters,
        rows, out.shape[-1], k, padded_n, padded_k, *units, parts, tail_parts,
        GROUP=weight.group_size, FORM=FORMS.index(weight.form), SCALE_FP16=weight.scale_dtype == torch.float16,
        BLOCK_N=config["block_n"], BLOCK_M=config["block_m"], MOST=configs.split_bound(most),
        STEP=config.get("step", 256), STAGES=config["stages"], HAS_BIAS=bias is not None,
        HAS_RESIDUAL=residual is not None, SILU=weight.is_gate_up, EVEN_K=k == padded_k,
        EVEN_M=rows == config["block_m"], PTX=x.is_cuda and torch.version.cuda is not None, EARLY=early,
        DIRECT=bool(config.get("direct", 0)), ADDS=adds, FOLDS=folds, FMA=bool(config.get("fma")),
        **configs.launch_options(config, early=early),
    )  # fmt: skip


@triton.jit(
    do_not_specialize=[
        "rows",
        "tiles",
        "tail_tiles",
        "split",
        "tail_split",
        "parts",
        "tail_parts",
    ]
)
def _w4a16_kernel(
    x_ptr, w_ptr, meta_ptr, sums_ptr, bias_ptr, residual_ptr, out_ptr, partial_ptr, counter_ptr,
    rows, n_out, k_size, padded_n, padded_k, tiles, tail_tiles, split, tail_split, parts, tail_parts,
    GROUP: tl.constexpr, FORM: tl.constexpr, SCALE_FP16: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, MOST: tl.constexpr, STEP: tl.constexpr, STAGES: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, SILU: tl.constexpr, EVEN_K: tl.constexpr, EVEN_M: tl.constexpr,
    PTX: tl.constexpr, EARLY: tl.constexpr, DIRECT: tl.constexpr, ADDS: tl.constexpr, FOLDS: tl.constexpr,
    FMA: tl.constexpr,
):  # fmt: skip
    """One tile [BLOCK_N, BLOCK_M] of W x.T over one run of parts of K; layout of `w` and `meta` in w4_layout.

    The first `tiles` tiles are cut into `split` runs, the `tail_tiles` after them into `tail_split`: finer units at
    the end even out the last wave of programs. A run has several parts where it FOLDS.

    The matrix instruction multiplies codes plus MAGIC (exact in 16 bits) by x; per group
    acc += (dot - (MAGIC + zero) * sum(x)) * scale, so that neither subtraction nor scale is paid per weight.
    """
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    NB: tl.constexpr = BLOCK_N // 16
    PASSES: tl.constexpr = 256 // STEP  # passes a block of 256 k, the unit of `meta` and of the split
    HIGH_ROWS: tl.constexpr = 16.0 if PTX and dtype == tl.float16 else 1.0  # factor of the codes in rows h = 1

    pid_n, pid_k, runs, first, last = unit_range(tl.program_id(0), tiles, tail_tiles, split, tail_split, padded_k)
    row_words = padded_k * 2  # of 16 rows
    w_ptrs = w_ptr + (pid_n * NB + tl.arange(0, NB)).to(tl.int64)[:, None] * row_words + tl.arange(0, 128)[None, :]
    if DIRECT:
        chunks = load_chunks(w_ptrs, first * PASSES, STEP, DIRECT)  # weights do not depend on the kernel before
    else:
        chunks = (0, 0, 0, 0)
    if EARLY:
        tl.extra.cuda.gdc_wait()

    offs_row = tl.arange(0, BLOCK_N)
    offs_n = pid_n * BLOCK_N + offs_row
    factor = tl.where(offs_row % 16 < 8, 1.0, HIGH_ROWS)
    inverse = tl.where(offs_row % 16 < 8, 1.0, 1.0 / HIGH_ROWS)
    offs_m = tl.arange(0, BLOCK_M)
    is_row = (offs_m < rows)[None, :]
    if ADDS:  # partials [runs, padded_n / BLOCK_N, BLOCK_M, BLOCK_N]: offsets in a tile are constants
        at = offs_m[None, :] * BLOCK_N + offs_row[:, None]
        tile_ptr = partial_ptr + pid_n * (BLOCK_M * BLOCK_N)
        run_ptr = tile_ptr + pid_k * (BLOCK_M * padded_n)
    else:  # partials [runs, rows, padded_n]
        at = offs_m[None, :] * padded_n + offs_n[:, None]
        run_ptr = partial_ptr + pid_k * rows * padded_n
    if FOLDS:  # the sum of a run's parts so far waits in memory, where it holds no registers
        acc = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
        of_tile = tl.where(pid_n < tiles, parts, tail_parts)
        first_part = pid_k * of_tile // runs
        end_part = (pid_k + 1) * of_tile // runs
        steps = padded_k // 256
        for part in tl.range(first_part, end_part, num_stages=1):
            acc, chunks = _sum_passes(
                w_ptrs, meta_ptr + offs_n, x_ptr, sums_ptr, chunks, part * steps // of_tile * PASSES,
                (part + 1) * steps // of_tile * PASSES, last * PASSES, rows, k_size, padded_n, factor, inverse,
                GROUP, FORM, SCALE_FP16, BLOCK_N, BLOCK_M, STEP, STAGES, EVEN_K, EVEN_M, PTX, DIRECT, FMA,
            )  # fmt: skip
            if part > first_part:
                acc = tl.load(run_ptr + at, mask=is_row, other=0.0) + acc
            if part < end_part - 1:
                tl.store(run_ptr + at, acc, mask=is_row)
                tl.debug_barrier()  # other threads read what these store
    else:
        acc, chunks = _sum_passes(
            w_ptrs, meta_ptr + offs_n, x_ptr, sums_ptr, chunks, first * PASSES, last * PASSES, last * PASSES,
            rows, k_size, padded_n, factor, inverse,
            GROUP, FORM, SCALE_FP16, BLOCK_N, BLOCK_M, STEP, STAGES, EVEN_K, EVEN_M, PTX, DIRECT, FMA,
        )  # fmt: skip

    if EARLY:  # before, the next kernel's programs would be in the way of these
        tl.extra.cuda.gdc_launch_dependents()
    is_last = ADDS
    if not ADDS:
        tl.store(run_ptr + at, acc, mask=is_row)
        if pid_k == runs - 1:  # tiles of fewer runs than others
            zero = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
            for missing in range(runs, tl.maximum(split, tail_split)):
                tl.store(partial_ptr + missing * rows * padded_n + at, zero, mask=is_row)
    elif MOST > 1:  # noqa: SIM102 - decided when compiling, the next one when running
        if runs > 1:
            tl.store(run_ptr + at, acc, mask=is_row)
            tl.debug_barrier()  # every thread's partials are written before the arrival is counted
            arrived = tl.atomic_add(counter_ptr + pid_n, 1, sem="acq_rel")
            is_last = arrived == runs - 1
            if is_last:
                tl.store(counter_ptr + pid_n, 0)
                acc = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
                for run in tl.static_range(MOST):
                    acc += tl.load(tile_ptr + at, mask=is_row & (run < runs), other=0.0)
                    tile_ptr += BLOCK_M * padded_n
    if is_last:
        store_tile(acc, out_ptr, bias_ptr, residual_ptr, pid_n, rows, n_out,
                   BLOCK_N, BLOCK_M, HAS_BIAS, HAS_RESIDUAL, SILU)  # fmt: skip


@triton.jit
def _sum_passes(
    w_ptrs, meta_ptrs, x_ptr, sums_ptr, chunks, first, last, end, rows, k_size, padded_n, factor, inverse,
    GROUP: tl.constexpr, FORM: tl.constexpr, SCALE_FP16: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr,
    STEP: tl.constexpr, STAGES: tl.constexpr, EVEN_K: tl.constexpr, EVEN_M: tl.constexpr, PTX: tl.constexpr,
    DIRECT: tl.constexpr, FMA: tl.constexpr,
):  # fmt: skip
    """(sum [BLOCK_N, BLOCK_M] of passes `first` to `last` of a run that ends at `end`, the words of pass `last`)."""
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    NB: tl.constexpr = BLOCK_N // 16
    GROUPS: tl.constexpr = STEP // GROUP  # groups a pass of the loop
    PASSES: tl.constexpr = 256 // STEP  # passes a block of 256 k, the unit of `meta` and of the split
    WORDS: tl.constexpr = 5 if FORM == 3 else (128 // GROUP if FORM == 0 else 256 // GROUP)
    MAGIC: tl.constexpr = (128.0 if dtype == tl.bfloat16 else 1024.0) if PTX else 0.0
    acc = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
    for step in tl.range(first, last, num_stages=STAGES):
        c0, c1, c2, c3 = chunks if DIRECT else load_chunks(w_ptrs, step, STEP, DIRECT)
        at = meta_ptrs + (step // PASSES) * (WORDS * padded_n)
        if FORM == 3:
            top = tl.load(at)
        for j in tl.static_range(GROUPS):
            in_block = (step % PASSES) * GROUPS + j  # this group's place among those of 256 k
            if GROUP == 128:
                w = codes_tile(two_chunks(c0, c1, NB) if j == 0 else two_chunks(c2, c3, NB), dtype, PTX, NB, 2, 4, FMA)
            elif GROUP == 64:
                w = codes_tile(c0 if j == 0 else c1 if j == 1 else c2 if j == 2 else c3, dtype, PTX, NB, 1, 4, FMA)
            else:
                chunk = c0 if j < 2 else c1 if j < 4 else c2 if j < 6 else c3
                w = codes_tile(half_chunk(chunk, j % 2, NB), dtype, PTX, NB, 1, 2, FMA)
            minimum = inverse
            if FORM == 0:
                word = tl.load(at + (in_block // 2) * padded_n) >> (16 * (in_block % 2))
                scale = half_to_float(word, SCALE_FP16) * inverse
                shift = MAGIC + 8.0 * factor
            elif FORM == 3:
                sub = tl.load(at + (1 + in_block // 4) * padded_n) >> (8 * (in_block % 4))
                low = tl.load(at + (3 + in_block // 4) * padded_n) >> (8 * (in_block % 4))
                scale = half_to_float(top, SCALE_FP16) * (sub & 255).to(tl.float32) * inverse
                shift = MAGIC + 0.0 * factor
                minimum = -half_to_float(top >> 16, SCALE_FP16) * (low & 255).to(tl.float32)
            else:
                word = tl.load(at + in_block * padded_n)
                scale = half_to_float(word, SCALE_FP16) * inverse
                if FORM == 1:
                    shift = MAGIC + ((word >> 16) & 0xFFFF).to(tl.float32) * factor
                else:
                    shift = MAGIC + 0.0 * factor
                    minimum = half_to_float(word >> 16, SCALE_FP16)
            group = step * GROUPS + j
            acc = _add_group(acc, w, x_ptr, sums_ptr, group, rows, k_size, scale, shift, minimum,
                             GROUP, BLOCK_M, EVEN_K, EVEN_M, FORM >= 2)  # fmt: skip
        if DIRECT:
            chunks = load_chunks(w_ptrs, tl.minimum(step + 1, end - 1), STEP, DIRECT)
    return acc, chunks


@triton.jit
def _add_group(
    acc, w, x_ptr, sums_ptr, group, rows, k_size, scale, shift, minimum,
    GROUP: tl.constexpr, BLOCK_M: tl.constexpr, EVEN_K: tl.constexpr, EVEN_M: tl.constexpr,
    HAS_MINIMUM: tl.constexpr,
):  # fmt: skip
    """acc [BLOCK_N, BLOCK_M] plus one group's product; rows beyond `rows` and k beyond `k_size` are not read."""
    offs_m = tl.arange(0, BLOCK_M)
    offs_k = group * GROUP + tl.arange(0, GROUP)
    x_ptrs = x_ptr + offs_m[:, None] * k_size + offs_k[None, :]
    if not EVEN_K:
        x = tl.load(x_ptrs, mask=(offs_m < rows)[:, None] & (offs_k < k_size)[None, :], other=0.0)
    elif EVEN_M:
        x = tl.load(x_ptrs)
    else:
        x = tl.load(x_ptrs, mask=(offs_m < rows)[:, None], other=0.0)
    sums = tl.load(sums_ptr + group * BLOCK_M + offs_m)
    d = tl.dot(w, x.T, input_precision="ieee")
    acc += (d - shift[:, None] * sums[None, :]) * scale[:, None]
    if HAS_MINIMUM:
        acc += minimum[:, None] * sums[None, :]
    return acc
