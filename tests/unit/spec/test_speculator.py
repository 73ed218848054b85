"""The stop rule and the drafters without a model."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from specq.spec.drafters import PromptLookup
from specq.spec.speculator import StopRule


def run_rule(rule: StopRule, start: list[int], tokens: list[int]) -> list[int]:
    """The tokens a decode loop would give out under this rule."""
    context, out = list(start), []
    for token in tokens:
        if rule(context):
            break
        context.append(token)
        out.append(token)
    rule(context)
    return out


WORDS = {1: "al", 2: "pha", 3: " be", 4: "ta ", 5: "gam", 6: "ma"}


def test_a_stop_string_that_spans_tokens_ends_the_text_before_it() -> None:
    rule = StopRule(
        start=2, stop_ids=frozenset(), context_limit=100, stop_strings=["beta"], read_text=WORDS.__getitem__
    )
    assert run_rule(rule, [0, 0], [1, 2, 3, 4, 5, 6]) == [1, 2, 3, 4]
    assert (rule.reason, rule.text) == ("stop", "alpha ")


def test_text_that_may_begin_a_stop_string_is_held_back() -> None:
    rule = StopRule(
        start=0,
        stop_ids=frozenset(),
        context_limit=100,
        stop_strings=["beta", "ma!"],
        read_text=WORDS.__getitem__,
    )
    run_rule(rule, [], [1, 2, 3])
    assert rule.text == "alpha be"
    assert rule.held_back() == 2
    run_rule(rule, [1, 2, 3], [5])
    assert rule.text == "alpha begam"
    assert rule.held_back() == 1


@given(st.integers(1, 6), st.integers(1, 20))
def test_the_cap_and_the_context_limit_are_exact(cap: int, limit: int) -> None:
    rule = StopRule(start=3, stop_ids=frozenset(), max_new_tokens=cap, context_limit=3 + limit)
    assert run_rule(rule, [9, 9, 9], [1] * 50) == [1] * min(cap, limit)
    assert rule.reason == "length"


def test_any_of_several_stop_ids_ends_and_is_not_text() -> None:
    for stop_id in (7, 8):
        rule = StopRule(
            start=0, stop_ids=frozenset({7, 8}), context_limit=50, read_text=lambda t: WORDS.get(t, "<eos>")
        )
        assert run_rule(rule, [], [1, 2, stop_id, 3]) == [1, 2, stop_id]
        assert (rule.reason, rule.text) == ("stop", "alpha")


def brute_force_lookup(context: list[int], draft: int, max_ngram: int, min_ngram: int) -> list[int]:
    for size in range(min(max_ngram, len(context) - 1), min_ngram - 1, -1):
        for end in range(len(context) - 1, size - 1, -1):
            if context[end - size : end] == context[-size:]:
                return context[end : end + draft]
    return []


@given(
    st.lists(st.integers(0, 2), min_size=1, max_size=30),
    st.integers(1, 6),
    st.integers(1, 4),
    st.integers(1, 3),
)
def test_lookup_finds_the_last_occurrence_of_the_longest_ending(
    context: list[int], draft: int, max_ngram: int, min_ngram: int
) -> None:
    drafter = PromptLookup(draft_length=draft, max_ngram=max(max_ngram, min_ngram), min_ngram=min_ngram)
    got = drafter.propose(context, max_nodes=60, max_depth=60)
    assert got.tokens.tolist() == brute_force_lookup(context, draft, max(max_ngram, min_ngram), min_ngram)
    assert len(drafter.propose(context, max_nodes=60, max_depth=0)) == 0
