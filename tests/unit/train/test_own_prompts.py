"""Prompts in the user's place begin where the template lets the user begin, and only whole and new ones count."""

from __future__ import annotations

import pytest
from factories import write_tokenizer

from specq.errors import UsageError
from specq.tokenizer import Tokenizer
from specq.train.data import Sequences
from specq.train.own_prompts import finished_prompts, user_opening


def test_a_chat_is_its_opening_the_text_and_an_end(tmp_path) -> None:
    tokenizer = Tokenizer.load(write_tokenizer(tmp_path))
    opening, ends = user_opening(tokenizer)
    chat = tokenizer.encode_chat([{"role": "user", "content": "hello"}])
    assert chat[: len(opening)] == opening
    rest = chat[len(opening) :]
    text = rest[: next(place for place, token in enumerate(rest) if token in ends)]
    assert tokenizer.decode(text) == "hello"


def test_unfinished_empty_repeated_and_known_prompts_are_left_out(tmp_path) -> None:
    tokenizer = Tokenizer.load(write_tokenizer(tmp_path))
    end = 1
    texts = ["one", "two", "one", "known", " "]
    ids = [[7, *tokenizer.encode(text, special_tokens=False), end] for text in texts]
    ids.append([7, *tokenizer.encode("unfinished", special_tokens=False)])
    written = Sequences(ids, [1] * len(ids))
    assert finished_prompts(tokenizer, written, {end}, without=["known"]) == ["one", "two"]


def test_a_base_model_is_told_that_it_writes_none(tmp_path) -> None:
    tokenizer = Tokenizer.load(write_tokenizer(tmp_path, chat_template=None))
    with pytest.raises(UsageError, match="without a chat template writes no prompts"):
        user_opening(tokenizer)
