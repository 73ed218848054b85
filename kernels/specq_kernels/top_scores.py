"""The best ids of each row with their log-softmax scores, without writing the scores of all ids: what a drafter needs.

Above temperature 0 the noise of sampling.py is in the score. The definition that
decoding uses is `Sampler.guesses` in specq/spec/sampling.py.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from specq_kernels.launch import check_tensor, has_dependent_launch, interpreted, runs_kernel
from specq_kernels.sampling import Draw, gumbel_noise, noise_of

BLOCK = 2048
MAX_COUNT = 64


def top_scores(
    logits: Tensor,
    count: int,
    *,
    draw: Draw | None = None,
    positions: Tensor | None = None,
    noise_scale: float = 1.0,
    vocab: int | None = None,
    target_ids: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """(scores float32, ids int32), [rows, count] each, best first, the lowest column among equals.

    logits float32 [rows, columns]. Scores are log-softmax of the logits, or with a `draw` (and positions int64 [rows])
    of (logits / temperature + noise) / noise_scale. `target_ids` int32 [columns] name the columns' ids, without them
    the columns themselves; ids from `vocab` on are left out. Where fewer than `count` are left the score is -inf and
    the id means nothing, but lies within the table. Raises ValueError naming the argument.
    """
    check_tensor("logits", logits, shape=(None, None), dtype=(torch.float32, torch.float64))
    rows, columns = logits.shape
    if not 1 <= count <= min(MAX_COUNT, columns):
        raise ValueError(f"count: {count} is not within 1 to {min(MAX_COUNT, columns)}")
    if target_ids is not None:
        check_tensor("target_ids", target_ids, shape=(columns,), dtype=torch.int32, device=logits.device)
    if draw is not None:
        if positions is None:
            raise ValueError("positions: needed for the noise")
        check_tensor("positions", positions, shape=(rows,), dtype=torch.int64, device=logits.device)
    if not runs_kernel(logits):
        return top_scores_ref(
            logits, count, draw=draw, positions=positions, noise_scale=noise_scale, vocab=vocab, target_ids=target_ids
        )
    blocks = triton.cdiv(columns, BLOCK)
    best = logits.new_empty(rows, blocks * count)
    best_id = torch.empty(rows, blocks * count, dtype=torch.int32, device=logits.device)
    totals = logits.new_empty(2, rows, blocks)
    scores = logits.new_empty(rows, count)
    ids = torch.empty(rows, count, dtype=torch.int32, device=logits.device)
    early = has_dependent_launch(logits)
    options = {} if interpreted() else {"num_warps": 4, "launch_pdl": early}
    _block_top_kernel[(rows, blocks)](
        logits, positions if positions is not None else ids, target_ids if target_ids is not None else ids,
        draw.temperature if draw is not None else logits, draw.seed if draw is not None else ids,
        best, best_id, totals, totals[1], columns, columns if vocab is None else vocab, 1.0 / noise_scale,
        NOISE=draw is not None, HAS_IDS=target_ids is not None, COUNT=count, BLOCK=BLOCK, EARLY=early, **options,
    )  # fmt: skip
    _row_top_kernel[(rows,)](
        best, best_id, totals, totals[1], scores, ids, blocks, COUNT=count,
        BLOCK=triton.next_power_of_2(blocks * count), BLOCKS=triton.next_power_of_2(blocks), EARLY=early, **options,
    )  # fmt: skip
    return scores, ids


def top_scores_ref(
    logits: Tensor,
    count: int,
    *,
    draw: Draw | None = None,
    positions: Tensor | None = None,
    noise_scale: float = 1.0,
    vocab: int | None = None,
    target_ids: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The definition."""
    ids = target_ids
    if ids is None:
        ids = torch.arange(logits.shape[1], dtype=torch.int32, device=logits.device)
    scores = logits
    if draw is not None and positions is not None:
        noise = gumbel_noise(draw.seed, positions[:, None], ids.long()[None]).to(logits.dtype)
        scores = (logits / draw.temperature.to(logits.dtype) + noise) / noise_scale
    if vocab is not None:
        scores = scores.masked_fill(ids >= vocab, -torch.inf)
    order = scores.float().log_softmax(-1).sort(dim=-1, descending=True, stable=True)
    return order.values[:, :count].contiguous(), ids[order.indices[:, :count]]


@triton.jit
def _block_top_kernel(
    logits_ptr, position_ptr, target_id_ptr, temperature_ptr, seed_ptr, best_ptr, best_id_ptr, top_ptr, total_ptr,
    columns, vocab, scale,
    NOISE: tl.constexpr, HAS_IDS: tl.constexpr, COUNT: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """The COUNT best of BLOCK columns of one row, and their largest score and sum of exponents.

    best, best_id [rows, blocks, COUNT]; top, total [rows, blocks].
    """
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0)
    offs = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_column = offs < columns
    ids = offs
    if HAS_IDS:
        ids = tl.load(target_id_ptr + offs, mask=is_column, other=0)
    score = tl.load(logits_ptr + row.to(tl.int64) * columns + offs, mask=is_column, other=-float("inf"))
    if NOISE:
        temperature = tl.load(temperature_ptr).to(tl.float32)
        noise = noise_of(tl.load(seed_ptr), tl.load(position_ptr + row), ids)
        score = (tl.div_rn(score, tl.zeros_like(score) + temperature) + noise) * scale
    score = tl.where(is_column & (ids < vocab), score, -float("inf"))
    top = tl.max(score, 0)
    safe = tl.where(top == -float("inf"), 0.0, top)
    at = row * tl.num_programs(1) + tl.program_id(1)
    tl.store(top_ptr + at, top)
    tl.store(total_ptr + at, tl.sum(tl.exp(score - safe), 0))
    for i in range(COUNT):
        value = tl.max(score, 0)
        column = tl.min(tl.where((score == value) & is_column, offs, 2147483647), 0)
        column = tl.minimum(column, columns - 1)
        tl.store(best_ptr + at * COUNT + i, value)
        found = column
        if HAS_IDS:
            found = tl.load(target_id_ptr + column)
        tl.store(best_id_ptr + at * COUNT + i, found)
        score = tl.where(offs == column, -float("inf"), score)


@triton.jit
def _row_top_kernel(
    best_ptr, best_id_ptr, top_ptr, total_ptr, score_ptr, id_ptr, blocks,
    COUNT: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """The COUNT best of a row's blocks, less the logarithm of the sum of all exponents; score, id [rows, COUNT]."""
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0)
    offs_b = tl.arange(0, BLOCKS)
    is_block = offs_b < blocks
    tops = tl.load(top_ptr + row * blocks + offs_b, mask=is_block, other=-float("inf"))
    totals = tl.load(total_ptr + row * blocks + offs_b, mask=is_block, other=0.0)
    top = tl.max(tops, 0)
    log_total = top + tl.log(tl.sum(totals * tl.exp(tops - top), 0))
    offs = tl.arange(0, BLOCK)
    is_best = offs < blocks * COUNT
    best = tl.load(best_ptr + row * blocks * COUNT + offs, mask=is_best, other=-float("inf"))
    for i in range(COUNT):
        value = tl.max(best, 0)
        place = tl.min(tl.where((best == value) & is_best, offs, 2147483647), 0)
        place = tl.minimum(place, blocks * COUNT - 1)
        tl.store(score_ptr + row * COUNT + i, tl.minimum(value - log_total, 0.0))
        tl.store(id_ptr + row * COUNT + i, tl.load(best_id_ptr + row * blocks * COUNT + place))
        best = tl.where(offs == place, -float("inf"), best)
