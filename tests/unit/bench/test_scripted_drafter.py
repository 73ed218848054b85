"""Stops, caps and streams wherever a block ends: a scripted model and drafts that are right for a scripted length."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from specq.models.causal_lm import Nodes, Output
from specq.recipe import Recipe, Sampling
from specq.spec.drafters import NoDrafter
from specq.spec.pipelines import PIPELINES, PipelineKind
from specq.spec.session import Generation, Pipeline, Stream
from specq.spec.speculator import Speculator
from specq.spec.tree import MAX_NODES, DraftTree, chain
from specq.spec.verifier import Verifier
from specq.tokenizer import Tokenizer

CONTEXT = 200
PROMPT = [1, 2, 3]
TEXT = "the sea 👩‍👩‍👧 said: 삼겹살, ďáb! and then it ended."
BLOCKS = [(first, length) for length in range(1, 9) for first in range(length + 1)]
"""Right tokens of the first draft and of all later ones: each offset of a block falls on each token of the text."""


class Slots:
    """A cache that only counts."""

    def __init__(self) -> None:
        self.length, self.max_len = 0, CONTEXT + MAX_NODES

    def keep(self, path: Sequence[int]) -> None:
        self.length += len(path)

    def truncate(self, n: int) -> None:
        assert 0 <= n <= self.length
        self.length = n


class ScriptedModel:
    """Says the token of a script at every position, whatever was drafted."""

    device = torch.device("cpu")

    def __init__(self, script: Sequence[int], vocab: int) -> None:
        self.script, self.vocab = torch.tensor(script), vocab
        self.spec = SimpleNamespace(vocab=vocab)

    def forward(self, nodes: Nodes, cache: Slots, *, rows: slice | None = None, act: str = "a16") -> Output:
        positions = cache.length + nodes.depths().long()
        logits = torch.nn.functional.one_hot(self.script[positions + 1], self.vocab).float()
        return Output(logits[rows or slice(None)], torch.empty(len(positions), 0), positions)


class ScriptedDrafter(NoDrafter):
    """The script as far as a block is to be right, then a wrong token; a tree has a wrong sibling at every level."""

    def __init__(self, script: Sequence[int], blocks: Callable[[int], int], *, is_tree: bool) -> None:
        self.script, self.blocks, self.is_tree, self.rounds = script, blocks, is_tree, 0

    def propose(self, context: Sequence[int], *, max_nodes: int, max_depth: int) -> DraftTree:
        length = self.blocks(self.rounds)
        self.rounds += 1
        start = len(context)
        right = [*self.script[start : start + length], 0][:max_depth]
        if not self.is_tree:
            return chain(right)
        tokens, parents, parent = [], [], -1
        for token in right:
            tokens += [5, token]
            parents += [parent, parent]
            parent = len(tokens) - 1
        return DraftTree.from_lists(tokens, parents)


@pytest.fixture
def script(tokenizer: Tokenizer) -> list[int]:
    """The prompt, the text, its end, and text after the end that must never come out."""
    ids = tokenizer.encode(TEXT, special_tokens=False)
    assert len(ids) > 40
    return [*PROMPT, *ids, min(tokenizer.eos_ids), *tokenizer.encode("never said " * 20, special_tokens=False)]


@pytest.fixture(params=["chain", "tree"])
def stream(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tokenizer: Tokenizer, script: list[int]
) -> Callable[..., Stream]:
    """Streams the script with drafts right for (first, later) tokens."""

    def make(first: int, later: int, *, script: list[int] = script, context: int = CONTEXT, **options: Any) -> Stream:
        model, cache = ScriptedModel(script, tokenizer.size), Slots()

        def build(parts: Any, sampler: Any, recipe: Recipe) -> Speculator:
            drafter = ScriptedDrafter(script, lambda n: later if n else first, is_tree=request.param == "tree")
            return Speculator(drafter, Verifier(model, cache, sampler))  # type: ignore[arg-type]

        monkeypatch.setitem(PIPELINES, "scripted", PipelineKind(build, (), "follows a script"))
        seat = SimpleNamespace(model=model, cache=cache)
        parts = SimpleNamespace(target=seat, roles={"target"}, rollback=lambda n: cache.truncate(min(n, cache.length)))
        pipeline = Pipeline(
            recipe=Recipe.model_validate({"target": "scripted"}),
            parts=parts,  # type: ignore[arg-type]
            tokenizer=tokenizer,
            context=context,
            defaults=Sampling(temperature=0.0),
            models={},
        )
        pipeline.use("scripted")
        return pipeline.stream(PROMPT, **options)

    return make


def read(stream: Stream) -> tuple[str, Generation]:
    """The text put together from the events, checked against the record, and the record."""
    events = list(stream)
    result = stream.result
    text = "".join(event.text for event in events)
    assert text == result.text
    assert [token for event in events for token in event.token_ids] == list(result.token_ids)
    assert result.tokens_out == len(result.token_ids)
    return text, result


@pytest.mark.parametrize(("first", "later"), BLOCKS)
def test_a_stop_id_ends_the_answer_at_every_block_offset(stream, script, first: int, later: int) -> None:
    text, result = read(stream(first, later))
    assert (text, result.finish_reason) == (TEXT, "stop")
    end = script.index(result.token_ids[-1])
    assert list(result.token_ids) == script[len(PROMPT) : end + 1]


@pytest.mark.parametrize("length", [1, 3, 8])
def test_whichever_token_is_the_stop_id(stream, script, tokenizer, length: int, monkeypatch) -> None:
    for at in range(len(PROMPT), len(PROMPT) + 24):
        monkeypatch.setattr(tokenizer, "eos_ids", frozenset({script[at]}))
        expected = script[len(PROMPT) : script.index(script[at], len(PROMPT)) + 1]
        text, result = read(stream(at % (length + 1), length))
        assert list(result.token_ids) == expected
        assert result.finish_reason == "stop"
        assert text == tokenizer.decode(expected[:-1])


@pytest.mark.parametrize(("first", "later"), BLOCKS)
def test_a_stop_text_ends_it_before_the_text_at_every_block_offset(stream, first: int, later: int) -> None:
    for stop in ("said", ": 삼", "겹살, ď", "👩‍👧", "."):
        text, result = read(stream(first, later, stop=["never", stop]))
        assert (text, result.finish_reason) == (TEXT[: TEXT.index(stop)], "stop")


@pytest.mark.parametrize(("first", "later"), BLOCKS)
def test_every_cap_is_exact_at_every_block_offset(stream, script, tokenizer, first: int, later: int) -> None:
    for cap in (*range(1, 12), 20, 39):
        text, result = read(stream(first, later, max_new_tokens=cap))
        assert list(result.token_ids) == script[len(PROMPT) : len(PROMPT) + cap]
        assert result.finish_reason == "length"
        assert text == tokenizer.decode(result.token_ids)


@pytest.mark.parametrize(("first", "later"), BLOCKS)
def test_the_end_of_the_context_is_a_cap(stream, script, first: int, later: int) -> None:
    for context in (4, 5, 9, 16):
        _, result = read(stream(first, later, context=context))
        assert list(result.token_ids) == script[len(PROMPT) : context]
        assert result.finish_reason == "length"


@pytest.mark.parametrize(("first", "later"), BLOCKS)
def test_text_comes_in_whole_characters_at_every_block_offset(stream, first: int, later: int) -> None:
    pieces = [event.text for event in stream(first, later)]
    assert "".join(pieces) == TEXT
    assert all("\ufffd" not in piece for piece in pieces)


@pytest.mark.parametrize(("first", "later"), BLOCKS)
def test_closing_at_every_token_leaves_that_much(stream, script, tokenizer, first: int, later: int) -> None:
    for count in range(14):
        open_stream = stream(first, later)
        for _ in range(count):
            next(open_stream)
        open_stream.close()
        result = open_stream.result
        assert list(result.token_ids) == script[len(PROMPT) : len(PROMPT) + count]
        assert result.finish_reason == "interrupted"
        assert result.text == tokenizer.decode(result.token_ids)
        assert list(open_stream) == []


@pytest.mark.parametrize(("first", "later"), BLOCKS)
def test_forced_lengths_run_past_stops_and_are_exact(stream, script, first: int, later: int) -> None:
    count = script.index(min(set(script[40:]) - set(script[:40]), default=script[-1])) + 10
    _, result = read(stream(first, later, max_new_tokens=count, ignore_stop_ids=True))
    assert list(result.token_ids) == script[len(PROMPT) : len(PROMPT) + count]
    assert result.finish_reason == "length"


@pytest.mark.parametrize(("first", "later"), BLOCKS)
def test_accept_length_counts_the_targets_own_token(stream, first: int, later: int) -> None:
    _, result = read(stream(first, later, max_new_tokens=2 + first + 4 * (later + 1)))
    assert result.rounds == 5
    assert result.accept_len == pytest.approx((first + 1 + 4 * (later + 1)) / 5)


def test_a_stop_text_in_what_follows_the_last_whole_character(stream, tokenizer) -> None:
    """The last id of a cap ends inside a character: what is held comes out as one replacement, once."""
    ids = tokenizer.encode("ab삼", special_tokens=False)
    text, result = read(stream(2, 2, script=[*PROMPT, *ids, *ids], max_new_tokens=4))
    assert text == tokenizer.decode(result.token_ids) == "ab\ufffd"
