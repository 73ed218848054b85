"""Drafters: each proposes a tree below the context; none of them keeps a history of its own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np

from specq.spec.tree import DraftTree, chain

if TYPE_CHECKING:
    from specq.spec.speculator import Speculator


class Drafter(Protocol):
    """Proposes what may follow the context. A proposal depends on the context only, never on earlier rounds."""

    def propose(self, context: Sequence[int], *, max_nodes: int, max_depth: int) -> DraftTree:
        """A tree of at most `max_nodes` nodes and `max_depth` levels; empty when there is nothing to say."""
        ...

    def rollback(self, n: int) -> None:
        """Forget everything after the first `n` tokens of the context."""
        ...

    def levels(self) -> Iterator[Speculator]:
        """The speculators inside, outermost first."""
        ...


class NoDrafter:
    """Proposes nothing: the speculator then decodes token by token."""

    def propose(self, context: Sequence[int], *, max_nodes: int, max_depth: int) -> DraftTree:
        return chain([])

    def rollback(self, n: int) -> None:
        pass

    def levels(self) -> Iterator[Speculator]:
        return iter(())


class PromptLookup(NoDrafter):
    """Proposes what followed the last earlier occurrence of the context's ending (longest ending first).

    Source: prompt lookup decoding, as in transformers' `prompt_lookup_num_tokens`.
    """

    def __init__(self, *, draft_length: int, max_ngram: int, min_ngram: int = 1) -> None:
        self.draft_length, self.max_ngram, self.min_ngram = draft_length, max_ngram, min_ngram

    def propose(self, context: Sequence[int], *, max_nodes: int, max_depth: int) -> DraftTree:
        length = min(self.draft_length, max_nodes, max_depth)
        if length <= 0:
            return chain([])
        start = self._continuation(context)
        return chain(context[start : start + length])

    def _continuation(self, context: Sequence[int]) -> int:
        """Where the text after the last earlier occurrence begins; the context's end when there is none."""
        ids = np.asarray(context)
        ends = np.flatnonzero(ids[:-1] == ids[-1])  # last tokens of earlier occurrences
        best, size = len(context), 1
        while len(ends):
            if size >= self.min_ngram:
                best = int(ends[-1]) + 1
            if size == self.max_ngram:
                break
            ends = ends[ends >= size]
            ends = ends[ids[ends - size] == ids[-1 - size]] if size < len(ids) else ends[:0]
            size += 1
        return best


class SequenceDrafter:
    """A whole speculator as the drafter of the next level: its verified text becomes one chain.

    With `Speculator(NoDrafter(), model)` inside it is the ordinary draft model; with an EAGLE tree inside it is the
    hierarchical pipeline's tree-to-sequence step. Source: arXiv 2505.22179 section 4.
    """

    def __init__(self, speculator: Speculator, *, at_least: int) -> None:
        self.speculator, self.at_least = speculator, at_least

    def propose(self, context: Sequence[int], *, max_nodes: int, max_depth: int) -> DraftTree:
        at_most = min(max_nodes, max_depth, self.speculator.verifier.limit - len(context))
        if at_most <= 0:
            return chain([])
        at_least = min(self.at_least, at_most)
        return chain(self.speculator.extend(context, at_least=at_least, at_most=at_most))

    def rollback(self, n: int) -> None:
        self.speculator.rollback(n)

    def levels(self) -> Iterator[Speculator]:
        return self.speculator.levels()
