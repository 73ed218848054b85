"""The plan: every pipeline predicted, and the one to run; a pure function of times and acceptance."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from specq.profile.acceptance import Acceptance
from specq.profile.cost import CostModel
from specq.profile.predict import PREDICTORS, Candidate, Measured, Prediction, predict
from specq.spec.decision import Level

MODELS_OF = {
    "plain": ("target",),
    "lookup": ("target",),
    "sequence": ("target", "intermediate"),
    "eagle2": ("target", "target_head"),
    "hierarchical": ("target", "intermediate", "intermediate_head"),
    "qspec": ("target",),
}
"""The models in memory while a pipeline runs."""

CHAINS = ("lookup", "sequence", "qspec")
"""Pipelines whose draft can be cut short on the fly at a cost that was measured."""


@dataclass(frozen=True)
class Refused:
    """A pipeline that was not considered, and why."""

    pipeline: str
    reason: str


@dataclass(frozen=True)
class Plan:
    """Candidates by predicted speed, fastest first, plain among them; what was not considered; and the winner.

    It holds for answers of `answer` tokens on average.
    """

    context: int
    answer: float
    ranking: tuple[Prediction, ...]
    refused: tuple[Refused, ...]
    winner: Prediction

    @property
    def plain(self) -> Prediction:
        return next(p for p in self.ranking if p.candidate.pipeline == "plain")

    def best_of_each(self) -> list[Prediction]:
        """The fastest candidate of every pipeline, fastest first."""
        best: dict[str, Prediction] = {}
        for prediction in self.ranking:
            best.setdefault(prediction.candidate.pipeline, prediction)
        return list(best.values())

    def record(self) -> dict[str, Any]:
        return {
            "context": self.context,
            "answer_tokens": self.answer,
            "candidates": [p.record() for p in self.ranking],
            "not_considered": {r.pipeline: r.reason for r in self.refused},
            "winner": self.winner.record(),
        }


def plan(
    costs: CostModel,
    acceptance: Acceptance,
    *,
    context: int,
    answer: float,
    missing: Mapping[str, str | None],
    memory: Mapping[str, int] | None = None,
    available_bytes: int | None = None,
) -> Plan:
    """The plan at this context, for answers of so many tokens.

    `missing` has every pipeline, with the reason when it lacks a part. `memory` is bytes by model role. The winner
    beats plain decoding by more than the uncertainty of the prediction; when none does it is plain.
    """
    ranking: list[Prediction] = []
    refused: list[Refused] = []
    for name, reason in missing.items():
        needed = sum(memory.get(role, 0) for role in MODELS_OF[name]) if memory and reason is None else None
        if reason is None and needed is not None and available_bytes is not None and needed > available_bytes:
            reason = f"needs {needed / 1e9:.1f} GB, {available_bytes / 1e9:.1f} available"
        if reason is not None:
            refused.append(Refused(name, reason))
            continue
        found = [
            replace(
                predict(costs, candidate, round_, context=context, answer=answer),
                memory_bytes=None if memory is None or needed is None else needed + _draft_head(candidate, memory),
            )
            for candidate, round_ in PREDICTORS[name](costs, acceptance, context)
        ]
        if not found:
            refused.append(Refused(name, "its acceptance or its steps were not measured"))
        ranking += found
    ranking.sort(key=lambda p: (-p.tokens_per_s, p.candidate.pipeline != "plain"))
    plain = next(p for p in ranking if p.candidate.pipeline == "plain")
    winner = next((p for p in ranking if p.is_faster), plain)
    return Plan(context, answer, tuple(ranking), tuple(refused), winner)


def _draft_head(candidate: Candidate, memory: Mapping[str, int]) -> int:
    """Bytes of the draft head a candidate has beside the one in 16 bits."""
    bits = dict(candidate.settings).get("drafter.head_bits")
    return memory.get(f"{MODELS_OF[candidate.pipeline][-1]}_{bits}", 0)


@dataclass(frozen=True)
class Verdict:
    """What runs in the end: the winner after measuring again, and its gain with both estimates taken together."""

    winner: Candidate
    gain: float
    uncertainty: float


def settle(chosen: Plan, measured: Sequence[Measured]) -> Verdict:
    """The verdict after the best candidates ran beside plain decoding.

    Prediction and measurement count by their certainty; where they contradict each other the measurement alone does.
    What ran slower than plain decoding is not chosen, however uncertain that is. Without a candidate that is faster
    than plain by more than what is left of uncertainty it is plain.
    """
    best = Verdict(chosen.plain.candidate, 1.0, 0.0)
    predicted = {p.candidate: p for p in chosen.ranking}
    for each in measured:
        guess = predicted[each.candidate]
        if guess is chosen.plain:
            continue
        gain, error = each.gain, each.uncertainty
        if abs(guess.gain - each.gain) <= guess.uncertainty + each.uncertainty:
            gain, error = _together((guess.gain, guess.uncertainty), (each.gain, each.uncertainty))
        if each.gain > 1 and gain > 1 + error and gain > best.gain:
            best = Verdict(each.candidate, gain, error)
    return best


def _together(a: tuple[float, float], b: tuple[float, float]) -> tuple[float, float]:
    """Two independent estimates (value, half width) as one, weighted by the squares of their certainty."""
    if 0 in (a[1], b[1]):
        return min(a, b, key=lambda estimate: estimate[1])
    weights = 1 / a[1] ** 2, 1 / b[1] ** 2
    total = sum(weights)
    return (a[0] * weights[0] + b[0] * weights[1]) / total, total**-0.5


def levels(costs: CostModel, acceptance: Acceptance, candidate: Candidate) -> tuple[Level, ...]:
    """What run-time adaptation may choose among beside plain decoding: the candidate, and for a chain half of it.

    The cost of each is that of a round that drafts, in plain steps, at every measured context.
    """
    wanted = [candidate]
    if candidate.pipeline in CHAINS:
        key, full = candidate.settings[0]
        shorter = [
            c
            for c, _ in PREDICTORS[candidate.pipeline](costs, acceptance, costs.steps["target"].contexts()[0])
            if 1 <= dict(c.settings)[key] <= full // 2
        ]
        wanted += shorter[-1:]
    found = []
    for each in wanted:
        ratios = []
        for context in costs.steps["target"].contexts():
            rounds = dict(PREDICTORS[each.pipeline](costs, acceptance, context))
            ratios.append((context, rounds[each].drafting_cost.ms / costs.plain_round(context).ms))
        depth = dict(each.settings)["pipeline.draft_length"] if each.pipeline in CHAINS else None
        found.append(Level(depth, tuple(ratios)))
    return tuple(found)


def explain(chosen: Plan) -> str:
    """The sentence that says why the winner wins, with its numbers."""
    plain, winner = chosen.plain, chosen.winner
    best = winner if winner is not plain else next((p for p in chosen.ranking if p is not plain), None)
    if best is None:
        return "plain decoding runs: no other pipeline could be considered"
    sizes = f" ({best.candidate.label})" if best.candidate.label else ""
    steps = best.round_ms / plain.round_ms
    body = (
        f"a round drafts for {best.draft_ms:.2f} ms and verifies for {best.verify_ms:.2f} ms, "
        f"{steps:.2f} plain steps in all, and decides {best.accept_len:.2f} tokens"
    )
    if winner is not plain:
        return f"{best.candidate.pipeline}{sizes} wins: {body}, {best.gain:.2f} ± {best.uncertainty:.2f} times plain"
    verdict = (
        "within the measurement's uncertainty of plain, so plain runs"
        if best.gain > 1 - best.uncertainty
        else "slower than plain"
    )
    return (
        f"plain wins: of the rest {best.candidate.pipeline}{sizes} comes closest, {body}, "
        f"{best.gain:.2f} ± {best.uncertainty:.2f} times plain: {verdict}"
    )
