"""One token a row from logits: argmax, or Gumbel-max with noise that depends on seed, position and token id only.

The noise is Philox4x32-10 with key = seed and counter = (absolute position, token id, 0, 0), u = (word + 0.5) / 2^32
and -log(-log(u)) in float64, rounded to float32. Source: Salmon et al., Parallel random numbers: as easy as 1, 2, 3
(2011); the definition that decoding uses is specq/spec/sampling.py.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from specq_kernels.launch import check_tensor, has_dependent_launch, interpreted, runs_kernel

BLOCK = 2048
WORD = 0xFFFFFFFF


@dataclass(frozen=True)
class Draw:
    """Seed and temperature on the device, so that one CUDA graph serves all of them."""

    seed: Tensor  # int64 [1], the bits of a seed below 2^64
    temperature: Tensor  # float64 [1], above 0

    @classmethod
    def of(cls, seed: int, temperature: float, device: torch.device | str = "cpu") -> Draw:
        """The draw of these numbers. Raises ValueError for a temperature that is not above 0."""
        if not temperature > 0:
            raise ValueError(f"temperature: {temperature} is not above 0, use argmax")
        return cls(
            torch.tensor([signed(seed)], dtype=torch.int64, device=device),
            torch.tensor([temperature], dtype=torch.float64, device=device),
        )


def signed(seed: int) -> int:
    """The int64 with the bits of a seed below 2^64."""
    return seed - 2**64 if seed >= 2**63 else seed


def argmax(logits: Tensor, *, vocab: int | None = None) -> Tensor:
    """int64 [rows]: the id of the largest logit below `vocab`, the lowest among equals; logits float32 [rows, ids]."""
    return _choose(logits, None, None, vocab)


def gumbel_argmax(logits: Tensor, positions: Tensor, draw: Draw, *, vocab: int | None = None) -> Tensor:
    """int64 [rows]: argmax of logits / temperature + noise(seed, position, id) over ids below `vocab`.

    logits float32 [rows, ids]; positions int64 [rows], absolute.
    """
    check_tensor("positions", positions, shape=(logits.shape[0],), dtype=torch.int64, device=logits.device)
    return _choose(logits, positions, draw, vocab)


def gumbel_argmax_ref(
    logits: Tensor, positions: Tensor | None, draw: Draw | None, *, vocab: int | None = None
) -> Tensor:
    """The definition; argmax without a draw."""
    logits = logits[:, :vocab]
    if positions is None or draw is None:
        return logits.argmax(-1)
    ids = torch.arange(logits.shape[1], device=logits.device)
    noise = gumbel_noise(draw.seed, positions[:, None], ids)
    return (logits / draw.temperature.to(logits.dtype) + noise).argmax(-1)


def gumbel_noise(seed: Tensor, positions: Tensor, ids: Tensor) -> Tensor:
    """float32 noise of these positions and ids (int64, broadcast); the definition."""
    c0, c1 = torch.broadcast_tensors(positions, ids)
    c2 = c3 = torch.zeros_like(c0)
    key0, key1 = seed & WORD, seed >> 32 & WORD
    for _ in range(10):
        low, high = c0 * 0xD2511F53, c2 * 0xCD9E8D57  # wraps mod 2^64; the sign extension is masked away
        c0, c1 = (high >> 32 & WORD) ^ c1 ^ key0, high & WORD
        c2, c3 = (low >> 32 & WORD) ^ c3 ^ key1, low & WORD
        key0, key1 = key0 + 0x9E3779B9 & WORD, key1 + 0xBB67AE85 & WORD
    return (-torch.log(-torch.log((c0.double() + 0.5) / 2.0**32))).float()


def _choose(logits: Tensor, positions: Tensor | None, draw: Draw | None, vocab: int | None) -> Tensor:
    check_tensor("logits", logits, shape=(None, None), dtype=torch.float32)
    rows, ids = logits.shape
    if vocab is not None and not 1 <= vocab <= ids:
        raise ValueError(f"vocab: {vocab} is not within the {ids} ids of logits")
    if not runs_kernel(logits):
        return gumbel_argmax_ref(logits, positions, draw, vocab=vocab)
    blocks = triton.cdiv(vocab or ids, BLOCK)
    best = logits.new_empty(rows, blocks)
    best_id = torch.empty(rows, blocks, dtype=torch.int32, device=logits.device)
    early = has_dependent_launch(logits)
    options = {} if interpreted() else {"num_warps": 4, "launch_pdl": early}
    _block_best_kernel[(rows, blocks)](
        logits, positions if positions is not None else logits, draw.temperature if draw is not None else logits,
        draw.seed if draw is not None else logits, best, best_id, ids, vocab or ids, NOISE=draw is not None,
        BLOCK=BLOCK, EARLY=early, **options,
    )  # fmt: skip
    return best_of_blocks(best, best_id)


def best_of_blocks(best: Tensor, best_id: Tensor) -> Tensor:
    """int64 [rows]: the id of each row's largest value over its blocks, the lowest among equals; [rows, blocks]."""
    rows, blocks = best.shape
    out = torch.empty(rows, dtype=torch.int64, device=best.device)
    early = has_dependent_launch(best)
    options = {} if interpreted() else {"num_warps": 4, "launch_pdl": early}
    _row_best_kernel[(rows,)](best, best_id, out, blocks, BLOCK=triton.next_power_of_2(blocks), EARLY=early, **options)
    return out


@triton.jit
def _philox_first_word(c0, c1, key0, key1):
    """First of the four words of Philox4x32-10 at counter (c0, c1, 0, 0); all uint32."""
    c2 = tl.zeros_like(c0)
    c3 = tl.zeros_like(c0)
    for _ in tl.static_range(10):
        a = c0.to(tl.uint64) * 0xD2511F53
        b = c2.to(tl.uint64) * 0xCD9E8D57
        c0 = (b >> 32).to(tl.uint32) ^ c1 ^ key0
        c1 = b.to(tl.uint32)
        c2 = (a >> 32).to(tl.uint32) ^ c3 ^ key1
        c3 = a.to(tl.uint32)
        key0 = (key0.to(tl.uint64) + 0x9E3779B9).to(tl.uint32)
        key1 = (key1.to(tl.uint64) + 0xBB67AE85).to(tl.uint32)
    return c0


@triton.jit
def noise_of(seed, position, ids):
    """float32 noise of int32 `ids` at one int64 position, key the int64 seed."""
    word = _philox_first_word(
        tl.zeros_like(ids).to(tl.uint32) + position.to(tl.uint32), ids.to(tl.uint32),
        tl.zeros_like(ids).to(tl.uint32) + seed.to(tl.uint32),
        tl.zeros_like(ids).to(tl.uint32) + (seed >> 32).to(tl.uint32),
    )  # fmt: skip
    uniform = (word.to(tl.float64) + 0.5) / 4294967296.0
    return (-tl.log(-tl.log(uniform))).to(tl.float32)


@triton.jit
def _block_best_kernel(
    logits_ptr, position_ptr, temperature_ptr, seed_ptr, best_ptr, best_id_ptr, ids, vocab,
    NOISE: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """The best score and its id in BLOCK ids of one row; logits [rows, ids], best [rows, blocks]."""
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0)
    offs = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    score = tl.load(logits_ptr + row.to(tl.int64) * ids + offs, mask=offs < vocab, other=-float("inf"))
    if NOISE:
        temperature = tl.load(temperature_ptr).to(tl.float32)
        noise = noise_of(tl.load(seed_ptr), tl.load(position_ptr + row), offs)
        score = tl.div_rn(score, tl.zeros_like(score) + temperature) + noise
    top = tl.max(score, 0)
    winner = tl.min(tl.where(score == top, offs, 2147483647), 0)
    at = row * tl.num_programs(1) + tl.program_id(1)
    tl.store(best_ptr + at, top)
    tl.store(best_id_ptr + at, winner)


@triton.jit
def _row_best_kernel(best_ptr, best_id_ptr, out_ptr, blocks, BLOCK: tl.constexpr, EARLY: tl.constexpr):
    """The best of a row's blocks; best and best_id [rows, blocks]."""
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0)
    offs = tl.arange(0, BLOCK)
    best = tl.load(best_ptr + row * blocks + offs, mask=offs < blocks, other=-float("inf"))
    ids = tl.load(best_id_ptr + row * blocks + offs, mask=offs < blocks, other=2147483647)
    winner = tl.min(tl.where(best == tl.max(best, 0), ids, 2147483647), 0)
    tl.store(out_ptr + row, winner.to(tl.int64))
