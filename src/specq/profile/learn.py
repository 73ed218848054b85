"""What whole answers teach the planner: rounds are not the sum of their parts, and prompts differ."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from statistics import median

from specq.profile.acceptance import Acceptance
from specq.profile.cost import CostModel
from specq.profile.predict import MOST_OVERLAP, PREDICTORS, Measured
from specq.spec.decision import whole_accept_len


def with_real_rounds(costs: CostModel, acceptance: Acceptance, seen: Sequence[Measured]) -> CostModel:
    """The cost model with what rounds of pipelines that ran took beyond their parts, for each part; it can be less
    than nothing, since a GPU begins a step while the host prepares the next.

    Of several candidates of a pipeline the median counts.
    """
    bare = replace(costs, loop_ms=0.0, extra_ms={}, first_ms={})
    more: dict[str, list[float]] = {}
    first: dict[str, list[float]] = {}
    for each in seen:
        name = each.candidate.pipeline
        expected = dict(PREDICTORS[name](bare, acceptance, each.context)).get(each.candidate)
        if expected is not None and each.round_ms is not None:
            more.setdefault(name, []).append((each.round_ms - expected.cost.ms) / expected.parts)
            first.setdefault(name, []).append(max(each.first_ms or 0.0, 0.0) if name != "plain" else 0.0)
    medians = {pipeline: median(values) for pipeline, values in more.items()}
    step = costs.steps["target"]
    least = -MOST_OVERLAP * step.step(1, step.contexts()[0]).ms  # as for the others, so that none gains by it
    loop_ms = max(medians.pop("plain", costs.loop_ms), least)
    first_ms = {pipeline: median(values) for pipeline, values in first.items()}
    return replace(costs, loop_ms=loop_ms, extra_ms=medians, first_ms=first_ms)


def with_real_answers(costs: CostModel, acceptance: Acceptance, seen: Sequence[Measured]) -> Acceptance:
    """The acceptance scaled, pipeline by pipeline, so that what ran on more prompts is predicted to accept as it did.

    Of several candidates of a pipeline the median counts.
    """
    bare = replace(acceptance, scale={}, spread={})
    factors: dict[str, list[float]] = {}
    spread: dict[str, float] = {}
    for each in seen:
        name = each.candidate.pipeline
        expected = dict(PREDICTORS[name](costs, bare, each.context)).get(each.candidate)
        if expected is not None and expected.tokens > 1 and each.prompts:
            accept_len = whole_accept_len(each.accept_len, each.answer)
            factors.setdefault(name, []).append((accept_len - 1) / (expected.tokens - 1))
            if each.accept_error is not None and accept_len > 1:
                spread[name] = each.accept_error / (accept_len - 1)
    return replace(acceptance, scale={name: median(values) for name, values in factors.items()}, spread=spread)
