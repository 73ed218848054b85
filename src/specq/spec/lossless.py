"""Whether a pipeline's answer is that of plain decoding: exact, a tie that rounding explains, or a bug.

Every token of an answer is judged against the target's own scores, worked out again in higher precision: how far it
falls short of the best choice there. A token that falls short by no more than rounding can move a score is a tie.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from specq.models.causal_lm import CausalLM
from specq.spec.sampling import Sampler, Seen, distinct_ids, gumbel_noise, penalize
from specq.spec.session import Generation
from specq.spec.tree import chain
from specq.spec.verifier import PREFILL_CHUNK

ROWS = 32
"""Rows judged at a time: their scores are kept in float64."""

COMPARED = 4
"""Best candidates of a position whose gaps tell how far rounding moves a score."""

LEAST_TOLERANCE = {"float64": 1e-9, "float32": 1e-5}
MOST_TOLERANCE = {"float64": 1e-7, "float32": 1e-2}
LEAST_TOLERANCE_16_BIT, MOST_TOLERANCE_16_BIT = 0.05, 1.5
"""Bounds in logits. Gaps of SmolLM2-135M move by up to 3e-5 in fp32 and by up to 0.6 with bf16 activations."""


@dataclass(frozen=True)
class Verdict:
    """`kind` is exact, tie or bug; indices count the answer's tokens, scores are in logits.

    `margin` is the gap between the two best choices at the first difference, `shortfall` the most that any token of
    the answer lies below the best choice of its position, at token `shortfall_at`.
    """

    kind: str
    tokens: int
    reason: str | None = None
    first_difference: int | None = None
    plain_token: int | None = None
    pipeline_token: int | None = None
    margin: float | None = None
    shortfall: float | None = None
    shortfall_at: int | None = None

    def record(self) -> dict[str, Any]:
        """The fields as JSON takes them: numbers that are not finite are None."""
        fields = asdict(self)
        return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in fields.items()}


@dataclass(frozen=True)
class Ending:
    """Where an answer has to end: at a stop id, at the cap, or where the context is full."""

    stop_ids: frozenset[int]
    max_tokens: int

    def broken(self, answer: Generation) -> str | None:
        """What is wrong with the end of an answer, or None."""
        early = next((i for i, token in enumerate(answer.token_ids[:-1]) if token in self.stop_ids), None)
        if early is not None:
            return f"goes on after the stop id at token {early}"
        if len(answer.token_ids) > self.max_tokens:
            return f"has {len(answer.token_ids)} tokens, more than the {self.max_tokens} allowed"
        if answer.finish_reason == "length" and len(answer.token_ids) < self.max_tokens:
            return f"ends for its length after {len(answer.token_ids)} of {self.max_tokens} tokens"
        return None


def first_difference(ours: Sequence[int], theirs: Sequence[int]) -> int | None:
    """Index of the first token that differs or that only one has; None when they are equal."""
    for i, (a, b) in enumerate(zip(ours, theirs, strict=False)):
        if a != b:
            return i
    return min(len(ours), len(theirs)) if len(ours) != len(theirs) else None


def same_answer(plain: Generation, other: Generation) -> Verdict | None:
    """The verdict that needs no scores: exact, or a bug of stops and text; None when other tokens were chosen."""
    at = first_difference(plain.token_ids, other.token_ids)
    count = len(other.token_ids)
    if at is None:
        if (plain.text, plain.finish_reason) == (other.text, other.finish_reason):
            return Verdict("exact", count)
        return Verdict("bug", count, "same tokens, but another text or finish reason")
    if at == min(count, len(plain.token_ids)):
        return Verdict("bug", count, f"ends after {count} tokens, plain after {len(plain.token_ids)}", at)
    return None


class Judge:
    """Judges answers of one target by a copy of it in higher precision.

    `tolerance`, in logits, is how far rounding may move the gap between two scores of the target as it decodes.
    """

    def __init__(self, precise: CausalLM, *, tolerance: float) -> None:
        self.precise, self.tolerance = precise, tolerance

    def compare(
        self, prompt: Sequence[int], plain: Generation, other: Generation, *, sampler: Sampler, ending: Ending
    ) -> Verdict:
        """The verdict on `other`, decoded from the same prompt with the same sampler as `plain`."""
        known = same_answer(plain, other)
        if known is not None:
            return known
        at = first_difference(plain.token_ids, other.token_ids)
        assert at is not None
        short, margins = self.shortfalls(prompt, other.token_ids, sampler)
        plain_short, _ = self.shortfalls(prompt, plain.token_ids[: at + 1], sampler)
        worst = int(short.argmax())
        reason = ending.broken(other)
        if math.isinf(short[worst]):
            reason = f"token {worst} is removed by top-k or top-p"
        elif not float(short[worst]) <= self.tolerance:  # also when it is no number
            reason = f"token {worst} is no choice of the target"
        elif not float(plain_short[at]) <= self.tolerance:
            reason = f"token {at} of plain decoding is no choice of the target"
        return Verdict(
            kind="tie" if reason is None else "bug",
            tokens=len(other.token_ids),
            reason=reason,
            first_difference=at,
            plain_token=plain.token_ids[at],
            pipeline_token=other.token_ids[at],
            margin=float(margins[at]),
            shortfall=float(short[worst]),
            shortfall_at=worst,
        )

    def shortfalls(self, prompt: Sequence[int], ids: Sequence[int], sampler: Sampler) -> tuple[Tensor, Tensor]:
        """(shortfall, margin), float64 [tokens] each: how far a token lies below the best, and best from second."""
        short, margins = [], []
        for start, logits, positions in teacher_forced(self.precise, prompt, ids, sampler):
            chosen = torch.tensor(ids[start : start + len(logits)], device=logits.device)
            short.append(shortfall(logits, positions, chosen, sampler, tolerance=self.tolerance))
            best = _noisy(logits, positions, sampler).topk(2).values
            margins.append((best[:, 0] - best[:, 1]) * (sampler.temperature or 1.0))
        return torch.cat(short).cpu(), torch.cat(margins).cpu()


@torch.inference_mode()
def teacher_forced(
    model: CausalLM, prompt: Sequence[int], ids: Sequence[int], sampler: Sampler
) -> Iterator[tuple[int, Tensor, Tensor]]:
    """(start, logits float64 [rows, vocab], positions int64 [rows]) for a few tokens of `ids` at a time.

    Row i is what the model says of token `start + i`, with penalties applied and unknown ids left out.
    """
    cache = model.new_cache(len(prompt) + len(ids))
    before = list(prompt[:-1])
    for start in range(0, len(before), PREFILL_CHUNK):
        part = before[start : start + PREFILL_CHUNK]
        model.forward(chain(part, device=model.device), cache, rows=slice(0, 0))
        cache.keep(range(len(part)))
    fed = [prompt[-1], *ids[:-1]]
    for start in range(0, len(ids), ROWS):
        nodes = chain(fed[start : start + ROWS], device=model.device)
        out = model.forward(nodes, cache)
        logits = out.logits.double()
        if sampler.needs_seen:
            seen = Seen.of(distinct_ids([*before, *fed[:start]], model.device), nodes, start=0)
            logits = penalize(logits, seen, sampler.repetition_penalty)
        cache.keep(range(len(nodes)))
        yield start, logits[:, : sampler.vocab], out.positions + 1


def shortfall(logits: Tensor, positions: Tensor, chosen: Tensor, sampler: Sampler, *, tolerance: float) -> Tensor:
    """float64 [rows]: logits that the chosen ids lie below what the sampler takes, 0 where they are its choice.

    Infinite for an id that top-k or top-p removes even if rounding moves every score by `tolerance`; in turn only
    what these filters surely keep counts as a better choice.
    """
    scores = _noisy(logits, positions, sampler)
    own = scores.gather(1, chosen[:, None]).squeeze(1)
    if sampler.temperature == 0.0:
        return scores.amax(1) - own
    surely, possibly = _kept(logits / sampler.temperature, sampler, tolerance / sampler.temperature)
    best = scores.masked_fill(~surely, -torch.inf).amax(1)
    short = (best - own).clamp(min=0.0) * sampler.temperature
    return short.masked_fill(~possibly.gather(1, chosen[:, None]).squeeze(1), torch.inf)


def rounding_error(
    working: CausalLM, precise: CausalLM, prompt: Sequence[int], ids: Sequence[int], sampler: Sampler
) -> float:
    """The most, in logits, by which gaps between the best choices of these positions differ between the two models."""
    worst = 0.0
    pairs = zip(
        teacher_forced(working, prompt, ids, sampler), teacher_forced(precise, prompt, ids, sampler), strict=True
    )
    for (_, rough, _), (_, exact, positions) in pairs:
        best = _noisy(exact, positions, sampler).topk(COMPARED).indices
        gaps = [scores.gather(1, best) for scores in (rough.to(exact.device), exact)]
        moved = (gaps[0] - gaps[0][:, :1]) - (gaps[1] - gaps[1][:, :1])
        worst = max(worst, float(moved.abs().max()))
    return worst


def tolerance_for(dtype: str, error: float) -> float:
    """Twice the rounding error seen, within what is possible in this precision at all (a fault must not widen it)."""
    least = LEAST_TOLERANCE.get(dtype, LEAST_TOLERANCE_16_BIT)
    return min(max(2 * error, least), MOST_TOLERANCE.get(dtype, MOST_TOLERANCE_16_BIT))


def _noisy(logits: Tensor, positions: Tensor, sampler: Sampler) -> Tensor:
    """What the sampler takes the maximum of, before filters: logits, or logits / T plus noise."""
    if sampler.temperature == 0.0:
        return logits
    ids = torch.arange(logits.shape[1], device=logits.device)
    return logits / sampler.temperature + gumbel_noise(sampler.seed, positions[:, None], ids)


def _kept(scaled: Tensor, sampler: Sampler, slack: float) -> tuple[Tensor, Tensor]:
    """(surely, possibly), bool [rows, vocab]: what top-k and top-p keep however scores move by up to `slack`."""
    surely = possibly = torch.ones_like(scaled, dtype=torch.bool)
    if 0 < sampler.top_k < scaled.shape[1]:
        last_in, first_out = scaled.topk(sampler.top_k + 1).values[:, -2:].split(1, dim=1)
        surely, possibly = scaled > first_out + slack, scaled >= last_in - slack
    if sampler.top_p < 1.0:
        most = _mass_ahead(scaled.masked_fill(~surely, -torch.inf), slack)
        least = _mass_ahead(scaled.masked_fill(~possibly, -torch.inf), -slack)
        surely = surely & (most * math.exp(2 * slack) < sampler.top_p)
        # The best id always stays, and rounding decides which of the nearly best it is.
        is_best = scaled >= scaled.amax(1, keepdim=True) - slack
        possibly = possibly & ((least * math.exp(-2 * slack) < sampler.top_p) | is_best)
    return surely, possibly


def _mass_ahead(scaled: Tensor, slack: float) -> Tensor:
    """Probability [rows, vocab] of the ids better than each id by more than `-slack`, itself left out.

    NaN in rows that are all -inf.
    """
    ordered = scaled.sort(dim=1, descending=True).values
    mass = F.pad(ordered.softmax(1).cumsum(1), (1, 0))  # [rows, vocab + 1]
    ahead = torch.searchsorted(-ordered, -(scaled - slack), right=slack > 0)
    own = scaled.softmax(1) if slack > 0 else 0.0
    return (mass.gather(1, ahead) - own).clamp(min=0.0)
