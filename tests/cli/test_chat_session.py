"""The turns of a chat: what the next prompt is made of, stopping, taking back, dropping, saving."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
from factories import tiny_model, write_tokenizer

from specq.cli.chat_session import ChatSession, Turn
from specq.cli.options import Overflow, Thinking
from specq.errors import UsageError
from specq.recipe import Sampling, build_recipe
from specq.spec.pipelines import Parts, Seat
from specq.spec.session import Pipeline
from specq.spec.tree import MAX_NODES
from specq.tokenizer import Tokenizer

MODEL = tiny_model()


@pytest.fixture(scope="module")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture
def session(tokenizer_folder: Path):
    def make(*, context: int = 400, max_new_tokens: int | None = 12, **options) -> ChatSession:
        pipeline = Pipeline(
            recipe=build_recipe({"target": "tiny"}),
            parts=Parts(target=Seat(MODEL, MODEL.new_cache(context + MAX_NODES))),
            tokenizer=Tokenizer.load(tokenizer_folder),
            context=context,
            defaults=Sampling.model_validate({"temperature": 0.0}),
            models={"target": ("tiny", None)},
        )
        return ChatSession(pipeline, max_new_tokens=max_new_tokens, **options)

    return make


def say(session: ChatSession, text: str) -> str:
    return "".join(session.ask(text))


def prompt_text(session: ChatSession, text: str) -> str:
    """What the model reads when `text` is said next."""
    return session.pipeline.tokenizer.decode(session._fitting_prompt(text), skip_special=False)


def test_the_next_prompt_holds_every_turn(session) -> None:
    chat = session(system="be brief")
    answer = say(chat, "hello")
    assert chat.turns == [Turn("hello", answer)]
    assert prompt_text(chat, "and now?") == (
        "<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\nhello<|im_end|>\n"
        f"<|im_start|>assistant\n{answer}<|im_end|>\n<|im_start|>user\nand now?<|im_end|>\n<|im_start|>assistant\n"
    )


def test_a_turn_reuses_what_the_cache_holds_of_the_chat(session) -> None:
    chat = session()
    say(chat, "hello")
    say(chat, "and now?")
    first, second = chat.results
    assert first.reused_tokens == 0
    assert second.reused_tokens >= first.prompt_tokens


def test_a_stopped_answer_stays_as_far_as_it_was_shown(session) -> None:
    chat = session(max_new_tokens=100)
    pieces = chat.ask("hello")
    shown = "".join(itertools.islice(pieces, 3))
    pieces.close()
    assert chat.turns == [Turn("hello", chat.results[-1].text)]
    assert chat.turns[0].answer.startswith(shown)
    assert chat.results[-1].finish_reason == "interrupted"
    assert chat.pipeline.parts.target.cache.length < chat.results[-1].prompt_tokens + 100
    fresh = session(max_new_tokens=100)
    fresh.turns = list(chat.turns)
    assert say(chat, "go on") == say(fresh, "go on")  # nothing of the stopped part is left anywhere


def test_a_turn_stopped_while_thinking_is_forgotten(session, monkeypatch) -> None:
    chat = session()
    monkeypatch.setattr("specq.cli.chat_session.opens_thinking", lambda tokenizer, ids: True)
    pieces = chat.ask("hello")
    next(pieces)
    pieces.close()
    assert chat.turns == []


def test_undo_takes_one_turn_back(session) -> None:
    chat = session()
    before = say(chat, "one")
    say(chat, "two")
    assert chat.undo().user == "two"
    assert chat.turns == [Turn("one", before)]
    chat.reset()
    with pytest.raises(UsageError, match="no turn to take back"):
        chat.undo()


def test_a_full_context_is_an_error_that_says_how_full(session) -> None:
    chat = session(context=64, max_new_tokens=1)
    say(chat, "twenty tokens of text")
    with pytest.raises(UsageError, match=r"the chat has \d+ tokens and the context holds 64") as caught:
        chat.ask("twenty tokens of text")
    assert "--overflow drop-oldest" in str(caught.value.hint)
    assert len(chat.turns) == 1  # the turn before is kept


def test_a_turn_that_cannot_be_answered_again_is_kept(session) -> None:
    chat = session(context=64, max_new_tokens=1)
    say(chat, "twenty tokens of text")
    kept, chat.system = list(chat.turns), "a system message that leaves no room for it"
    with pytest.raises(UsageError, match="the context holds 64"), chat.without_last() as turn:
        say(chat, turn.user)
    assert chat.turns == kept
    chat.system = None
    with chat.without_last() as turn:
        assert chat.turns == []
        say(chat, turn.user)
    assert [turn.user for turn in chat.turns] == [turn.user for turn in kept]
    with chat.without_last() as turn:  # stopped before a word of it
        stopped = chat.ask(turn.user)
        stopped.close()
    assert chat.turns == kept


def test_drop_oldest_drops_whole_turns_and_keeps_the_system_message(session) -> None:
    chat = session(context=128, max_new_tokens=4, overflow=Overflow.drop_oldest, system="be brief")
    for number in range(6):
        say(chat, f"turn number {number} of them")
    assert len(chat.turns) == 6
    assert 0 < chat.num_dropped < 6
    text = prompt_text(chat, "more")
    assert text.startswith("<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\nturn number ")
    assert "turn number 0" not in text
    assert "turn number 5" in text


def test_drop_oldest_cannot_help_a_single_message_that_is_too_long(session) -> None:
    chat = session(context=64, overflow=Overflow.drop_oldest)
    with pytest.raises(UsageError, match="the context holds 64") as caught:
        chat.ask("far too long " * 20)
    assert caught.value.hint == "less text or a larger --context"
    assert chat.num_dropped == 0


def test_a_base_model_chats_only_raw(session, tmp_path) -> None:
    chat = session()
    chat.pipeline.tokenizer.use_chat_template(None)
    with pytest.raises(UsageError) as caught:
        ChatSession(chat.pipeline)
    assert caught.value.hint == "base model: use --raw or --chat-template FILE"
    raw = ChatSession(chat.pipeline, is_raw=True, max_new_tokens=4)
    answer = say(raw, "once")
    assert prompt_text(raw, "upon") == f"once{answer}\nupon"


def test_thinking_off_reaches_the_template(session) -> None:
    chat = session(thinking=Thinking.off)
    template = "{{ messages[0]['content'] }}{% if enable_thinking is defined and not enable_thinking %}|off{% endif %}"
    chat.pipeline.tokenizer.use_chat_template(template)
    assert prompt_text(chat, "hi") == "hi|off"
    chat.thinking = Thinking.show
    assert prompt_text(chat, "hi") == "hi"


def test_save_and_load_are_inverse(session, tmp_path) -> None:
    chat = session(system="be brief")
    say(chat, "žluť")
    chat.save(tmp_path / "chat.json")
    other = session()
    other.load((tmp_path / "chat.json").read_text(encoding="utf-8"))
    assert (other.system, other.turns) == (chat.system, chat.turns)


@pytest.mark.parametrize(
    "text",
    [
        "no json",
        "[]",
        '{"messages": [{"role": "user", "content": "alone"}]}',
        '{"messages": [{"role": "assistant", "content": "a"}, {"role": "user", "content": "b"}]}',
        '{"messages": [{"role": "user", "content": 1}, {"role": "assistant", "content": "b"}]}',
        '{"messages": [{"role": "user", "content": "\\ud800"}, {"role": "assistant", "content": "b"}]}',
        "[" * 100_000,
    ],
)
def test_what_is_no_chat_is_refused_and_changes_nothing(text: str, session) -> None:
    chat = session()
    chat.turns = [Turn("a", "b")]
    with pytest.raises(UsageError):
        chat.load(text)
    assert chat.turns == [Turn("a", "b")]


def test_settings_change_the_sampling_and_name_what_is_wrong(session) -> None:
    chat = session()
    chat.set("temperature", "0.7")
    chat.set("seed", "3")
    assert chat.pipeline.sampler(chat.sampling).temperature == 0.7
    assert (chat.settings()["temperature"], chat.settings()["seed"]) == ("0.7", "3")
    chat.set("temperature", "default")
    assert chat.settings()["temperature"] == "0.0"
    for key, value in (("top_p", "2"), ("max_new_tokens", "0"), ("overflow", "x"), ("colour", "red")):
        with pytest.raises(UsageError, match=key):
            chat.set(key, value)


def test_records_hold_the_names_of_the_contract(session) -> None:
    chat = session()
    say(chat, "hello")
    record = json.loads(json.dumps(chat.results[0].record()))
    assert record["tokens_out"] == len(record["token_ids"]) == 12
    assert record["finish_reason"] == "length"


def test_an_answer_without_a_chosen_length_ends_at_the_default(session, monkeypatch) -> None:
    monkeypatch.setattr("specq.cli.chat_session.CHAT_TOKENS", 6)
    free, chosen = session(max_new_tokens=None), session(max_new_tokens=6)
    say(free, "hello")
    say(chosen, "hello")
    assert [chat.results[0].tokens_out for chat in (free, chosen)] == [6, 6]
    assert (free.was_cut, chosen.was_cut) == (True, False)
    free.set("max_new_tokens", "9")
    say(free, "hello")
    assert (free.results[1].tokens_out, free.was_cut) == (9, False)


def test_settings_may_be_written_as_the_flags(session) -> None:
    chat = session()
    chat.set("max-new-tokens", "3")
    say(chat, "hello")
    assert chat.results[0].tokens_out == 3


def test_an_answer_again_counts_its_first_token_where_no_prompt_is_read(session) -> None:
    chat = session()
    say(chat, "hello")
    first = chat.results[0]
    chat.undo()
    say(chat, "hello")
    again = chat.results[1]
    assert (first.accept_len, again.accept_len) == (1.0, 1.0)
    assert (first.rounds, again.rounds) == (11, 12)


def test_the_models_own_length_comes_before_the_default(session) -> None:
    chat = session(max_new_tokens=None)
    chat.pipeline.answer_length = 5
    say(chat, "hello")
    assert (chat.results[0].tokens_out, chat.was_cut, chat.settings()["max_new_tokens"]) == (5, True, "5")
