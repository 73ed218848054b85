"""Predicted rounds of every pipeline, from measured times and acceptance; pure, one predictor a pipeline."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from specq.profile.acceptance import Acceptance, Rates
from specq.profile.cost import SEQUENCE, TREE, Cost, CostModel, StepCurve, Tree
from specq.spec.decision import answer_tps

SELF = "target_low"
"""The role under which the target's own drafting in low precision is timed."""

LONGEST_SEQUENCE = 16
LOOKUP_LENGTHS = (2, 3, 4, 5, 7, 9, 12, 15)
MOST_OVERLAP = 0.2
"""Share of its parts by which a round is believed to be shorter than they; more is a machine that got faster."""

MIN_DRAFTS = (2, 3, 4, 5, 6, 8, 10, 12)


@dataclass(frozen=True)
class Candidate:
    """A pipeline and the recipe keys that give its sizes."""

    pipeline: str
    settings: tuple[tuple[str, int], ...] = ()

    @property
    def label(self) -> str:
        """The sizes as a person reads them."""
        return ", ".join(f"{key.rpartition('.')[2]} {value}" for key, value in self.settings)


@dataclass(frozen=True)
class Round:
    """A predicted decode round: tokens with half their 95 % interval, its parts in milliseconds and their number.

    `drafting_cost` is the whole round's cost when it drafted; for lookup only some rounds do. `first_ms` is what the
    first round of an answer takes more.
    """

    tokens: float
    tokens_error: float
    draft: Cost
    verify: Cost
    loop: Cost
    drafting_cost: Cost
    first_ms: float = 0.0
    parts: float = 1.0

    @property
    def cost(self) -> Cost:
        return self.draft + self.verify + self.loop


@dataclass(frozen=True)
class Prediction:
    """What a candidate is expected to do over answers of the length planned for.

    `gain` is against plain decoding, `uncertainty` its 95 % half width.
    """

    candidate: Candidate
    tokens_per_s: float
    gain: float
    uncertainty: float
    accept_len: float
    draft_ms: float
    verify_ms: float
    round_ms: float
    first_ms: float = 0.0
    memory_bytes: int | None = None

    @property
    def is_faster(self) -> bool:
        """Whether it beats plain decoding by more than the measurement's own uncertainty."""
        return self.gain > 1 + self.uncertainty

    def record(self) -> dict[str, Any]:
        return {
            "pipeline": self.candidate.pipeline,
            "settings": dict(self.candidate.settings),
            "predicted_tps": self.tokens_per_s,
            "gain": self.gain,
            "uncertainty": self.uncertainty,
            "accept_len": self.accept_len,
            "draft_ms": self.draft_ms,
            "verify_ms": self.verify_ms,
            "round_ms": self.round_ms,
            "first_ms": self.first_ms,
            "memory_bytes": self.memory_bytes,
        }


@dataclass(frozen=True)
class Measured:
    """A candidate as it ran: tokens a second over all prompts, and its gain over plain on the same prompts.

    `round_ms` and `first_ms` are medians over the prompts, at `context` tokens on average; None of one-round answers.
    `answer` is tokens of an answer on average, `accept_error` half the 95 % interval of the accept length, from its
    spread over the prompts; None where they are too few.
    """

    candidate: Candidate
    tokens_per_s: float
    accept_len: float
    gain: float
    uncertainty: float
    prompts: int
    context: float = 0.0
    round_ms: float | None = None
    first_ms: float | None = None
    answer: float = math.inf
    accept_error: float | None = None

    def record(self) -> dict[str, Any]:
        return {
            "pipeline": self.candidate.pipeline,
            "settings": dict(self.candidate.settings),
            "measured_tps": self.tokens_per_s,
            "accept_len": self.accept_len,
            "gain": self.gain,
            "uncertainty": self.uncertainty,
            "prompts": self.prompts,
            "context": self.context,
            "round_ms": self.round_ms,
            "first_ms": self.first_ms,
        }


Predicted = Iterator[tuple[Candidate, Round]]


def predict(costs: CostModel, candidate: Candidate, round_: Round, *, context: float, answer: float) -> Prediction:
    """The prediction of a candidate whose round is known, for answers of so many tokens."""
    plain, cost = costs.plain_round(context), round_.cost
    tps = answer_tps(accept_len=round_.tokens, round_ms=cost.ms, first_ms=round_.first_ms, tokens=answer)
    gain = tps * plain.ms / 1e3
    parts = (plain.error_ms / plain.ms, cost.error_ms / cost.ms, round_.tokens_error / round_.tokens, costs.drift)
    is_plain = candidate.pipeline == "plain"
    return Prediction(
        candidate=candidate,
        tokens_per_s=tps,
        gain=1.0 if is_plain else gain,
        uncertainty=0.0 if is_plain else gain * math.hypot(*parts),
        accept_len=round_.tokens,
        draft_ms=round_.draft.ms,
        verify_ms=round_.verify.ms,
        round_ms=cost.ms,
        first_ms=round_.first_ms,
    )


def plain_rounds(costs: CostModel, acceptance: Acceptance, context: float) -> Predicted:
    yield (
        Candidate("plain"),
        _round(costs, acceptance, "plain", 0.0, 0.0, Cost(0.0), costs.steps["target"].step(1, context)),
    )


def lookup_rounds(costs: CostModel, acceptance: Acceptance, context: float) -> Predicted:
    """In the share of rounds that find something `length` tokens are drafted; the others are plain."""
    rates, share, target = acceptance.lookup, acceptance.lookup_share, costs.steps["target"]
    if rates is None:
        return
    for length in LOOKUP_LENGTHS:
        if length > len(rates.rates) or length + 1 > target.most(SEQUENCE):
            continue
        whole = target.step(length + 1, context)
        verify = whole.times(share) + target.step(1, context).times(1 - share)
        draft = costs.lookup_draft(context)
        yield (
            Candidate("lookup", (("pipeline.draft_length", length),)),
            _round(
                costs,
                acceptance,
                "lookup",
                share * rates.accepted(length),
                share * rates.error(length),
                draft,
                verify,
                drafting=draft + whole,
            ),
        )


def sequence_rounds(costs: CostModel, acceptance: Acceptance, context: float) -> Predicted:
    rates, inner = acceptance.sequence, costs.steps.get("intermediate")
    if rates is None or inner is None:
        return
    for length in range(1, min(LONGEST_SEQUENCE, len(rates.rates), costs.steps["target"].most(SEQUENCE) - 1) + 1):
        # Where the whole draft was accepted its last token is one the intermediate never ran: two rows at first.
        whole = rates.chances(length)[-1]
        first = inner.step(1, context).times(1 - whole) + inner.step(2, context).times(whole)
        draft = first + inner.step(1, context).times(length - 1)
        verify = costs.steps["target"].step(length + 1, context)
        yield (
            Candidate("sequence", (("pipeline.draft_length", length),)),
            _round(
                costs,
                acceptance,
                "sequence",
                rates.accepted(length),
                rates.error(length),
                draft,
                verify,
                parts=length + 1,
            ),
        )


def eagle2_rounds(costs: CostModel, acceptance: Acceptance, context: float) -> Predicted:
    target = costs.steps["target"]
    for tree, rates in _measured(costs, "target_head", acceptance.eagle2):
        form = form_of(tree)
        if tree.nodes > target.most(form):
            continue
        draft = costs.draft("target_head", tree, context)
        verify = target.step(tree.nodes, context, form=form)
        yield (
            Candidate("eagle2", tree_settings(tree)),
            _round(
                costs,
                acceptance,
                "eagle2",
                rates.accepted(tree.depth),
                rates.error(tree.depth),
                draft,
                verify,
                parts=2,
            ),
        )


def hierarchical_rounds(costs: CostModel, acceptance: Acceptance, context: float) -> Predicted:
    """The intermediate turns trees into at least `min_draft` tokens; the target verifies them as one sequence."""
    outer, inner, target = acceptance.sequence, costs.steps.get("intermediate"), costs.steps["target"]
    if outer is None or inner is None:
        return
    for tree, rates in _measured(costs, "intermediate_head", acceptance.inner):
        form = form_of(tree)
        if tree.nodes + 1 > inner.most(form):
            continue
        step = inner.step(tree.nodes, context, form=form)
        # With two pending tokens the tree of the first round has one row more, which may cost the next bucket.
        late = inner.step(tree.nodes + 1, context, form=form)
        for min_draft in MIN_DRAFTS:
            rounds, lengths = draft_lengths(rates.chances(tree.depth), min_draft)
            longest = max(lengths)
            if longest > len(outer.rates) or longest + 1 > target.most(SEQUENCE):
                continue
            whole = sum(chance * outer.chances(length)[-1] for length, chance in lengths.items())
            draft = (
                costs.draft("intermediate_head", tree, context).times(rounds)
                + step.times(rounds - whole)
                + late.times(whole)
            )
            verify = _mean(target, lengths, context)
            accepted = sum(chance * outer.accepted(length) for length, chance in lengths.items())
            error = math.hypot(outer.error(longest), _length_error(rates, tree.depth, outer, min_draft))
            settings = (*tree_settings(tree), ("pipeline.min_draft", min_draft))
            yield (
                Candidate("hierarchical", settings),
                _round(costs, acceptance, "hierarchical", accepted, error, draft, verify, parts=2 * rounds + 1),
            )


def qspec_rounds(costs: CostModel, acceptance: Acceptance, context: float) -> Predicted:
    """The target drafts for itself in low precision; two lengths of its chain were timed, the others lie on a line."""
    for bits, rates in sorted(acceptance.qspec.items(), reverse=True):
        timed = [length for length, _, other in costs.drafting.get(SELF, {}) if other == bits]
        if len(timed) < 2:
            continue
        short, long = min(timed), max(timed)
        near, far = (costs.draft(SELF, Tree(0, length, 1, bits), context) for length in (short, long))
        for length in range(short, min(long, len(rates.rates), costs.steps["target"].most(SEQUENCE) - 1) + 1):
            share = (length - short) / (long - short)
            draft = near.times(1 - share) + far.times(share)
            verify = costs.steps["target"].step(length + 1, context)
            yield (
                Candidate("qspec", self_settings(length, bits)),
                _round(
                    costs,
                    acceptance,
                    "qspec",
                    rates.accepted(length),
                    rates.error(length),
                    draft,
                    verify,
                    parts=length + 1,
                ),
            )


def why_no_qspec(costs: CostModel, context: float) -> str | None:
    """The reason why the target's own drafts cannot pay, whatever is accepted: a token of them costs a plain step."""
    timed = costs.drafting.get(SELF, {})
    reasons = []
    for bits in sorted({bits for _, _, bits in timed}, reverse=True):
        lengths = [length for length, _, other in timed if other == bits]
        short, long = (
            costs.draft(SELF, Tree(0, length, 1, bits), context).ms for length in (min(lengths), max(lengths))
        )
        share = (long - short) / max(max(lengths) - min(lengths), 1) / costs.steps["target"].step(1, context).ms
        if share < 1:
            return None
        reasons.append(f"with activations in {bits} bits a token it drafts costs {share:.2f} plain steps")
    return f"cannot pay here: {', '.join(reasons)}" if reasons else None


PREDICTORS: dict[str, Callable[[CostModel, Acceptance, float], Predicted]] = {
    "plain": plain_rounds,
    "lookup": lookup_rounds,
    "sequence": sequence_rounds,
    "eagle2": eagle2_rounds,
    "hierarchical": hierarchical_rounds,
    "qspec": qspec_rounds,
}


def form_of(tree: Tree) -> str:
    """How a tree is verified: with one child a node it is a sequence."""
    return SEQUENCE if tree.top_k == 1 else TREE


def draft_lengths(chances: Sequence[float], at_least: int) -> tuple[float, dict[int, float]]:
    """(inner rounds on average, chance of every final length) of a draft grown until it has `at_least` tokens.

    `chances` are those of 0, 1 ... accepted nodes a round; each round adds one token more than it accepts.
    """
    here, rounds = {0: 1.0}, 0.0
    done: dict[int, float] = {}
    while here:
        grown: dict[int, float] = {}
        for length, weight in here.items():
            rounds += weight
            for accepted, chance in enumerate(chances):
                if chance > 0:
                    after = length + accepted + 1
                    place = done if after >= at_least else grown
                    place[after] = place.get(after, 0.0) + weight * chance
        here = grown
    return rounds, done


def _round(
    costs: CostModel,
    acceptance: Acceptance,
    pipeline: str,
    accepted: float,
    error: float,
    draft: Cost,
    verify: Cost,
    *,
    parts: float = 1.0,
    drafting: Cost | None = None,
) -> Round:
    """The round of so many `parts`, which are steps and draftings; what those took beyond themselves is the loop's."""
    loop_ms = parts * costs.extra_ms[pipeline] if pipeline in costs.extra_ms else costs.loop_ms
    loop = Cost(max(loop_ms, -MOST_OVERLAP * (draft + verify).ms))
    first_ms, scale = costs.first_ms.get(pipeline, 0.0), acceptance.scale.get(pipeline, 1.0)
    whole = (drafting or draft + verify) + loop
    error = scale * max(error, acceptance.spread.get(pipeline, 0.0) * accepted)
    return Round(1 + scale * accepted, error, draft, verify, loop, whole, first_ms, parts)


def tree_settings(tree: Tree) -> tuple[tuple[str, int], ...]:
    """The tree as keys of a recipe."""
    return tuple((f"drafter.{key}", value) for key, value in tree._asdict().items())


def self_settings(length: int, act_bits: int) -> tuple[tuple[str, int], ...]:
    """A chain of the target's own as keys of a recipe."""
    return ("pipeline.draft_length", length), ("pipeline.act_bits", act_bits)


def _measured(costs: CostModel, role: str, rates: Mapping[Tree, Rates]) -> Iterator[tuple[Tree, Rates]]:
    """The trees whose drafting was timed too."""
    timed = costs.drafting.get(role, {})
    return ((tree, rate) for tree, rate in sorted(rates.items()) if tree[1:] in timed)


def _mean(target: StepCurve, lengths: dict[int, float], context: float) -> Cost:
    """The verification of a sequence of varying length, on average; its errors are taken as one."""
    steps = [(target.step(length + 1, context), chance) for length, chance in lengths.items()]
    return Cost(sum(s.ms * chance for s, chance in steps), sum(s.error_ms * chance for s, chance in steps))


def _length_error(rates: Rates, depth: int, outer: Rates, min_draft: int) -> float:
    """What the inner acceptance's error means for the target's tokens: a longer draft earns its next position."""
    next_rate = outer.chances(min_draft)[-1]
    return rates.error(depth) * next_rate
