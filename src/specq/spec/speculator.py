"""One drafter and one verifier advance a context; the only decode loop of specq, and the only stop rule."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from specq.spec.drafters import Drafter
from specq.spec.stopwatch import Stopwatch
from specq.spec.tree import DraftTree
from specq.spec.verifier import Verifier


@dataclass(frozen=True)
class Round:
    """One draft-verify round: draft nodes proposed, tokens decided, and milliseconds of both halves."""

    is_prefill: bool
    drafted: int
    decided: int
    draft_ms: float
    verify_ms: float


class Speculator:
    """A drafter and the verifier that judges it. Every pipeline is a composition of these; none has its own loop."""

    def __init__(self, drafter: Drafter, verifier: Verifier) -> None:
        self.drafter, self.verifier = drafter, verifier
        self.rounds: list[Round] = []
        self._watch = Stopwatch()
        self.observer: Callable[[DraftTree, list[int]], None] | None = None
        """Called with the draft and the tokens decided after every decode round, by those who measure acceptance."""

    @torch.inference_mode()
    def step(self, context: Sequence[int], room: int) -> list[int]:
        """The tokens of one round, at least one and at most `room` (which is at least 1)."""
        watch = self._watch
        watch.start()
        if self.verifier.needs_prefill(context):
            decided = self.verifier.prefill(context)
            self.rounds.append(Round(True, 0, len(decided), 0.0, sum(watch.stop())))
            return decided
        tree = self.drafter.propose(context, max_nodes=self.verifier.max_draft(context), max_depth=room - 1)
        watch.drafted(tree.tokens.device)
        decided = self.verifier.verify(context, tree)
        self.rounds.append(Round(False, len(tree), len(decided), *watch.stop()))
        if self.observer is not None:
            self.observer(tree, decided)
        return decided

    def extend(self, context: Sequence[int], *, at_least: int, at_most: int) -> list[int]:
        """Between `at_least` and `at_most` tokens that follow the context, decided by this speculator's verifier."""
        grown = list(context)
        while len(grown) - len(context) < at_least:
            grown += self.step(grown, len(context) + at_most - len(grown))
            self.drafter.rollback(len(grown) - 1)
        return grown[len(context) :]

    def rollback(self, n: int) -> None:
        """Forget everything after the first `n` tokens, here and in every level below."""
        self.verifier.rollback(n)
        self.drafter.rollback(n)

    def levels(self) -> Iterator[Speculator]:
        """This speculator, then those inside its drafter, outermost first."""
        yield self
        yield from self.drafter.levels()


class Stop(Protocol):
    """When decoding ends: asked with the context after every token."""

    def __call__(self, context: Sequence[int]) -> bool: ...

    def room(self, context: Sequence[int]) -> int:
        """Tokens that may still be decided (at least 1 while decoding goes on)."""
        ...


def generate(speculator: Speculator, context: list[int], stop: Stop) -> Iterator[int]:
    """Tokens as they are decided; each is appended to `context` before it is given out.

    However it ends, also when the caller stops reading in the middle of a block, every cache is left holding a prefix
    of the context without its newest token.
    """
    try:
        while not stop(context):
            for token in speculator.step(context, stop.room(context)):
                context.append(token)
                yield token
                if stop(context):
                    return
            speculator.rollback(len(context) - 1)  # whatever ran ahead is forgotten by length
    finally:
        speculator.rollback(len(context) - 1)


class StopRule:
    """Ends at a stop id, a stop string in the new text, the token cap or the context limit; `reason` says which kind.

    `read_text` turns one new id into the text it completes (a TextStream's `push`); it is asked once for every id, stop
    ids left out, and `text` holds what came of it, cut before a stop string.
    """

    def __init__(
        self,
        *,
        start: int,
        stop_ids: frozenset[int],
        max_new_tokens: int | None = None,
        context_limit: int,
        stop_strings: Sequence[str] = (),
        read_text: Callable[[int], str] | None = None,
    ) -> None:
        self.stop_ids, self.stop_strings = stop_ids, tuple(stop_strings)
        self.end = context_limit if max_new_tokens is None else min(context_limit, start + max_new_tokens)
        self.read_text = read_text
        self.reason: str | None = None
        self.text = ""
        self._is_cut = False  # before a stop string: nothing may follow then
        self._checked = start

    def room(self, context: Sequence[int]) -> int:
        return self.end - len(context)

    def __call__(self, context: Sequence[int]) -> bool:
        while self.reason is None and self._checked < len(context):
            token = context[self._checked]
            self._checked += 1
            if token in self.stop_ids:
                self.reason = "stop"
            elif self.read_text is not None:
                self._add_text(self.read_text(token))
        if self.reason is None and len(context) >= self.end:
            self.reason = "length"
        return self.reason is not None

    def held_back(self) -> int:
        """Characters at the end of `text` that may be the beginning of a stop string, so are not shown yet."""
        if self.reason == "stop":
            return 0
        longest = max((len(s) for s in self.stop_strings), default=1) - 1
        for size in range(min(longest, len(self.text)), 0, -1):
            if any(s.startswith(self.text[-size:]) for s in self.stop_strings):
                return size
        return 0

    def finish_text(self, rest: str) -> None:
        """Take in what the text reader still held (a stop string may end in it) once decoding is over."""
        if not self._is_cut:
            self._add_text(rest)

    def _add_text(self, piece: str) -> None:
        searched = max(0, len(self.text) - max((len(s) for s in self.stop_strings), default=0))
        self.text += piece
        found = [at for s in self.stop_strings if (at := self.text.find(s, searched)) >= 0]
        if found:
            self.text = self.text[: min(found)]
            self._is_cut = True
            self.reason = "stop"
