"""A profile as tables for a person: cost curves, ranking, prediction against measurement; and the recipe to save."""

from __future__ import annotations

from collections import Counter
from typing import Any

from specq.profile.cost import SEQUENCE, TREE, CostModel, StepCurve, Tree
from specq.profile.plan import Plan
from specq.profile.predict import SELF, Prediction
from specq.profile.result import Profile
from specq.recipe import Recipe
from specq.spec.decision import with_settings
from specq.words import counted

Rows = list[tuple[str, ...]]
Section = tuple[str, Rows]
MOST_RANKED = 4
"""Candidates shown of each pipeline, and the best of each precision of the draft head; JSON has them all."""


def sections(profile: Profile) -> list[Section]:
    """(title, rows) of every table there is something for, in order."""
    found: list[Section] = []
    if profile.costs is not None:
        found += [curve_section(role, curve) for role, curve in profile.costs.steps.items()]
        if drafting := _drafting_rows(profile.costs):
            found.append(("drafting of a round", drafting))
    if profile.splits:
        found.append(("where a step's time goes", _split_rows(profile.splits)))
    if rates := _acceptance_rows(profile):
        on = f"on {counted(profile.num_prompts, 'prompt')}"
        found.append((f"acceptance {'as given' if profile.is_random else on}, by position or depth", rates))
    if profile.costs is not None and (beyond := _beyond_rows(profile.costs)):
        found.append(("rounds as they ran, beyond their parts as timed alone", beyond))
    if profile.plan is not None:
        what = f"predicted for answers of {profile.plan.answer:g} tokens at {profile.plan.context} of context"
        found.append((what, ranking_rows(profile.plan)))
        if profile.plan.refused:
            found.append(("not considered", [(r.pipeline, r.reason) for r in profile.plan.refused]))
    if profile.measured:
        most = max(each.prompts for each in profile.measured)
        found.append((f"measured again on up to {most} prompts; predicted before that", measured_rows(profile)))
    return found


def curve_section(role: str, curve: StepCurve) -> Section:
    """The cost curve of one model: milliseconds and T(n)/T(1), as sequence and as tree, at every context."""
    contexts = curve.contexts()
    rows: Rows = [("nodes", *(f"{form} @{at}" for at in contexts for form in (SEQUENCE, TREE)))]
    counts = sorted({n for steps in curve.forms.values() for by_nodes in steps.values() for n in by_nodes})
    for nodes in counts:
        cells = []
        for at in contexts:
            for form in (SEQUENCE, TREE):
                timing = curve.forms.get(form, {}).get(at, {}).get(nodes)
                one = curve.step(1, at).ms
                cells.append(f"{timing.median_ms:.2f} ms {timing.median_ms / one:.2f}x" if timing else "-")
        rows.append((str(nodes), *cells))
    prefill = curve.prefill_ms_per_token
    title = f"a step of the {role.replace('_', ', ')}"
    return (f"{title}; prefill {prefill:.3f} ms a token" if prefill is not None else title), rows


def ranking_rows(plan: Plan) -> Rows:
    """Candidates, fastest first: what they are predicted to do and by how much they lose to the first."""
    counts: Counter[str] = Counter()
    precisions: Counter[tuple[str, int | None]] = Counter()
    shown = []
    for prediction in plan.ranking:
        candidate = prediction.candidate
        precision = candidate.pipeline, dict(candidate.settings).get("drafter.head_bits")
        counts[candidate.pipeline] += 1
        precisions[precision] += 1
        if counts[candidate.pipeline] <= MOST_RANKED or precisions[precision] == 1:
            shown.append(prediction)
    rows: Rows = [("pipeline", "tokens/s", "against plain", "behind", "accept length", "round", "memory", "sizes")]
    fastest = plan.ranking[0].tokens_per_s
    return rows + [_ranking_row(p, fastest) for p in shown]


def _ranking_row(p: Prediction, fastest: float) -> tuple[str, ...]:
    return (
        p.candidate.pipeline,
        f"{p.tokens_per_s:.1f}",
        f"{p.gain:.2f} ± {p.uncertainty:.2f}",
        f"{100 * (1 - p.tokens_per_s / fastest):.0f} %",
        f"{p.accept_len:.2f}",
        f"{p.draft_ms:.2f} + {p.verify_ms:.2f} ms",
        "-" if p.memory_bytes is None else _size(p.memory_bytes),
        p.candidate.label,
    )


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.1f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:.0f} MB"


def measured_rows(profile: Profile) -> Rows:
    """Every candidate that ran again, with its prediction and how far that was off."""
    assert profile.first_plan is not None
    predicted = {p.candidate: p for p in profile.first_plan.ranking}
    rows: Rows = [
        (
            "pipeline",
            "tokens/s",
            "predicted",
            "off by",
            "against plain",
            "predicted",
            "accept length",
            "predicted",
            "sizes",
        )
    ]
    for each in profile.measured:
        guess = predicted[each.candidate]
        off = guess.tokens_per_s / each.tokens_per_s - 1 if each.tokens_per_s else 0.0
        rows.append(
            (
                each.candidate.pipeline,
                f"{each.tokens_per_s:.1f}",
                f"{guess.tokens_per_s:.1f}",
                f"{100 * off:+.0f} %",
                "1" if each.candidate.pipeline == "plain" else f"{each.gain:.2f} ± {each.uncertainty:.2f}",
                "1" if each.candidate.pipeline == "plain" else f"{guess.gain:.2f} ± {guess.uncertainty:.2f}",
                f"{each.accept_len:.2f}",
                f"{guess.accept_len:.2f}",
                each.candidate.label,
            )
        )
    return rows


def closing_lines(profile: Profile) -> list[str]:
    """The sentence that explains the winner, where the plan would differ, and what makes the numbers doubtful."""
    lines = [profile.reason] if profile.reason else ["the profile is not complete"]
    if profile.plan is not None:
        chosen = profile.plan.winner.candidate.pipeline
        lines += [
            f"at {other.context} tokens of context {other.winner.candidate.pipeline} would be chosen"
            for other in profile.other_plans
            if other.winner.candidate.pipeline != chosen
        ]
    return lines + [f"note: {note}" for note in profile.notes]


def chosen_recipe(profile: Profile) -> Recipe:
    """The recipe that runs what was chosen. Only of a complete profile."""
    assert profile.decision is not None
    name = ("pipeline.name", profile.decision.pipeline)
    return with_settings(profile.recipe, [name, *profile.decision.settings])


def recipe_text(profile: Profile, name: str) -> str:
    """The chosen recipe as YAML; its first line is the command that runs it."""
    import yaml

    assert profile.decision is not None
    data: dict[str, Any] = chosen_recipe(profile).model_dump(exclude_unset=True)
    device = profile.environment["device"]
    gain = f"{profile.decision.gain:.2f} times plain"
    head = f"# specq chat {name}\n# Chosen by specq profile, {profile.measured_at}: {gain} on {device}.\n"
    return head + yaml.safe_dump(data, sort_keys=False, allow_unicode=True)


def _drafting_rows(costs: CostModel) -> Rows:
    rows: Rows = []
    for role, shapes in costs.drafting.items():
        for (depth, top_k, bits), by_context in sorted(shapes.items(), key=lambda item: (-item[0][2], *item[0])):
            times = ", ".join(f"{t.median_ms:.2f} ms @{at}" for at, t in sorted(by_context.items()))
            what = f"depth {depth}, top-k {top_k}, {bits} bits"
            if role == SELF:
                role, what = "target itself", f"{depth} tokens, activations in {bits} bits"
            rows.append((role.replace("_", " "), what, times))
    if costs.lookup:
        times = ", ".join(f"{t.median_ms:.3f} ms @{at}" for at, t in sorted(costs.lookup.items()))
        rows.append(("lookup", "", times))
    return rows


def _beyond_rows(costs: CostModel) -> Rows:
    """What a round of each pipeline that ran took more than its draftings and steps, and an answer's first one."""
    if not costs.first_ms:
        return []
    rows: Rows = [("pipeline", "each step or drafting", "the first round")]
    for name, first_ms in costs.first_ms.items():
        rows.append((name, f"{costs.extra_ms.get(name, costs.loop_ms):+.2f} ms", f"{first_ms:+.2f} ms more"))
    return rows


def _split_rows(splits: dict[str, list[dict[str, Any]]]) -> Rows:
    rows: Rows = [("model", "nodes", "products", "attention", "rest")]
    for role, shares in splits.items():
        for each in shares:
            cells = (f"{100 * each[kind]:.0f} %" for kind in ("products", "attention", "rest"))
            rows.append((role, str(each["nodes"]), *cells))
    return rows


def _acceptance_rows(profile: Profile) -> Rows:
    found = profile.acceptance
    if found is None:
        return []
    rows: Rows = []
    for name, rates in (("sequence", found.sequence), ("lookup", found.lookup)):
        if rates is not None:
            share = f" (drafts in {100 * found.lookup_share:.0f} % of rounds)" if name == "lookup" else ""
            rows.append((name, _rates_text(rates.rates), _basis(rates.rounds) + share))
    for bits, own in sorted(found.qspec.items(), reverse=True):
        rows.append((f"qspec, activations in {bits} bits", _rates_text(own.rates), _basis(own.rounds)))
    for name, trees in (("eagle2", found.eagle2), ("inner", found.inner)):
        for tree in _widest(list(trees)):
            label = f"{name}, {tree.nodes} nodes, top-k {tree.top_k}, {tree.head_bits} bits"
            rows.append((label, _rates_text(trees[tree].rates), _basis(trees[tree].rounds)))
    return rows


def _widest(trees: list[Tree]) -> list[Tree]:
    """Of every top-k and precision the tree with the most levels, then nodes."""
    best: dict[tuple[int, int], Tree] = {}
    for tree in sorted(trees, key=lambda t: (t.depth, t.nodes)):
        best[tree.top_k, tree.head_bits] = tree
    return list(best.values())


def _rates_text(rates: tuple[float, ...]) -> str:
    return " ".join(f"{rate:.2f}" for rate in rates)


def _basis(rounds: int | None) -> str:
    return "given by hand" if rounds is None else counted(rounds, "round")
