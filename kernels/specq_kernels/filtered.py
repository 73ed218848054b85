"""Sampling behind top-k and top-p in two launches: a choice a row, or the scores by which a drafter expects it.

Only the best candidates of a row are looked at: CANDIDATES of them, from many blocks at most 16 each. Where the filter
keeps more than is certain to be among them, a row is undecided and left to the host. Order as in `Sampler` of
specq/spec/sampling.py, which is the definition: temperature, top-k, top-p, noise.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from specq_kernels.launch import check_tensor, has_dependent_launch, interpreted, runs_kernel
from specq_kernels.sampling import Draw, gumbel_noise, noise_of

CANDIDATES = 64
BLOCK, PIECE = 2048, 128
UNDECIDED = -1


def filtered_choice(
    logits: Tensor, positions: Tensor, draw: Draw, *, top_k: int = 0, top_p: float = 1.0, vocab: int | None = None
) -> Tensor:
    """int64 [rows]: the token that top-k, top-p and the noise of the draw leave on top; -1 where undecided.

    logits float32 [rows, ids]; positions int64 [rows]; ids from `vocab` on are left out. top_k 0 to CANDIDATES, 0 keeps
    all. Raises ValueError naming the argument.
    """
    scores, ids = _filtered(logits, positions, draw, 1, top_k, top_p, vocab, None, None)
    return torch.where(scores[:, 0] > -torch.inf, ids[:, 0].long(), UNDECIDED)


def filtered_scores(
    logits: Tensor,
    count: int,
    positions: Tensor,
    draw: Draw,
    *,
    top_k: int = 0,
    top_p: float = 1.0,
    noise_scale: float = 1.0,
    vocab: int | None = None,
    target_ids: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """(scores float32, ids int32), [rows, count] each, best first, as `top_scores` gives them, of what a filter keeps.

    Scores are log-softmax over the candidates kept; beyond them -inf. Arguments as in `filtered_choice` and
    `top_scores`. Raises ValueError naming the argument.
    """
    if not 1 <= count <= CANDIDATES:
        raise ValueError(f"count: {count} is not within 1 to {CANDIDATES}")
    return _filtered(logits, positions, draw, count, top_k, top_p, vocab, target_ids, noise_scale)


def filtered_ref(
    logits: Tensor,
    positions: Tensor,
    draw: Draw,
    count: int,
    *,
    top_k: int = 0,
    top_p: float = 1.0,
    vocab: int | None = None,
    target_ids: Tensor | None = None,
    noise_scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """The definition: the `count` best of each row; without a `noise_scale` -inf where undecided, scores unscaled."""
    ids = target_ids
    if ids is None:
        ids = torch.arange(logits.shape[1], dtype=torch.int32, device=logits.device)
    scaled = logits / draw.temperature.to(logits.dtype)
    if vocab is not None:
        scaled = scaled.masked_fill(ids >= vocab, -torch.inf)
    order = scaled.sort(dim=-1, descending=True, stable=True)
    kept = min(CANDIDATES, logits.shape[1])
    best, places = order.values[:, :kept], order.indices[:, :kept]
    if top_k:
        best = best.masked_fill(torch.arange(kept, device=logits.device) >= top_k, -torch.inf)
    total = (best if top_k else scaled).logsumexp(-1, keepdim=True)
    weights = (best - total).exp()
    before = weights.cumsum(-1) - weights
    before[:, 0] = -1.0
    found = ids[places]
    noise = gumbel_noise(draw.seed, positions[:, None], found.long()).to(best.dtype)
    scores = torch.where((before < top_p) & (best > -torch.inf), best + noise, -torch.inf)
    if noise_scale is None:
        if top_k == 0 and top_p < 1.0 and kept < logits.shape[1]:
            scores = scores.masked_fill(weights.sum(-1, keepdim=True) < top_p, -torch.inf)
    else:
        scores = (scores / noise_scale).float().log_softmax(-1)
    order = scores.sort(dim=-1, descending=True, stable=True)
    chosen = found.gather(1, order.indices)[:, :count]
    missing = count - chosen.shape[1]
    values = torch.nn.functional.pad(order.values[:, :count], (0, missing), value=-torch.inf)
    return values.float(), torch.nn.functional.pad(chosen, (0, missing))


def _filtered(
    logits: Tensor,
    positions: Tensor,
    draw: Draw,
    count: int,
    top_k: int,
    top_p: float,
    vocab: int | None,
    target_ids: Tensor | None,
    noise_scale: float | None,
) -> tuple[Tensor, Tensor]:
    check_tensor("logits", logits, shape=(None, None), dtype=(torch.float32, torch.float64))
    rows, columns = logits.shape
    check_tensor("positions", positions, shape=(rows,), dtype=torch.int64, device=logits.device)
    if target_ids is not None:
        check_tensor("target_ids", target_ids, shape=(columns,), dtype=torch.int32, device=logits.device)
    if not 0 <= top_k <= CANDIDATES:
        raise ValueError(f"top_k: {top_k} is not within 0 to {CANDIDATES}")
    if not runs_kernel(logits):
        return filtered_ref(
            logits, positions, draw, count, top_k=top_k, top_p=top_p, vocab=vocab, target_ids=target_ids,
            noise_scale=noise_scale,
        )  # fmt: skip
    blocks = triton.cdiv(columns, BLOCK)
    per_block = 16 if blocks >= 16 else CANDIDATES
    best = logits.new_empty(rows, blocks * per_block)
    column = torch.empty(rows, blocks * per_block, dtype=torch.int32, device=logits.device)
    totals = logits.new_empty(2, rows, blocks)
    sorted_best = logits.new_empty(rows, CANDIDATES)
    sorted_column = torch.empty(rows, CANDIDATES, dtype=torch.int32, device=logits.device)
    scores = logits.new_empty(rows, count)
    ids = torch.empty(rows, count, dtype=torch.int32, device=logits.device)
    early = has_dependent_launch(logits)
    options = {} if interpreted() else {"num_warps": 4, "launch_pdl": early}
    _candidates_kernel[(rows, blocks)](
        logits, target_ids if target_ids is not None else ids, draw.temperature, best, column, totals, totals[1],
        columns, 2**31 - 1 if vocab is None else vocab, HAS_IDS=target_ids is not None, PER_BLOCK=per_block,
        BLOCK=BLOCK, PIECE=PIECE, EARLY=early, **options,
    )  # fmt: skip
    _filter_kernel[(rows,)](
        best, column, totals, totals[1], target_ids if target_ids is not None else ids, positions, draw.seed,
        sorted_best, sorted_column, scores, ids, blocks, top_k, top_p, 1.0 / (noise_scale or 1.0), count,
        HAS_IDS=target_ids is not None, CHOICE=noise_scale is None, IS_TOP_K=top_k > 0, KEPT=CANDIDATES,
        PER_BLOCK=per_block, BLOCK=triton.next_power_of_2(blocks * per_block),
        BLOCKS=triton.next_power_of_2(blocks), EARLY=early, **options,
    )  # fmt: skip
    return scores, ids


@triton.jit
def _candidates_kernel(
    logits_ptr, target_id_ptr, temperature_ptr, best_ptr, column_ptr, top_ptr, total_ptr, columns, vocab,
    HAS_IDS: tl.constexpr, PER_BLOCK: tl.constexpr, BLOCK: tl.constexpr, PIECE: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """The best of BLOCK columns of a row over the temperature, and their largest and sum of exponents.

    A block is made of pieces from all over the row, since frequent ids lie side by side. best, column [rows, blocks,
    PER_BLOCK], best first; top, total [rows, blocks].
    """
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0)
    i = tl.arange(0, BLOCK)
    offs = (i // PIECE * tl.num_programs(1) + tl.program_id(1)) * PIECE + i % PIECE
    is_column = offs < columns
    score = tl.load(logits_ptr + row.to(tl.int64) * columns + offs, mask=is_column, other=-float("inf"))
    score = tl.div_rn(score, tl.zeros_like(score) + tl.load(temperature_ptr).to(tl.float32))
    ids = offs
    if HAS_IDS:
        ids = tl.load(target_id_ptr + offs, mask=is_column, other=2147483647)
    score = tl.where(is_column & (ids < vocab), score, -float("inf"))
    top = tl.max(score, 0)
    safe = tl.where(top == -float("inf"), 0.0, top)
    at = row * tl.num_programs(1) + tl.program_id(1)
    tl.store(top_ptr + at, top)
    tl.store(total_ptr + at, tl.sum(tl.exp(score - safe), 0))
    for n in range(PER_BLOCK):
        value = tl.max(score, 0)
        place = tl.min(tl.where((score == value) & is_column, offs, 2147483647), 0)
        tl.store(best_ptr + at * PER_BLOCK + n, value)
        tl.store(column_ptr + at * PER_BLOCK + n, tl.minimum(place, columns - 1))
        score = tl.where(offs == place, -float("inf"), score)


@triton.jit(do_not_specialize=["top_k", "count"])
def _filter_kernel(
    best_ptr, column_ptr, top_ptr, total_ptr, target_id_ptr, position_ptr, seed_ptr, sorted_ptr, sorted_column_ptr,
    score_ptr, id_ptr, blocks, top_k, top_p, scale, count,
    HAS_IDS: tl.constexpr, CHOICE: tl.constexpr, IS_TOP_K: tl.constexpr, KEPT: tl.constexpr, PER_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr, BLOCKS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """One row a program: KEPT candidates in order, the filter, the noise, the best; score, id [rows, count]."""
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0)
    offs = tl.arange(0, BLOCK)
    is_best = offs < blocks * PER_BLOCK
    best = tl.load(best_ptr + row * blocks * PER_BLOCK + offs, mask=is_best, other=-float("inf"))
    column = tl.load(column_ptr + row * blocks * PER_BLOCK + offs, mask=is_best, other=2147483647)
    # nothing a block has beyond its candidates is larger than its last one
    is_last = is_best & (offs % PER_BLOCK == PER_BLOCK - 1)
    unseen = tl.max(tl.where(is_last, best, -float("inf")), 0)
    for n in range(KEPT):
        value = tl.max(best, 0)
        found = tl.min(tl.where(best == value, column, 2147483647), 0)
        tl.store(sorted_ptr + row * KEPT + n, value)
        tl.store(sorted_column_ptr + row * KEPT + n, found)
        best = tl.where((best == value) & (column == found), -float("inf"), best)
    tl.debug_barrier()
    at = tl.arange(0, KEPT)
    kept = tl.load(sorted_ptr + row * KEPT + at)
    column_of = tl.load(sorted_column_ptr + row * KEPT + at)
    last = tl.min(kept, 0)
    if IS_TOP_K:
        kept = tl.where(at < top_k, kept, -float("inf"))
        top = tl.max(kept, 0)
        log_total = top + tl.log(tl.sum(tl.exp(kept - top), 0))
    else:
        offs_b = tl.arange(0, BLOCKS)
        is_block = offs_b < blocks
        tops = tl.load(top_ptr + row * blocks + offs_b, mask=is_block, other=-float("inf"))
        totals = tl.load(total_ptr + row * blocks + offs_b, mask=is_block, other=0.0)
        top = tl.max(tops, 0)
        log_total = top + tl.log(tl.sum(totals * tl.exp(tops - top), 0))
    weights = tl.exp(kept - log_total)
    before = tl.where(at == 0, -1.0, tl.cumsum(weights, 0) - weights)
    is_kept = (before < top_p) & (kept > -float("inf"))
    ids = column_of
    if HAS_IDS:
        ids = tl.load(target_id_ptr + column_of, mask=kept > -float("inf"), other=0)
    ids = tl.where(kept > -float("inf"), ids, 0)
    noise = noise_of(tl.load(seed_ptr), tl.load(position_ptr + row), ids)
    score = tl.where(is_kept, kept + noise, -float("inf"))
    if CHOICE:
        # certain are the candidates above what no block has shown
        if IS_TOP_K:
            is_whole = tl.sum(((at < top_k) & (kept <= unseen)).to(tl.int32), 0) == 0
            is_whole = is_whole | (unseen == -float("inf"))
        else:
            is_whole = tl.sum(tl.where(kept > unseen, weights, 0.0), 0) >= top_p
            is_whole = is_whole | ((unseen == -float("inf")) & (last == -float("inf")))
        score = tl.where(is_whole, score, -float("inf"))
    else:
        score = score * scale
        top = tl.max(score, 0)
        score = tl.minimum(score - (top + tl.log(tl.sum(tl.exp(score - top), 0))), 0.0)
    for n in range(count):
        value = tl.max(score, 0)
        place = tl.min(tl.where(score == value, at, KEPT), 0)
        tl.store(score_ptr + row * count + n, value)
        tl.store(id_ptr + row * count + n, tl.sum(tl.where(at == place, ids, 0), 0))
        score = tl.where(at == place, -float("inf"), score)
