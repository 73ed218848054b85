"""The same properties for rounds of static shapes, as a GPU runs them: here with the definitions of the kernels."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
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
from specq.models.device_step import DeviceStep
from specq.recipe import Recipe
from specq.spec import device_round, sampling
from specq.spec.device_draft import DeviceEagleTree
from specq.spec.device_round import DeviceVerifier
from specq.spec.drafters import SequenceDrafter
from specq.spec.pipelines import PIPELINES
from specq.spec.sampling import Sampler
from specq.spec.speculator import Speculator, StopRule, generate

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
few = settings(max_examples=6)
DRAFTING = [name for name in PIPELINES if name not in ("plain", "lookup")]


@pytest.fixture(scope="module", autouse=True)
def _definitions() -> Iterator[None]:
    """Definitions in place of kernels, which the interpreter does not run in float64."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "0")
        yield


def on_device(model: CausalLM) -> CausalLM:
    model.device_step = DeviceStep(model)
    return model


@pytest.fixture(scope="module")
def static() -> CausalLM:
    """The target with rounds of static shapes; `target` is the same without."""
    return on_device(make_model(bits=4))


@pytest.fixture(scope="module")
def static_intermediates() -> dict[str, CausalLM]:
    far = make_model(seed=7, num_hidden_layers=1)
    models = {"same": make_model(bits=4), "close": make_model(noise=0.05, bits=4), "far": far}
    return {kind: on_device(model) for kind, model in models.items()}


def assert_runs_on_device(speculator: Speculator) -> None:
    for level in speculator.levels():
        assert isinstance(level.verifier, DeviceVerifier)
        if hasattr(level.drafter, "shape"):
            assert isinstance(level.drafter, DeviceEagleTree)


@pytest.mark.parametrize("name", PIPELINES)
@few
@given(prompt=prompts, sampler=samplers, recipe=recipes, kind=kinds, count=st.integers(1, 40))
def test_text_equals_plain_decoding(
    name: str,
    target: CausalLM,
    static: CausalLM,
    static_intermediates: dict[str, CausalLM],
    prompt: list[int],
    sampler: Sampler,
    recipe: Recipe,
    kind: str,
    count: int,
) -> None:
    speculator = PIPELINES[name].build(make_parts(static, static_intermediates[kind]), sampler, recipe)
    assert_runs_on_device(speculator)
    assert decode(speculator, prompt, count) == plain_text(target, sampler, prompt, count)


@given(prompt=prompts, sampler=samplers, seed=st.integers(0, 10**6), is_chain=st.booleans())
def test_text_equals_plain_decoding_under_any_tree(
    target: CausalLM, static: CausalLM, prompt: list[int], sampler: Sampler, seed: int, is_chain: bool
) -> None:
    truth = prompt + plain_text(target, sampler, prompt, 40)
    drafter = OracleTree(truth, seed=seed, is_chain=is_chain)
    speculator = Speculator(drafter, seat(static).verifier(sampler))
    assert prompt + decode(speculator, prompt, 40) == truth
    assert_cache_holds(speculator, truth)


@few
@given(prompt=prompts, sampler=samplers, seed=st.integers(0, 10**6))
def test_sliding_window_text_equals_plain_decoding(prompt: list[int], sampler: Sampler, seed: int) -> None:
    window = {"seed": 3, "family": "mistral", "sliding_window": 16}
    truth = prompt + plain_text(make_model(**window), sampler, prompt, 48)  # type: ignore[arg-type]
    static = on_device(make_model(**window))  # type: ignore[arg-type]
    speculator = Speculator(OracleTree(truth, seed=seed), seat(static).verifier(sampler))
    assert prompt + decode(speculator, prompt, 48) == truth


@pytest.mark.parametrize("name", DRAFTING)
@few
@given(prompt=prompts, sampler=samplers, recipe=recipes, kind=kinds, cut=st.integers(1, 40))
def test_a_drafter_has_no_history_and_proposes_what_its_definition_does(
    name: str,
    target: CausalLM,
    intermediates: dict[str, CausalLM],
    static: CausalLM,
    static_intermediates: dict[str, CausalLM],
    prompt: list[int],
    sampler: Sampler,
    recipe: Recipe,
    kind: str,
    cut: int,
) -> None:
    speculator = PIPELINES[name].build(make_parts(static, static_intermediates[kind]), sampler, recipe)
    rule = StopRule(start=len(prompt), stop_ids=frozenset(), max_new_tokens=40, context_limit=CONTEXT)
    context = list(prompt)
    stream = generate(speculator, context, rule)
    for _ in range(cut):
        next(stream, None)
    stream.close()
    assert_cache_holds(speculator, context)
    fresh = PIPELINES[name].build(make_parts(target, intermediates[kind]), sampler, recipe)
    for old, level in zip(speculator.levels(), fresh.levels(), strict=True):
        if length := old.verifier.cache.length:
            level.verifier.prefill(context[:length])
    used, new = (s.drafter.propose(context, max_nodes=60, max_depth=20) for s in (speculator, fresh))
    kept = used.tokens >= 0  # nodes that no sampler chooses have no token there
    found, expected = used.tokens[kept].tolist(), new.tokens.tolist()
    if isinstance(fresh.drafter, SequenceDrafter):
        owed = recipe.pipeline.draft_length
        assert found[:owed] == expected[:owed]
    else:
        assert found == expected
        assert used.parents[kept].tolist() == new.parents.tolist()
        assert kept[: len(found)].all()


@few
@given(prompt=prompts, cut=st.integers(1, 30), length=st.integers(1, 8), kind=kinds)
def test_closing_at_any_token_leaves_caches_that_go_on_as_if_nothing_happened(
    target: CausalLM,
    static: CausalLM,
    static_intermediates: dict[str, CausalLM],
    prompt: list[int],
    cut: int,
    length: int,
    kind: str,
) -> None:
    sampler = Sampler(temperature=0.8, repetition_penalty=1.2, seed=9)
    parts = make_parts(static, static_intermediates[kind])
    speculator = PIPELINES["hierarchical"].build(parts, sampler, make_recipe(draft_length=length))
    context = list(prompt)

    def rule() -> StopRule:
        return StopRule(start=len(prompt), stop_ids=frozenset(), max_new_tokens=40, context_limit=CONTEXT)

    stream = generate(speculator, context, rule())
    for _ in range(cut):
        next(stream)
    stream.close()
    assert_cache_holds(speculator, context)
    # a pipeline built anew over the same caches takes over, as for the next prompt
    speculator = PIPELINES["hierarchical"].build(parts, sampler, make_recipe(draft_length=length))
    for _ in generate(speculator, context, rule()):
        pass
    assert context[len(prompt) :] == plain_text(target, sampler, prompt, 40)


@few
@given(prompt=prompts, seed=st.integers(0, 10**6), penalty=st.sampled_from([1.0, 1.3]))
def test_distributions_flatter_than_the_candidates_are_exact(
    target: CausalLM, static: CausalLM, prompt: list[int], seed: int, penalty: float
) -> None:
    sampler = Sampler(temperature=2.0, top_p=0.95, seed=seed, repetition_penalty=penalty)
    truth = prompt + plain_text(target, sampler, prompt, 30)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sampling, "TOP_P_CANDIDATES", 3)
        speculator = Speculator(OracleTree(truth, seed=seed), seat(static).verifier(sampler))
        assert prompt + decode(speculator, prompt, 30) == truth
    assert_cache_holds(speculator, truth)


def test_long_prompts_are_caught_up_with(
    target: CausalLM, static: CausalLM, static_intermediates: dict[str, CausalLM]
) -> None:
    prompt = [(7 * i) % VOCAB for i in range(100)]
    for name in DRAFTING:
        speculator = PIPELINES[name].build(
            make_parts(static, static_intermediates["close"]), Sampler(), make_recipe(nodes=60, depth=6, top_k=10)
        )
        assert decode(speculator, prompt, 20) == plain_text(target, Sampler(), prompt, 20)
        assert_cache_holds(speculator, [*prompt, *plain_text(target, Sampler(), prompt, 20)])


@pytest.mark.parametrize(("depth", "top_k"), [(6, 20), (2, 64), (1, 64)])
def test_trees_the_kernels_do_not_hold_are_drafted_all_the_same(
    target: CausalLM, static: CausalLM, static_intermediates: dict[str, CausalLM], depth: int, top_k: int
) -> None:
    recipe = make_recipe(nodes=40, depth=depth, top_k=top_k)
    parts = make_parts(static, static_intermediates["same"])
    head = parts.target_head
    assert head is not None
    roomy = replace(parts, target_head=replace(head, cache=head.head.new_cache(CONTEXT + 64 + depth * top_k)))
    speculator = PIPELINES["eagle2"].build(roomy, Sampler(), recipe)
    assert decode(speculator, [1, 2, 3], 12) == plain_text(target, Sampler(), [1, 2, 3], 12)
    assert any(r.drafted for r in speculator.rounds)


def _no_compaction(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_round, "compact", lambda *arguments: None)


def _late_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    original = Sampler.choose

    def late(self: Sampler, logits: torch.Tensor, positions: torch.Tensor, *rest: object, **options: object) -> object:
        return original(self, logits, positions + 1, *rest, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(Sampler, "choose", late)


def _wrong_depths(monkeypatch: pytest.MonkeyPatch) -> None:
    original = device_round.graft_nodes

    def flat(*inputs: torch.Tensor, depths: torch.Tensor, **buffers: torch.Tensor) -> None:
        original(*inputs, depths=depths, **buffers)
        depths.copy_(torch.arange(len(depths)))

    monkeypatch.setattr(device_round, "graft_nodes", flat)


def _first_child_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Samples that do not follow their node: every node takes those of the one before."""
    original = device_round.walk_nodes

    def shifted(
        counts: torch.Tensor, tokens: torch.Tensor, parents: torch.Tensor, sampled: torch.Tensor, **out: object
    ):
        original(counts, tokens, parents, sampled.roll(1), **out)  # type: ignore[arg-type]

    monkeypatch.setattr(device_round, "walk_nodes", shifted)


@pytest.mark.parametrize("plant", [_no_compaction, _late_noise, _wrong_depths, _first_child_only])
def test_planted_faults_change_the_text(
    plant: object, target: CausalLM, static: CausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control of this file: each fault must be seen by the comparison with plain decoding."""
    sampler = Sampler(temperature=1.0, seed=2)
    runs: list[tuple[list[int], Sequence[int]]] = [
        ([i, i + 1], plain_text(target, sampler, [i, i + 1], 40)) for i in range(6)
    ]
    plant(monkeypatch)  # type: ignore[operator]
    differs = False
    for i, (prompt, text) in enumerate(runs):
        speculator = Speculator(OracleTree([*prompt, *text], seed=i), seat(static).verifier(sampler))
        differs |= decode(speculator, prompt, 40) != text
    assert differs
