"""Rates from rounds, expectations from rates, smaller trees out of larger ones."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specq.errors import UsageError
from specq.profile.acceptance import MAX_BY_HAND, Rates, TreeRound, count_rates, parse_by_hand, tree_rates
from specq.profile.cost import Tree


def test_expected_tokens_are_the_sum_of_the_chances_to_get_so_far() -> None:
    rates = Rates((0.9, 0.5, 0.5), 100)
    assert rates.chances(2) == pytest.approx([0.1, 0.45, 0.45])
    assert rates.accepted(3) == pytest.approx(0.9 + 0.45 + 0.225)


@given(st.lists(st.floats(0.0, 1.0), min_size=1, max_size=12), st.integers(1, 12))
def test_chances_are_a_distribution(rates: list[float], length: int) -> None:
    chances = Rates(tuple(rates)).chances(min(length, len(rates)))
    assert sum(chances) == pytest.approx(1.0)
    assert all(chance >= 0 for chance in chances)


def test_counted_rates_give_back_those_of_the_process() -> None:
    draws, truth, length = random.Random(0), (0.9, 0.7, 0.6, 0.8), 4
    accepted = []
    for _ in range(6000):
        count = 0
        while count < length and draws.random() < truth[count]:
            count += 1
        accepted.append(count)
    rates = count_rates(accepted, [length] * len(accepted))
    assert rates.rates == pytest.approx(truth, abs=0.03)
    mean = sum(accepted) / len(accepted)
    assert rates.accepted(length) == pytest.approx(mean)
    assert 0.02 < rates.error(length) < 0.06  # 1.96 * 1.5 / sqrt(6000)


def test_drafts_that_ended_early_do_not_count_against_later_positions() -> None:
    assert count_rates([3] * 30 + [1] * 30, [3] * 30 + [1] * 30).rates == (1.0, 1.0, 1.0)


def test_positions_hardly_ever_reached_share_one_rate_that_is_not_above_the_last() -> None:
    accepted = [0] * 60 + [1] * 30 + [4] * 3
    rates = count_rates(accepted, [4] * 93).rates
    assert rates[:2] == pytest.approx((33 / 93, 3 / 33))
    assert rates[2] == rates[3] == rates[1]


def test_rates_given_by_hand_have_no_error_and_go_on_with_the_last() -> None:
    given_ = parse_by_hand(["sequence=0.9,0.8", "inner=0.5"])
    assert given_["sequence"].rates == (0.9, *[0.8] * (MAX_BY_HAND - 1))
    assert given_["inner"].error(3) == 0.0


@pytest.mark.parametrize("text", ["sequence", "sequence=", "sequence=1.2", "sequence=a", "tree=0.5", "sequence=-0.1"])
def test_other_forms_are_refused_with_an_example(text: str) -> None:
    with pytest.raises(UsageError) as error:
        parse_by_hand([text])
    assert text in error.value.message
    assert "--acceptance sequence=0.85,0.8" in str(error.value.hint)


def test_a_smaller_tree_accepts_what_its_best_nodes_hold() -> None:
    # nodes best first: level 1, level 1, level 2 under the first, level 3 under that, level 1
    round_ = TreeRound((1, 1, 2, 3, 1), (0, 2, 3))
    trees = [Tree(6, 3, 3), Tree(4, 3, 3), Tree(3, 3, 3), Tree(4, 2, 3), Tree(2, 1, 3)]
    rates = tree_rates([round_] * 30, trees)
    accepted = {tree: rates[tree].accepted(tree.depth) for tree in trees}
    assert accepted == {Tree(6, 3, 3): 3, Tree(4, 3, 3): 2, Tree(3, 3, 3): 1, Tree(4, 2, 3): 2, Tree(2, 1, 3): 1}


def test_without_its_deep_nodes_the_others_move_up() -> None:
    round_ = TreeRound((1, 2, 3, 1), (3,))
    rates = tree_rates([round_] * 30, [Tree(3, 1, 2), Tree(4, 3, 2)])
    assert rates[Tree(3, 1, 2)].accepted(1) == 1.0
    assert rates[Tree(4, 3, 2)].accepted(3) == 0.0
