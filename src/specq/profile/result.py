"""What a profile holds and what follows from it; and how it is stored."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from specq.files import write_atomically
from specq.profile.acceptance import Acceptance
from specq.profile.cost import CostModel
from specq.profile.plan import Plan, Verdict, explain
from specq.profile.predict import Measured
from specq.recipe import Recipe
from specq.spec.decision import FORMAT, Decision, ProfileKey

SAID = 2
"""Pipelines whose measured gain the closing sentence gives, fastest first; the table has them all."""


@dataclass
class Profile:
    """Everything that was measured and what follows from it; parts are None until they are there.

    `first_plan` is what was predicted before the best were `measured` again, `plan` what follows from all.
    """

    key: ProfileKey
    recipe: Recipe
    environment: dict[str, Any]
    device: str
    seconds: float
    measured_at: str
    memory: Mapping[str, int]
    states: list[dict[str, Any]] = field(default_factory=list)
    costs: CostModel | None = None
    acceptance: Acceptance | None = None
    num_prompts: int = 0
    plan: Plan | None = None
    first_plan: Plan | None = None
    other_plans: list[Plan] = field(default_factory=list)
    measured: list[Measured] = field(default_factory=list)
    verdict: Verdict | None = None
    decision: Decision | None = None
    splits: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    by_hand: tuple[str, ...] = ()
    is_random: bool = False
    sampling: dict[str, Any] = field(default_factory=dict)

    @property
    def is_complete(self) -> bool:
        return self.decision is not None

    @property
    def reason(self) -> str | None:
        """The sentence that explains what runs."""
        if self.plan is None or self.verdict is None:
            return None
        if self.verdict.winner == self.plan.winner.candidate or not self.measured:
            return explain(self.plan)
        rivals = [m for m in self.measured if m.candidate.pipeline != "plain"]
        ran = ", ".join(
            f"{m.candidate.pipeline} {m.gain:.2f} ± {m.uncertainty:.2f} times plain"
            for m in sorted(rivals, key=lambda m: -m.gain)[:SAID]
        )
        return f"{self.verdict.winner.pipeline} runs, though the prediction chose otherwise: measured again, {ran}"

    def record(self) -> dict[str, Any]:
        """The profile as JSON takes it, and as it is stored."""
        return {
            "format": FORMAT,
            "is_complete": self.is_complete,
            "key": self.key.record(),
            "recipe": self.recipe.model_dump(exclude_unset=True),
            "random_weights": self.is_random,
            "environment": self.environment,
            "sampling": self.sampling,
            "measured_at": self.measured_at,
            "seconds": self.seconds,
            "memory_bytes": dict(self.memory),
            "device_states": self.states,
            "costs": self.costs.record() if self.costs else None,
            "splits": self.splits,
            "acceptance": self.acceptance.record() if self.acceptance else None,
            "acceptance_by_hand": list(self.by_hand),
            "prompts": self.num_prompts,
            "plan": self.plan.record() if self.plan else None,
            "plans_at_other_contexts": [
                {"context": other.context, "winner": other.winner.record()} for other in self.other_plans
            ],
            "measured": [m.record() | {"predicted_tps": self._guess(m)} for m in self.measured],
            "reason": self.reason,
            "decision": self.decision.record() if self.decision else None,
            "notes": self.notes,
        }

    def _guess(self, measured: Measured) -> float:
        """Tokens a second that were predicted of what was measured, before it was."""
        assert self.first_plan is not None
        return next(p.tokens_per_s for p in self.first_plan.ranking if p.candidate == measured.candidate)


def save(profile: Profile) -> Path:
    """Write the profile where `auto` finds it; an incomplete one beside that, where `auto` does not look."""
    path = profile.key.path
    if not profile.is_complete:
        path = path.with_name(f"{path.stem}.partial")
    path.parent.mkdir(parents=True, exist_ok=True)
    with write_atomically(path) as temporary:
        temporary.write_text(json.dumps(profile.record(), indent=1, default=str) + "\n", encoding="utf-8")
    return path
