"""16-bit product for decoding: 1 to 64 rows of x times a matrix [N, K] as torch.nn.Linear holds it; argmax on request.

For what stays in 16 bits: the head, unquantized layers, EAGLE heads. Rows are bitwise independent of their number, by
the same means as in w4a16: one order and split of K per shape, partial sums added in order.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from specq_kernels import configs
from specq_kernels.launch import MAX_ROWS, check_tensor, has_dependent_launch, interpreted, runs_kernel
from specq_kernels.sampling import best_of_blocks

STEP = 256  # unit of the split of K


@dataclass(frozen=True)
class W16Weight:
    """A 16-bit matrix [N, K] and the arrival counters of its split of K (zero between calls; one stream at a time)."""

    matrix: Tensor
    counters: Tensor  # int32 [ceil(N / 64)]

    @classmethod
    def of(cls, matrix: Tensor) -> W16Weight:
        """The weight of a contiguous matrix, not copied."""
        check_tensor("matrix", matrix, shape=(None, None))
        return cls(matrix, torch.zeros(-(-matrix.shape[0] // 64), dtype=torch.int32, device=matrix.device))


def w16a16(
    x: Tensor,
    weight: W16Weight,
    *,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    config: configs.Config | None = None,
) -> Tensor:
    """x @ W.T + bias + residual, [rows, N], in `out_dtype` (x's dtype when None; float32 for logits), rounded once.

    x [rows, K], fp16 or bf16 as the matrix; bias [N] and residual [rows, N] in x's dtype. Raises ValueError naming
    the argument.
    """
    rows, n = check_product(x, weight)
    for name, term, shape in (("bias", bias, (n,)), ("residual", residual, (rows, n))):
        if term is not None:
            check_tensor(name, term, shape=shape, dtype=x.dtype, device=x.device)
    if not runs_kernel(x):
        return w16a16_ref(x, weight, bias=bias, residual=residual, out_dtype=out_dtype)
    out = torch.empty(rows, n, dtype=out_dtype or x.dtype, device=x.device)
    _launch(x, weight, out, bias, residual, None, n, config)
    return out


def w16a16_argmax(
    x: Tensor, weight: W16Weight, *, vocab: int | None = None, config: configs.Config | None = None
) -> Tensor:
    """int64 [rows]: argmax of x @ W.T over ids below `vocab`, the lowest among equals; logits never reach memory."""
    _, n = check_product(x, weight)
    if vocab is not None and not 1 <= vocab <= n:
        raise ValueError(f"vocab: {vocab} is not within the {n} rows of the matrix")
    if not runs_kernel(x):
        return w16a16_ref(x, weight, out_dtype=torch.float32)[:, :vocab].argmax(-1)
    config = config or configs.product_config("w16a16", x, n=n, k=x.shape[1])
    best = torch.empty(x.shape[0], triton.cdiv(n, config["block_n"]), dtype=torch.float32, device=x.device)
    best_id = torch.empty_like(best, dtype=torch.int32)
    _launch(x, weight, best, None, None, best_id, vocab or n, config)
    return best_of_blocks(best, best_id)


def w16a16_ref(
    x: Tensor,
    weight: W16Weight,
    *,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """The definition, in fp32 (float64 for a float64 x)."""
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    y = x.to(wide) @ weight.matrix.to(wide).T
    for term in (bias, residual):
        y = y if term is None else y + term.to(wide)
    return y.to(out_dtype or x.dtype)


def check_product(x: Tensor, weight: W16Weight) -> tuple[int, int]:
    """(rows, N) of a product the kernel takes; ValueError otherwise."""
    n, k = weight.matrix.shape
    check_tensor("x", x, shape=(None, k), device=weight.matrix.device)
    if runs_kernel(x):
        if not 1 <= x.shape[0] <= MAX_ROWS:
            raise ValueError(f"x: {x.shape[0]} rows, the kernel takes 1 to {MAX_ROWS}")
        if x.dtype != weight.matrix.dtype or (x.dtype == torch.float32 and not interpreted()):
            raise ValueError(f"x: dtype is {x.dtype}, expected the matrix's {weight.matrix.dtype}, fp16 or bf16")
    return x.shape[0], n


def _launch(
    x: Tensor,
    weight: W16Weight,
    out: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    best_id: Tensor | None,
    n: int,
    config: configs.Config | None,
) -> None:
    """Run the kernel over all columns; with `best_id`, `out` holds each tile's maximum over columns below `n`."""
    rows, k = x.shape
    full_n = weight.matrix.shape[0]
    config = config or configs.product_config("w16a16", x, n=full_n, k=k)
    split = max(1, min(config["split"], k // STEP))
    tiles = triton.cdiv(full_n, config["block_n"])
    partials = x.new_empty(
        split * config["block_m"] * tiles * config["block_n"] if split > 1 else 1, dtype=torch.float32
    )
    early = has_dependent_launch(x)
    _w16a16_kernel[(tiles, split)](
        x, weight.matrix, bias if bias is not None else out, residual if residual is not None else out, out,
        best_id if best_id is not None else out, partials, weight.counters, rows, n, full_n, k,
        BLOCK_N=config["block_n"], BLOCK_M=config["block_m"], BLOCK_K=64, SPLIT=split, STAGES=config["stages"],
        HAS_BIAS=bias is not None, HAS_RESIDUAL=residual is not None, ARGMAX=best_id is not None,
        EVEN_N=full_n % config["block_n"] == 0, EVEN_K=k % 64 == 0, EARLY=early,
        **configs.launch_options(config, early=early),
    )  # fmt: skip


@triton.jit(do_not_specialize=["rows"])
def _w16a16_kernel(
    x_ptr, w_ptr, bias_ptr, residual_ptr, out_ptr, best_id_ptr, partial_ptr, counter_ptr, rows, n, full_n, k_size,
    BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, SPLIT: tl.constexpr, STAGES: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, ARGMAX: tl.constexpr, EVEN_N: tl.constexpr,
    EVEN_K: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """One tile [BLOCK_N, BLOCK_M] of W x.T over one of SPLIT parts of K; w [full_n, k_size], x [rows, k_size].

    ARGMAX: out and best_id [rows, tiles] get the tile's maximum below column n and its lowest column.
    """
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    pid_n = tl.program_id(0)
    pid_k = tl.program_id(1)
    blocks = tl.cdiv(k_size, BLOCK_K)
    first = pid_k * blocks // SPLIT
    last = (pid_k + 1) * blocks // SPLIT
    offs_row = tl.arange(0, BLOCK_N)
    offs_n = pid_n * BLOCK_N + offs_row
    offs_m = tl.arange(0, BLOCK_M)
    offs_k = tl.arange(0, BLOCK_K)
    w_ptrs = w_ptr + offs_n[:, None].to(tl.int64) * k_size + offs_k[None, :]
    x_ptrs = x_ptr + offs_m[:, None] * k_size + offs_k[None, :]
    is_n = (offs_n < full_n)[:, None]
    is_m = (offs_m < rows)[:, None]
    if EARLY:
        tl.extra.cuda.gdc_wait()
    acc = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
    for block in tl.range(first, last, num_stages=STAGES):
        at = block * BLOCK_K
        if EVEN_K:
            w = tl.load(w_ptrs + at) if EVEN_N else tl.load(w_ptrs + at, mask=is_n, other=0.0)
            x = tl.load(x_ptrs + at, mask=is_m, other=0.0)
        else:
            is_k = (at + offs_k < k_size)[None, :]
            w = tl.load(w_ptrs + at, mask=is_n & is_k, other=0.0)
            x = tl.load(x_ptrs + at, mask=is_m & is_k, other=0.0)
        acc = tl.dot(w, x.T, acc, input_precision="ieee")

    is_last = True
    if SPLIT > 1:
        # partials [SPLIT, tiles, BLOCK_M, BLOCK_N]
        at = offs_m[None, :] * BLOCK_N + offs_row[:, None]
        mask = (offs_m < rows)[None, :]
        stride = tl.num_programs(0) * (BLOCK_M * BLOCK_N)
        tile_ptr = partial_ptr + pid_n * (BLOCK_M * BLOCK_N)
        tl.store(tile_ptr + pid_k * stride + at, acc, mask=mask)
        tl.debug_barrier()  # every thread's partials are written before the arrival is counted
        is_last = tl.atomic_add(counter_ptr + pid_n, 1, sem="acq_rel") == SPLIT - 1
        if is_last:
            tl.store(counter_ptr + pid_n, 0)
            acc = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
            for _ in tl.static_range(SPLIT):
                acc += tl.load(tile_ptr + at, mask=mask, other=0.0)
                tile_ptr += stride
    if is_last:
        if ARGMAX:
            acc = tl.where((offs_n < n)[:, None], acc, -float("inf"))
            top = tl.max(acc, 0)
            winner = tl.min(tl.where(acc == top[None, :], offs_n[:, None], 2147483647), 0)
            best_at = offs_m * tl.num_programs(0) + pid_n
            tl.store(out_ptr + best_at, top, mask=offs_m < rows)
            tl.store(best_id_ptr + best_at, winner, mask=offs_m < rows)
        else:
            if HAS_BIAS:
                acc += tl.load(bias_ptr + offs_n, mask=offs_n < n, other=0.0).to(tl.float32)[:, None]
            out_at = offs_m[None, :] * n + offs_n[:, None]
            out_mask = (offs_n < n)[:, None] & (offs_m < rows)[None, :]
            if HAS_RESIDUAL:
                acc += tl.load(residual_ptr + out_at, mask=out_mask, other=0.0).to(tl.float32)
            tl.store(out_ptr + out_at, acc.to(out_ptr.dtype.element_ty), mask=out_mask)
