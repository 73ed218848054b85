"""Cross-entropy against a teacher's whole distribution through a frozen output head, without keeping logits."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

ROWS_AT_ONCE = 4096
"""Rows whose logits exist at the same time; 4096 x 49152 in fp32 are 0.8 GB."""


class _SoftCrossEntropy(torch.autograd.Function):
    """Mean over rows of -sum(teacher * log_softmax(states @ head.T)); the gradient of `states` is made on the way."""

    @staticmethod
    def forward(ctx: Any, states: Tensor, head: Tensor, teacher: Tensor) -> Tensor:
        total = states.new_zeros((), dtype=torch.float32)
        gradient = torch.empty_like(states)
        for part in _parts(states):
            logits = (states[part] @ head.T).float()  # [rows, vocab]
            log_total = logits.logsumexp(-1, keepdim=True)
            wanted = teacher[part]
            total += (log_total.squeeze(1) * wanted.sum(-1) - (logits * wanted).sum(-1)).sum()
            difference = logits.sub_(log_total).exp_().sub_(wanted)
            gradient[part] = difference.to(head.dtype) @ head
        ctx.save_for_backward(gradient.div_(len(states)))
        return total / len(states)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (gradient,) = ctx.saved_tensors
        return gradient * grads[0].to(gradient.dtype), None, None


def soft_cross_entropy(states: Tensor, head: Tensor, teacher: Tensor) -> Tensor:
    """The mean cross-entropy, a fp32 scalar, of states [rows, hidden] against teacher [rows, vocab].

    `head` [vocab, hidden] gets no gradient; `teacher` rows are probabilities, in any float dtype.
    """
    loss: Tensor = _SoftCrossEntropy.apply(states, head, teacher)
    return loss


@torch.no_grad()
def teacher_distribution(states: Tensor, head: Tensor) -> Tensor:
    """Probabilities [rows, vocab] of the target's final states [rows, hidden], in the head's dtype."""
    out = states.new_empty(states.shape[0], head.shape[0], dtype=head.dtype)
    for part in _parts(states):
        out[part] = (states[part] @ head.T).float().softmax(-1).to(head.dtype)
    return out


@torch.no_grad()
def top1_agreement(states: Tensor, head: Tensor, teacher: Tensor) -> Tensor:
    """The share of rows whose likeliest id is the teacher's, a fp32 scalar."""
    hits = [(states[p] @ head.T).argmax(-1) == teacher[p].argmax(-1) for p in _parts(states)]
    return torch.cat(hits).float().mean()


def _parts(rows: Tensor) -> Iterator[slice]:
    for first in range(0, rows.shape[0], ROWS_AT_ONCE):
        yield slice(first, first + ROWS_AT_ONCE)
