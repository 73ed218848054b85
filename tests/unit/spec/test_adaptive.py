"""Adaptation while decoding: when drafts are cut, when they come back, and that the text never changes."""

from __future__ import annotations

import logging
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import VOCAB, make_head, make_model

from specq.models.causal_lm import CausalLM
from specq.recipe import Recipe
from specq.spec.adaptive import MARGIN, MOST_REST, REST, TRIAL, WINDOW, AdaptiveSpeculator, Governor
from specq.spec.decision import Level
from specq.spec.pipelines import PIPELINES, HeadSeat, Parts, Seat
from specq.spec.sampling import Sampler
from specq.spec.speculator import Round, StopRule, generate
from specq.spec.tree import MAX_NODES

CONTEXT = 160
FULL, HALF = Level(6, ((100, 2.0),)), Level(3, ((100, 1.5),))


def feed(governor: Governor, decided: int, rounds: int) -> None:
    """Rounds that draft as far as the governor lets them and decide so many tokens, at most."""
    for _ in range(rounds):
        room = governor.room(100)
        governor.observe(Round(False, room - 1, min(decided, room), 1.0, 1.0), 100)


def fall_to_plain(governor: Governor) -> None:
    feed(governor, 1, len(governor.levels) * WINDOW)
    assert governor.is_plain


def test_drafts_that_earn_their_cost_stay() -> None:
    governor = Governor([FULL, HALF], name="sequence")
    feed(governor, 3, 10 * WINDOW)
    assert governor.room(100) == 7
    assert governor.room(4) == 4


def test_losing_drafts_become_shorter_then_none() -> None:
    governor = Governor([FULL, HALF], name="sequence")
    feed(governor, 1, WINDOW - 1)
    assert governor.room(100) == 7
    feed(governor, 1, 1)
    assert governor.room(100) == 4
    feed(governor, 1, WINDOW)
    assert governor.is_plain
    assert governor.room(100) == 1


def test_a_gain_within_the_margin_changes_nothing() -> None:
    level = Level(6, ((100, 2.0 * (1 + MARGIN / 2)),))
    governor = Governor([level], name="sequence")
    feed(governor, 2, 10 * WINDOW)
    assert governor.room(100) == 7


def test_drafts_come_back_when_a_trial_pays() -> None:
    governor = Governor([FULL, HALF], name="sequence")
    fall_to_plain(governor)
    feed(governor, 1, REST)
    assert governor.room(100) == 7
    feed(governor, 5, TRIAL)
    feed(governor, 5, 10 * WINDOW)
    assert governor.room(100) == 7


def test_a_trial_that_fails_at_full_length_tries_the_shorter_draft() -> None:
    governor = Governor([FULL, Level(3, ((100, 1.2),))], name="sequence")
    feed(governor, 1, 2 * WINDOW)
    feed(governor, 1, REST)
    feed(governor, 1, TRIAL)
    assert governor.room(100) == 4
    feed(governor, 2, TRIAL)
    assert governor.room(100) == 4
    assert not governor.is_plain


def test_trials_that_fail_become_rare() -> None:
    governor = Governor([FULL], name="eagle2")
    fall_to_plain(governor)
    rests = []
    for _ in range(7):
        rest = 0
        while governor.is_plain:
            feed(governor, 1, 1)
            rest += 1
        rests.append(rest)
        feed(governor, 1, TRIAL)
        assert governor.is_plain
    assert rests == [REST, 2 * REST, 4 * REST, 8 * REST, *[MOST_REST] * 3]


def test_rounds_without_a_draft_and_prefills_are_not_judged() -> None:
    governor = Governor([FULL], name="lookup")
    for _ in range(10 * WINDOW):
        governor.observe(Round(False, 0, 1, 1.0, 1.0), 100)
        governor.observe(Round(True, 0, 1, 0.0, 1.0), 100)
    assert not governor.is_plain


def test_costs_grow_with_the_context() -> None:
    level = Level(None, ((100, 1.0), (300, 3.0), (500, 4.0)))
    assert [level.cost(at) for at in (1, 100, 200, 300, 400, 500, 9000)] == [1.0, 1.0, 2.0, 3.0, 3.5, 4.0, 4.0]
    assert Governor([level], name="eagle2").room(9) == 9


def test_what_changed_is_one_line_and_said_once(caplog: pytest.LogCaptureFixture) -> None:
    governor = Governor([FULL, HALF], name="sequence")
    fall_to_plain(governor)
    with caplog.at_level(logging.INFO, logger="specq"):
        governor.report()
        governor.report()
    assert [record.getMessage() for record in caplog.records] == [
        "auto: sequence runs at 0.50 times plain on this text: drafts of 3; "
        "then sequence runs at 0.67 times plain on this text: plain decoding for now"
    ]


class Forced(Governor):
    """A governor that jumps between levels at random."""

    def __init__(self, seed: int) -> None:
        super().__init__([Level(None, ((1, 1.0),)), Level(4, ((1, 1.0),)), Level(2, ((1, 1.0),))], name="forced")
        self._draws = random.Random(seed)
        self.visited: set[int] = set()

    def observe(self, round_: Round, context: int) -> None:
        self.visited.add(self.index)
        if self._draws.random() < 0.5:
            self.index = self._draws.randint(0, len(self.levels))


@pytest.fixture(scope="module")
def models() -> tuple[CausalLM, CausalLM]:
    torch.set_num_threads(1)
    return make_model(), make_model(noise=0.05)


def make_parts(target: CausalLM, intermediate: CausalLM) -> Parts:
    head, inner = make_head(target), make_head(intermediate, eagle3=True, trimmed=VOCAB - 8)
    slots = CONTEXT + MAX_NODES
    return Parts(
        target=Seat(target, target.new_cache(slots, features=head.spec.features)),
        intermediate=Seat(intermediate, intermediate.new_cache(slots, features=inner.spec.features)),
        target_head=HeadSeat(head, head.new_cache(slots + 36)),
        intermediate_head=HeadSeat(inner, inner.new_cache(slots + 36)),
    )


RECIPE = Recipe.model_validate({"target": "tiny", "drafter": {"nodes": 16, "depth": 3, "top_k": 4}})


@pytest.mark.parametrize("name", PIPELINES)
@settings(max_examples=8, deadline=None)
@given(
    prompt=st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=12),
    temperature=st.sampled_from([0.0, 0.8]),
    penalty=st.sampled_from([1.0, 1.3]),
    seed=st.integers(0, 10**6),
)
def test_text_equals_plain_decoding_however_levels_change(
    name: str, models: tuple[CausalLM, CausalLM], prompt: list[int], temperature: float, penalty: float, seed: int
) -> None:
    sampler = Sampler(temperature=temperature, repetition_penalty=penalty, seed=seed)

    def decode(pipeline: str, governor: Governor | None) -> list[int]:
        speculator = PIPELINES[pipeline].build(make_parts(*models), sampler, RECIPE)
        if governor is not None:
            speculator = AdaptiveSpeculator(speculator.drafter, speculator.verifier, governor)
        rule = StopRule(start=len(prompt), stop_ids=frozenset(), max_new_tokens=70, context_limit=CONTEXT)
        return list(generate(speculator, list(prompt), rule))

    governor = Forced(seed)
    assert decode(name, governor) == decode("plain", None)
    assert len(governor.visited) > 1


def test_a_drafter_of_random_weights_is_switched_off_and_the_text_stays(models: tuple[CausalLM, CausalLM]) -> None:
    """lmstudio-ai/mlx-engine#103: three pairs all slower; here the pipeline notices after a window of rounds."""
    target, stranger = models[0], make_model(seed=9, num_hidden_layers=1)
    governor = Governor([Level(5, ((1, 2.0),)), Level(2, ((1, 1.4),))], name="sequence")

    def rule() -> StopRule:
        return StopRule(start=3, stop_ids=frozenset(), max_new_tokens=80, context_limit=CONTEXT)

    built = PIPELINES["sequence"].build(make_parts(target, stranger), Sampler(), RECIPE)
    speculator = AdaptiveSpeculator(built.drafter, built.verifier, governor)
    text = list(generate(speculator, [1, 2, 3], rule()))
    plain = PIPELINES["plain"].build(make_parts(target, stranger), Sampler(), RECIPE)
    assert text == list(generate(plain, [1, 2, 3], rule()))
    assert governor.is_plain
    drafted = [r.drafted for r in speculator.rounds if not r.is_prefill]
    assert drafted[:WINDOW] == [5] * WINDOW
    assert set(drafted[2 * WINDOW :]) == {0}
