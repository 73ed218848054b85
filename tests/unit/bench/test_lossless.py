"""Exact, tie or bug: what rounding explains is a tie, and no planted fault ever is."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from factories import WeightsInMemory, tiny_config
from tiny_models import VOCAB, confident_weights

from specq.checkpoint import ModelSpec
from specq.models.causal_lm import CausalLM
from specq.models.loader import build_model
from specq.spec.drafters import NoDrafter
from specq.spec.lossless import Ending, Judge, Verdict, rounding_error, same_answer, shortfall, tolerance_for
from specq.spec.pipelines import Seat
from specq.spec.sampling import Sampler
from specq.spec.session import Generation
from specq.spec.speculator import Speculator, StopRule, generate
from specq.spec.tree import MAX_NODES, DraftTree
from specq.spec.verifier import Verifier

CONTEXT, TOKENS = 160, 48
PROMPTS = [[i, (7 * i) % VOCAB, (3 * i + 1) % VOCAB] for i in range(8)]
ENDING = Ending(frozenset(), TOKENS)


def model(dtype: str, *, seed: int = 0) -> CausalLM:
    shape = {"vocab_size": VOCAB, "hidden_size": 24, "intermediate_size": 40}
    spec = ModelSpec.from_config(tiny_config(**shape))
    return build_model(spec, WeightsInMemory(confident_weights(spec, seed=seed)), dtype=dtype)


class HalfRightTree(NoDrafter):
    """Trees along the true text that branch off it: two levels right, the third wrong, siblings beside each."""

    def __init__(self, truth: Sequence[int]) -> None:
        self.truth = truth

    def propose(self, context: Sequence[int], *, max_nodes: int, max_depth: int) -> DraftTree:
        tokens: list[int] = []
        parents: list[int] = []
        parent = -1
        for level in range(min(3, max_depth)):
            at = len(context) + level
            true = self.truth[at] if at < len(self.truth) and level < 2 else -1
            wrong = [(31 + level + len(context)) % VOCAB, (17 + level + 3 * len(context)) % VOCAB]
            tokens += [wrong[0], true if true >= 0 else wrong[1], wrong[1]]
            parents += [parent] * 3
            parent = len(tokens) - 2
        return DraftTree.from_lists(tokens, parents)


def answer(target: CausalLM, drafter: NoDrafter, prompt: Sequence[int], sampler: Sampler) -> Generation:
    seat = Seat(target, target.new_cache(CONTEXT + MAX_NODES))
    rule = StopRule(start=len(prompt), stop_ids=frozenset(), max_new_tokens=TOKENS, context_limit=CONTEXT)
    return generation(list(generate(Speculator(drafter, seat.verifier(sampler)), list(prompt), rule)))


def generation(ids: Sequence[int], *, reason: str = "length", text: str = "") -> Generation:
    return Generation(
        text=text,
        token_ids=tuple(ids),
        tokens_out=len(ids),
        finish_reason=reason,
        prompt_tokens=3,
        reused_tokens=0,
        ttft_s=None,
        decode_tps=None,
        e2e_tps=None,
        accept_len=None,
        accept_len_inner=None,
        rounds=0,
        draft_ms=0.0,
        intermediate_ms=0.0,
        verify_ms=0.0,
        overhead_ms=0.0,
        pipeline="x",
        seed=0,
    )


def judged(dtype: str, sampler: Sampler, plant: Callable[[pytest.MonkeyPatch], None] | None) -> list[Verdict]:
    """Verdicts on trees over a target in `dtype`, a fault planted for the trees alone."""
    target, precise = model(dtype), model("float32" if dtype == "bfloat16" else "float64")
    plain = [answer(target, NoDrafter(), prompt, sampler) for prompt in PROMPTS]
    error = max(rounding_error(target, precise, p, a.token_ids, sampler) for p, a in zip(PROMPTS, plain, strict=True))
    judge = Judge(precise, tolerance=tolerance_for(dtype, error))
    with pytest.MonkeyPatch.context() as patch:
        if plant is not None:
            plant(patch)
        others = [
            answer(target, HalfRightTree([*prompt, *a.token_ids]), prompt, sampler)
            for prompt, a in zip(PROMPTS, plain, strict=True)
        ]
    return [
        judge.compare(prompt, a, b, sampler=sampler, ending=ENDING)
        for prompt, a, b in zip(PROMPTS, plain, others, strict=True)
    ]


def corrupted_row(patch: pytest.MonkeyPatch) -> None:
    """After a rejection the row of the last token kept is that of the draft that was refused."""
    original = Verifier.verify

    def verify(self: Verifier, context: Sequence[int], tree: DraftTree) -> list[int]:
        decided = original(self, context, tree)
        if len(tree) and len(decided) <= int(tree.depths().max()) + 1:
            end = self.cache.length
            self.cache.k[:, :, end - 1], self.cache.v[:, :, end - 1] = self.cache.k[:, :, end], self.cache.v[:, :, end]
        return decided

    patch.setattr(Verifier, "verify", verify)


def wrong_bonus_token(patch: pytest.MonkeyPatch) -> None:
    """Once in an answer the token after the draft is the next id."""
    original = Verifier.verify

    def verify(self: Verifier, context: Sequence[int], tree: DraftTree) -> list[int]:
        decided = original(self, context, tree)
        if 20 <= len(context) + len(decided) < 24:
            decided[-1] = (decided[-1] + 1) % VOCAB
        return decided

    patch.setattr(Verifier, "verify", verify)


def mask_off_by_one(patch: pytest.MonkeyPatch) -> None:
    """Every node sees the ancestors of the node before it, and itself."""
    original = DraftTree.ancestor_mask

    def ancestor_mask(self: DraftTree) -> torch.Tensor:
        mask = original(self)
        shifted = torch.cat([mask[:1], mask[:-1]]) | torch.eye(len(self), dtype=torch.bool)
        return mask if self.is_chain else shifted

    patch.setattr(DraftTree, "ancestor_mask", ancestor_mask)


SAMPLERS = [
    Sampler(),
    Sampler(temperature=1.0, seed=4),
    Sampler(temperature=0.8, top_k=6, top_p=0.9, seed=4),
    Sampler(temperature=0.7, repetition_penalty=1.3, seed=4, vocab=VOCAB - 2),
]


@pytest.mark.parametrize("sampler", SAMPLERS, ids=str)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_without_a_fault_nothing_is_a_bug(dtype: str, sampler: Sampler) -> None:
    kinds = [verdict.kind for verdict in judged(dtype, sampler, None)]
    assert "bug" not in kinds
    if dtype == "float32":
        assert kinds == ["exact"] * len(PROMPTS)


@pytest.mark.parametrize("plant", [corrupted_row, wrong_bonus_token, mask_off_by_one])
@pytest.mark.parametrize("sampler", SAMPLERS[:3], ids=str)
def test_a_planted_fault_is_a_bug_and_never_a_tie(plant: Callable[..., None], sampler: Sampler) -> None:
    verdicts = judged("float32", sampler, plant)
    kinds = [verdict.kind for verdict in verdicts]
    assert kinds.count("bug") >= 6
    assert "tie" not in kinds
    bug = next(verdict for verdict in verdicts if verdict.kind == "bug")
    ways = ("no choice of the target", "removed by top-k or top-p")
    assert bug.reason in [f"token {bug.shortfall_at} is {way}" for way in ways[: 2 if sampler.top_k else 1]]
    assert bug.first_difference <= bug.shortfall_at
    assert bug.shortfall > 0.01


@pytest.mark.parametrize("plant", [corrupted_row, wrong_bonus_token, mask_off_by_one])
def test_a_planted_fault_is_a_bug_in_16_bits_too(plant: Callable[..., None]) -> None:
    kinds = [verdict.kind for verdict in judged("bfloat16", Sampler(), plant)]
    assert kinds.count("bug") >= 6
    assert "tie" not in kinds


def test_a_tie_is_told_from_a_bug_by_what_follows_too() -> None:
    """A tie is followed by the target's own choices; one wrong token after it makes the answer a bug."""
    target = precise = model("float64")
    judge = Judge(precise, tolerance=0.5)
    plain = answer(target, NoDrafter(), PROMPTS[1], Sampler())
    _, margins = judge.shortfalls(PROMPTS[1], plain.token_ids, Sampler())
    at = int(margins[:-8].argmin())  # the nearest thing to a tie in this answer
    tolerance = float(margins[at]) + 1e-3
    second = second_best(precise, [*PROMPTS[1], *plain.token_ids[:at]])
    rest = answer(target, NoDrafter(), [*PROMPTS[1], *plain.token_ids[:at], second], Sampler())
    other = generation([*plain.token_ids[:at], second, *rest.token_ids][:TOKENS])
    verdict = Judge(precise, tolerance=tolerance).compare(PROMPTS[1], plain, other, sampler=Sampler(), ending=ENDING)
    assert (verdict.kind, verdict.first_difference, verdict.pipeline_token) == ("tie", at, second)
    assert verdict.margin == pytest.approx(float(margins[at]))
    assert verdict.plain_token == plain.token_ids[at]
    spoiled = replace(other, token_ids=(*other.token_ids[:-1], (other.token_ids[-1] + 1) % VOCAB))
    verdict = Judge(precise, tolerance=tolerance).compare(PROMPTS[1], plain, spoiled, sampler=Sampler(), ending=ENDING)
    assert (verdict.kind, verdict.shortfall_at) == ("bug", TOKENS - 1)


def second_best(target: CausalLM, context: Sequence[int]) -> int:
    verifier = Seat(target, target.new_cache(CONTEXT + MAX_NODES)).verifier(Sampler())
    best = verifier.prefill(context)[0]
    verifier.rollback(0)
    with torch.inference_mode():
        from specq.spec.tree import chain

        logits = target.forward(chain(context), verifier.cache).logits[-1]
    assert int(logits.argmax()) == best
    return int(logits.topk(2).indices[1])


def test_a_wrong_token_of_plain_decoding_is_a_bug_of_plain() -> None:
    precise = model("float64")
    right = answer(precise, NoDrafter(), PROMPTS[0], Sampler())
    wrong = replace(right, token_ids=(*right.token_ids[:5], (right.token_ids[5] + 1) % VOCAB, *right.token_ids[6:]))
    verdict = Judge(precise, tolerance=1e-5).compare(PROMPTS[0], wrong, right, sampler=Sampler(), ending=ENDING)
    assert (verdict.kind, verdict.reason) == ("bug", "token 5 of plain decoding is no choice of the target")


def test_scores_that_are_no_numbers_excuse_nothing() -> None:
    precise = model("float64")
    plain = answer(precise, NoDrafter(), PROMPTS[0], Sampler())
    other = answer(precise, NoDrafter(), PROMPTS[1], Sampler())
    with torch.no_grad():
        precise.norm.fill_(math.nan)
    verdict = Judge(precise, tolerance=0.5).compare(PROMPTS[0], plain, other, sampler=Sampler(), ending=ENDING)
    assert verdict.kind == "bug"
    assert verdict.record()["shortfall"] is None


def test_a_token_that_top_k_removes_is_a_bug_that_json_can_hold() -> None:
    target, sampler = model("float64"), Sampler(temperature=0.5, top_k=2, seed=1)
    plain = answer(target, NoDrafter(), PROMPTS[0], sampler)
    other = generation([*plain.token_ids[:-1], (plain.token_ids[-1] + 9) % VOCAB])
    verdict = Judge(target, tolerance=1e-5).compare(PROMPTS[0], plain, other, sampler=sampler, ending=ENDING)
    assert (verdict.kind, verdict.reason) == ("bug", f"token {TOKENS - 1} is removed by top-k or top-p")
    assert json.loads(json.dumps(verdict.record(), allow_nan=False))["shortfall"] is None


def test_stops_and_text_need_no_scores() -> None:
    plain = generation([1, 2, 3], reason="stop", text="abc")
    assert same_answer(plain, plain) == Verdict("exact", 3)
    assert same_answer(plain, replace(plain, text="ab")).kind == "bug"
    assert same_answer(plain, replace(plain, finish_reason="length")).kind == "bug"
    longer = same_answer(plain, generation([1, 2, 3, 4]))
    assert (longer.kind, longer.reason, longer.first_difference) == ("bug", "ends after 4 tokens, plain after 3", 3)
    assert same_answer(plain, generation([1, 2])).kind == "bug"
    assert same_answer(plain, generation([1, 2, 4])) is None


@pytest.mark.parametrize(
    ("ids", "reason", "broken"),
    [
        ([1, 2, 9], "stop", None),
        ([1, 2, 3, 4], "length", None),
        ([1, 9, 2], "stop", "goes on after the stop id at token 1"),
        ([1, 2, 3, 4, 5], "length", "has 5 tokens, more than the 4 allowed"),
        ([1, 2], "length", "ends for its length after 2 of 4 tokens"),
    ],
)
def test_endings(ids: list[int], reason: str, broken: str | None) -> None:
    assert Ending(frozenset({9}), 4).broken(generation(ids, reason=reason)) == broken


def rows(*values: float) -> torch.Tensor:
    return torch.tensor([values], dtype=torch.float64)


def short(logits: torch.Tensor, chosen: int, sampler: Sampler, tolerance: float = 0.0) -> float:
    return float(shortfall(logits, torch.tensor([5]), torch.tensor([chosen]), sampler, tolerance=tolerance)[0])


def test_the_shortfall_is_in_logits_below_the_best() -> None:
    assert short(rows(1.0, 3.0, 2.5), 1, Sampler()) == 0.0
    assert short(rows(1.0, 3.0, 2.5), 2, Sampler()) == pytest.approx(0.5)


def test_what_a_filter_removes_is_no_choice_unless_rounding_decides() -> None:
    logits = rows(3.0, 1.001, 1.0, -9.0)
    for sampler in (Sampler(temperature=1.0, top_k=2), Sampler(temperature=1.0, top_p=0.85)):
        assert short(logits, 3, sampler, 0.01) == math.inf
        assert short(logits, 2, sampler, 1e-6) == math.inf
        assert short(logits, 2, sampler, 0.01) < math.inf
        assert short(logits, 1, sampler, 1e-6) < math.inf


@pytest.mark.parametrize("settings", [{}, {"top_k": 5}, {"top_p": 0.7}, {"top_k": 8, "top_p": 0.8}])
def test_the_sampler_never_falls_short_and_others_do(settings: dict) -> None:
    draws = torch.Generator().manual_seed(0)
    logits = 2 * torch.randn(200, 16, generator=draws, dtype=torch.float64)
    positions = torch.arange(200)
    sampler = Sampler(temperature=0.9, seed=8, **settings)
    chosen = sampler(logits, positions)
    assert float(shortfall(logits, positions, chosen, sampler, tolerance=1e-9).max()) < 1e-5  # noise is fp32
    for other in range(1, 16):
        wrong = (chosen + other) % 16
        assert float(shortfall(logits, positions, wrong, sampler, tolerance=1e-9).min()) > 1e-5


def test_tolerances_follow_the_error_within_what_a_precision_explains() -> None:
    assert tolerance_for("float32", 0.0) == 1e-5
    assert tolerance_for("float32", 3e-5) == 6e-5
    assert tolerance_for("float32", 1.0) == 1e-2
    assert tolerance_for("bfloat16", 0.3) == 0.6
    assert tolerance_for("float16", 9.0) == 1.5


def test_the_rounding_error_is_larger_in_fewer_bits() -> None:
    ids = answer(model("float64"), NoDrafter(), PROMPTS[0], Sampler()).token_ids
    errors = [rounding_error(model(d), model("float64"), PROMPTS[0], ids, Sampler()) for d in ("float32", "bfloat16")]
    assert 0 < errors[0] < 1e-4
    assert 1e-3 < errors[1] < 2
    assert rounding_error(model("float64"), model("float64"), PROMPTS[0], ids, Sampler()) < 1e-12
