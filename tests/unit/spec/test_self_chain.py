"""The target as its own drafter: what it drafts, what it leaves in the cache, and that drafts do get rejected."""

from __future__ import annotations

import pytest
import torch
from lossless_cases import CONTEXT, decode, make_parts, make_recipe, plain_text, seat
from tiny_models import make_model

from specq.errors import UnsupportedError
from specq.models.causal_lm import CausalLM
from specq.recipe import Recipe
from specq.spec.pipelines import FOUR_BITS, PIPELINES, require_pipeline
from specq.spec.sampling import Sampler
from specq.spec.self_chain import SelfChain
from specq.spec.speculator import Speculator
from specq.spec.tree import DraftTree, chain
from specq.spec.verifier import Verifier


@pytest.fixture(scope="module")
def target() -> CausalLM:
    return make_model(bits=4)


def speculator(target: CausalLM, *, act_bits: int = 8, **sizes: int) -> Speculator:
    parts = make_parts(target, target)
    return PIPELINES["qspec"].build(parts, Sampler(), make_recipe(act_bits=act_bits, **sizes))


def test_a_draft_is_the_text_of_the_low_precision_alone_and_the_cache_stays(target: CausalLM) -> None:
    context = [3, 1, 4, 1, 5, 9, 2, 6]
    verifier = seat(target).verifier(Sampler())
    verifier.prefill(context)
    k, v = verifier.cache.k.clone(), verifier.cache.v.clone()
    n = verifier.cache.length
    draft = SelfChain(verifier, act="a4", draft_length=5).propose([*context, 7], max_nodes=60, max_depth=60)
    expected = [*context, 7]
    with torch.inference_mode():
        for _ in range(5):
            out = target.forward(chain(expected[-1:]), verifier.cache, act="a4")
            verifier.cache.commit(1)
            expected.append(int(out.logits[-1].argmax()))
    assert draft.is_chain
    assert draft.tokens.tolist() == expected[9:]
    verifier.rollback(n)
    assert torch.equal(verifier.cache.k[:, :, :n], k[:, :, :n])
    assert torch.equal(verifier.cache.v[:, :, :n], v[:, :, :n])
    assert not torch.equal(verifier.cache.k[:, :, n : n + 5], k[:, :, n : n + 5])  # it did write behind them


@pytest.mark.parametrize("act_bits", [8, 4])
def test_verification_leaves_only_its_own_k_and_v(target: CausalLM, act_bits: int) -> None:
    running = speculator(target, act_bits=act_bits)
    text = decode(running, [1, 2, 3], 40)
    cache = running.verifier.cache
    fresh = Verifier(target, target.new_cache(CONTEXT + 64), Sampler())
    fresh.prefill([1, 2, 3, *text][: cache.length])
    for mine, theirs in ((cache.k, fresh.cache.k), (cache.v, fresh.cache.v)):
        torch.testing.assert_close(mine[:, :, : cache.length], theirs[:, :, : cache.length])


def test_four_bits_are_accepted_less_often_than_eight(target: CausalLM) -> None:
    accepted = {}
    for act_bits in (8, 4):
        rounds = []
        for start in range(8):
            running = speculator(target, act_bits=act_bits)
            assert decode(running, [start, 5], 30) == plain_text(target, Sampler(), [start, 5], 30)
            rounds += [r for r in running.rounds if r.drafted]
        accepted[act_bits] = sum(r.decided - 1 for r in rounds) / sum(r.drafted for r in rounds)
    assert 0.2 < accepted[4] < accepted[8] <= 1


def test_k_and_v_of_the_draft_kept_as_history_would_be_seen(target: CausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control of this file: a cache that keeps what the draft wrote for the pending tokens changes every text."""
    prompts = [[start, 5] for start in range(8)]
    expected = [plain_text(target, Sampler(), prompt, 40) for prompt in prompts]
    propose, verify = SelfChain.propose, Verifier.verify
    drafted: list[tuple[slice, torch.Tensor, torch.Tensor]] = []

    def drafting(self: SelfChain, context: list[int], **sizes: int) -> DraftTree:
        cache = self.verifier.cache
        pending = slice(cache.length, len(context))
        draft = propose(self, context, **sizes)
        drafted.append((pending, cache.k[:, :, pending].clone(), cache.v[:, :, pending].clone()))
        return draft

    def restoring(self: Verifier, context: list[int], tree: DraftTree) -> list[int]:
        decided = verify(self, context, tree)
        pending, k, v = drafted.pop()
        self.cache.k[:, :, pending], self.cache.v[:, :, pending] = k, v
        return decided

    monkeypatch.setattr(SelfChain, "propose", drafting)
    monkeypatch.setattr(Verifier, "verify", restoring)
    texts = [decode(speculator(target, act_bits=4), prompt, 40) for prompt in prompts]
    assert all(text != other for text, other in zip(texts, expected, strict=True))


def test_the_default_draft_is_three_tokens_unless_a_length_is_set(target: CausalLM) -> None:
    for pipeline, length in (({}, 3), ({"draft_length": 5}, 5)):
        recipe = Recipe.model_validate({"target": "tiny", "pipeline": pipeline})
        recipe = Recipe.model_validate(recipe.model_dump(mode="json"))  # all of it written down and read again
        running = PIPELINES["qspec"].build(make_parts(target, target), Sampler(), recipe)
        decode(running, [1, 2], 20)
        assert max(r.drafted for r in running.rounds) == length


def test_a_target_of_16_bits_is_refused_with_the_reason(target: CausalLM) -> None:
    assert FOUR_BITS in make_parts(target, target).roles
    dense = make_model()
    with pytest.raises(UnsupportedError, match=r"`qspec` cannot run: it needs a target with 4-bit matrices"):
        require_pipeline("qspec", make_parts(dense, dense).roles)
