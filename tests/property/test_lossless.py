"""The properties that define specq: text never depends on the pipeline, a drafter has no history, stops are exact."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from lossless_cases import (
    CONTEXT,
    OracleTree,
    assert_cache_holds,
    decode,
    kinds,
    make_parts,
    make_recipe,
    plain_text,
    prompts,
    recipes,
    samplers,
    seat,
)
from tiny_models import VOCAB, make_model

from specq.models.causal_lm import CausalLM
from specq.recipe import PipelineName, Recipe
from specq.spec import verifier as verifier_module
from specq.spec.drafters import SequenceDrafter
from specq.spec.pipelines import PIPELINES, Parts
from specq.spec.sampling import Sampler
from specq.spec.speculator import Speculator, StopRule, generate
from specq.spec.tree import DraftTree


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
