"""The target's final states of the texts that are learnt from, kept on a GPU from the first time on while they fit."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from specq.train.batch import BatchedForward
from specq.train.data import Batch
from specq.train.memory import states_budget


class TargetStates:
    """The states [batch, length, hidden] of batches; a text met again is looked up, in whatever batch it comes."""

    def __init__(self, forward: BatchedForward, lengths: Sequence[int], *, budget_bytes: int | None = None) -> None:
        """`lengths` are those of the texts by number (Batch.texts). None are kept where not all fit the budget."""
        self._forward, model = forward, forward.model
        rows, width = sum(lengths) + 1, model.spec.hidden  # the last row takes what padding gives
        if budget_bytes is None:
            budget_bytes = states_budget(model.device)
        self._kept: Tensor | None = None
        if lengths and rows * width * model.dtype.itemsize <= budget_bytes:
            self._kept = torch.zeros(rows, width, dtype=model.dtype, device=model.device)
        self._begins = torch.tensor([0, *accumulate(lengths)])
        self._is_known = torch.zeros(len(lengths), dtype=torch.bool)

    @torch.no_grad()
    def of(self, batch: Batch, tokens: Tensor) -> Tensor:
        """The states of a batch whose `tokens` are on the model's device already."""
        if self._kept is None:
            return self._forward.states(tokens)
        texts = torch.tensor(batch.texts)
        steps = torch.arange(tokens.shape[1])
        begins, ends = self._begins[texts, None], self._begins[texts + 1, None]
        places = torch.where(begins + steps < ends, begins + steps, len(self._kept) - 1).to(tokens.device)
        if bool(self._is_known[texts].all()):
            return self._kept[places]
        states = self._forward.states(tokens)
        self._kept[places] = states
        self._is_known[texts] = True
        return states
