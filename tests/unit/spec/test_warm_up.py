"""Warming up leaves nothing behind, and a round's time is split where the draft ends."""

from __future__ import annotations

import pytest
import torch
from tiny_models import make_head, make_model

from specq.recipe import Recipe
from specq.spec import stopwatch, warm_up
from specq.spec.pipelines import PIPELINES, HeadSeat, Parts, Seat
from specq.spec.sampling import Sampler
from specq.spec.self_chain import SelfChain
from specq.spec.speculator import Speculator, StopRule, generate
from specq.spec.stopwatch import Stopwatch
from specq.spec.tree import MAX_NODES, DraftTree

CONTEXT = 64
RECIPE = Recipe.model_validate({"target": "tiny", "drafter": {"nodes": 8, "depth": 3, "top_k": 2}})


@pytest.fixture(scope="module")
def parts() -> Parts:
    torch.set_num_threads(1)
    target, small = make_model(), make_model(noise=0.05)
    head, slots = make_head(small), CONTEXT + MAX_NODES
    return Parts(
        target=Seat(target, target.new_cache(slots)),
        intermediate=Seat(small, small.new_cache(slots, features=head.spec.features)),
        intermediate_head=HeadSeat(head, head.new_cache(slots + 8)),
    )


def decode(speculator: Speculator) -> list[int]:
    return list(generate(speculator, [1, 2, 3], StopRule(start=3, stop_ids=frozenset(), context_limit=30)))


@pytest.mark.parametrize("name", ["plain", "lookup", "sequence", "hierarchical"])
def test_every_size_runs_and_the_text_stays(parts: Parts, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    build = PIPELINES[name].build
    sampler = Sampler(temperature=0.8, seed=5)
    parts.rollback(0)
    before = decode(build(parts, sampler, RECIPE))
    ran: list[int] = []
    forward = type(parts.target.model).forward

    def noting(model, nodes, *args, **options):  # type: ignore[no-untyped-def]
        if model is parts.target.model:
            ran.append(len(nodes))
        return forward(model, nodes, *args, **options)

    monkeypatch.setattr(type(parts.target.model), "forward", noting)
    parts.rollback(0)
    speculator = build(parts, sampler, RECIPE)
    warm_up.warm_up(speculator)
    assert ran == [warm_up.CONTEXT, *warm_up.NODES]
    assert all(seat.cache.length == 0 for _, seat in parts.items())
    assert speculator.rounds == []
    assert decode(speculator) == before


@pytest.mark.parametrize(("longest", "lengths"), [(3, [1, 2, 3]), (56, [1, 2, 3, 4, 5, 6, 7, 8, 56])])
def test_of_long_drafts_of_its_own_a_target_runs_the_short_and_the_longest(
    longest: int, lengths: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    target = make_model(bits=4)
    recipe = Recipe.model_validate({"target": "tiny", "pipeline": {"draft_length": longest}})
    speculator = PIPELINES["qspec"].build(Parts(Seat(target, target.new_cache(CONTEXT + MAX_NODES))), Sampler(), recipe)
    ran: list[int] = []
    propose = SelfChain.propose

    def noting(self: SelfChain, context: list[int], **sizes: int) -> DraftTree:
        ran.append(len(draft := propose(self, context, **sizes)))
        return draft

    monkeypatch.setattr(SelfChain, "propose", noting)
    warm_up.warm_up(speculator)
    assert ran == lengths


class Event:
    """A GPU event on a clock of the test."""

    now = 0.0

    def __init__(self, enable_timing: bool) -> None:
        self.at: float | None = None

    def record(self, stream: object) -> None:
        self.at = Event.now

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, end: Event) -> float:
        return 1e3 * (end.at - self.at)


def test_a_draft_that_the_gpu_makes_later_counts_as_drafting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: device)
    host = iter([0.0, 0.001, 0.010])  # the host asks for the draft in 1 ms; 10 ms later it knows what was decided
    monkeypatch.setattr(stopwatch, "perf_counter", lambda: next(host))
    watch = Stopwatch()
    watch.start()
    Event.now = 0.006  # the GPU ends the draft at 6 ms
    watch.drafted(torch.device("cuda:0"))
    Event.now = 0.010
    assert watch.stop() == pytest.approx((6.0, 4.0))


def test_a_draft_on_the_host_is_split_by_its_clock_and_a_prefill_is_all_verification(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    host = iter([0.0, 0.003, 0.010, 0.020, 0.025])
    monkeypatch.setattr(stopwatch, "perf_counter", lambda: next(host))
    watch = Stopwatch()
    watch.start()
    watch.drafted(torch.device("cpu"))
    assert watch.stop() == pytest.approx((3.0, 7.0))
    watch.start()
    assert watch.stop() == pytest.approx((0.0, 5.0))
