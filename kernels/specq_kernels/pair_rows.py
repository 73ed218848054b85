"""The input of an EAGLE head's rows: the embedding of each token beside the state before it, both gathered, or normed.

Source: SafeAILab/EAGLE, model/cnets1.py (embedding first, feature second); EAGLE-3 norms either half.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from specq_kernels.launch import check_tensor, has_dependent_launch, interpreted, runs_kernel, wide

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)  # the last for the definition only


def pair_rows(
    embedding: Tensor,
    tokens: Tensor,
    states: Tensor,
    rows: Tensor,
    *,
    norms: tuple[Tensor, Tensor] | None = None,
    eps: float = 1e-6,
) -> tuple[Tensor, Tensor]:
    """(pair, state): embedding[tokens] beside states[rows], [n, E + S], and states[rows] alone, [n, S].

    embedding [vocab, E] in any float; tokens and rows int32 [n], within the tables; states [m, S], whose dtype the
    results have. With `norms` ([E] and [S]) each half of the pair is RMS-normed. Raises ValueError naming the argument.
    """
    check_tensor("embedding", embedding, shape=(None, None), dtype=FLOATS, device=states.device)
    check_tensor("states", states, shape=(None, None), dtype=FLOATS)
    check_tensor("tokens", tokens, shape=(None,), dtype=torch.int32, device=states.device)
    n, width, size = tokens.shape[0], embedding.shape[1], states.shape[1]
    check_tensor("rows", rows, shape=(n,), dtype=torch.int32, device=states.device)
    for i, columns in enumerate((width, size)):
        if norms is not None:
            check_tensor(f"norms[{i}]", norms[i], shape=(columns,), dtype=FLOATS, device=states.device)
    if not runs_kernel(states):
        return pair_rows_ref(embedding, tokens, states, rows, norms=norms, eps=eps)
    pair, state = states.new_empty(n, width + size), states.new_empty(n, size)
    block = triton.next_power_of_2(max(width, size))
    early = has_dependent_launch(states)
    options = {} if interpreted() else {"num_warps": min(16, max(4, block // 1024)), "launch_pdl": early}
    _pair_kernel[(n, 2)](
        embedding, tokens, states, rows, norms[0] if norms is not None else states,
        norms[1] if norms is not None else states, pair, state, width, size, eps,
        HAS_NORM=norms is not None, BLOCK=block, EARLY=early, **options,
    )  # fmt: skip
    return pair, state


def pair_rows_ref(
    embedding: Tensor,
    tokens: Tensor,
    states: Tensor,
    rows: Tensor,
    *,
    norms: tuple[Tensor, Tensor] | None = None,
    eps: float = 1e-6,
) -> tuple[Tensor, Tensor]:
    """The definition."""
    embedded, state = embedding[tokens.long()].to(states.dtype), states[rows.long()]
    halves = [embedded, state]
    if norms is not None:
        for i, half in enumerate(halves):
            scale = torch.rsqrt(wide(half).square().mean(-1, keepdim=True) + eps)
            halves[i] = (wide(half) * scale * wide(norms[i])).to(states.dtype)
    return torch.cat(halves, -1), state


@triton.jit
def _pair_kernel(
    embedding_ptr, token_ptr, state_ptr, row_ptr, embedding_norm_ptr, state_norm_ptr, pair_ptr, out_ptr,
    width, size, eps, HAS_NORM: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """One half of one row a program; pair [n, width + size], out [n, size]."""
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    i = tl.program_id(0)
    offs = tl.arange(0, BLOCK)
    kind = pair_ptr.dtype.element_ty
    target = pair_ptr + i.to(tl.int64) * (width + size) + offs
    if tl.program_id(1) == 0:
        mask = offs < width
        # no name for the pointer: in the other branch it may be of another type
        first = tl.load(token_ptr + i).to(tl.int64) * width
        half = tl.load(embedding_ptr + first + offs, mask=mask, other=0.0).to(kind)
        if HAS_NORM:
            half = _normed(half, tl.load(embedding_norm_ptr + offs, mask=mask, other=0.0), width, eps).to(kind)
        tl.store(target, half, mask=mask)
    else:
        mask = offs < size
        half = tl.load(state_ptr + tl.load(row_ptr + i).to(tl.int64) * size + offs, mask=mask, other=0.0)
        tl.store(out_ptr + i.to(tl.int64) * size + offs, half, mask=mask)
        if HAS_NORM:
            half = _normed(half, tl.load(state_norm_ptr + offs, mask=mask, other=0.0), size, eps).to(kind)
        tl.store(target + width, half, mask=mask)


@triton.jit
def _normed(x, weight, columns, eps):
    x = x.to(tl.float32)
    return x * (1.0 / tl.sqrt(tl.sum(x * x, 0) / columns + eps)) * weight.to(tl.float32)
