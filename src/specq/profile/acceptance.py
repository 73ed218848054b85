"""How much of a draft is accepted: chances per position of a chain, per depth of a tree; pure, no torch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from specq.errors import UsageError
from specq.profile.cost import Tree

FEWEST_SEEN = 20
"""A position reached less often takes the rate of all positions from there on together."""

MAX_BY_HAND = 16
"""Positions that rates given by hand are continued to, the last one repeated."""

_Draft = TypeVar("_Draft")


@dataclass(frozen=True)
class Rates:
    """Chance that position k (or depth k) is accepted once those before it were.

    `rounds` they rest on; None means given by hand, without a statistical error.
    """

    rates: tuple[float, ...]
    rounds: int | None = None

    def chances(self, length: int) -> list[float]:
        """Chance that exactly 0, 1 ... `length` positions of a draft of this length are accepted."""
        chances, reached = [], 1.0
        for rate in self.rates[:length]:
            chances.append(reached * (1 - rate))
            reached *= rate
        return [*chances, reached]

    def accepted(self, length: int) -> float:
        """Positions accepted of a draft of this length, on average."""
        return sum(k * chance for k, chance in enumerate(self.chances(length)))

    def error(self, length: int) -> float:
        """Half the width of the 95 % interval of `accepted`."""
        if self.rounds is None:
            return 0.0
        chances = self.chances(length)
        mean = sum(k * chance for k, chance in enumerate(chances))
        variance = sum((k - mean) ** 2 * chance for k, chance in enumerate(chances))
        return 1.96 * math.sqrt(variance / max(self.rounds, 1))

    def record(self) -> dict[str, Any]:
        return {"rates": list(self.rates), "rounds": self.rounds}


@dataclass(frozen=True)
class Acceptance:
    """What was accepted, by drafter: the intermediate's sequence, prompt lookup, both heads' trees, the target's own.

    `lookup_share` is the share of rounds in which lookup found something to draft. `inner` is the intermediate's
    acceptance of its own head's trees; what the target accepts of the outcome is `sequence`. `qspec` are the target's
    own chains by the bits of their activations. `scale` multiplies what a pipeline's drafts are expected to have
    accepted, where whole answers told more than the rounds these rates rest on; `spread` is half the 95 % interval of
    that, as a share, from how it differs between prompts.
    """

    sequence: Rates | None = None
    lookup: Rates | None = None
    lookup_share: float = 0.0
    eagle2: Mapping[Tree, Rates] = field(default_factory=dict)
    inner: Mapping[Tree, Rates] = field(default_factory=dict)
    qspec: Mapping[int, Rates] = field(default_factory=dict)
    scale: Mapping[str, float] = field(default_factory=dict)
    spread: Mapping[str, float] = field(default_factory=dict)

    @property
    def none_of_it(self) -> Acceptance:
        """The same drafts, none of them accepted, as with random weights; lookup, where it may be, is left out."""

        def nothing(rates: Rates | None) -> Rates | None:
            return None if rates is None else Rates((0.0,) * len(rates.rates))

        def nothing_of(drafts: Mapping[_Draft, Rates]) -> dict[_Draft, Rates]:
            return {draft: Rates((0.0,) * len(rates.rates)) for draft, rates in drafts.items()}

        return Acceptance(
            sequence=nothing(self.sequence),
            eagle2=nothing_of(self.eagle2),
            inner=nothing_of(self.inner),
            qspec=nothing_of(self.qspec),
        )

    def record(self) -> dict[str, Any]:
        def trees(rates: Mapping[Tree, Rates]) -> list[dict[str, Any]]:
            return [{**tree._asdict(), **value.record()} for tree, value in sorted(rates.items())]

        return {
            "sequence": self.sequence.record() if self.sequence else None,
            "lookup": self.lookup.record() | {"share": self.lookup_share} if self.lookup else None,
            "eagle2": trees(self.eagle2),
            "hierarchical_inner": trees(self.inner),
            "qspec": [{"act_bits": bits, **rates.record()} for bits, rates in sorted(self.qspec.items())],
            "scale": dict(self.scale),
            "spread": dict(self.spread),
        }


def count_rates(accepted: Sequence[int], drafted: Sequence[int]) -> Rates:
    """The rates of rounds that each drafted so many positions and had so many accepted from the first on."""
    longest = max(drafted, default=0)
    reached = [
        sum(d >= k and a >= k - 1 for a, d in zip(accepted, drafted, strict=True)) for k in range(1, longest + 1)
    ]
    passed = [sum(a >= k for a in accepted) for k in range(1, longest + 1)]
    rates: list[float] = []
    for k in range(longest):
        if reached[k] >= FEWEST_SEEN:
            rates.append(passed[k] / reached[k])
        elif seen := sum(reached[k:]):
            # The tail shares one rate; where it rests on almost nothing the chance of the position before caps it.
            pooled = sum(passed[k:]) / seen
            rates.append(min(pooled, rates[-1]) if rates and seen < FEWEST_SEEN else pooled)
        else:
            rates.append(0.0)
    return Rates(tuple(rates), len(accepted))


@dataclass(frozen=True)
class TreeRound:
    """One verified tree: the level (from 1) of every node, best first, and which nodes were accepted, root first."""

    levels: tuple[int, ...]
    path: tuple[int, ...]


def tree_rates(rounds: Sequence[TreeRound], trees: Sequence[Tree]) -> dict[Tree, Rates]:
    """Rates of smaller trees out of rounds of the largest: a tree of fewer nodes is the beginning of its best nodes.

    A cut in depth leaves the nodes of deeper levels out and lets the others move up.
    """
    found = {}
    for tree in trees:
        accepted = []
        for each in rounds:
            rank, ranks = 0, {}
            for node, level in enumerate(each.levels):
                if level <= tree.depth:
                    ranks[node] = rank
                    rank += 1
            count = 0
            for node in each.path:
                if node not in ranks or ranks[node] >= tree.nodes - 1:
                    break
                count += 1
            accepted.append(count)
        found[tree] = count_rates(accepted, [tree.depth] * len(accepted))
    return found


NAMES_BY_HAND = ("sequence", "lookup", "eagle2", "inner", "qspec")


def parse_by_hand(texts: Sequence[str]) -> dict[str, Rates]:
    """Rates of `NAME=P[,P...]` texts, the last P repeated for what follows. Raises UsageError saying the form."""
    given = {}
    for text in texts:
        name, equals, values = text.partition("=")
        try:
            rates = [float(value) for value in values.split(",")]
        except ValueError:
            rates = []
        if not equals or name not in NAMES_BY_HAND or not rates or not all(0 <= rate <= 1 for rate in rates):
            raise UsageError(
                f"--acceptance `{text}` is not NAME=P[,P...] with chances from 0 to 1",
                hint=f"for example --acceptance sequence=0.85,0.8; NAME is one of {', '.join(NAMES_BY_HAND)}",
            )
        given[name] = Rates((*rates, *[rates[-1]] * (MAX_BY_HAND - len(rates))), None)
    return given
