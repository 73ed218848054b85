"""Text of an answer apart from the thinking some models put before it, between <think> and </think>."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from specq.tokenizer import Tokenizer

OPEN, CLOSE = "<think>", "</think>"


class Piece(NamedTuple):
    """A stretch of text, and whether it belongs to the thinking (its tags do)."""

    text: str
    is_thinking: bool


class ThinkingSplitter:
    """Streamed text as pieces; a tag may come in any number of parts, and nothing else is ever held back."""

    def __init__(self, *, is_inside: bool = False) -> None:
        self.is_inside = is_inside
        self._held = ""

    def push(self, text: str) -> list[Piece]:
        """The pieces that are certain with this text."""
        self._held += text
        pieces: list[Piece] = []
        while True:
            tag = CLOSE if self.is_inside else OPEN
            before, found, after = self._held.partition(tag)
            if not found:
                break
            if self.is_inside:
                pieces.append(Piece(before + tag, True))
            else:
                pieces += [Piece(before, False), Piece(tag, True)]
            self._held, self.is_inside = after, not self.is_inside
        certain = len(self._held) - _partial_tag(self._held, tag)
        pieces.append(Piece(self._held[:certain], self.is_inside))
        self._held = self._held[certain:]
        return [piece for piece in pieces if piece.text]

    def flush(self) -> list[Piece]:
        """What was held back because it might have become a tag."""
        held, self._held = self._held, ""
        return [Piece(held, self.is_inside)] if held else []


def without_thinking(text: str, *, is_inside: bool = False) -> str:
    """The text less its thinking, closed or not, and less the space that separated the two."""
    splitter = ThinkingSplitter(is_inside=is_inside)
    pieces = [*splitter.push(text), *splitter.flush()]
    said = "".join(piece.text for piece in pieces if not piece.is_thinking)
    return said.lstrip() if any(piece.is_thinking for piece in pieces) else said


def opens_thinking(tokenizer: Tokenizer, prompt_ids: Sequence[int]) -> bool:
    """Whether the prompt ends inside a thinking section that its template opened."""
    return tokenizer.decode(prompt_ids[-8:], skip_special=False).rstrip().endswith(OPEN)


def _partial_tag(text: str, tag: str) -> int:
    """Length of the longest end of the text that begins the tag."""
    return next((n for n in range(min(len(tag) - 1, len(text)), 0, -1) if tag.startswith(text[-n:])), 0)
