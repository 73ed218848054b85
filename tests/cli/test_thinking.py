"""Thinking apart from the answer, however the text was cut while it streamed."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from specq.cli.thinking import Piece, ThinkingSplitter, without_thinking

TEXT = st.lists(st.sampled_from(["<think>", "</think>", "<", "</", "a", "thin", "k>", "\n", "é"])).map("".join)


def split(text: str, cuts: list[int], *, is_inside: bool = False) -> list[Piece]:
    splitter = ThinkingSplitter(is_inside=is_inside)
    bounds = [0, *sorted(cut % (len(text) + 1) for cut in cuts), len(text)]
    parts = [text[a:b] for a, b in itertools.pairwise(bounds)]
    pieces = [piece for part in parts for piece in splitter.push(part)]
    return [*pieces, *splitter.flush()]


def by_character(pieces: list[Piece]) -> list[tuple[str, bool]]:
    return [(char, piece.is_thinking) for piece in pieces for char in piece.text]


@given(TEXT, st.lists(st.integers(0, 99)), st.booleans())
def test_cutting_the_stream_changes_nothing(text: str, cuts: list[int], is_inside: bool) -> None:
    whole = by_character(split(text, [], is_inside=is_inside))
    assert by_character(split(text, cuts, is_inside=is_inside)) == whole
    assert "".join(char for char, _ in whole) == text


def test_only_what_may_become_a_tag_is_held_back() -> None:
    splitter = ThinkingSplitter()
    assert splitter.push("a <thi") == [Piece("a ", False)]
    assert splitter.push("s") == [Piece("<this", False)]


def test_tags_belong_to_the_thinking() -> None:
    assert split("<think>why</think>so", []) == [
        Piece("<think>", True),
        Piece("why</think>", True),
        Piece("so", False),
    ]


def test_without_thinking_leaves_the_answer_alone() -> None:
    assert without_thinking("<think>why</think>\n\nso") == "so"
    assert without_thinking("why</think>\nso", is_inside=True) == "so"
    assert without_thinking("<think>why") == ""
    assert without_thinking("  so") == "  so"
