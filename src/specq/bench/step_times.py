"""Times steps, drafting and rounds of random 4-bit models on a GPU: `python -m specq.bench.step_times [8b] [70b]`.

A step is one verification on the device, from grafting to compaction, its head over every node: milliseconds between
two events around replays in a row, median of 7 runs of up to 20; then the whole round as the decode loop runs it,
Python, upload and read included. Random weights, so timing only. The floor is the bytes of all weights, and of K and V
of the context, over the copy bandwidth measured first.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from time import perf_counter

import torch

from specq.bench.step_drafts import FORMS, draft_bytes, module_bytes, random_drafter
from specq.bench.step_shares import TRACED, kernel_lines, share_out, traced, traced_shares
from specq.models.causal_lm import CausalLM
from specq.models.eagle import EagleHead
from specq.models.random_weights import GROUP, SHAPES, llama_config, random_model
from specq.spec.device_draft import EagleDrafting
from specq.spec.device_round import DeviceRound, DeviceVerifier
from specq.spec.drafters import NoDrafter
from specq.spec.eagle_tree import TreeShape
from specq.spec.pipelines import HeadSeat, Seat
from specq.spec.sampling import Sampler
from specq.spec.speculator import Speculator
from specq.spec.tree import MAX_NODES, DraftTree, chain
from specq_kernels.launch import device_name
from specq_kernels.timing import copy_bandwidth, require_cuda

NODES = (1, 4, 8, 10, 16, 30, 32, 60)
TREES = (30, 60)
CONTEXTS = (1024, 8192)
STEPS, RUN_MS, RUNS = 20, 60.0, 7
"""Calls in a row at most, and milliseconds after which they are enough, but never below three; medians of so many."""
DRAFT_DEPTH, DRAFT_TOP_K = 3, 10
STEP_TARGETS: Mapping[tuple[str, int, int, str], tuple[float, float]] = {
    ("70b", 1024, 1, "chain"): (12.5, 11.0),
    ("8b", 1024, 1, "chain"): (1.95, 1.6),
    ("70b", 1024, 60, "tree"): (22.5, 18.0),
    ("8b", 1024, 30, "tree"): (2.5, 2.0),
}
"""(must, aim) in milliseconds on an H200: what a step has to take at most, and what it should."""

SAMPLERS: Mapping[str, Sampler] = {
    "greedy": Sampler(),
    "temperature": Sampler(temperature=0.6),
    "top-p": Sampler(temperature=0.05, top_p=0.9),
    "top-k, penalty": Sampler(temperature=0.7, top_k=20, top_p=0.8, repetition_penalty=1.05),
}
"""Random models are flat, hence the low temperature beside top-p."""

DRAFT_TARGETS: Mapping[str, tuple[float, float]] = {"8b": (0.9, 0.45)}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m specq.bench.step_times", description=__doc__)
    parser.add_argument("models", nargs="*", default=list(SHAPES))
    parser.add_argument("--nodes", type=int, nargs="+", default=list(NODES))
    parser.add_argument("--contexts", type=int, nargs="+", default=list(CONTEXTS))
    parser.add_argument("--kernels", action="store_true", help="steps alone, each with the time of its kernels")
    options = parser.parse_args(arguments)
    require_cuda("the benchmark")
    bandwidth = copy_bandwidth()
    print(f"{device_name(0)}, torch {torch.__version__}, copy {bandwidth / 1e12:.2f} TB/s, bf16, groups of {GROUP}")
    print("random weights, timing only; ms; shares of products, attention, small kernels, gaps in a trace of its own")
    for name in options.models:
        model = random_model(llama_config(**SHAPES[name]), device="cuda", dtype="bfloat16")
        if model.device_step is None:
            sys.exit("the step on kernels is off: unset SPECQ_KERNELS")
        print(f"\n{'model':<6}{'context':>8}{'nodes':>6} {'form':<6}{'step':>8}{'round':>8}{'floor':>8}{'share':>6}"
              f"  {'prod attn smal gaps':<24}{'must':>7}{'aim':>6}")  # fmt: skip
        for context in options.contexts:
            bench = StepBench(model, context)
            for nodes, form in rows(options.nodes):
                for line in step_lines(bench, name, nodes, form, bandwidth=bandwidth, kernels=options.kernels):
                    print(line, flush=True)
            del bench
        if not options.kernels:
            print(sampling_line(model, name, min(options.contexts)), flush=True)
            for line in draft_lines(model, name, min(options.contexts), bandwidth=bandwidth):
                print(line, flush=True)
        del model
        torch.cuda.empty_cache()


def rows(nodes: Sequence[int]) -> list[tuple[int, str]]:
    """Every chain asked for, and of the larger ones a tree as EAGLE drafts them."""
    return [(count, "chain") for count in nodes] + [(count, "tree") for count in nodes if count in TREES]


def step_lines(
    bench: StepBench, name: str, nodes: int, form: str, *, bandwidth: float, kernels: bool = False
) -> list[str]:
    """One row of the table of steps, with `kernels` a line for each of them behind it."""
    floor = (module_bytes(bench.model) + bench.kv_bytes) / bandwidth * 1e3
    bench.load(nodes, form)
    step_ms, round_ms, trace = bench.step_ms(), bench.round_ms(nodes, form), traced(bench.run, runs=TRACED)
    shares = share_out(trace, runs=TRACED)
    goal = STEP_TARGETS.get((name, bench.context, nodes, form))
    goals = f"{goal[0]:>7.2f}{goal[1]:>6.2f}" if goal else ""
    row = (
        f"{name:<6}{bench.context:>8}{nodes:>6} {form:<6}{step_ms:>8.3f}{round_ms:>8.3f}{floor:>8.3f}"
        f"{floor / step_ms:>6.0%}  {shares!s:<24}{goals}"
    )
    return [row, *(kernel_lines(trace, runs=TRACED) if kernels else [])]


def sampling_line(model: CausalLM, name: str, context: int) -> str:
    """What a step of 8 nodes takes by the way its tokens are sampled."""
    times = []
    for what, sampler in SAMPLERS.items():
        bench = StepBench(model, context, sampler)
        bench.load(8, "chain")
        times.append(f"{what} {bench.step_ms():.3f}")
    return f"{name:<6}{context:>8}     8 chain  by sampling: {', '.join(times)}"


def draft_lines(model: CausalLM, name: str, context: int, *, bandwidth: float) -> list[str]:
    """The drafting of a round, and the round it is part of, for every form of head."""
    lines = [
        f"\n{'model':<6}{'EAGLE drafting, depth 3, top 10':<46}{'draft':>8}{'floor':>8}{'share':>6}"
        f"  {'prod attn smal gaps':<24}{'must':>7}{'aim':>6}{'round of 30':>13}{'of 60':>8}"
    ]
    goal = DRAFT_TARGETS.get(name)
    for form in FORMS:
        bench = DraftBench(model, context, random_drafter(model, form))
        floor = draft_bytes(bench.head, DRAFT_DEPTH) / bandwidth * 1e3
        draft_ms, shares = events_ms(bench.run), traced_shares(bench.run)
        rounds = [bench.round_ms(nodes) for nodes in TREES]
        goals = f"{goal[0]:>7.2f}{goal[1]:>6.2f}" if goal else " " * 13
        lines.append(
            f"{name:<6}{form!s:<46}{draft_ms:>8.3f}{floor:>8.3f}{floor / draft_ms:>6.0%}  {shares!s:<24}{goals}"
            f"{rounds[0]:>13.3f}{rounds[1]:>8.3f}"
        )
        del bench
    return lines


class StepBench:
    """Verifications of one model behind a context of zeros; nothing stays committed."""

    def __init__(self, model: CausalLM, context: int, sampler: Sampler | None = None) -> None:
        self.model, self.context = model, context
        cache = model.new_cache(context + 2 * MAX_NODES)
        cache.commit(context)
        self.kv_bytes = 2 * cache.k[:, :, :context].numel() * cache.k.itemsize
        self.seat = Seat(model, cache)
        verifier = self.seat.verifier(sampler or Sampler())
        assert isinstance(verifier, DeviceVerifier)
        self.verifier = verifier
        self._round: DeviceRound = verifier.ready([0] * (context + 1))
        self._count = 1

    def load(self, nodes: int, form: str) -> None:
        """Make a step of so many nodes, root included, what `run` does."""
        self._count = self._round.load(self.context, [1], draft(nodes, form))

    @torch.inference_mode()
    def run(self) -> None:
        self._round.run(self._count)

    def step_ms(self) -> float:
        return events_ms(self.run)

    def round_ms(self, nodes: int, form: str) -> float:
        """As the decode loop runs it, from the draft on."""
        return loop_ms(self.speculator(nodes, form), [1] * (self.context + 1))

    def speculator(self, nodes: int, form: str) -> Speculator:
        """Verifies the same draft again and again."""
        return Speculator(GivenDraft(draft(nodes, form)), self.verifier)


class DraftBench:
    """Drafting of a head behind a context of zeros."""

    def __init__(self, model: CausalLM, context: int, head: EagleHead) -> None:
        self.head, self.context, self._model = head, context, model
        cache = model.new_cache(context + 2 * MAX_NODES, features="final")
        cache.commit(context)
        self.seat, self.cache = Seat(model, cache), head.new_cache(context + 4 * MAX_NODES)
        self.cache.commit(context - 3)
        verifier = self.seat.verifier(Sampler())
        assert isinstance(verifier, DeviceVerifier)
        self.verifier = verifier
        self._round = verifier.ready([0] * (context + 1))
        self._drafting = EagleDrafting(head, self.cache, cache, TreeShape(60, DRAFT_DEPTH, DRAFT_TOP_K))

    @torch.inference_mode()
    def run(self) -> None:
        """One drafting after a round that accepted two nodes."""
        self._drafting(self._round, self.context - 3, [1, 1, 1], [], DRAFT_DEPTH)

    def round_ms(self, nodes: int) -> float:
        """Drafting and verification of a tree, as the decode loop runs them."""
        seat = HeadSeat(self.head, self.cache)
        drafter = seat.drafter(self.verifier, TreeShape(nodes, DRAFT_DEPTH, DRAFT_TOP_K))
        return loop_ms(Speculator(drafter, self.verifier), [1] * (self.context + 1))


class GivenDraft(NoDrafter):
    """Proposes the same tree again and again."""

    def __init__(self, tree: DraftTree) -> None:
        self._tree = tree

    def propose(self, context: Sequence[int], *, max_nodes: int, max_depth: int) -> DraftTree:
        return self._tree


def draft(nodes: int, form: str) -> DraftTree:
    """A draft of nodes - 1: a chain, or a tree of ten nodes a level, which hang off three of the level above."""
    if form == "chain":
        return chain([2] * (nodes - 1))
    parents = [
        -1 if i < DRAFT_TOP_K else i // DRAFT_TOP_K * DRAFT_TOP_K - DRAFT_TOP_K + i % 3 for i in range(nodes - 1)
    ]
    return DraftTree.from_lists([2] * (nodes - 1), parents)


def events_ms(run: Callable[[], None]) -> float:
    """Median milliseconds of one of several calls in a row, on the device."""
    run()  # compiles and captures
    steps = max(3, min(STEPS, int(RUN_MS / _elapsed_ms(run, 1))))
    return statistics.median(_elapsed_ms(run, steps) / steps for _ in range(RUNS))


def _elapsed_ms(run: Callable[[], None], steps: int) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(steps):
        run()
    end.record()
    end.synchronize()
    elapsed: float = start.elapsed_time(end)
    return elapsed


def loop_ms(speculator: Speculator, context: list[int]) -> float:
    """Median milliseconds of a round, of those after the first few; what it decides is forgotten."""
    times = []
    for _ in range(STEPS):
        began = perf_counter()
        speculator.step(context, MAX_NODES)
        speculator.rollback(len(context) - 1)
        times.append((perf_counter() - began) * 1e3)
    return statistics.median(times[3:])


if __name__ == "__main__":
    main()
