"""Cross-entropy against a teacher's whole distribution through a frozen output head, without keeping logits.

The gradient of a row's cross-entropy is what its own distribution expects of the head's rows, less what the teacher's
does. So a teacher is that expectation, one vector a row, made once for all depths that learn from it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

ROWS_AT_ONCE = 4096
"""Rows whose logits exist at the same time; 4096 x 49152 in bf16 are 0.4 GB."""


@dataclass(frozen=True)
class Teacher:
    """The target's distributions after some positions: `expected` [rows, hidden], the head's row that each expects, and
    `best` int64 [rows], its likeliest id."""

    expected: Tensor
    best: Tensor

    @classmethod
    @torch.no_grad()
    def of(cls, states: Tensor, head: Tensor) -> Teacher:
        """The teacher whose final states are [rows, hidden] under this output head [vocab, hidden]."""
        expected = torch.empty_like(states)
        best = torch.empty(len(states), dtype=torch.int64, device=states.device)
        for part in _parts(states):
            logits = states[part] @ head.T
            best[part] = logits.argmax(-1)
            expected[part] = logits.softmax(-1) @ head
        return cls(expected, best)


class _SoftCrossEntropy(torch.autograd.Function):
    """(Mean cross-entropy over rows, share of rows whose likeliest id is the teacher's); the gradient is made on the
    way."""

    @staticmethod
    def forward(ctx: Any, states: Tensor, head: Tensor, expected: Tensor, best: Tensor) -> tuple[Tensor, Tensor]:
        total, hits = (states.new_zeros((), dtype=torch.float32) for _ in range(2))
        gradient = torch.empty_like(states)
        for part in _parts(states):
            logits = states[part] @ head.T  # [rows, vocab]
            largest, own = logits.max(-1)
            chances = logits.softmax(-1)
            # softmax sums in fp32 whatever its dtype; the sum is read off the likeliest id, which never underflows.
            log_total = largest.float() - chances.gather(1, own[:, None]).squeeze(1).float().log()
            total += (log_total - (states[part].float() * expected[part].float()).sum(-1)).sum()
            hits += (own == best[part]).sum()
            gradient[part] = chances @ head - expected[part]
        ctx.save_for_backward(gradient.div_(len(states)))
        agreement = hits / len(states)
        ctx.mark_non_differentiable(agreement)
        return total / len(states), agreement

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        (gradient,) = ctx.saved_tensors
        return gradient * grads[0].to(gradient.dtype), None, None, None


def soft_cross_entropy(states: Tensor, head: Tensor, teacher: Teacher) -> tuple[Tensor, Tensor]:
    """(mean cross-entropy of states [rows, hidden] against the teacher, how often both find the same id likeliest).

    Both are fp32 scalars; only the first has a gradient, and `head` [vocab, hidden] gets none.
    """
    loss, agreement = _SoftCrossEntropy.apply(states, head, teacher.expected, teacher.best)
    return loss, agreement


def _parts(rows: Tensor) -> Iterator[slice]:
    for first in range(0, rows.shape[0], ROWS_AT_ONCE):
        yield slice(first, first + ROWS_AT_ONCE)
