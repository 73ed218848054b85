"""The coupling rates against what can be worked out for small distributions, and a head's row beside its target's."""

from __future__ import annotations

import pytest
import torch
from factories import tiny_config, tiny_model
from tiny_models import make_head
from torch import Tensor

from specq.bench.coupling import coupling_rates, head_logits_of, logits_of
from specq.spec.tree import chain


def gumbel_match(p: Tensor, q: Tensor) -> float:
    """The chance that argmax(log p + g) is argmax(log q + g): the sum over i of 1 / sum_j max(p_j / p_i, q_j / q_i)."""
    worst = torch.maximum(p[None] / p[:, None], q[None] / q[:, None])
    return float((1 / worst.sum(1)).sum())


def test_rates_are_those_of_the_distributions() -> None:
    draws = torch.Generator().manual_seed(0)
    target, draft = torch.randn(2, 9, generator=draws).mul(2).split(1)
    temperature = 0.7
    p, q = (torch.softmax(logits[0].double() / temperature, -1) for logits in (target, draft))
    rates = coupling_rates(target, draft, temperature=temperature, draws=20000, generator=draws)
    assert rates.maximal == pytest.approx(float(torch.minimum(p, q).sum()), abs=1e-5)
    assert rates.greedy == pytest.approx(float(p[q.argmax()]), abs=1e-5)
    assert rates.independent == pytest.approx(float(p @ q), abs=1e-5)
    # 20000 draws: three standard deviations are 0.011
    assert rates.shared_noise == pytest.approx(gumbel_match(p, q), abs=0.011)
    assert rates.among_plain == pytest.approx(float(p[q.topk(4).indices].sum()), abs=0.011)
    assert rates.independent < rates.shared_noise <= rates.maximal + 0.011
    assert rates.among_noisy > rates.shared_noise


def test_a_draft_that_is_the_target_agrees_always() -> None:
    logits = torch.randn(5, 30)
    rates = coupling_rates(logits, logits, temperature=1.0)
    assert rates.maximal == pytest.approx(1.0)
    assert (rates.shared_noise, rates.among_noisy) == (1.0, 1.0)
    assert rates.independent < 0.9


def test_a_heads_row_stands_beside_the_targets_of_one_id_later() -> None:
    target = tiny_model(tiny_config(num_hidden_layers=3))
    head = make_head(target)
    ids = [5, 9, 33, 7, 12]
    found = head_logits_of(head, ids)
    assert found.shape == (4, target.spec.vocab)
    assert logits_of(target, ids).shape == (5, target.spec.vocab)
    with torch.inference_mode():
        cache = target.new_cache(2, features=head.spec.features)
        target.forward(chain(ids[:2]), cache)
        row = head(chain(ids[1:3]), head.enter(cache.features), head.new_cache(2))[-1:]
    # what is expected after ids[:3], when the target has run the first two
    torch.testing.assert_close(found[1:2], head.logits(row))
