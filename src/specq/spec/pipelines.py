"""The pipelines: each a composition of speculators over the models at hand, registered once by name."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from specq.models.cache import KVCache
from specq.models.causal_lm import CausalLM
from specq.recipe import PipelineSection
from specq.spec.drafters import NoDrafter, PromptLookup, SequenceDrafter
from specq.spec.sampling import Sampler
from specq.spec.speculator import Speculator
from specq.spec.verifier import Verifier


@dataclass(frozen=True)
class Seat:
    """A model and the cache it fills."""

    model: CausalLM
    cache: KVCache

    def verifier(self, sampler: Sampler) -> Verifier:
        """A verifier over this cache. Models of one pipeline share the noise, so their samples agree most often."""
        return Verifier(self.model, self.cache, sampler)


@dataclass(frozen=True)
class Parts:
    """The models a pipeline may be built from; what is not at hand is None."""

    target: Seat
    intermediate: Seat | None = None

    def seats(self) -> Iterator[Seat]:
        """Those at hand, the target first."""
        yield self.target
        if self.intermediate is not None:
            yield self.intermediate

    def rollback(self, n: int) -> None:
        """Truncate every cache to the first `n` tokens."""
        for seat in self.seats():
            seat.cache.truncate(min(seat.cache.length, n))


@dataclass(frozen=True)
class PipelineKind:
    """How a pipeline is built, the parts it cannot do without, and one line on what it does."""

    build: Callable[[Parts, Sampler, PipelineSection], Speculator]
    needs: tuple[str, ...]
    summary: str

    def missing(self, parts: Parts) -> str | None:
        """The reason why it cannot be built from these parts, or None."""
        lacking = [name for name in self.needs if getattr(parts, name) is None]
        return f"needs {' and '.join(_PART_NAMES[name] for name in lacking)}" if lacking else None


_PART_NAMES = {"intermediate": "an intermediate model with the target's tokenizer (--intermediate MODEL)"}


def _plain(parts: Parts, sampler: Sampler, section: PipelineSection) -> Speculator:
    return Speculator(NoDrafter(), parts.target.verifier(sampler))


def _lookup(parts: Parts, sampler: Sampler, section: PipelineSection) -> Speculator:
    drafter = PromptLookup(draft_length=section.draft_length, max_ngram=section.max_ngram, min_ngram=section.min_ngram)
    return Speculator(drafter, parts.target.verifier(sampler))


def _sequence(parts: Parts, sampler: Sampler, section: PipelineSection) -> Speculator:
    assert parts.intermediate is not None  # `missing` was asked before
    inner = Speculator(NoDrafter(), parts.intermediate.verifier(sampler))
    return Speculator(SequenceDrafter(inner, at_least=section.draft_length), parts.target.verifier(sampler))


PIPELINES: dict[str, PipelineKind] = {
    "plain": PipelineKind(_plain, (), "the target alone, token by token"),
    "lookup": PipelineKind(_lookup, (), "drafts what followed the same words earlier in the context"),
    "sequence": PipelineKind(_sequence, ("intermediate",), "a small model drafts a sequence"),
}
