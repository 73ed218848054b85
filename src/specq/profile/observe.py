"""Acceptance and speed of the real pipelines on calibration prompts, for a bounded time."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from time import perf_counter

from specq.profile.acceptance import Acceptance, Rates, TreeRound, count_rates, tree_rates
from specq.profile.cost import Tree
from specq.profile.predict import LOOKUP_LENGTHS, Candidate, Measured
from specq.recipe import Recipe
from specq.spec.decision import with_settings
from specq.spec.pipelines import PIPELINES, Parts
from specq.spec.sampling import Sampler
from specq.spec.session import Reader, Stream
from specq.spec.speculator import Round, Speculator, StopRule
from specq.spec.tree import DraftTree
from specq.spec.warm_up import warm_up

FEWEST_ROUNDS = 8
FEWEST_PROMPTS = 2
FEWEST_SPREAD = 4
"""Answers from which on their spread says something."""

T_FACTORS = (12.7, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23)
"""Student's t for 95 %, by degrees of freedom from 1."""


class Mute:
    """A reader of ids that stand for no text."""

    def push(self, token_id: int) -> str:
        return ""

    def flush(self) -> str:
        return ""


@dataclass(frozen=True)
class Setting:
    """Models, sampler and stop ids that calibration runs with, and what makes text of ids, which takes time too."""

    parts: Parts
    recipe: Recipe
    sampler: Sampler
    stop_ids: frozenset[int]
    context: int
    max_new_tokens: int
    reader: Callable[[], Reader] = Mute

    def speculator(self, candidate: Candidate) -> Speculator:
        """The pipeline of a candidate, as decoding builds it."""
        recipe = with_settings(self.recipe, candidate.settings)
        return PIPELINES[candidate.pipeline].build(self.parts, self.sampler, recipe)


@dataclass
class Run:
    """One answer: where it began, its decode rounds, and tokens and seconds after the first token."""

    start: int
    rounds: list[Round]
    tokens: int
    seconds: float

    @property
    def first_ms(self) -> float | None:
        """What the first round took beyond the others, since drafters catch up with the prompt in it. None alone."""
        first, *others = [r.draft_ms + r.verify_ms for r in self.rounds] or [0.0]
        return first - statistics.fmean(others) if others else None

    @property
    def round_ms(self) -> float | None:
        """What a round took on average, without what only the first took. None without more rounds."""
        first_ms = self.first_ms
        return None if first_ms is None else (self.seconds * 1e3 - first_ms) / len(self.rounds)


def run_prompt(setting: Setting, speculator: Speculator, prompt: Sequence[int], *, seconds: float | None = None) -> Run:
    """The answer of a pipeline to a prompt, from empty caches, read as text like any answer.

    With `seconds` it ends after so many of them, but not before FEWEST_ROUNDS decode rounds, and always after a whole
    round: a cap cuts the last drafts short, which says nothing of what a drafter can do.
    """
    setting.parts.rollback(0)
    context, reader = list(prompt), setting.reader()
    rule = StopRule(
        start=len(context),
        stop_ids=setting.stop_ids,
        max_new_tokens=setting.max_new_tokens if seconds is None else None,
        context_limit=setting.context,
        read_text=reader.push,
    )
    stream = Stream(speculator, context, rule, reader, reused_tokens=0, pipeline="", seed=setting.sampler.seed)
    with closing(stream):
        began, count = perf_counter(), 0
        for event in stream:
            count += len(event.token_ids)
            if seconds is None:
                continue
            is_over = perf_counter() - began > seconds and len(speculator.rounds) > FEWEST_ROUNDS
            if (is_over or count >= setting.max_new_tokens) and count == sum(r.decided for r in speculator.rounds):
                break
    result = stream.result
    rounds = [r for r in speculator.rounds if not r.is_prefill]
    tokens = result.tokens_out - 1
    return Run(len(prompt), rounds, tokens, tokens / result.decode_tps if result.decode_tps else 0.0)


@dataclass
class Observation:
    """What was seen of the pipelines so far; usable at any time, so that an interrupted run keeps what it has.

    Trees are kept by the top-k and head bits they were drafted with, the target's own chains by their activation bits.
    """

    lookup: list[Run] = field(default_factory=list)
    sequence: list[Run] = field(default_factory=list)
    qspec: dict[int, list[Run]] = field(default_factory=dict)
    eagle2: dict[tuple[int, int], list[TreeRound]] = field(default_factory=dict)
    inner: dict[tuple[int, int], list[TreeRound]] = field(default_factory=dict)
    runs: dict[Candidate, list[Run]] = field(default_factory=dict)
    prompts: set[int] = field(default_factory=set)

    @property
    def measured(self) -> list[Measured]:
        """What ran, candidate by candidate, as it is measured again in the end; where there are more runs without the
        first, in which a GPU captures graphs."""
        return [measured(candidate, runs[1:] or runs, ()) for candidate, runs in self.runs.items()]

    def acceptance(
        self, trees: Sequence[Tree], by_hand: Mapping[str, Rates], recipe_tree: Tree, act_bits: int = 8
    ) -> Acceptance:
        """The rates of what was seen; what is given by hand comes before it (a tree's for the recipe's shape, those of
        the target's own chains for the recipe's `act_bits`)."""
        own = {bits: rates for bits, runs in self.qspec.items() if (rates := _chain_rates(_all_rounds(runs)))}
        drafting = [r for r in _all_rounds(self.lookup) if r.drafted]
        rounds = sum(len(run.rounds) for run in self.lookup)
        lookup, share = _chain_rates(drafting), len(drafting) / rounds if rounds else 0.0
        if rounds and lookup is None:  # it ran and found nothing
            lookup = Rates((0.0,) * max(LOOKUP_LENGTHS), rounds)
        if "lookup" in by_hand:
            lookup, share = by_hand["lookup"], 1.0
        return Acceptance(
            sequence=by_hand.get("sequence") or _chain_rates(_all_rounds(self.sequence)),
            lookup=lookup,
            lookup_share=share,
            eagle2=_trees(by_hand.get("eagle2"), recipe_tree, self.eagle2, trees),
            inner=_trees(by_hand.get("inner"), recipe_tree, self.inner, trees),
            qspec={act_bits: by_hand["qspec"]} if "qspec" in by_hand else own,
        )


def observe(
    setting: Setting,
    prompts: Sequence[Sequence[int]],
    tasks: Sequence[tuple[Candidate, str]],
    found: Observation,
    *,
    seconds: float,
    on_run: Callable[[str], None] = lambda what: None,
) -> None:
    """Fill `found`: every task on every prompt in turn until the time is over, each at least once for a few rounds.

    A task is a candidate to run and what its rounds tell: `plain`, `lookup`, `sequence`, `eagle2`, `inner`, `qspec`.
    """
    began = perf_counter()
    share = seconds / max(len(tasks), 1)
    for number, prompt in enumerate(prompts):
        for candidate, kind in tasks:
            if number > 0 and perf_counter() - began > seconds:
                return
            if number > 1 and kind == "plain":  # only its loop is wanted, and it runs again in the end
                continue
            on_run(f"acceptance: {candidate.pipeline} on prompt {number + 1} of {len(prompts)}")
            _run_task(setting, candidate, kind, prompt, found, seconds=share)
            found.prompts.add(number)


def _run_task(
    setting: Setting, candidate: Candidate, kind: str, prompt: Sequence[int], found: Observation, *, seconds: float
) -> None:
    speculator = setting.speculator(candidate)
    if kind in ("eagle2", "inner"):
        trees = found.eagle2 if kind == "eagle2" else found.inner
        watched = speculator if kind == "eagle2" else list(speculator.levels())[1]
        sizes = dict(candidate.settings)
        rounds = trees.setdefault((sizes["drafter.top_k"], sizes["drafter.head_bits"]), [])
        watched.observer = lambda tree, decided: rounds.append(_tree_round(tree, decided))
    run = run_prompt(setting, speculator, prompt, seconds=seconds)
    found.runs.setdefault(candidate, []).append(run)
    if kind in ("lookup", "sequence"):
        getattr(found, kind).append(run)
    elif kind == "qspec":
        found.qspec.setdefault(dict(candidate.settings)["pipeline.act_bits"], []).append(run)


def _tree_round(tree: DraftTree, decided: Sequence[int]) -> TreeRound:
    """Levels of a tree's nodes, and the nodes that the decided tokens (the last is the verifier's own) follow."""
    levels: list[int] = []
    children: dict[tuple[int, int], int] = {}
    for node, (parent, token) in enumerate(zip(tree.parents.tolist(), tree.tokens.tolist(), strict=True)):
        levels.append(1 if parent < 0 else levels[parent] + 1)
        children.setdefault((parent, token), node)
    path: list[int] = []
    for token in decided[:-1]:
        path.append(children[path[-1] if path else -1, token])
    return TreeRound(tuple(levels), tuple(path))


def _all_rounds(runs: Sequence[Run]) -> list[Round]:
    return [r for run in runs for r in run.rounds]


def _chain_rates(rounds: Sequence[Round]) -> Rates | None:
    return count_rates([r.decided - 1 for r in rounds], [r.drafted for r in rounds]) if rounds else None


def _trees(
    by_hand: Rates | None, recipe_tree: Tree, seen: Mapping[tuple[int, int], list[TreeRound]], trees: Sequence[Tree]
) -> dict[Tree, Rates]:
    if by_hand is not None:
        # A shallower tree of as many nodes has more of them on every level, so these chances are not too high for it.
        alike = [t for t in trees if (t.nodes, t.top_k) == (recipe_tree.nodes, recipe_tree.top_k)]
        return dict.fromkeys([*(t for t in alike if t.depth <= recipe_tree.depth), recipe_tree], by_hand)
    found: dict[Tree, Rates] = {}
    for drafted, rounds in seen.items():
        if rounds:
            found |= tree_rates(rounds, [tree for tree in trees if (tree.top_k, tree.head_bits) == drafted])
    return found


def remeasure(
    setting: Setting,
    prompts: Sequence[Sequence[int]],
    candidates: Sequence[Candidate],
    *,
    best: int,
    seconds: float,
    on_run: Callable[[str], None] = lambda what: None,
) -> list[Measured]:
    """The candidates (plain first) run one after the other on the same prompts, the order turned round each time.

    All run on FEWEST_PROMPTS prompts, then plain and the `best` that follow it on more, until the time is over.
    """
    if setting.parts.target.model.device.type == "cuda":
        for candidate in candidates:
            on_run(f"preparing {candidate.pipeline}")
            warm_up(setting.speculator(candidate))
    began = perf_counter()
    runs: dict[Candidate, list[Run]] = {candidate: [] for candidate in candidates}
    for number, prompt in enumerate(prompts):
        if number >= FEWEST_PROMPTS and perf_counter() - began > seconds:
            break
        again = candidates if number < FEWEST_PROMPTS or _is_quick(setting) else candidates[: best + 1]
        for candidate in again if number % 2 == 0 else reversed(again):
            on_run(f"measuring {candidate.pipeline} again on prompt {number + 1} of {len(prompts)}")
            runs[candidate].append(run_prompt(setting, setting.speculator(candidate), prompt))
    return [measured(candidate, runs[candidate], runs[candidates[0]]) for candidate in candidates]


def _is_quick(setting: Setting) -> bool:
    """Whether there is time for every pipeline on every prompt."""
    return setting.parts.target.model.device.type == "cuda"


def measured(candidate: Candidate, runs: Sequence[Run], plain: Sequence[Run]) -> Measured:
    """What these runs of a candidate say, and its gain over `plain` runs on the same prompts, as far as there are."""
    lengths = [run.tokens / len(run.rounds) for run in runs if run.rounds]
    logs = [
        math.log((run.tokens / run.seconds) / (base.tokens / base.seconds))
        for run, base in zip(runs, plain, strict=False)
        if run.seconds > 0 and base.seconds > 0 and run.tokens > 0 and base.tokens > 0
    ]
    gain = math.exp(statistics.fmean(logs)) if logs else 1.0
    error = math.inf
    if len(logs) > 1:
        error = _half_width(logs)
    tokens, rounds = sum(run.tokens for run in runs), sum(len(run.rounds) for run in runs)
    seconds = sum(run.seconds for run in runs)
    whole = [(run.round_ms, run.first_ms) for run in runs if run.round_ms is not None and run.first_ms is not None]
    return Measured(
        candidate,
        tokens_per_s=tokens / seconds if seconds else 0.0,
        accept_len=tokens / rounds if rounds else 1.0,
        gain=gain,
        uncertainty=gain * error,
        prompts=len(logs),
        context=statistics.fmean(run.start + run.tokens / 2 for run in runs) if runs else 0.0,
        # Of two the lower: what makes a round slower than it is is other work of the machine.
        round_ms=statistics.median_low(ms for ms, _ in whole) if whole else None,
        first_ms=statistics.median_low(ms for _, ms in whole) if whole else None,
        answer=1 + tokens / len(runs) if runs else math.inf,
        accept_error=_half_width(lengths) if len(lengths) >= FEWEST_SPREAD else None,
    )


def _half_width(values: Sequence[float]) -> float:
    """Half the 95 % interval of the mean of at least two values."""
    factor = T_FACTORS[min(len(values) - 1, len(T_FACTORS)) - 1]
    return factor * statistics.stdev(values) / math.sqrt(len(values))
