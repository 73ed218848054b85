"""Adaptation while decoding: drafts become shorter, or none, while they earn less than plain decoding would.

It lives outside the drafters and only caps their depth, so it cannot change the text; it goes by what is accepted and
by the costs of the profile, not by the clock, so the same text takes the same course.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from specq.spec.decision import Level
from specq.spec.drafters import Drafter
from specq.spec.speculator import Round, Speculator
from specq.spec.verifier import Verifier

log = logging.getLogger("specq")

WINDOW = 16
"""Rounds with a draft that are judged together."""

TRIAL = 6
"""Rounds of a trial at the full draft."""

MARGIN = 0.03
"""A level is left below 1 less this, and taken up again above 1 and this, so that noise does not swing it."""

REST = 64
MOST_REST = 1024
"""Tokens between two trials; doubled after each one that loses, up to the larger number."""


class Governor:
    """Which of the levels drafts now; below the last one is plain decoding. It outlives a prompt."""

    def __init__(self, levels: Sequence[Level], *, name: str) -> None:
        self.levels, self.name = tuple(levels), name
        self.index = 0
        self._home = 0
        self._rest, self._next_rest = REST, REST
        self._notices: list[str] = []
        self._clear()

    @property
    def is_plain(self) -> bool:
        return self.index == len(self.levels)

    def room(self, room: int) -> int:
        """Tokens the next round may decide at this level, of those there is room for."""
        if self.is_plain:
            return 1
        depth = self.levels[self.index].max_depth
        return room if depth is None else min(room, depth + 1)

    def observe(self, round_: Round, context: int) -> None:
        """Take in a finished round after which the context has so many tokens."""
        if round_.is_prefill:
            return
        if self._home > 0 and self.index == self._home:
            self._rest -= round_.decided
            if self._rest <= 0:
                self._move(0)
                return
        if self.is_plain or round_.drafted == 0:
            return
        self._decided += round_.decided
        self._cost += self.levels[self.index].cost(context)
        self._rounds += 1
        if self._rounds == (TRIAL if self._is_trial else WINDOW):
            self._judge()

    def report(self) -> None:
        """Say what changed since the last report, in one line."""
        if self._notices:
            log.info("auto: %s", "; then ".join(self._notices))
            self._notices.clear()

    @property
    def _is_trial(self) -> bool:
        return self.index < self._home

    def _judge(self) -> None:
        gain = self._decided / self._cost
        if not self._is_trial:
            if gain < 1 - MARGIN:
                self._settle(self.index + 1, gain)
            else:
                self._clear()
        elif gain > 1 + MARGIN:
            self._settle(self.index, gain)
        elif self.index + 1 < self._home:
            self._move(self.index + 1)
        else:
            self._next_rest = min(2 * self._next_rest, MOST_REST)
            self._rest = self._next_rest
            self._move(self._home)

    def _settle(self, index: int, gain: float) -> None:
        """Stay at this level from now on; trials of the full draft begin anew."""
        self._home = index
        self._rest = self._next_rest = REST
        self._move(index)
        if self.is_plain:
            what = "plain decoding for now"
        elif index == 0:
            what = "full drafts again"
        else:
            what = f"drafts of {self.levels[index].max_depth}"
        self._notices.append(f"{self.name} runs at {gain:.2f} times plain on this text: {what}")

    def _move(self, index: int) -> None:
        self.index = index
        self._clear()

    def _clear(self) -> None:
        self._decided, self._cost, self._rounds = 0, 0.0, 0


class AdaptiveSpeculator(Speculator):
    """A speculator whose rounds decide at most what its governor allows."""

    def __init__(self, drafter: Drafter, verifier: Verifier, governor: Governor) -> None:
        super().__init__(drafter, verifier)
        self.governor = governor

    def step(self, context: Sequence[int], room: int) -> list[int]:
        decided = super().step(context, self.governor.room(room))
        self.governor.observe(self.rounds[-1], len(context) + len(decided))
        return decided
