"""The two ends of a step: rows of the embedding, and rows kept beside the cache.

`embed_rows` alone of all kernels lets the next one start only when the one before it is done: kernels behind it may
read what was written before it (the length, depths and masks of the step) without waiting.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from specq_kernels.launch import check_tensor, has_dependent_launch, interpreted, runs_kernel

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)  # the last for the definitions only


def embed_rows(embedding: Tensor, tokens: Tensor, *, dtype: torch.dtype) -> Tensor:
    """embedding[tokens] as `dtype`, [n, E]; embedding [vocab, E] in any float, tokens int32 [n] within it.

    Raises ValueError naming the argument.
    """
    check_tensor("tokens", tokens, shape=(None,), dtype=torch.int32)
    check_tensor("embedding", embedding, shape=(None, None), dtype=FLOATS, device=tokens.device)
    if not runs_kernel(tokens):
        return embed_rows_ref(embedding, tokens, dtype=dtype)
    n, width = tokens.shape[0], embedding.shape[1]
    x = embedding.new_empty(n, width, dtype=dtype)
    early = has_dependent_launch(tokens)
    options = {} if interpreted() else {"num_warps": 4, "launch_pdl": early}
    _embed_kernel[(n, triton.cdiv(width, 1024))](embedding, tokens, x, width, EARLY=early, **options)
    return x


def embed_rows_ref(embedding: Tensor, tokens: Tensor, *, dtype: torch.dtype) -> Tensor:
    """The definition."""
    return embedding[tokens.long()].to(dtype)


def keep_rows(x: Tensor, rows: Tensor, kept: Tensor | None, length: Tensor, *, column: int = 0) -> None:
    """Write x [n, width] to the first rows of `rows`, and to those from `length` on of `kept`, from a column on.

    rows [any, columns], kept [max_len, columns]; length int32 [1], with length + n <= max_len. Raises ValueError naming
    the argument.
    """
    check_tensor("x", x, shape=(None, None), dtype=FLOATS)
    n, width = x.shape
    check_tensor("rows", rows, shape=(None, None), dtype=x.dtype, device=x.device)
    check_tensor("length", length, shape=(1,), dtype=torch.int32, device=x.device)
    if kept is not None:
        check_tensor("kept", kept, shape=(None, rows.shape[1]), dtype=x.dtype, device=x.device)
    if rows.shape[0] < n or column + width > rows.shape[1]:
        raise ValueError(f"rows: {tuple(rows.shape)} hold no {n} rows of {width} from column {column} on")
    if not runs_kernel(x):
        keep_rows_ref(x, rows, kept, length, column=column)
        return
    early = has_dependent_launch(x)
    options = {} if interpreted() else {"num_warps": 4, "launch_pdl": early}
    _keep_kernel[(n, triton.cdiv(width, 1024))](
        x, rows, kept if kept is not None else rows, length, width, rows.shape[1], column,
        HAS_KEPT=kept is not None, EARLY=early, **options,
    )  # fmt: skip


def keep_rows_ref(x: Tensor, rows: Tensor, kept: Tensor | None, length: Tensor, *, column: int = 0) -> None:
    """The definition."""
    n, width = x.shape
    rows[:n, column : column + width] = x
    if kept is not None:
        kept[int(length) : int(length) + n, column : column + width] = x


@triton.jit
def _embed_kernel(embedding_ptr, token_ptr, x_ptr, width, EARLY: tl.constexpr):
    """1024 columns of one row a program."""
    if EARLY:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    i = tl.program_id(0)
    offs = tl.program_id(1) * 1024 + tl.arange(0, 1024)
    first = tl.load(token_ptr + i).to(tl.int64) * width
    row = tl.load(embedding_ptr + first + offs, mask=offs < width, other=0.0)
    tl.store(x_ptr + i.to(tl.int64) * width + offs, row.to(x_ptr.dtype.element_ty), mask=offs < width)


@triton.jit(do_not_specialize=["column"])
def _keep_kernel(
    x_ptr, rows_ptr, kept_ptr, length_ptr, width, columns, column, HAS_KEPT: tl.constexpr, EARLY: tl.constexpr
):  # fmt: skip
    """1024 columns of one row a program."""
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    i = tl.program_id(0).to(tl.int64)
    offs = tl.program_id(1) * 1024 + tl.arange(0, 1024)
    mask = offs < width
    row = tl.load(x_ptr + i * width + offs, mask=mask, other=0.0)
    tl.store(rows_ptr + i * columns + column + offs, row, mask=mask)
    if HAS_KEPT:
        tl.store(kept_ptr + (tl.load(length_ptr) + i) * columns + column + offs, row, mask=mask)
