"""Whole rounds in the interpreter: every kernel of a verification and of a drafting, one after the other."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from factories import tiny_config
from round_cases import SAMPLERS, decode, make_parts, make_recipe, reference, seat
from step_cases import FORMS, PackedInMemory, fast_model, packed_config, random_chain

from specq.models.device_step import BUCKETS
from specq.spec import device_draft, sampling, warm_up
from specq.spec.device_draft import DeviceEagleTree
from specq.spec.device_round import DeviceVerifier
from specq.spec.device_self import DeviceSelfChain
from specq.spec.pipelines import PIPELINES, Parts
from specq.spec.sampling import Sampler, Seen, penalize
from specq.spec.self_chain import SelfChain
from specq.spec.tree import chain
from specq.spec.verifier import Verifier

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
CONFIG = tiny_config(num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1, head_dim=16)
RECIPE = make_recipe(nodes=8, depth=2, top_k=3, draft_length=3)


@pytest.fixture(scope="module")
def parts() -> Parts:
    """In float32, so that no draft hangs on a rounding."""
    return make_parts(CONFIG, dtype="float32")


@pytest.mark.parametrize("name", SAMPLERS)
def test_trees_are_those_of_their_definition(parts: Parts, name: str) -> None:
    prompt = random_chain(3, seed=2).tokens.tolist()
    trees = []
    pipeline = PIPELINES["eagle2"].build(parts, SAMPLERS[name], RECIPE)
    assert isinstance(pipeline.drafter, DeviceEagleTree)
    for speculator in (pipeline, reference(parts, SAMPLERS[name], RECIPE)):
        parts.rollback(0)
        context = [*prompt, *speculator.verifier.prefill(prompt)]
        with torch.inference_mode():
            tree = speculator.drafter.propose(context, max_nodes=60, max_depth=9)
        kept = tree.tokens >= 0
        trees.append((tree.tokens[kept].tolist(), tree.parents[kept].tolist()))
    assert len(trees[0][0]) >= 2
    assert trees[0] == trees[1]


def test_eagle_rounds_give_the_text_of_plain_ones(parts: Parts) -> None:
    prompt = random_chain(3, seed=1).tokens.tolist()
    found, plain = (decode(parts, kind, SAMPLERS["top-p"], RECIPE, prompt, 3).tokens for kind in ("eagle2", "plain"))
    assert found == plain


def test_the_hierarchical_pipeline_runs_on_kernels_throughout(parts: Parts) -> None:
    sampler, recipe = SAMPLERS["noise"], RECIPE
    speculator = PIPELINES["hierarchical"].build(parts, sampler, recipe)
    assert all(isinstance(level.verifier, DeviceVerifier) for level in speculator.levels())
    assert isinstance(list(speculator.levels())[-1].drafter, DeviceEagleTree)
    prompt = random_chain(3, seed=3).tokens.tolist()
    found = decode(parts, "hierarchical", sampler, recipe, prompt, 4)
    assert found.tokens == decode(parts, "plain", sampler, recipe, prompt, 4).tokens


@pytest.mark.parametrize("name", ["noise", "top-k, penalty"])
def test_the_targets_own_chain_is_that_of_its_definition(name: str) -> None:
    form = FORMS["per channel"]
    config = packed_config(form, num_hidden_layers=1)
    model = fast_model(config, PackedInMemory(config, form), dtype="float16")
    own, sampler = seat(model), SAMPLERS[name]
    verifier = own.verifier(sampler)
    drafter = own.self_drafter(verifier, act="a4", draft_length=3)
    assert isinstance(drafter, DeviceSelfChain)
    context = random_chain(4, seed=5).tokens.tolist()
    verifier.prefill(context[:2])  # two tokens are pending: the first step runs both
    drafts = []
    for each in (drafter, SelfChain(Verifier(model, own.cache, sampler), act="a4", draft_length=3)):
        drafts.append(each.propose(context, max_nodes=60, max_depth=9).tokens.tolist())
        assert own.cache.length == 2
    assert len(drafts[0]) == 3
    assert drafts[0] == drafts[1]


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("penalty", [1.0, 1.2])
def test_a_tokenizer_may_have_more_ids_than_the_model(parts: Parts, temperature: float, penalty: float) -> None:
    prompt = random_chain(3, seed=4).tokens.tolist()
    found = [
        decode(parts, "plain", Sampler(temperature, repetition_penalty=penalty, vocab=vocab), RECIPE, prompt, 3).tokens
        for vocab in (10**6, None)
    ]
    assert found[0] == found[1]


def test_what_the_round_leaves_undecided_is_decided_on_its_device(
    parts: Parts, monkeypatch: pytest.MonkeyPatch
) -> None:
    sampler = Sampler(temperature=50.0, top_p=0.99, repetition_penalty=1.2, seed=3)
    target, context = parts.target, random_chain(4, seed=5).tokens.tolist()
    devices: set[torch.device] = set()

    def noting(logits: torch.Tensor, seen: Seen, penalty: float) -> torch.Tensor:
        devices.update(each.device for each in (logits, seen.context_ids, seen.tokens, seen.ancestors))
        return penalize(logits, seen, penalty)

    decided = []
    for verifier in (Verifier(target.model, target.cache, sampler), target.verifier(sampler)):
        parts.rollback(0)
        verifier.prefill(context[:-1])
        tree = chain([], device=target.model.device)
        monkeypatch.setattr(sampling, "penalize", noting)
        with torch.inference_mode(), torch.device("meta"):  # where tensors go that nobody places
            decided.append(verifier.verify(context, tree))
    assert devices == {target.model.device}
    assert decided[0] == decided[1]
    parts.rollback(len(context) - 1)
    assert isinstance(verifier, DeviceVerifier)
    assert verifier.round(len(context) - 1, context[-1:], tree) == []


def test_a_cache_goes_with_its_seat(parts: Parts) -> None:
    place = seat(parts.target.model)
    verifier, cache = place.verifier(Sampler()), weakref.ref(place.cache)
    assert isinstance(verifier, DeviceVerifier)
    verifier.ready([1])
    gc.disable()
    try:
        del place, verifier
        assert cache() is None
    finally:
        gc.enable()


def test_every_size_of_a_round_is_warmed_up() -> None:
    assert warm_up.NODES == BUCKETS
    assert warm_up.NEW_ROWS == device_draft.NEW_ROWS
