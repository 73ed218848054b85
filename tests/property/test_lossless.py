"""The properties that define specq: text never depends on the pipeline, a drafter has no history, stops are exact."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from tiny_models import VOCAB, make_head, make_model

from specq.models.causal_lm import CausalLM
from specq.models.eagle import EagleHead
from specq.recipe import PipelineName, Recipe
from specq.spec import verifier as verifier_module
from specq.spec.drafters import NoDrafter, SequenceDrafter
from specq.spec.eagle_tree import EagleTree
from specq.spec.pipelines import PIPELINES, HeadSeat, Parts, Seat
from specq.spec.sampling import Sampler
from specq.spec.speculator import Speculator, StopRule, generate
from specq.spec.tree import MAX_NODES, DraftTree, chain
from specq.spec.verifier import Verifier

CONTEXT = 160

prompts = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=24)
samplers = st.builds(
    Sampler,
    temperature=st.sampled_from([0.0, 0.7, 1.0]),
    top_k=st.sampled_from([0, 5]),
    top_p=st.sampled_from([1.0, 0.9]),
    repetition_penalty=st.sampled_from([1.0, 1.3]),
    seed=st.integers(0, 2**40),
    vocab=st.sampled_from([None, VOCAB - 3]),
)
kinds = st.sampled_from(["same", "close", "far"])


def make_recipe(*, draft_length: int = 5, nodes: int = 20, depth: int = 3, top_k: int = 4) -> Recipe:
    return Recipe.model_validate(
        {
            "target": "tiny",
            "pipeline": {"draft_length": draft_length, "min_draft": draft_length},
            "drafter": {"nodes": nodes, "depth": depth, "top_k": top_k},
        }
    )


recipes = st.builds(
    make_recipe,
    draft_length=st.integers(1, 12) | st.just(56),
    nodes=st.integers(2, 64),
    depth=st.integers(1, 6),
    top_k=st.integers(1, 6),
)


def seat(model: CausalLM, *, limit: int = CONTEXT, head: EagleHead | None = None) -> Seat:
    return Seat(model, model.new_cache(limit + MAX_NODES, features=head.spec.features if head else None))


def head_seat(head: EagleHead, *, limit: int = CONTEXT) -> HeadSeat:
    return HeadSeat(head, head.new_cache(limit + MAX_NODES + 36))


def make_parts(target: CausalLM, intermediate: CausalLM, *, limit: int = CONTEXT) -> Parts:
    """Every part: an EAGLE-2 head for the target, a trimmed EAGLE-3 head for the intermediate."""
    head, inner = make_head(target), make_head(intermediate, eagle3=True, trimmed=VOCAB - 8)
    return Parts(
        target=seat(target, head=head, limit=limit),
        intermediate=seat(intermediate, head=inner, limit=limit),
        target_head=head_seat(head, limit=limit),
        intermediate_head=head_seat(inner, limit=limit),
    )


def decode(
    speculator: Speculator, prompt: Sequence[int], count: int, *, stop_ids: frozenset[int] = frozenset()
) -> list[int]:
    rule = StopRule(start=len(prompt), stop_ids=stop_ids, max_new_tokens=count, context_limit=CONTEXT)
    return list(generate(speculator, list(prompt), rule))


def plain_text(target: CausalLM, sampler: Sampler, prompt: Sequence[int], count: int) -> list[int]:
    return decode(Speculator(NoDrafter(), seat(target).verifier(sampler)), prompt, count)


def assert_cache_holds(speculator: Speculator, context: Sequence[int]) -> None:
    """Every cache of the pipeline holds a prefix of the context: K and V equal those of a fresh run over it."""
    for level in speculator.levels():
        model, cache = level.verifier.model, level.verifier.cache
        assert cache.length < len(context)
        fresh = Verifier(model, model.new_cache(CONTEXT + MAX_NODES), Sampler())
        if cache.length:
            fresh.prefill(list(context[: cache.length]))
            torch.testing.assert_close(cache.k[:, :, : cache.length], fresh.cache.k[:, :, : cache.length])
            torch.testing.assert_close(cache.v[:, :, : cache.length], fresh.cache.v[:, :, : cache.length])
        if isinstance(level.drafter, EagleTree):
            assert_head_holds(level.drafter, context)


def assert_head_holds(drafter: EagleTree, context: Sequence[int]) -> None:
    """The head's rows are those of true features of the context, one fewer than the tokens kept."""
    head, cache, model = drafter.head, drafter.cache, drafter.verifier.model
    n = cache.length
    assert n < len(context)
    if n == 0:
        return
    fresh = Verifier(model, model.new_cache(CONTEXT + MAX_NODES, features=head.spec.features), Sampler())
    fresh.prefill(list(context[:n]))
    rows = head.new_cache(CONTEXT)
    assert fresh.cache.features is not None
    with torch.inference_mode():
        head(chain(context[1 : n + 1]), head.enter(fresh.cache.features[:n]), rows)
    torch.testing.assert_close(cache.k[:, :, :n], rows.k[:, :, :n])
    torch.testing.assert_close(cache.v[:, :, :n], rows.v[:, :, :n])


class OracleTree(NoDrafter):
    """Trees that hold the true continuation down to a random depth, among decoys and at random places."""

    def __init__(self, truth: Sequence[int], *, seed: int, is_chain: bool = False) -> None:
        self.truth, self.draws, self.is_chain = list(truth), random.Random(seed), is_chain

    def propose(self, context: Sequence[int], *, max_nodes: int, max_depth: int) -> DraftTree:
        tokens: list[int] = []
        parents: list[int] = []
        depth: list[int] = []
        true_node, true_depth = -1, 0
        for _ in range(self.draws.randint(0, min(20, max_nodes))):
            grow_truth = self.draws.random() < 0.5 and len(context) + true_depth < len(self.truth)
            parent = true_node if grow_truth or self.is_chain else self.draws.randint(-1, len(tokens) - 1)
            level = 1 if parent < 0 else depth[parent] + 1
            if level > max_depth:
                continue
            token = self.truth[len(context) + true_depth] if grow_truth else self.draws.randrange(VOCAB)
            if self.is_chain or grow_truth:
                true_node, true_depth = len(tokens), true_depth + 1
            tokens.append(token)
            parents.append(parent)
            depth.append(level)
        return DraftTree.from_lists(tokens, parents)


def test_every_pipeline_a_recipe_names_is_registered() -> None:
    assert set(PIPELINES) == set(PipelineName.__args__) - {"auto"}


@pytest.mark.parametrize("name", PIPELINES)
@given(prompt=prompts, sampler=samplers, recipe=recipes, kind=kinds, count=st.integers(1, 40))
def test_text_equals_plain_decoding(
    name: str,
    target: CausalLM,
    intermediates: dict[str, CausalLM],
    prompt: list[int],
    sampler: Sampler,
    recipe: Recipe,
    kind: str,
    count: int,
) -> None:
    parts = make_parts(target, intermediates[kind])
    speculator = PIPELINES[name].build(parts, sampler, recipe)
    assert decode(speculator, prompt, count) == plain_text(target, sampler, prompt, count)


@given(prompt=prompts, sampler=samplers, seed=st.integers(0, 10**6), is_chain=st.booleans())
def test_text_equals_plain_decoding_under_any_tree(
    target: CausalLM, prompt: list[int], sampler: Sampler, seed: int, is_chain: bool
) -> None:
    truth = prompt + plain_text(target, sampler, prompt, 40)
    drafter = OracleTree(truth, seed=seed, is_chain=is_chain)
    speculator = Speculator(drafter, seat(target).verifier(sampler))
    assert prompt + decode(speculator, prompt, 40) == truth
    assert_cache_holds(speculator, truth)


@given(prompt=prompts, sampler=samplers, seed=st.integers(0, 10**6))
def test_sliding_window_text_equals_plain_decoding(prompt: list[int], sampler: Sampler, seed: int) -> None:
    target = make_model(seed=3, family="mistral", sliding_window=16)
    truth = prompt + plain_text(target, sampler, prompt, 48)
    speculator = Speculator(OracleTree(truth, seed=seed), seat(target).verifier(sampler))
    assert prompt + decode(speculator, prompt, 48) == truth


@pytest.mark.parametrize("name", PIPELINES)
@given(prompt=prompts, sampler=samplers, recipe=recipes, kind=kinds, data=st.data())
def test_a_drafter_has_no_history(
    name: str,
    target: CausalLM,
    intermediates: dict[str, CausalLM],
    prompt: list[int],
    sampler: Sampler,
    recipe: Recipe,
    kind: str,
    data: st.DataObject,
) -> None:
    parts = make_parts(target, intermediates[kind])
    speculator = PIPELINES[name].build(parts, sampler, recipe)
    rule = StopRule(start=len(prompt), stop_ids=frozenset(), max_new_tokens=40, context_limit=CONTEXT)
    context = list(prompt)
    stream = generate(speculator, context, rule)
    for _ in range(data.draw(st.integers(1, 40))):
        next(stream, None)
    stream.close()
    assert_cache_holds(speculator, context)
    fresh = PIPELINES[name].build(make_parts(target, intermediates[kind]), sampler, recipe)
    for old, level in zip(speculator.levels(), fresh.levels(), strict=True):
        if length := old.verifier.cache.length:
            level.verifier.prefill(context[:length])
    used, new = (s.drafter.propose(context, max_nodes=60, max_depth=20).tokens.tolist() for s in (speculator, fresh))
    # A SequenceDrafter may overshoot by a block, so only the length it owes is compared.
    owed = recipe.pipeline.draft_length if isinstance(fresh.drafter, SequenceDrafter) else len(new)
    assert used[:owed] == new[:owed]


@given(prompt=prompts, sampler=samplers, length=st.integers(1, 12))
def test_a_self_draft_is_accepted_whole(target: CausalLM, prompt: list[int], sampler: Sampler, length: int) -> None:
    parts = make_parts(target, target)
    speculator = PIPELINES["sequence"].build(parts, sampler, make_recipe(draft_length=length))
    decode(speculator, prompt, 40)
    rounds = [r for r in speculator.rounds if not r.is_prefill]
    assert all(r.decided == r.drafted + 1 for r in rounds)
    assert all(r.drafted == length for r in rounds[:-1])


@pytest.mark.parametrize("name", PIPELINES)
@given(prompt=prompts, at=st.integers(0, 19), length=st.integers(1, 8), kind=kinds)
def test_decoding_ends_at_a_stop_id_wherever_it_falls_in_a_block(
    name: str,
    target: CausalLM,
    intermediates: dict[str, CausalLM],
    prompt: list[int],
    at: int,
    length: int,
    kind: str,
) -> None:
    sampler = Sampler(temperature=1.0, seed=5)
    text = plain_text(target, sampler, prompt, 20)
    assume(text[at] not in text[:at])
    parts = make_parts(target, intermediates[kind])
    speculator = PIPELINES[name].build(parts, sampler, make_recipe(draft_length=length))
    assert decode(speculator, prompt, 20, stop_ids=frozenset({text[at]})) == text[: at + 1]


@pytest.mark.parametrize("name", PIPELINES)
@given(prompt=prompts, cut=st.integers(1, 30), length=st.integers(1, 8), kind=kinds)
def test_closing_at_any_token_leaves_caches_that_go_on_as_if_nothing_happened(
    name: str,
    target: CausalLM,
    intermediates: dict[str, CausalLM],
    prompt: list[int],
    cut: int,
    length: int,
    kind: str,
) -> None:
    sampler = Sampler(temperature=0.8, seed=9)
    parts = make_parts(target, intermediates[kind])
    speculator = PIPELINES[name].build(parts, sampler, make_recipe(draft_length=length))
    context = list(prompt)

    def rule() -> StopRule:
        return StopRule(start=len(prompt), stop_ids=frozenset(), max_new_tokens=40, context_limit=CONTEXT)

    stream = generate(speculator, context, rule())
    for _ in range(cut):
        next(stream)
    stream.close()
    assert_cache_holds(speculator, context)
    for _ in generate(speculator, context, rule()):
        pass
    assert context[len(prompt) :] == plain_text(target, sampler, prompt, 40)


@pytest.mark.parametrize("name", PIPELINES)
def test_the_context_limit_is_exact_and_nothing_is_drafted_past_it(
    name: str, target: CausalLM, intermediates: dict[str, CausalLM]
) -> None:
    prompt = [i % 5 for i in range(61)]
    sampler = Sampler()
    parts = make_parts(target, intermediates["same"], limit=64)
    speculator = PIPELINES[name].build(parts, sampler, make_recipe(draft_length=8))
    rule = StopRule(start=61, stop_ids=frozenset(), context_limit=64)
    context = list(prompt)
    out = list(generate(speculator, context, rule))
    assert out == plain_text(target, sampler, prompt, 3)
    assert rule.reason == "length"
    # One token is the prefill's; of the two that are left one is decided without a draft.
    assert all(r.decided <= 2 for r in speculator.rounds)
    assert sum(r.drafted > 0 for r in speculator.rounds) <= 1


def test_a_drafter_with_a_shorter_context_stops_drafting_and_the_text_goes_on(
    target: CausalLM, intermediates: dict[str, CausalLM]
) -> None:
    parts = Parts(target=seat(target), intermediate=seat(intermediates["same"], limit=30))
    speculator = PIPELINES["sequence"].build(parts, Sampler(), make_recipe(draft_length=4))
    assert decode(speculator, [1, 2, 3], 60) == plain_text(target, Sampler(), [1, 2, 3], 60)
    assert speculator.rounds[-1].drafted == 0


@pytest.mark.parametrize("name", PIPELINES)
def test_long_prompts_run_in_chunks_of_fixed_cuts(
    name: str, target: CausalLM, intermediates: dict[str, CausalLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = [(7 * i) % VOCAB for i in range(100)]
    expected = plain_text(target, Sampler(), prompt, 20)
    monkeypatch.setattr(verifier_module, "PREFILL_CHUNK", 16)
    speculator = PIPELINES[name].build(make_parts(target, intermediates["close"]), Sampler(), make_recipe())
    assert decode(speculator, prompt, 20) == expected
    assert [r.decided for r in speculator.rounds if r.is_prefill] == [1]


@pytest.fixture
def planted(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    request.param(monkeypatch)
    return


def _wrong_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every node sees its siblings."""
    monkeypatch.setattr(
        DraftTree, "ancestor_mask", lambda self: torch.ones(len(self), len(self), dtype=torch.bool).tril()
    )


def _wrong_depths(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DraftTree, "depths", lambda self: torch.arange(len(self), dtype=torch.int32))


def _no_compaction(monkeypatch: pytest.MonkeyPatch) -> None:
    def keep(self: object, path: Sequence[int]) -> None:
        self.length += len(path)  # type: ignore[attr-defined]

    monkeypatch.setattr("specq.models.cache.KVCache.keep", keep)


def _late_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    """Noise of the node's slot instead of its position."""
    original = Sampler.__call__

    def call(self: Sampler, logits: torch.Tensor, positions: torch.Tensor, seen: object = None) -> torch.Tensor:
        return original(self, logits, positions[0] + torch.arange(len(positions)), seen)

    monkeypatch.setattr(Sampler, "__call__", call)


@pytest.mark.parametrize("plant", [_wrong_mask, _wrong_depths, _no_compaction, _late_noise])
def test_planted_faults_change_the_text(plant: object, target: CausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control of this file: each fault must be seen by the comparison with plain decoding."""
    sampler = Sampler(temperature=1.0, seed=2)
    runs = [([i, i + 1], plain_text(target, sampler, [i, i + 1], 40)) for i in range(6)]
    plant(monkeypatch)  # type: ignore[operator]
    differs = False
    for i, (prompt, text) in enumerate(runs):
        speculator = Speculator(OracleTree(prompt + text, seed=i), seat(target).verifier(sampler))
        differs |= decode(speculator, prompt, 40) != text
    assert differs
