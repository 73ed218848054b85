"""Sampling as a pure function of logits, position, seed and prefix, so that no drafter can change the text.

Gumbel-max with counter-based noise: the noise of a token depends on the seed, its absolute position and its own id
only. Source: Philox4x32-10, Salmon et al. 2011; noise shared by drafter and target, arXiv 2408.07978.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from specq.spec.tree import DraftTree

if TYPE_CHECKING:
    from specq_kernels.sampling import Draw

MASK32 = 0xFFFFFFFF
PHILOX_M0, PHILOX_M1 = 0xD2511F53, 0xCD9E8D57
PHILOX_W0, PHILOX_W1 = 0x9E3779B9, 0xBB67AE85
NOISE_AT_ONCE = 2**16
"""Noise made at a time on a CPU, so that it stays in the cache (60 rows of 49152 ids: 180 ms instead of 800)."""

TOP_P_CANDIDATES = 1024
"""Candidates sorted at first for top-p; a flatter distribution is sorted whole."""

UNDECIDED = -1
"""Stands for the token of a row whose distribution is flatter than that."""


@dataclass(frozen=True)
class Seen:
    """Ids that count for penalties: the context's, and each node's own ancestors' (itself included).

    `context_ids` int64 [n], each any number of times; `tokens` int64 [nodes]; `ancestors` bool [rows, nodes].
    """

    context_ids: Tensor
    tokens: Tensor
    ancestors: Tensor

    @classmethod
    def of(cls, context_ids: Tensor, nodes: DraftTree, *, start: int) -> Seen:
        """What counts for the nodes from `start` on (-1: one row, the context's end, before any node)."""
        ancestors = nodes.ancestor_mask()
        rows = ancestors[start:] if start >= 0 else ancestors.new_zeros(1, len(nodes))
        return cls(context_ids, nodes.tokens.long(), rows)


def distinct_ids(context: Iterable[int], device: torch.device) -> Tensor:
    """int64 [n]: the ids of a context, each once."""
    return torch.tensor(sorted(set(context)), dtype=torch.int64, device=device)


@dataclass(frozen=True)
class Sampler:
    """Chooses one token a row; the same answer for the same logits, positions, seed and prefix, whatever drafted.

    temperature 0 is the argmax. `top_k` 0 and `top_p` 1 switch a filter off. `vocab` masks ids from there on, which
    no tokenizer means. Order as in transformers: repetition penalty, temperature, top-k, top-p.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    repetition_penalty: float = 1.0
    seed: int = 0
    vocab: int | None = None

    @property
    def needs_seen(self) -> bool:
        """Whether the prefix matters."""
        return self.repetition_penalty != 1.0

    @property
    def has_filter(self) -> bool:
        """Whether only some of the ids can be drawn."""
        return self.temperature > 0 and (self.top_k > 0 or self.top_p < 1.0)

    @property
    def form(self) -> Sampler:
        """What is the same for samplers that differ in nothing but seed and temperature (0 or above)."""
        return replace(self, seed=0, temperature=1.0 if self.temperature > 0 else 0.0)

    def __call__(self, logits: Tensor, positions: Tensor, seen: Seen | None = None) -> Tensor:
        """int64 [rows]: the token at each absolute position. `logits` [rows, vocab], `positions` int64 [rows]."""
        chosen = self.choose(logits, positions, seen)
        if self.may_be_undecided(logits) and bool((chosen == UNDECIDED).any()):
            chosen = self.choose(logits, positions, seen, candidates=logits.shape[1])
        return chosen

    def choose(
        self,
        logits: Tensor,
        positions: Tensor,
        seen: Seen | None = None,
        *,
        draw: Draw | None = None,
        candidates: int | None = None,
    ) -> Tensor:
        """As a call, but nothing depends on the data: UNDECIDED where top-p keeps more than so many candidates.

        By default TOP_P_CANDIDATES. `draw` stands for seed and temperature.
        """
        logits = self._processed(logits, seen)
        if self.temperature == 0.0:
            return logits.argmax(-1)
        scores, ids, is_whole = self._noisy(logits, positions, draw, candidates)
        chosen = ids.gather(1, scores.argmax(1, keepdim=True)).squeeze(1)
        return chosen if is_whole is None else torch.where(is_whole, chosen, UNDECIDED)

    def guesses(
        self,
        logits: Tensor,
        positions: Tensor,
        seen: Seen | None = None,
        *,
        count: int,
        noise_scale: float = 1.0,
        draw: Draw | None = None,
    ) -> tuple[Tensor, Tensor]:
        """(log-scores fp32, ids int64), [rows, count] each, best first: what a drafter expects this sampler to choose.

        At temperature 0 the log-probabilities. Above it the noise that the choice will be made with is in the score:
        log-softmax of (filtered logits / T + noise) / `noise_scale`; what a filter removes has score -inf, and of a
        flat distribution top-p keeps the best candidates only. Logits may be -inf where the drafter has no token.
        `draw` as in `choose`.
        """
        logits = self._processed(logits, seen)
        if self.temperature == 0.0:
            scores, ids = logits, None
        else:
            scores, ids, _ = self._noisy(logits, positions, draw, None)
            scores = scores / noise_scale
        best, columns = scores.float().log_softmax(-1).topk(min(count, scores.shape[1]), dim=-1)
        return best, columns if ids is None else ids.gather(1, columns)

    def penalized(self, logits: Tensor, seen: Seen | None) -> Tensor:
        """Logits after the repetition penalty, if there is one. Raises ValueError without the prefix it needs."""
        if not self.needs_seen:
            return logits
        if seen is None:
            raise ValueError("seen: a repetition penalty needs the prefix")
        return penalize(logits, seen, self.repetition_penalty)

    def may_be_undecided(self, logits: Tensor) -> bool:
        """Whether `choose` can leave a row of these logits undecided."""
        is_cut = self.temperature > 0 and self.top_k == 0 and self.top_p < 1.0
        return is_cut and logits[:, : self.vocab].shape[1] > TOP_P_CANDIDATES

    def _processed(self, logits: Tensor, seen: Seen | None) -> Tensor:
        """Logits of the ids a tokenizer means, after the penalty."""
        return self.penalized(logits, seen)[:, : self.vocab]

    def _noisy(
        self, logits: Tensor, positions: Tensor, draw: Draw | None, candidates: int | None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """(scores, ids) [rows, candidates]: filtered logits / T plus the noise of each id at its position.

        Then bool [rows], whether these are all that the filter keeps; None where they always are.
        """
        # A tensor, because a GPU multiplies by the inverse of a number.
        temperature = logits.new_full((1,), self.temperature) if draw is None else draw.temperature.to(logits.dtype)
        scores, ids, is_whole = self._candidates(logits / temperature, candidates or TOP_P_CANDIDATES)
        noise = gumbel_noise(self.seed if draw is None else draw.seed, positions[:, None], ids)
        return scores + noise.to(scores.dtype), ids, is_whole

    def _candidates(self, scaled: Tensor, most: int) -> tuple[Tensor, Tensor, Tensor | None]:
        """(scores, ids), [rows, candidates] each, best first, -inf what a filter removes; the third as in `_noisy`."""
        rows, vocab = scaled.shape
        if self.top_k == 0 and self.top_p >= 1.0:
            return scaled, torch.arange(vocab, device=scaled.device).expand(rows, vocab), None
        if self.top_k:
            scores, ids = scaled.topk(min(self.top_k, vocab), dim=-1)
            log_total = scores.logsumexp(-1, keepdim=True)
            return _keep_top_p(scores, log_total, self.top_p), ids, None
        log_total = scaled.logsumexp(-1, keepdim=True)
        if most >= vocab:
            scores, ids = scaled.sort(dim=-1, descending=True)
            return _keep_top_p(scores, log_total, self.top_p), ids, None
        scores, ids = scaled.topk(most, dim=-1)
        is_whole = (scores - log_total).exp().sum(-1) >= self.top_p
        return _keep_top_p(scores, log_total, self.top_p), ids, is_whole


def _keep_top_p(scores: Tensor, log_total: Tensor, top_p: float) -> Tensor:
    """`scores` (sorted, best first) with -inf where the probability before a candidate already reaches `top_p`."""
    if top_p >= 1.0:
        return scores
    probabilities = (scores - log_total).exp()
    before = probabilities.cumsum(-1) - probabilities
    before[:, 0] = -1.0  # the best candidate always stays
    return scores.masked_fill(before >= top_p, -torch.inf)


def penalize(logits: Tensor, seen: Seen, penalty: float) -> Tensor:
    """Logits with every seen id divided by `penalty` when positive, multiplied when negative (arXiv 1909.05858)."""
    times = torch.zeros(logits.shape, dtype=torch.int32, device=logits.device).index_fill_(1, seen.context_ids, 1)
    times.scatter_add_(1, seen.tokens.expand(len(times), -1), seen.ancestors.int())
    return torch.where(times > 0, torch.where(logits > 0, logits / penalty, logits * penalty), logits)


def gumbel_noise(seed: int | Tensor, positions: Tensor, ids: Tensor) -> Tensor:
    """float32 Gumbel noise -log(-log(u)), u of 32 bits, never infinite; `positions` and `ids` (int64) broadcast.

    The seed may be an int64 tensor [1] of its bits.
    """
    positions, ids = torch.broadcast_tensors(positions, ids)
    if ids.numel() <= NOISE_AT_ONCE or ids.dim() == 0 or ids.is_cuda:
        return _gumbel_noise(seed, positions, ids)
    rows = max(1, NOISE_AT_ONCE * ids.shape[0] // ids.numel())
    parts = zip(positions.split(rows), ids.split(rows), strict=True)
    return torch.cat([_gumbel_noise(seed, some, of) for some, of in parts])


def _gumbel_noise(seed: int | Tensor, positions: Tensor, ids: Tensor) -> Tensor:
    # float64 holds u = 1 - 2**-33 exactly; in float32 it would be 1 and the noise infinite.
    u = (philox(seed, positions, ids).double() + 0.5) / 2.0**32
    return (-torch.log(-torch.log(u))).float()


def philox(seed: int | Tensor, counter0: Tensor, counter1: Tensor) -> Tensor:
    """int64 in [0, 2**32): first word of Philox4x32-10 at counter (counter0, counter1, 0, 0), key the 64-bit `seed`.

    Source: Salmon et al., Parallel random numbers: as easy as 1, 2, 3 (2011).
    """
    key0, key1 = seed & MASK32, (seed >> 32) & MASK32
    c0, c1 = torch.broadcast_tensors(counter0, counter1)
    c2 = c3 = torch.zeros_like(c0)
    for _ in range(10):
        # int64 products wrap mod 2**64; the sign extension of >> is masked away, so the high word is right.
        product0, product1 = c0 * PHILOX_M0, c2 * PHILOX_M1
        c0, c1, c2, c3 = (
            (product1 >> 32 & MASK32) ^ c1 ^ key0,
            product1 & MASK32,
            (product0 >> 32 & MASK32) ^ c3 ^ key1,
            product0 & MASK32,
        )
        key0, key1 = (key0 + PHILOX_W0) & MASK32, (key1 + PHILOX_W1) & MASK32
    return c0
