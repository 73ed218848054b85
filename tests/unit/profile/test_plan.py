"""The plan that must come out of cost curves people reported, and what holds for every plan."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specq.profile.acceptance import Acceptance, Rates
from specq.profile.cost import CostModel, StepCurve, Timing, Tree
from specq.profile.learn import with_real_answers, with_real_rounds
from specq.profile.plan import MODELS_OF, Plan, explain, levels, plan, settle
from specq.profile.predict import (
    PREDICTORS,
    SELF,
    Candidate,
    Measured,
    draft_lengths,
    why_no_qspec,
)
from specq.spec.pipelines import PIPELINES

CONTEXT = 256
EVERYTHING: dict[str, str | None] = dict.fromkeys(PREDICTORS)
TREE = Tree(60, 5, 10)
TREE_KEYS = (("drafter.nodes", 60), ("drafter.depth", 5), ("drafter.top_k", 10))


def steps(ratios: dict[int, float], *, one: float = 10.0, spread: float = 0.01, tree: dict[int, float] | None = None):
    def timings(values: dict[int, float]) -> dict[int, dict[int, Timing]]:
        found = {}
        for nodes, ratio in values.items():
            ms = ratio * one
            found[nodes] = Timing(ms, ms * (1 - spread / 2), ms * (1 + spread / 2), 25)
        return {CONTEXT: found}

    return StepCurve({"sequence": timings(ratios), "tree": timings(tree if tree is not None else ratios)})


def timing(ms: float) -> dict[int, Timing]:
    return {CONTEXT: Timing(ms, ms, ms, 25)}


FLAT = {1: 1.0, 2: 1.0, 4: 1.0, 8: 1.01, 10: 1.01, 16: 1.02, 32: 1.05, 64: 1.2}
HOSTILE = {1: 1.0, 2: 1.0, 4: 1.0, 8: 1.01, 10: 1.01, 16: 1.03, 32: 1.25, 64: 1.8}
"""A 4-bit target on a large GPU: verify(60) = 1.8, verify(10) = 1.01 (arXiv 2505.22179)."""


def rates(*values: float, rounds: int = 2000) -> Rates:
    return Rates((*values, *[values[-1]] * (16 - len(values))), rounds)


def make_plan(costs: CostModel, acceptance: Acceptance, **options: object) -> Plan:
    """The plan for answers without end, where only rounds count."""
    return plan(costs, acceptance, context=CONTEXT, answer=1e9, **({"missing": EVERYTHING} | options))  # type: ignore[arg-type]


def with_head(target: StepCurve, *, draft_ms: float, tree: Tree = TREE) -> CostModel:
    return CostModel({"target": target}, {"target_head": {tree[1:]: timing(draft_ms)}})


def with_intermediate(target: StepCurve, inner: StepCurve, *, head_ms: float | None = None) -> CostModel:
    drafting = {} if head_ms is None else {"intermediate_head": {(3, 10, 16): timing(head_ms)}}
    return CostModel({"target": target, "intermediate": inner}, drafting)


def test_every_registered_pipeline_has_a_predictor_and_its_models() -> None:
    assert set(PREDICTORS) == set(PIPELINES) == set(MODELS_OF)


def test_low_acceptance_on_a_machine_that_pays_for_every_node_is_plain() -> None:
    """llama.cpp#10594: verify(6) = 2.4 verify(1), 37 % accepted, 40.7 -> 22.3 tokens a second."""
    target = steps({1: 1.0, 2: 1.4, 4: 1.9, 6: 2.4, 8: 3.0, 16: 5.0})
    costs = with_intermediate(target, steps({1: 1.0, 2: 1.1}, one=1.5))
    found = make_plan(costs, Acceptance(sequence=rates(0.37)))
    assert found.winner.candidate.pipeline == "plain"
    five = next(p for p in found.ranking if p.candidate.settings == (("pipeline.draft_length", 5),))
    assert 0.3 < five.gain < 0.6
    assert explain(found).startswith("plain wins: of the rest sequence (draft_length 1) comes closest")
    assert explain(found).endswith("slower than plain")


def test_a_tree_that_costs_three_steps_is_never_chosen_beside_a_cheap_sequence() -> None:
    """llama.cpp#5625: tree(60) costs 3 x and sequence(6) 1.3 x."""
    target = steps({1: 1.0, 2: 1.1, 4: 1.2, 6: 1.3, 8: 1.6}, tree={8: 1.8, 16: 2.2, 32: 2.6, 60: 3.0})
    costs = CostModel(
        {"target": target, "intermediate": steps({1: 1.0, 2: 1.0}, one=1.0)},
        {"target_head": {(5, 10, 16): timing(2.0)}},
    )
    trees = {Tree(n, 5, 10): rates(0.8, 0.75) for n in (8, 16, 32, 60)}
    found = make_plan(costs, Acceptance(sequence=rates(0.8, 0.75), eagle2=trees))
    assert found.winner.candidate.pipeline == "sequence"
    assert all(p.gain < found.winner.gain for p in found.ranking if p.candidate.pipeline == "eagle2")


def test_a_drafter_almost_as_slow_as_its_target_is_plain_however_good_it_is() -> None:
    """vllm#15025: a draft step of 0.85 target steps, verify(6) = 1.3, 90 % accepted."""
    target = steps({1: 1.0, 2: 1.1, 3: 1.15, 4: 1.2, 5: 1.25, 6: 1.3, 8: 1.4})
    costs = with_intermediate(target, steps({1: 1.0, 2: 1.0}, one=8.5))
    found = make_plan(costs, Acceptance(sequence=rates(0.9)))
    assert found.winner.candidate.pipeline == "plain"
    five = next(p for p in found.ranking if p.candidate.settings == (("pipeline.draft_length", 5),))
    assert five.gain == pytest.approx(0.85, abs=0.01)


def test_where_memory_bounds_every_step_the_largest_tree_wins() -> None:
    trees = {Tree(n, 5, 10): rates(*[r] * 5) for n, r in ((8, 0.6), (32, 0.75), (60, 0.8))}
    found = make_plan(with_head(steps(FLAT), draft_ms=2.0), Acceptance(eagle2=trees))
    assert found.winner.candidate.settings[0] == ("drafter.nodes", 60)
    assert found.winner.gain > 1.8


def test_a_four_bit_target_turns_the_tree_into_a_sequence() -> None:
    """The paper's point: where verify(60) = 1.8 and verify(10) = 1.01 the hierarchical pipeline beats the tree."""
    costs = CostModel(
        {"target": steps(HOSTILE, one=12.0), "intermediate": steps(HOSTILE, one=2.0)},
        {"target_head": {(5, 10, 16): timing(1.5)}, "intermediate_head": {(3, 10, 16): timing(0.8)}},
    )
    tree = rates(0.8, 0.75, 0.7, 0.65, 0.6)
    acceptance = Acceptance(sequence=rates(0.9), eagle2={TREE: tree}, inner={Tree(30, 3, 10): tree})
    found = make_plan(costs, acceptance)
    order = [p.candidate.pipeline for p in found.best_of_each()]
    assert order == ["hierarchical", "sequence", "eagle2", "plain"]
    assert found.winner.candidate.pipeline == "hierarchical"
    assert explain(found).startswith("hierarchical (nodes 30, depth 3, top_k 10, head_bits 16, min_draft ")


def test_what_rounds_took_beyond_their_parts_counts_for_their_pipeline() -> None:
    costs = CostModel({"target": steps(FLAT)}, {"target_head": {TREE[1:]: timing(2.0)}}, {CONTEXT: Timing(0, 0, 0, 1)})
    acceptance = Acceptance(eagle2={TREE: rates(0.8)}, lookup=rates(0.5), lookup_share=0.5)
    tree, lookup = (
        Candidate("eagle2", (*TREE_KEYS, ("drafter.head_bits", 16))),
        Candidate("lookup", (("pipeline.draft_length", 2),)),
    )
    ran = [
        (Candidate("plain"), 10.4, 0.1),  # no drafter, so nothing that its first round takes more
        (tree, 16.0, 30.0),  # 2 ms of drafting, 12 of verifying: 2 more than that, 1.6 more than a plain round's
        (lookup, 11.9, -0.1),
        (Candidate("eagle2", (("drafter.nodes", 5),)), 1.0, 0.0),  # was not planned
    ]
    seen = [Measured(each, 1.0, 1.0, 1.0, 0.0, 4, CONTEXT, *times) for each, *times in ran]
    found = with_real_rounds(costs, acceptance, seen)
    assert found.loop_ms == pytest.approx(0.4)
    assert found.extra_ms == {"eagle2": pytest.approx(1.0), "lookup": pytest.approx(1.9)}  # two parts, and one
    assert found.first_ms == {"plain": 0.0, "eagle2": 30.0, "lookup": 0.0}
    planned = {p.candidate: p for p in make_plan(found, acceptance).ranking}
    assert planned[Candidate("plain")].round_ms == pytest.approx(10.4)
    assert (planned[tree].round_ms, planned[tree].first_ms) == (pytest.approx(16.0), 30.0)
    assert with_real_rounds(costs, acceptance, []).loop_ms == 0.0


def test_what_a_part_took_more_counts_for_each_of_them() -> None:
    """A round of one drafted token was measured, so each of its two parts is known to take 0.5 ms less."""
    costs = with_intermediate(steps(FLAT), steps({1: 1.0, 2: 1.0}, one=2.0))
    acceptance = Acceptance(sequence=rates(0.8))
    one = Candidate("sequence", (("pipeline.draft_length", 1),))
    found = with_real_rounds(costs, acceptance, [Measured(one, 1.0, 1.0, 1.0, 0.0, 4, CONTEXT, 11.0, 0.0)])
    rounds = {p.candidate.settings[0][1]: p.round_ms for p in make_plan(found, acceptance).ranking if p.draft_ms}
    assert rounds[1] == pytest.approx(11.0)
    assert rounds[3] == pytest.approx(3 * 2.0 + 10.0 - 4 * 0.5)


def test_rounds_that_overlap_their_parts_cost_less_than_them() -> None:
    costs = CostModel({"target": steps(FLAT)}, {"target_head": {TREE[1:]: timing(2.0)}})
    tree = Candidate("eagle2", (*TREE_KEYS, ("drafter.head_bits", 16)))
    acceptance = Acceptance(eagle2={TREE: rates(0.8)})
    found = with_real_rounds(costs, acceptance, [Measured(tree, 1.0, 1.0, 1.0, 0.0, 4, CONTEXT, 13.5, 0.0)])
    assert {p.candidate: p.round_ms for p in make_plan(found, acceptance).ranking}[tree] == pytest.approx(13.5)


def test_what_whole_answers_accepted_scales_what_was_expected() -> None:
    costs = with_head(steps(FLAT), draft_ms=2.0)
    acceptance = Acceptance(eagle2={TREE: rates(0.5)})
    tree = Candidate("eagle2", (*TREE_KEYS, ("drafter.head_bits", 16)))
    ran = [
        Measured(tree, 1.0, 2.5, 1.0, 0.0, 9, CONTEXT, 14.0, 0.0),
        Measured(Candidate("plain"), 1.0, 1.0, 1.0, 0.0, 9, CONTEXT, 10.0, 0.0),
    ]
    found = with_real_answers(costs, acceptance, ran)
    assert set(found.scale) == {"eagle2"}
    planned = {p.candidate: p for p in make_plan(costs, found).ranking}
    assert planned[tree].accept_len == pytest.approx(2.5)
    assert planned[Candidate("plain")].accept_len == 1.0
    assert with_real_answers(costs, found, ran).scale == found.scale  # from the bare rates, not on top
    assert planned[tree].uncertainty < 0.1 * planned[tree].gain
    spread = with_real_answers(costs, acceptance, [replace(ran[0], accept_error=0.5)])
    wide = {p.candidate: p for p in make_plan(costs, spread).ranking}
    assert wide[tree].uncertainty == pytest.approx(0.5 / 2.5 * wide[tree].gain, rel=0.05)
    unseen = [replace(ran[0], prompts=0)]
    assert with_real_answers(costs, acceptance, unseen).scale == {}


def test_a_machine_that_got_faster_makes_no_pipeline_free() -> None:
    """Steps were timed under load, the rounds were not: 60 ms less for two parts, of which ten would be a gift."""
    costs = with_intermediate(steps(FLAT, one=50.0), steps({1: 1.0, 2: 1.0}, one=30.0))
    acceptance = Acceptance(sequence=rates(0.8))
    one = Candidate("sequence", (("pipeline.draft_length", 1),))
    seen = [
        Measured(each, 1.0, 1.0, 1.0, 0.0, 4, CONTEXT, ms, 0.0) for each, ms in ((one, 20.0), (Candidate("plain"), 9))
    ]
    found = make_plan(with_real_rounds(costs, acceptance, seen), acceptance)
    assert all(p.round_ms >= 0.79 * (p.draft_ms + p.verify_ms) for p in found.ranking)
    assert found.plain.round_ms == pytest.approx(0.8 * 50.0)


def test_a_short_answer_pays_for_its_first_round_and_for_a_last_one_that_is_cut() -> None:
    costs = replace(with_head(steps(FLAT), draft_ms=2.0), first_ms={"eagle2": 28.0})
    acceptance = Acceptance(eagle2={TREE: rates(0.5)})
    short, long = (
        next(
            p
            for p in plan(costs, acceptance, context=CONTEXT, answer=answer, missing=EVERYTHING).ranking
            if p.candidate.pipeline == "eagle2"
        )
        for answer in (11, 10_001)
    )
    rounds = (10 + (short.accept_len - 1) / 2) / short.accept_len
    assert short.tokens_per_s == pytest.approx(1e3 * 10 / (rounds * 14.0 + 28.0), rel=1e-6)
    assert short.gain == pytest.approx(short.tokens_per_s / 100)
    assert short.accept_len == long.accept_len
    assert long.tokens_per_s == pytest.approx(1e3 * long.accept_len / 14.0, rel=1e-3)


def test_bits_measured_at_one_context_move_with_those_measured_at_all() -> None:
    def at(ms: float) -> Timing:
        return Timing(ms, ms, ms, 25)

    drafting = {(5, 10, 16): {100: at(1.0), 300: at(3.0)}, (5, 10, 4): {100: at(0.6)}}
    costs = CostModel({"target": steps(FLAT)}, {"target_head": drafting})
    coarse = TREE._replace(head_bits=4)
    assert [costs.draft("target_head", coarse, c).ms for c in (100, 200, 300)] == pytest.approx([0.6, 1.6, 2.6])


def test_a_coarser_draft_head_is_chosen_where_it_saves_more_than_it_loses() -> None:
    fine, coarse = TREE, TREE._replace(head_bits=4)
    drafting = {"target_head": {fine[1:]: timing(6.0), coarse[1:]: timing(3.0)}}
    costs = CostModel({"target": steps(FLAT)}, drafting)
    for lost, bits in ((0.01, 4), (0.3, 16)):
        accepted = Acceptance(eagle2={fine: rates(0.8), coarse: rates(0.8 - lost)})
        memory = {"target": 100, "target_head": 10, "target_head_4": 3}
        found = make_plan(costs, accepted, memory=memory, available_bytes=1000)
        assert dict(found.winner.candidate.settings)["drafter.head_bits"] == bits
        both = {dict(p.candidate.settings)["drafter.head_bits"]: p for p in found.ranking if p.candidate.settings}
        assert {bits: p.memory_bytes for bits, p in both.items()} == {16: 110, 4: 113}


def test_a_head_that_drafts_one_child_a_node_is_verified_as_a_sequence() -> None:
    target = steps({1: 1.0, 2: 1.0, 4: 1.0}, tree={2: 3.0, 4: 3.0})
    costs = CostModel({"target": target}, {"target_head": {(3, top_k, 16): timing(1.0) for top_k in (1, 2)}})
    found = make_plan(costs, Acceptance(eagle2={Tree(4, 3, 1): rates(0.8), Tree(4, 3, 2): rates(0.9)}))
    assert dict(found.winner.candidate.settings)["drafter.top_k"] == 1
    assert found.winner.verify_ms == pytest.approx(10.0)


def test_a_free_drafter_drafts_as_far_as_verification_stays_flat() -> None:
    target = steps({1: 1.0, 2: 1.0, 4: 1.0, 8: 1.0, 16: 2.5})
    costs = CostModel({"target": target}, lookup=timing(0.0))
    found = make_plan(costs, Acceptance(lookup=rates(0.9), lookup_share=1.0))
    assert found.winner.candidate == Candidate("lookup", (("pipeline.draft_length", 7),))


def test_lookup_that_seldom_finds_anything_costs_what_it_drafts_only_then() -> None:
    target = steps({1: 1.0, 2: 1.5, 4: 2.0, 8: 3.0})
    costs = CostModel({"target": target}, lookup=timing(0.0))
    found = make_plan(costs, Acceptance(lookup=rates(0.0), lookup_share=0.1))
    three = next(p for p in found.ranking if dict(p.candidate.settings).get("pipeline.draft_length") == 3)
    assert three.gain == pytest.approx(1 / (0.9 + 0.1 * 2.0))


@pytest.mark.parametrize(("spread", "winner"), [(0.001, "sequence"), (0.2, "plain")])
def test_too_close_to_call_is_plain(spread: float, winner: str) -> None:
    """The same gain of about 4 %, once with steady and once with noisy times."""
    target = steps({1: 1.0, 2: 1.1, 4: 2.0}, spread=spread)
    costs = with_intermediate(target, steps({1: 1.0, 2: 1.0}, one=5.0, spread=spread))
    found = make_plan(costs, Acceptance(sequence=rates(0.66, 0.1, rounds=10**6)))
    best = next(p for p in found.ranking if p.candidate.pipeline == "sequence")
    assert best.gain == pytest.approx(1.0375, abs=0.001)
    assert found.winner.candidate.pipeline == winner
    if winner == "plain":
        assert "within the measurement's uncertainty of plain, so plain runs" in explain(found)


def test_few_rounds_of_acceptance_are_uncertainty_too() -> None:
    costs = with_intermediate(steps(FLAT, spread=0.0), steps({1: 1.0, 2: 1.0}, one=5.0, spread=0.0))

    def best(rounds: int) -> float:
        return make_plan(costs, Acceptance(sequence=rates(0.7, rounds=rounds))).ranking[0].uncertainty

    assert best(10) > 3 * best(1000) > 0


def test_drift_during_the_measurement_is_part_of_the_uncertainty() -> None:
    curve = steps(FLAT, spread=0.0)
    costs = CostModel({"target": curve, "intermediate": steps({1: 1.0, 2: 1.0}, one=2.0, spread=0.0)}, drift=0.5)
    found = make_plan(costs, Acceptance(sequence=Rates((0.3,) * 8)))
    assert max(p.gain for p in found.ranking) > 1.05
    assert found.winner.candidate.pipeline == "plain"


def test_what_lacks_a_part_or_the_memory_is_listed_with_the_reason() -> None:
    costs = CostModel({"target": steps(FLAT)}, lookup=timing(0.0))
    missing = EVERYTHING | {"eagle2": "needs an EAGLE head of the target"}
    memory = {"target": 30_000_000_000, "intermediate": 11_000_000_000}
    found = make_plan(costs, Acceptance(), missing=missing, memory=memory, available_bytes=40_000_000_000)
    reasons = {r.pipeline: r.reason for r in found.refused}
    assert reasons["eagle2"] == "needs an EAGLE head of the target"
    assert reasons["sequence"] == "needs 41.0 GB, 40.0 available"
    assert reasons["lookup"] == "its acceptance or its steps were not measured"
    assert found.plain.memory_bytes == 30_000_000_000


unit = st.floats(0.0, 1.0)
growth = st.lists(st.floats(0.0, 0.8), min_size=7, max_size=7)


def test_the_chance_of_the_targets_own_draft_decides_whether_it_pays() -> None:
    """With one token drafted it pays where a step takes more than 1 / chance of a low-precision one."""
    steps_of = steps(FLAT)
    for share, rate, pays in ((1.0, 0.999, False), (1 / 1.5, 0.97, True), (1 / 1.02, 0.97, False)):
        drafting = {SELF: {(length, 1, 8): timing(10.0 * share * length) for length in (1, 6)}}
        costs = CostModel({"target": steps_of}, drafting)
        found = make_plan(costs, Acceptance(qspec={8: rates(rate)}))
        own = [p for p in found.ranking if p.candidate.pipeline == "qspec"]
        lengths = [p.candidate.settings[0][1] for p in own]
        assert sorted(lengths) == [1, 2, 3, 4, 5, 6]
        assert own[0].draft_ms == pytest.approx(10.0 * share * lengths[0])
        assert (found.winner.candidate.pipeline == "qspec") == pays
        assert (own[0].gain > 1) == pays


def test_drafts_of_its_own_that_cost_plain_steps_are_not_even_tried() -> None:
    for per_token, why in ((8.0, None), (10.5, "a token it drafts costs 1.05 plain steps")):
        drafting = {SELF: {(length, 1, 8): timing(1.0 + per_token * length) for length in (1, 8)}}
        reason = why_no_qspec(CostModel({"target": steps(FLAT)}, drafting), CONTEXT)
        assert (reason is None) if why is None else (reason is not None and why in reason)
    assert why_no_qspec(CostModel({"target": steps(FLAT)}), CONTEXT) is None


@given(growth, growth, st.floats(0.05, 1.2), st.floats(0.0, 5.0), unit, unit, unit, st.floats(0.0, 0.5))
def test_the_plan_is_never_slower_than_plain_under_its_own_costs(
    target: list[float],
    tree: list[float],
    inner_share: float,
    draft_ms: float,
    accept: float,
    lookup: float,
    share: float,
    spread: float,
) -> None:
    counts = (1, 2, 4, 8, 16, 32, 64)
    curves = [dict(zip(counts, itertools.accumulate(g, initial=1.0), strict=False)) for g in (target, tree)]
    costs = CostModel(
        {
            "target": steps(curves[0], tree=curves[1], spread=spread),
            "intermediate": steps(curves[0], tree=curves[1], one=10 * inner_share, spread=spread),
        },
        {role: {(3, 4, 16): timing(draft_ms)} for role in ("target_head", "intermediate_head")}
        | {SELF: {(length, 1, 8): timing(draft_ms * length) for length in (1, 6)}},
        timing(0.01),
        loop_ms=0.1,
    )
    trees = {Tree(n, 3, 4): rates(accept) for n in (8, 16, 32)}
    acceptance = Acceptance(rates(accept), rates(lookup), share, trees, trees, {8: rates(accept)})
    found = make_plan(costs, acceptance)
    assert found.winner.tokens_per_s >= found.plain.tokens_per_s
    assert [p.tokens_per_s for p in found.ranking] == sorted((p.tokens_per_s for p in found.ranking), reverse=True)
    assert {p.candidate.pipeline for p in found.ranking} == set(PREDICTORS)
    assert explain(found)
    for candidate in {p.candidate for p in found.best_of_each()} - {found.plain.candidate}:
        first, *_ = levels(costs, acceptance, candidate)
        assert first.cost(CONTEXT) > 0


def test_lengths_of_a_grown_draft_are_those_of_brute_force() -> None:
    chances, at_least = [0.2, 0.3, 0.5], 4
    rounds, lengths = draft_lengths(chances, at_least)
    expected: dict[int, float] = {}
    mean = 0.0
    for path in itertools.product(range(3), repeat=at_least):  # at_least rounds always suffice
        weight, length, used = 1.0, 0, 0
        for accepted in path:
            weight *= chances[accepted]
            if length < at_least:
                length, used = length + accepted + 1, used + 1
        expected[length] = expected.get(length, 0.0) + weight
        mean += weight * used
    assert lengths == pytest.approx(expected)
    assert rounds == pytest.approx(mean)


def settled(gain: float, uncertainty: float) -> str:
    costs = with_intermediate(steps(FLAT), steps({1: 1.0, 2: 1.0}, one=2.0))
    found = make_plan(costs, Acceptance(sequence=rates(0.8)))
    best = found.winner.candidate
    assert best.pipeline == "sequence"
    measured = [
        Measured(found.plain.candidate, 100.0, 1.0, 1.0, 0.0, 4),
        Measured(best, 100.0 * gain, 3.0, gain, uncertainty, 4),
    ]
    return settle(found, measured).winner.pipeline


@pytest.mark.parametrize(
    ("gain", "uncertainty", "winner"),
    [
        (2.0, 0.1, "sequence"),
        (0.8, 0.05, "plain"),  # contradicts the prediction: only the measurement counts
        (1.02, 0.05, "plain"),
        (1.9, float("inf"), "sequence"),  # one prompt says nothing, the prediction stands
        (0.9, 5.0, "plain"),  # two that were slower neither, but who would run it then
    ],
)
def test_the_verdict_needs_prediction_and_measurement(gain: float, uncertainty: float, winner: str) -> None:
    assert settled(gain, uncertainty) == winner


def test_levels_are_the_whole_draft_and_half_of_it_with_costs_by_context() -> None:
    curve = steps({1: 1.0, 2: 1.0, 4: 1.2, 8: 2.0})
    costs = with_intermediate(curve, steps({1: 1.0, 2: 1.0}, one=2.0))
    found = levels(costs, Acceptance(sequence=rates(0.5)), Candidate("sequence", (("pipeline.draft_length", 6),)))
    assert [level.max_depth for level in found] == [6, 3]
    assert [level.cost(CONTEXT) for level in found] == pytest.approx([2.0 + 6 * 0.2, 1.2 + 3 * 0.2])
