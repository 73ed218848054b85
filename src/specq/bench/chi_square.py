"""Chi-square tests of sampling on a small vocabulary: the sampler alone, and through drafts that are often wrong.

Controls sample wrongly on purpose, in the ways this has gone wrong elsewhere, and have to be rejected.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, cast

import torch
from torch import Tensor

from specq.bench.statistics import chi_square
from specq.models.cache import KVCache
from specq.models.causal_lm import CausalLM, Nodes, Output
from specq.spec.drafters import NoDrafter
from specq.spec.sampling import Sampler
from specq.spec.speculator import Speculator
from specq.spec.tree import MAX_NODES, DraftTree
from specq.spec.verifier import Verifier

CPU = torch.device("cpu")
VOCAB = 8
DRAWS, TREE_DRAWS = 200_000, 4_000
REJECTED = 1e-6
"""A right sampler falls below this p-value once in a million seeds; the controls do by many orders of magnitude."""

SETTINGS: dict[str, dict[str, Any]] = {
    "temperature 1": {"temperature": 1.0},
    "temperature 0.7": {"temperature": 0.7},
    "top-k 3": {"temperature": 1.0, "top_k": 3},
    "top-p 0.9": {"temperature": 1.0, "top_p": 0.9},
    "temperature 0.7, top-k 5, top-p 0.8": {"temperature": 0.7, "top_k": 5, "top_p": 0.8},
}


@dataclass(frozen=True)
class SamplerTest:
    """One test: a control has to be rejected, all others must not be."""

    name: str
    draws: int
    p_value: float
    is_control: bool = False

    @property
    def is_passed(self) -> bool:
        return (self.p_value < REJECTED) == self.is_control

    def record(self) -> dict[str, Any]:
        """The fields as JSON takes them, with the outcome."""
        return asdict(self) | {"is_passed": self.is_passed}


def sampler_tests(
    *, seed: int, device: torch.device = CPU, say: Callable[[str], None] = lambda text: None
) -> list[SamplerTest]:
    """Every test, drawn on `device`, on a GPU by the kernel too; the same seed gives the same draws."""
    say("testing the sampler")
    rows = _logits()
    tests = [
        SamplerTest(name, DRAWS, _p(_drawn(Sampler(seed=seed, **settings), rows[0], device), rows[0], settings))
        for name, settings in SETTINGS.items()
    ]
    if device.type == "cuda":
        for temperature in (1.0, 0.7):
            drawn = drawn_by_kernel(rows[0], device, seed=seed, temperature=temperature)
            p_value = _p(drawn, rows[0], {"temperature": temperature})
            tests.append(SamplerTest(f"the kernel, temperature {temperature:g}", DRAWS, p_value))
    one: dict[str, Any] = {"temperature": 1.0}
    rounded = rows[0].bfloat16().float()
    drawn = _drawn(Sampler(seed=seed, **one), rounded, device)
    tests.append(SamplerTest("logits of bfloat16", DRAWS, _p(drawn, rounded, one)))
    wrong = _drawn(Sampler(seed=seed, temperature=0.9), rows[0], device)
    tests.append(SamplerTest("control: draws at temperature 0.9", DRAWS, _p(wrong, rows[0], one), is_control=True))
    tests.append(
        SamplerTest("control: no residual", DRAWS, _p(_without_residual(rows[0], seed), rows[0], one), is_control=True)
    )
    for name in ("temperature 1", "temperature 0.7, top-k 5, top-p 0.8"):
        say(f"testing drafts at {name}")
        p_value = _through_drafts(rows, seed, SETTINGS[name])
        tests.append(SamplerTest(f"trees of two levels, {name}", TREE_DRAWS, p_value))
    return tests


def _logits() -> Tensor:
    """fp32 [VOCAB, VOCAB]: what follows each token; always the same, and so that filters leave a choice."""
    return 1.2 * torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(1))


def _drawn(sampler: Sampler, row: Tensor, device: torch.device) -> list[int]:
    """How often each id was drawn, at as many positions as there are draws."""
    positions = torch.arange(DRAWS, device=device)
    return _counts(sampler(row.to(device).expand(DRAWS, VOCAB), positions))


def drawn_by_kernel(row: Tensor, device: torch.device, *, seed: int, temperature: float) -> list[int]:
    """The same by the kernel that draws inside a round on a GPU; elsewhere its definition runs."""
    from specq_kernels.sampling import Draw, gumbel_argmax  # imports Triton, which not every platform has

    many = row.to(device).expand(DRAWS, VOCAB).contiguous()
    return _counts(gumbel_argmax(many, torch.arange(DRAWS, device=device), Draw.of(seed, temperature, device)))


def _counts(tokens: Tensor) -> list[int]:
    return torch.bincount(tokens, minlength=VOCAB).tolist()


def _p(counts: Sequence[int], row: Tensor, settings: dict[str, Any]) -> float:
    return chi_square(counts, exact_distribution(row, **settings))


def exact_distribution(row: Tensor, *, temperature: float, top_k: int = 0, top_p: float = 1.0) -> list[float]:
    """The probabilities of logits [vocab] under these settings, worked out by definition, one id after the other."""
    weights = (row.double() / temperature).exp().tolist()
    ranked = sorted(range(len(weights)), key=lambda i: -weights[i])[: top_k or len(weights)]
    total = sum(weights[i] for i in ranked)
    kept: list[int] = []
    before = 0.0
    for i in ranked:
        if before >= top_p and kept:
            break
        kept.append(i)
        before += weights[i] / total
    mass = sum(weights[i] for i in kept)
    return [weight / mass if i in kept else 0.0 for i, weight in enumerate(weights)]


def _without_residual(row: Tensor, seed: int) -> list[int]:
    """Draws of the best id accepted by its probability and else replaced by a draw from the whole distribution."""
    draws = torch.Generator().manual_seed((seed + 1) % 2**63)
    probabilities = row.softmax(0)
    best = int(probabilities.argmax())
    again = torch.multinomial(probabilities, DRAWS, replacement=True, generator=draws)
    accepted = torch.rand(DRAWS, generator=draws) < probabilities[best]
    return _counts(torch.where(accepted, torch.tensor(best), again))


def _through_drafts(rows: Tensor, seed: int, settings: dict[str, Any]) -> float:
    """The p-value of the first two tokens after token 0, decoded through drafted trees, TREE_DRAWS times."""
    first = exact_distribution(rows[0], **settings)
    joint = [p * q for token, p in enumerate(first) for q in exact_distribution(rows[token], **settings)]
    counts = [0] * VOCAB**2
    model = _TableModel(rows)
    for draw in range(TREE_DRAWS):
        sampler = Sampler(seed=seed + draw, **settings)
        speculator = Speculator(_TwoLevels(rows), Verifier(cast(CausalLM, model), cast(KVCache, _Slots()), sampler))
        context = [0]
        while len(context) < 3:
            context += speculator.step(context, 3 - len(context))
            speculator.rollback(len(context) - 1)
        counts[context[1] * VOCAB + context[2]] += 1
    return chi_square(counts, joint)


class _TwoLevels(NoDrafter):
    """Two children of the root and two of each: as an EAGLE tree, likeliest first, whatever the noise says."""

    def __init__(self, rows: Tensor) -> None:
        self._best = rows.topk(2, dim=1).indices.tolist()

    def propose(self, context: Sequence[int], *, max_nodes: int, max_depth: int) -> DraftTree:
        tokens, parents = list(self._best[context[-1]]), [-1, -1]
        for parent, token in enumerate(tokens[:2] if max_depth > 1 else []):
            tokens += self._best[token]
            parents += [parent, parent]
        return DraftTree.from_lists(*((tokens, parents) if max_depth > 0 else ([], [])))


class _TableModel:
    """A model whose logits depend on the last token only."""

    device = torch.device("cpu")

    def __init__(self, rows: Tensor) -> None:
        self._rows = rows

    def forward(self, nodes: Nodes, cache: _Slots, *, rows: slice | None = None, act: str = "a16") -> Output:
        tokens = nodes.tokens.long()
        positions = cache.length + nodes.depths().long()
        return Output(self._rows[tokens[rows or slice(None)]], torch.empty(len(tokens), 0), positions)


@dataclass
class _Slots:
    """A cache that only counts."""

    length: int = 0
    max_len: int = 3 + MAX_NODES
    kept: list[int] = field(default_factory=list)

    def keep(self, path: Sequence[int]) -> None:
        self.length += len(path)

    def truncate(self, n: int) -> None:
        self.length = n
