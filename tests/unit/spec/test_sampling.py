"""The sampler: noise as published, filters as transformers has them, the distribution exact."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import (
    RepetitionPenaltyLogitsProcessor,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from specq.spec import sampling
from specq.spec.sampling import UNDECIDED, Sampler, Seen, gumbel_noise, penalize, philox
from specq_kernels.sampling import Draw


def philox_numpy(seed: int, c0: int, c1: int) -> int:
    """Philox4x32-10 in Python integers: an independent statement of the published algorithm."""
    mask = 0xFFFFFFFF
    counter, key = [c0, c1, 0, 0], [seed & mask, seed >> 32 & mask]
    for _ in range(10):
        p0, p1 = 0xD2511F53 * counter[0], 0xCD9E8D57 * counter[2]
        counter = [p1 >> 32 ^ counter[1] ^ key[0], p1 & mask, p0 >> 32 ^ counter[3] ^ key[1], p0 & mask]
        key = [(key[0] + 0x9E3779B9) & mask, (key[1] + 0xBB67AE85) & mask]
    return counter[0]


def test_philox_gives_the_published_known_answer() -> None:
    assert int(philox(0, torch.tensor(0), torch.tensor(0))) == 0x6627E8D5


@given(st.integers(0, 2**64 - 1), st.integers(0, 2**31), st.integers(0, 2**20))
def test_philox_equals_integer_arithmetic(seed: int, position: int, token: int) -> None:
    assert int(philox(seed, torch.tensor(position), torch.tensor(token))) == philox_numpy(seed, position, token)


def test_noise_is_finite_at_both_ends_of_u(monkeypatch: pytest.MonkeyPatch) -> None:
    for word in (0, 2**32 - 1):
        monkeypatch.setattr(sampling, "philox", lambda *_, word=word: torch.tensor([word]))
        assert torch.isfinite(gumbel_noise(1, torch.tensor([0]), torch.tensor([0]))).all()


def test_samples_follow_the_filtered_softmax() -> None:
    logits = torch.tensor([[1.0, 0.2, -0.5, 2.0, 0.0, -3.0, 1.5, 0.7]], dtype=torch.float64)
    sampler = Sampler(temperature=0.7, top_p=0.9, seed=3)
    n = 100_000
    drawn = sampler(logits.expand(n, -1), torch.arange(n))
    counts = torch.bincount(drawn, minlength=8).double()
    expected = TopPLogitsWarper(0.9)(None, logits / 0.7).softmax(-1)[0] * n
    kept = expected > 0
    chi_square = float((((counts - expected) ** 2)[kept] / expected[kept]).sum())
    assert counts[~kept].sum() == 0
    # 99.99 % quantile of chi-square with 3 degrees of freedom is 21.1.
    assert int(kept.sum()) == 4
    assert chi_square < 21.1
    # Control: the same counts against the unfiltered law must fail.
    wrong = (logits / 0.9).softmax(-1)[0] * n
    assert float(((counts - wrong) ** 2 / wrong).sum()) > 1000


@given(
    st.integers(0, 2**32 - 1),
    st.sampled_from([0, 1, 5, 40]),
    st.sampled_from([0.05, 0.5, 0.9, 1.0]),
    st.sampled_from([0.3, 1.0, 2.5]),
)
def test_filters_keep_what_transformers_keeps(seed: int, top_k: int, top_p: float, temperature: float) -> None:
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 3
    expected = logits / temperature
    if top_k:
        expected = TopKLogitsWarper(top_k)(None, expected)
    if top_p < 1:
        expected = TopPLogitsWarper(top_p)(None, expected)
    scores, ids, _ = Sampler(temperature=temperature, top_k=top_k, top_p=top_p)._candidates(logits / temperature, 50)
    full = torch.full_like(logits, -torch.inf).scatter(1, ids, scores)
    assert torch.equal(full.isfinite(), expected.isfinite())


def test_flat_distributions_beyond_the_sorted_candidates_are_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.linspace(0, 0.01, 300, dtype=torch.float64)[None]
    whole = Sampler(temperature=1.0, top_p=0.9, seed=1)(logits.expand(50, -1), torch.arange(50))
    monkeypatch.setattr(sampling, "TOP_P_CANDIDATES", 16)
    sampler = Sampler(temperature=1.0, top_p=0.9, seed=1)
    assert torch.equal(whole, sampler(logits.expand(50, -1), torch.arange(50)))
    assert sampler.choose(logits, torch.arange(1)).tolist() == [UNDECIDED]
    steep = 30000 * logits.expand(50, -1)
    assert torch.equal(sampler.choose(steep, torch.arange(50)), sampler(steep, torch.arange(50)))


def test_seed_and_temperature_may_be_tensors() -> None:
    logits, positions = torch.randn(6, 40, generator=torch.Generator().manual_seed(2)), torch.arange(6)
    for seed in (5, 2**40 + 1):
        for settings in ({}, {"top_k": 7}, {"top_p": 0.8}):
            sampler = Sampler(temperature=0.7, seed=seed, **settings)
            draw = Draw.of(seed, 0.7)
            assert torch.equal(sampler.form.choose(logits, positions, draw=draw), sampler(logits, positions))
            expected = sampler.guesses(logits, positions, count=5)
            for ours, theirs in zip(sampler.form.guesses(logits, positions, count=5, draw=draw), expected, strict=True):
                assert torch.equal(ours, theirs)
    assert Sampler(temperature=0.3, seed=1).form == Sampler(temperature=0.9, seed=2).form
    assert Sampler(temperature=0.3).form != Sampler().form


def test_repetition_penalty_counts_each_nodes_own_ancestors() -> None:
    logits = torch.randn(3, 10, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    tokens = torch.tensor([4, 5, 6])
    ancestors = torch.tensor([[True, False, False], [True, True, False], [True, False, True]])
    got = penalize(logits, Seen(torch.tensor([1, 2]), tokens, ancestors), 1.3)
    processor = RepetitionPenaltyLogitsProcessor(1.3)
    for row, prefix in enumerate(([1, 2, 4], [1, 2, 4, 5], [1, 2, 4, 6])):
        assert torch.allclose(got[row], processor(torch.tensor([prefix]), logits[row : row + 1])[0])


def test_ids_beyond_the_tokenizer_are_never_chosen() -> None:
    logits = torch.zeros(200, 12)
    logits[:, 10:] = 50.0
    for temperature in (0.0, 1.0):
        assert int(Sampler(temperature=temperature, vocab=10)(logits, torch.arange(200)).max()) < 10


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    logits = torch.randn(9, 64, generator=torch.Generator().manual_seed(1))
    sampler = Sampler(temperature=0.8, top_p=0.95, seed=11)
    whole = sampler(logits, torch.arange(9))
    alone = torch.cat([sampler(logits[i : i + 1], torch.tensor([i])) for i in range(9)])
    assert torch.equal(whole, alone)


def test_every_token_of_a_flat_distribution_appears_over_seeds_and_a_seed_repeats() -> None:
    logits, position = torch.zeros(1, 8), torch.tensor([5])
    drawn = [int(Sampler(temperature=1.0, seed=seed)(logits, position)) for seed in range(300)]
    assert set(drawn) == set(range(8))
    assert drawn == [int(Sampler(temperature=1.0, seed=seed)(logits, position)) for seed in range(300)]
    assert np.bincount(drawn, minlength=8).min() > 15


def test_noise_made_in_parts_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    positions, ids = torch.arange(7)[:, None], torch.arange(50)
    whole = gumbel_noise(3, positions, ids)
    monkeypatch.setattr(sampling, "NOISE_AT_ONCE", 120)
    assert torch.equal(gumbel_noise(3, positions, ids), whole)
    assert torch.equal(gumbel_noise(3, positions, ids.expand(7, -1)), whole)
