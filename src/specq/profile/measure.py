"""Steps, draftings and prefill of loaded models, timed as decoding runs them: through its verifiers and drafters."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import NamedTuple

import torch
from torch import nn

from specq.models.storages import storages
from specq.profile.cost import SEQUENCE, TREE, CostModel, StepCurve, Timing, Tree
from specq.profile.predict import SELF
from specq.profile.timing import Samples, measure, warm_s
from specq.quant.rounding import low_act
from specq.spec.drafters import PromptLookup
from specq.spec.eagle_tree import TreeShape
from specq.spec.pipelines import HeadSeat, Parts, Seat
from specq.spec.sampling import Sampler
from specq.spec.tree import MAX_NODES, DraftTree, chain
from specq.spec.verifier import PREFILL_CHUNK, Verifier

BUCKETS = (1, 2, 4, 8, 10, 16, 32, 64)
BRANCHES = 3
"""Children of a node in the trees that are timed; what a tree costs depends on its number of nodes."""

SELF_LENGTHS = (1, 8)
"""Tokens that the target drafts for itself; what lies between is on a line."""

CAUGHT_UP = 3
"""Rows a head runs again at the start of a drafting: about as many as a round accepts."""


@dataclass(frozen=True)
class Grid:
    """What is timed: node counts of sequences and of trees, contexts, and the drafts of heads."""

    sequences: tuple[int, ...]
    trees: tuple[int, ...]
    contexts: tuple[int, ...]
    depths: tuple[int, ...]
    top_ks: tuple[int, ...]
    prefill: int
    head_bits: tuple[int, ...] = (16,)
    act_bits: tuple[int, ...] = ()
    """Of the activations that the target drafts for itself with; none where it cannot."""
    coarse_top_ks: tuple[int, ...] = ()
    """Widths that are drafted with every precision of the draft head; the others with 16 bits only."""
    most_run: int | None = None
    """Nodes that a head runs at most in one drafting; None where any number is worth a try."""

    @classmethod
    def of(
        cls,
        device: torch.device,
        *,
        context: int,
        tree: Tree | None,
        head_bits: tuple[int, ...] = (16,),
        act_bits: tuple[int, ...] = (),
        is_padded: bool = False,
        is_brief: bool = False,
    ) -> Grid:
        """The grid for this device, up to the recipe's context and with the tree in it that the recipe asks for.

        On a GPU our kernels pad to buckets, and torch's products are measured there too; a CPU runs every count as it
        is and has time for two contexts and for small trees, since every row costs there. `is_padded` leaves out what
        would run the graph of another count. `is_brief` is for little time on a CPU: one context, few sizes, and of
        draft heads only the one in 16 bits and the tree's.
        """
        sequences: tuple[int, ...] = (1, 2, 3, 4, 6, 8, 16)
        trees: tuple[int, ...] = (2, 3, 4, 6, 8, 12)
        contexts: tuple[int, ...] = (64, 512)
        depths: tuple[int, ...] = (1, 2, 3, 5)
        top_ks, prefill = {1, 4}, 128
        if device.type == "cuda":
            more = () if is_padded else (3, 5, 6, 12, 48)
            sequences, trees = tuple(sorted({*BUCKETS, *more})), (4, 8, 16, 24, 32, 48, 64)
            trees = tuple(nodes for nodes in trees if nodes in BUCKETS) if is_padded else trees
            contexts, depths = (128, 1024, 4096, context), (1, 2, 3, 4, 5, 6, 8)
            top_ks, prefill = {1, 4, 10}, PREFILL_CHUNK
        elif is_brief:
            sequences, trees, contexts, depths = (1, 2, 3, 4, 6), (2, 3, 4, 8), (64,), (1, 2, 3)
            top_ks, prefill = {4}, 64
            head_bits = tuple(bits for bits in head_bits if bits in (16, tree.head_bits if tree else 16))
        fitting = sorted({min(c, context - 1) for c in contexts})
        if tree is not None:
            top_ks.add(tree.top_k)
            # One row more is what a round that follows a wholly accepted draft verifies.
            nodes = {tree.nodes, min(tree.nodes + 1, MAX_NODES)} if device.type == "cpu" else {tree.nodes}
            depths, trees = tuple(sorted({*depths, tree.depth})), tuple(sorted({*trees, *nodes}))
        prefill = min(prefill, fitting[-1])
        most_run = None
        if device.type == "cuda":  # more leave the kernels, for drafts that are tens of times slower
            most_run = max(MAX_NODES, 0 if tree is None else (tree.depth - 1) * tree.top_k)
        return cls(
            sequences,
            trees,
            tuple(fitting),
            depths,
            tuple(sorted(top_ks)),
            prefill,
            head_bits=head_bits,
            act_bits=act_bits,
            coarse_top_ks=tuple({max(top_ks), tree.top_k if tree else max(top_ks)}),
            most_run=most_run,
        )

    def can_draft(self, depth: int, top_k: int, head_bits: int) -> bool:
        """Whether draftings of this shape are timed."""
        is_coarse = head_bits != 16
        if is_coarse and top_k not in self.coarse_top_ks:
            return False
        return self.most_run is None or (depth - 1) * top_k <= self.most_run

    def at(self, context: int) -> Grid:
        """The same at one context."""
        return replace(self, contexts=(context,), prefill=min(self.prefill, context))


class StepKey(NamedTuple):
    """A step of a model: role, form, context, nodes."""

    role: str
    form: str
    context: int
    nodes: int


class DraftKey(NamedTuple):
    """A drafting: a head's role, `lookup` or SELF, context, depth, top-k, bits of the draft head or of activations."""

    role: str
    context: int
    depth: int = 0
    top_k: int = 0
    head_bits: int = 16


class PrefillKey(NamedTuple):
    """The first chunk of a prompt run by a model."""

    role: str
    tokens: int


AnyKey = StepKey | DraftKey | PrefillKey


def time_models(
    parts: Parts,
    sampler: Sampler,
    text: Sequence[int],
    grid: Grid,
    samples: Samples[AnyKey],
    *,
    lookup: PromptLookup,
    seconds: float,
    rounds: int,
    on_round: Callable[[int], None] = lambda done: None,
    on_start: Callable[[int, float], None] | None = None,
) -> None:
    """Fill `samples` with every step, drafting and prefill of these models; the caches are empty afterwards.

    `text` is token ids that stand for contexts; it is repeated as needed. `on_start` gets the number of jobs and the
    seconds of one plain step of the target, which is timed for it alone.
    """
    text = [text[i % len(text)] for i in range(grid.contexts[-1] + MAX_NODES)]
    jobs = dict(_jobs(parts, sampler, text, grid, lookup))
    device = parts.target.model.device
    try:
        with torch.inference_mode():
            if on_start is not None:
                on_start(len(jobs), warm_s(jobs[StepKey("target", SEQUENCE, grid.contexts[0], 1)], device))
            measure(jobs, samples, device=device, seconds=seconds, rounds=rounds, on_round=on_round)
    finally:
        parts.rollback(0)


def cost_model(samples: Samples[AnyKey]) -> CostModel:
    """The cost model of what was timed."""
    steps: dict[str, dict[str, dict[int, dict[int, Timing]]]] = {}
    drafting: dict[str, dict[tuple[int, int, int], dict[int, Timing]]] = {}
    prefill: dict[str, float] = {}
    for key, timing in samples.timings().items():
        if isinstance(key, StepKey):
            forms = steps.setdefault(key.role, {})
            forms.setdefault(key.form, {}).setdefault(key.context, {})[key.nodes] = timing
        elif isinstance(key, DraftKey):
            drafting.setdefault(key.role, {}).setdefault(key[2:], {})[key.context] = timing
        else:
            prefill[key.role] = timing.median_ms / key.tokens
    lookup = next(iter(drafting.pop("lookup", {}).values()), {})
    curves = {role: StepCurve(forms, prefill.get(role)) for role, forms in steps.items()}
    return CostModel(curves, drafting, lookup, drift=samples.drift())


def tree_of(tokens: Sequence[int], *, device: torch.device) -> DraftTree:
    """A tree of these tokens in which every node has BRANCHES children until they run out."""
    parents = [node // BRANCHES - 1 if node >= BRANCHES else -1 for node in range(len(tokens))]
    return DraftTree.from_lists(tokens, parents, device=device)


def drafted_trees(grid: Grid) -> list[Tree]:
    """The trees whose verification and drafting the grid times; with one child a node only the whole chain."""
    chains = [Tree(depth + 1, depth, 1) for depth in grid.depths if 1 in grid.top_ks]
    trees = [
        Tree(nodes, depth, top_k)
        for top_k in grid.top_ks
        for depth in grid.depths
        for nodes in grid.trees
        if top_k > 1 and depth < nodes <= 1 + top_k + (depth - 1) * top_k**2
    ]
    every = [tree._replace(head_bits=bits) for bits in grid.head_bits for tree in chains + trees]
    return [tree for tree in every if grid.can_draft(*tree[1:])]


def _jobs(
    parts: Parts, sampler: Sampler, text: Sequence[int], grid: Grid, lookup: PromptLookup
) -> Iterator[tuple[AnyKey, Callable[[], object]]]:
    for role, seat, head in (
        ("target", parts.target, parts.target_head),
        ("intermediate", parts.intermediate, parts.intermediate_head),
    ):
        if seat is None:
            continue
        verifier = seat.verifier(sampler)
        contexts = [c for c in grid.contexts if c + MAX_NODES <= seat.cache.max_len]
        for context in contexts:
            for nodes in grid.sequences:
                yield StepKey(role, SEQUENCE, context, nodes), step_job(verifier, text, context, nodes)
            for nodes in grid.trees:
                yield StepKey(role, TREE, context, nodes), step_job(verifier, text, context, nodes, form=TREE)
            if head is not None:
                # What fewer bits save does not depend on the context: one is enough.
                bits = grid.head_bits if context == contexts[0] else (16,)
                for shape in product(grid.depths, grid.top_ks, bits):
                    if not grid.can_draft(*shape):
                        continue
                    job = _drafting(head, verifier, text, context, Tree(MAX_NODES, *shape))
                    yield DraftKey(f"{role}_head", context, *shape), job
            for length, act in product(SELF_LENGTHS, grid.act_bits if role == "target" else ()):
                job = _self_drafting(seat, verifier, text, context, length, act)
                yield DraftKey(SELF, context, length, 1, act), job
        yield PrefillKey(role, grid.prefill), _prefill(seat, verifier, text, grid.prefill)
    for context in grid.contexts:
        yield DraftKey("lookup", context), _lookup(lookup, text[: context + 1])


def step_job(
    verifier: Verifier, text: Sequence[int], context: int, nodes: int, *, form: str = SEQUENCE
) -> Callable[[], object]:
    """One verification of `nodes` rows, its pending token included; what K and V hold does not change what it costs."""
    device = verifier.model.device
    drafted = text[context + 1 : context + nodes]
    tree = chain(drafted, device=device) if form == SEQUENCE or nodes < 3 else tree_of(drafted, device=device)
    tokens = list(text[: context + 1])

    def job() -> object:
        _fill(verifier, context)
        return verifier.verify(tokens, tree)

    return job


def _drafting(
    seat: HeadSeat, verifier: Verifier, text: Sequence[int], context: int, tree: Tree
) -> Callable[[], object]:
    tokens = list(text[: context + 1])
    shape = TreeShape(tree.nodes, tree.depth, tree.top_k)
    drafter = seat.drafter(verifier, shape, bits=tree.head_bits)

    def job() -> object:
        _fill(verifier, context)
        seat.cache.truncate(0)
        seat.cache.commit(max(context - CAUGHT_UP, 0))
        return drafter.propose(tokens, max_nodes=MAX_NODES - 1, max_depth=tree.depth)

    return job


def _self_drafting(
    seat: Seat, verifier: Verifier, text: Sequence[int], context: int, length: int, bits: int
) -> Callable[[], object]:
    tokens = list(text[: context + 1])
    drafter = seat.self_drafter(verifier, act=low_act(bits), draft_length=length)

    def job() -> object:
        _fill(verifier, context)
        return drafter.propose(tokens, max_nodes=MAX_NODES - 1, max_depth=length)

    return job


def _prefill(seat: Seat, verifier: Verifier, text: Sequence[int], count: int) -> Callable[[], object]:
    tokens = list(text[:count])

    def job() -> object:
        seat.cache.truncate(0)
        return verifier.prefill(tokens)

    return job


def _lookup(lookup: PromptLookup, tokens: Sequence[int]) -> Callable[[], object]:
    return lambda: lookup.propose(tokens, max_nodes=MAX_NODES - 1, max_depth=MAX_NODES - 1)


def _fill(verifier: Verifier, length: int) -> None:
    """Let the cache hold `length` tokens, of whatever K and V lie there."""
    cache = verifier.cache
    cache.truncate(min(cache.length, length))
    cache.commit(length - cache.length)


def memory_of(parts: Parts) -> Mapping[str, int]:
    """Bytes of every loaded model with its cache, by role; of draft heads in other bits, by `ROLE_BITS`.

    What two models share counts with the first of them.
    """
    found: dict[str, int] = {}
    counted: set[int] = set()
    for role in ("target", "intermediate", "target_head", "intermediate_head"):
        seat = getattr(parts, role)
        if seat is None:
            continue
        cache = seat.cache
        found[role] = _new_bytes(seat.head if isinstance(seat, HeadSeat) else seat.model, counted)
        found[role] += cache.k.nbytes + cache.v.nbytes + (0 if cache.features is None else cache.features.nbytes)
        if isinstance(seat, HeadSeat):
            found |= {f"{role}_{bits}": _new_bytes(other, counted) for bits, other in seat.others.items()}
    return found


def _new_bytes(module: nn.Module, counted: set[int]) -> int:
    """Bytes of the module's tensors that were not `counted` yet; they are then."""
    tensors = storages(module)
    size = sum(count for address, count in tensors.items() if address not in counted)
    counted.update(tensors)
    return size
