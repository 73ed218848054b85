"""What a decode round costs: measured milliseconds as step functions of node counts; pure, no torch.

Source: issue 6; the form of a round, arXiv 2505.22179 section 3: T = drafting + verification, tokens = accept length.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median, quantiles
from typing import Any, NamedTuple

SEQUENCE, TREE = "sequence", "tree"
FORMS = (SEQUENCE, TREE)

NOTCH = 1.57
"""Half width of a median's 95 % interval in units of (interquartile range / sqrt(n)). Source: McGill et al. 1978."""


class Tree(NamedTuple):
    """A tree an EAGLE head drafts: rows its verifier runs (root included), levels, children a node.

    `head_bits` are those of the output head it is drafted with.
    """

    nodes: int
    depth: int
    top_k: int
    head_bits: int = 16


@dataclass(frozen=True)
class Cost:
    """Milliseconds, and half the width of their 95 % interval; errors of different measurements add in squares."""

    ms: float
    error_ms: float = 0.0

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.ms + other.ms, math.hypot(self.error_ms, other.error_ms))

    def times(self, factor: float) -> Cost:
        """The same thing `factor` times: its error is the same each time, so it grows as the cost does."""
        return Cost(self.ms * factor, self.error_ms * factor)


@dataclass(frozen=True)
class Timing:
    """The median of `runs` repeated measurements, with their quartiles."""

    median_ms: float
    low_ms: float
    high_ms: float
    runs: int

    @classmethod
    def of(cls, samples_ms: Sequence[float]) -> Timing:
        """The timing of these samples, at least one."""
        if len(samples_ms) == 1:
            return cls(samples_ms[0], samples_ms[0], samples_ms[0], 1)
        low, _, high = quantiles(samples_ms, n=4, method="inclusive")
        return cls(median(samples_ms), low, high, len(samples_ms))

    @property
    def cost(self) -> Cost:
        return Cost(self.median_ms, NOTCH * (self.high_ms - self.low_ms) / math.sqrt(self.runs))

    @property
    def spread(self) -> float:
        """Interquartile range as a share of the median."""
        return (self.high_ms - self.low_ms) / self.median_ms if self.median_ms else 0.0

    def record(self) -> dict[str, Any]:
        return {"ms": self.median_ms, "low_ms": self.low_ms, "high_ms": self.high_ms, "runs": self.runs}


Steps = Mapping[int, Mapping[int, Timing]]
"""context -> node count -> timing of one step."""


@dataclass(frozen=True)
class StepCurve:
    """Steps of one model by form (`sequence`, `tree`).

    n nodes cost what the cheapest measured count of at least n does: that of the bucket they are padded to, and never
    more than a larger one. Where nothing is padded it errs on the side of plain decoding.
    """

    forms: Mapping[str, Steps]
    prefill_ms_per_token: float | None = None

    def contexts(self) -> list[int]:
        return sorted({context for steps in self.forms.values() for context in steps})

    def most(self, form: str) -> int:
        """The largest measured node count of this form, 0 when there is none."""
        return max((max(steps) for steps in self.forms.get(form, {}).values() if steps), default=0)

    def step(self, nodes: int, context: float, *, form: str = SEQUENCE) -> Cost:
        """One step of `nodes` rows after `context` tokens; a smaller tree than any measured costs what that does.

        Raises ValueError past the largest measured count.
        """
        if nodes > self.most(form):
            raise ValueError(f"nodes: a {form} of {nodes} was not measured, only up to {self.most(form)}")
        points = {
            at: min((timing.cost for count, timing in steps.items() if count >= nodes), key=lambda cost: cost.ms)
            for at, steps in self.forms[form].items()
            if steps and max(steps) >= nodes
        }
        return interpolate(points, context)

    def ratio(self, nodes: int, context: float, *, form: str = SEQUENCE) -> float:
        """T(nodes) / T(1) at this context, the number the paper's conflict is about."""
        return self.step(nodes, context, form=form).ms / self.step(1, context).ms

    def record(self) -> dict[str, Any]:
        steps = [
            {"form": form, "context": context, "nodes": nodes, **timing.record()}
            for form, by_context in self.forms.items()
            for context, by_nodes in sorted(by_context.items())
            for nodes, timing in sorted(by_nodes.items())
        ]
        return {"steps": steps, "prefill_ms_per_token": self.prefill_ms_per_token}


@dataclass(frozen=True)
class CostModel:
    """Everything that was timed: steps by model role, drafting of a round by head role and shape, lookup, the loop.

    `drafting[role][(depth, top_k, head_bits)][context]` is one whole drafting of a head. `loop_ms` is what a plain
    round took beyond its step when whole answers were decoded, `extra_ms` what rounds of other pipelines took beyond
    each of their steps and draftings (less than nothing where they overlap), `first_ms` what an answer's first round
    took beyond the others. `drift` is how far the two halves of the measurement differ, as a share.
    """

    steps: Mapping[str, StepCurve]
    drafting: Mapping[str, Mapping[tuple[int, int, int], Mapping[int, Timing]]] = field(default_factory=dict)
    lookup: Mapping[int, Timing] = field(default_factory=dict)
    loop_ms: float = 0.0
    extra_ms: Mapping[str, float] = field(default_factory=dict)
    first_ms: Mapping[str, float] = field(default_factory=dict)
    drift: float = 0.0

    def plain_round(self, context: float) -> Cost:
        """One token of plain decoding."""
        return self.steps["target"].step(1, context) + Cost(self.loop_ms)

    def with_steps(self, role: str, curve: StepCurve) -> CostModel:
        """The same with the steps of one more model."""
        return replace(self, steps={**self.steps, role: curve})

    def lookup_draft(self, context: float) -> Cost:
        """One search of the context for its own ending."""
        return interpolate({at: t.cost for at, t in self.lookup.items()}, context) if self.lookup else Cost(0.0)

    def draft(self, role: str, tree: Tree, context: float) -> Cost:
        """One drafting of this tree by the head. Raises KeyError for a depth, top-k and bits that were not measured.

        Bits that were measured at one context only cost at others what 16 bits do and their difference there.
        """
        found = self._draft(role, tree[1:], context)
        whole = (tree.depth, tree.top_k, 16)
        if len(points := self.drafting[role][tree[1:]]) > 1 or whole not in self.drafting[role]:
            return found
        shift = self._draft(role, whole, context).ms - self._draft(role, whole, next(iter(points))).ms
        return Cost(max(found.ms + shift, 0.0), found.error_ms)

    def _draft(self, role: str, shape: tuple[int, int, int], context: float) -> Cost:
        return interpolate({at: t.cost for at, t in self.drafting[role][shape].items()}, context)

    def record(self) -> dict[str, Any]:
        drafting = [
            {"head": role, "depth": depth, "top_k": top_k, "head_bits": bits, "context": context, **timing.record()}
            for role, shapes in self.drafting.items()
            for (depth, top_k, bits), by_context in sorted(shapes.items())
            for context, timing in sorted(by_context.items())
        ]
        return {
            "models": {role: curve.record() for role, curve in self.steps.items()},
            "drafting": drafting,
            "lookup": [{"context": context, **timing.record()} for context, timing in sorted(self.lookup.items())],
            "loop_ms": self.loop_ms,
            "extra_ms": dict(self.extra_ms),
            "first_ms": dict(self.first_ms),
            "drift": self.drift,
        }


def interpolate(points: Mapping[int, Cost], at: float) -> Cost:
    """The cost between the measured points on either side of `at`, on a line; the nearest point outside them."""
    below = max((x for x in points if x <= at), default=min(points))
    above = min((x for x in points if x >= at), default=max(points))
    if below == above:
        return points[below]
    if at <= below:
        return points[below]
    if at >= above:
        return points[above]
    share = (at - below) / (above - below)
    return points[below].times(1 - share) + points[above].times(share)
