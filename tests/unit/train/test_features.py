"""States that were kept are those of computing them again, in whatever batches their texts come."""

from __future__ import annotations

import itertools

import pytest
import torch
from factories import tiny_model

from specq.train.batch import BatchedForward
from specq.train.data import BatchSource, Sequences
from specq.train.features import TargetStates


class Counting(BatchedForward):
    calls = 0

    def states(self, tokens, *, layers=None):
        self.calls += 1
        return super().states(tokens, layers=layers)


def source() -> BatchSource:
    draws = torch.Generator().manual_seed(1)
    ids = [torch.randint(0, 290, (int(n),), generator=draws).tolist() for n in torch.randint(6, 70, (24,))]
    return BatchSource(Sequences(ids, [3] * 24), length=64, batch_tokens=512, seed=0)


def test_texts_are_run_once_while_all_fit() -> None:
    texts, forward = source(), Counting(tiny_model())
    states = TargetStates(forward, texts.lengths, budget_bytes=1 << 30)
    for batch in itertools.islice(texts.batches(0), 3 * texts.per_epoch):
        found = states.of(batch, batch.tokens).flatten(0, 1)[batch.positions]
        expected = BatchedForward(forward.model).states(batch.tokens).flatten(0, 1)[batch.positions]
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
    assert texts.per_epoch <= forward.calls < 1.5 * texts.per_epoch


@pytest.mark.parametrize("budget", [None, 0, 1000])
def test_none_are_kept_where_they_do_not_fit(budget) -> None:
    texts, forward = source(), Counting(tiny_model())
    states = TargetStates(forward, texts.lengths, budget_bytes=budget)
    for batch in itertools.islice(texts.batches(0), 2 * texts.per_epoch):
        states.of(batch, batch.tokens)
    assert forward.calls >= 2 * texts.per_epoch - 1
