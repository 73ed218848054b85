"""The pipelines: each a composition of speculators over the models at hand, registered once by name."""

from __future__ import annotations

import logging
from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, TypeVar

from specq.checkpoint import ModelSpec
from specq.errors import UnsupportedError, UsageError
from specq.models.cache import KVCache
from specq.models.causal_lm import CausalLM
from specq.models.eagle import EagleHead
from specq.models.eagle_files import HeadFiles
from specq.models.eagle_loader import redraft
from specq.quant.rounding import Act, low_act
from specq.recipe import Recipe
from specq.spec.drafters import NoDrafter, PromptLookup, SequenceDrafter
from specq.spec.eagle_tree import EagleTree, TreeShape
from specq.spec.sampling import Sampler
from specq.spec.self_chain import SelfChain
from specq.spec.speculator import Speculator
from specq.spec.verifier import Verifier

if TYPE_CHECKING:
    from specq.spec.device_draft import EagleDrafting
    from specq.spec.device_round import DeviceRound
    from specq.spec.device_self import SelfDrafting

log = logging.getLogger("specq")


@dataclass(frozen=True)
class Seat:
    """A model and the cache it fills."""

    model: CausalLM
    cache: KVCache

    def verifier(self, sampler: Sampler) -> Verifier:
        """A verifier over this cache. Models of one pipeline share the noise, so their samples agree most often.

        Where the model has a step on the device, its rounds run there.
        """
        if self._round is None:
            return Verifier(self.model, self.cache, sampler)
        from specq.spec.device_round import DeviceVerifier

        return DeviceVerifier(self._round, sampler)

    def self_drafter(self, verifier: Verifier, *, act: Act, draft_length: int) -> SelfChain:
        """A drafter that is this model itself with activations of low precision, on the device as its verifier."""
        if not verifier.is_on_device:
            return SelfChain(verifier, act=act, draft_length=draft_length)
        from specq.spec.device_round import DeviceVerifier
        from specq.spec.device_self import DeviceSelfChain

        assert isinstance(verifier, DeviceVerifier)
        return DeviceSelfChain(self._self_drafting, verifier, act=act, draft_length=draft_length)

    @cached_property
    def _self_drafting(self) -> SelfDrafting:
        """Outlives drafters, since what it captured does."""
        from specq.spec.device_self import SelfDrafting

        return SelfDrafting(self.model.device)

    @cached_property
    def _round(self) -> DeviceRound | None:
        """Outlives verifiers, since what it captured does."""
        if self.model.device_step is None:
            return None
        from specq.spec.device_round import DeviceRound  # imports Triton, which not every platform has

        return DeviceRound(self.model, self.cache)


@dataclass(frozen=True)
class HeadSeat:
    """An EAGLE head and the cache of its rows; `files` are those it was loaded from.

    `others` are the same head with draft heads of other bits, made when they are first asked for.
    """

    head: EagleHead
    cache: KVCache
    files: HeadFiles | None = None
    others: dict[int, EagleHead] = field(default_factory=dict, compare=False)
    draftings: dict[tuple[TreeShape, int], EagleDrafting] = field(default_factory=dict, compare=False)

    def drafting_in(self, bits: int | None) -> EagleHead:
        """The head that drafts with an output head of so many bits; None leaves it as it was loaded."""
        if bits is None or bits == self.head.head_bits or self.files is None:
            return self.head
        if bits not in self.others:
            self.others[bits] = redraft(self.head, self.files, head_bits=bits)
        return self.others[bits]

    def drafter(self, verifier: Verifier, shape: TreeShape, *, bits: int | None = None) -> EagleTree:
        """A drafter of trees of this shape for a verifier, on the device where its rounds are and the head can be."""
        if verifier.is_on_device:
            from specq.spec.device_draft import DeviceEagleTree
            from specq.spec.device_round import DeviceVerifier

            drafting = self._drafting(verifier, shape, bits)
            if drafting is not None and isinstance(verifier, DeviceVerifier):
                return DeviceEagleTree(drafting, self.cache, verifier)
        return EagleTree(self.drafting_in(bits), self.cache, verifier, shape)

    def _drafting(self, verifier: Verifier, shape: TreeShape, bits: int | None) -> EagleDrafting | None:
        """Kept for the next drafter of the same shape, since what it captured is; None where the head cannot."""
        from specq.models.device_head import why_no_device_head
        from specq.spec.device_draft import EagleDrafting

        head = self.drafting_in(bits)
        if reason := why_no_device_head(head):
            log.warning(f"drafting stays on torch: {reason}")
            return None
        key = (shape, head.head_bits)
        if key not in self.draftings or self.draftings[key].verified is not verifier.cache:
            self.draftings[key] = EagleDrafting(head, self.cache, verifier.cache, shape)
            if not self.draftings[key].fits(0, shape.depth):
                log.warning(
                    f"trees of {shape.depth} levels of {shape.top_k} are drafted in torch: the head runs too many"
                )
        return self.draftings[key]


@dataclass(frozen=True)
class Parts:
    """The models a pipeline may be built from; what is not at hand is None."""

    target: Seat
    intermediate: Seat | None = None
    target_head: HeadSeat | None = None
    intermediate_head: HeadSeat | None = None

    def items(self) -> Iterator[tuple[str, Seat | HeadSeat]]:
        """Role and seat of what is at hand."""
        yield from ((role, seat) for role, seat in vars(self).items() if seat is not None)

    @property
    def roles(self) -> frozenset[str]:
        """The roles of what is at hand; FOUR_BITS among them where the target has some."""
        found = frozenset(role for role, _ in self.items())
        return found | {FOUR_BITS} if self.target.model.has_four_bit_products else found

    def rollback(self, n: int) -> None:
        """Truncate every cache to the first `n` tokens; a head's rows are one fewer."""
        for seat, rows in (
            (self.target, n),
            (self.intermediate, n),
            (self.target_head, max(n - 1, 0)),
            (self.intermediate_head, max(n - 1, 0)),
        ):
            if seat is not None:
                seat.cache.truncate(min(seat.cache.length, rows))


@dataclass(frozen=True)
class PipelineKind:
    """How a pipeline is built, the parts it cannot do without, and one line on what it does."""

    build: Callable[[Parts, Sampler, Recipe], Speculator]
    needs: tuple[str, ...]
    summary: str
    needs_four_bits: bool = False

    def missing(self, roles: Container[str]) -> str | None:
        """The reason why it cannot be built from parts of these roles (FOUR_BITS may be among them), or None."""
        needs = (*self.needs, FOUR_BITS) if self.needs_four_bits else self.needs
        lacking = [name for name in needs if name not in roles]
        return f"needs {' and '.join(_PART_NAMES[name] for name in lacking)}" if lacking else None


FOUR_BITS = "four_bits"
"""Stands among roles for 4-bit matrices of the target."""

_PART_NAMES = {
    FOUR_BITS: "a target with 4-bit matrices, whose activations it can round (specq quantize MODEL -o DIR makes one)",
    "intermediate": "an intermediate model with the target's tokenizer (--intermediate MODEL)",
    "target_head": "an EAGLE head of the target (--drafter HEAD)",
    "intermediate_head": "an EAGLE head of the intermediate model (--set intermediate.drafter=HEAD)",
}


def four_bits(spec: ModelSpec) -> frozenset[str]:
    """FOUR_BITS where the config of a target promises 4-bit matrices, before `Parts.roles` knows whether it has any."""
    stored = spec.quantization
    return frozenset({FOUR_BITS} if stored is not None and stored.bits == 4 else ())


def tree_shape(recipe: Recipe) -> TreeShape:
    """The tree a recipe asks its EAGLE head for."""
    drafter = recipe.drafter
    return TreeShape(drafter.nodes, drafter.depth, drafter.top_k, drafter.noise_scale)


def _plain(parts: Parts, sampler: Sampler, recipe: Recipe) -> Speculator:
    return Speculator(NoDrafter(), parts.target.verifier(sampler))


def _lookup(parts: Parts, sampler: Sampler, recipe: Recipe) -> Speculator:
    section = recipe.pipeline
    drafter = PromptLookup(
        draft_length=section.length_for("lookup"), max_ngram=section.max_ngram, min_ngram=section.min_ngram
    )
    return Speculator(drafter, parts.target.verifier(sampler))


def _sequence(parts: Parts, sampler: Sampler, recipe: Recipe) -> Speculator:
    inner = Speculator(NoDrafter(), _present(parts.intermediate).verifier(sampler))
    drafter = SequenceDrafter(inner, at_least=recipe.pipeline.length_for("sequence"))
    return Speculator(drafter, parts.target.verifier(sampler))


def _eagle2(parts: Parts, sampler: Sampler, recipe: Recipe) -> Speculator:
    return _tree_speculator(_present(parts.target_head), parts.target, sampler, recipe)


def _hierarchical(parts: Parts, sampler: Sampler, recipe: Recipe) -> Speculator:
    """The head's tree is verified by the intermediate; what comes of it is one sequence for the target."""
    inner = _tree_speculator(_present(parts.intermediate_head), _present(parts.intermediate), sampler, recipe)
    return Speculator(SequenceDrafter(inner, at_least=recipe.pipeline.min_draft), parts.target.verifier(sampler))


def _qspec(parts: Parts, sampler: Sampler, recipe: Recipe) -> Speculator:
    verifier, section = parts.target.verifier(sampler), recipe.pipeline
    act = low_act(section.act_bits)
    drafter = parts.target.self_drafter(verifier, act=act, draft_length=section.length_for("qspec"))
    return Speculator(drafter, verifier)


def _tree_speculator(head: HeadSeat, seat: Seat, sampler: Sampler, recipe: Recipe) -> Speculator:
    verifier = seat.verifier(sampler)
    return Speculator(head.drafter(verifier, tree_shape(recipe), bits=recipe.drafter.head_bits), verifier)


_Part = TypeVar("_Part")


def _present(part: _Part | None) -> _Part:
    """The part, which `missing` was asked about before."""
    assert part is not None
    return part


PIPELINES: dict[str, PipelineKind] = {
    "plain": PipelineKind(_plain, (), "the target alone, token by token"),
    "lookup": PipelineKind(_lookup, (), "drafts what followed the same words earlier in the context"),
    "sequence": PipelineKind(_sequence, ("intermediate",), "a small model drafts a sequence"),
    "eagle2": PipelineKind(_eagle2, ("target_head",), "an EAGLE head drafts a tree"),
    "hierarchical": PipelineKind(
        _hierarchical, ("intermediate", "intermediate_head"), "a small model turns an EAGLE tree into a sequence"
    ),
    "qspec": PipelineKind(
        _qspec, (), "the 4-bit target drafts for itself, its activations in 8 or 4 bits", needs_four_bits=True
    ),
}


def require_pipeline(name: str, roles: Container[str]) -> PipelineKind:
    """The pipeline of this name, which parts of these roles can build.

    Raises UsageError when there is none of this name, UnsupportedError with the reason when a part is missing.
    """
    if name not in PIPELINES:
        raise UsageError(f"there is no pipeline `{name}`", hint=f"choose one of {', '.join(PIPELINES)}, auto")
    if reason := PIPELINES[name].missing(roles):
        raise UnsupportedError(f"pipeline `{name}` cannot run: it {reason}")
    return PIPELINES[name]
