"""The turns of a chat and the prompts made of them; knows no terminal, so programs and tests can drive it.

A turn is kept as it was shown: an answer that was stopped stays in the history as far as it came. What the
caches hold beyond the tokens that the next prompt shares with them is dropped there. A turn without a word of
answer (stopped at once, or stopped while still thinking) is forgotten, question included.
"""

from __future__ import annotations

import json
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from specq.cli.options import CHAT_TOKENS, Overflow, Thinking
from specq.cli.thinking import opens_thinking, without_thinking
from specq.errors import UsageError
from specq.files import is_text, write_text
from specq.recipe import Sampling
from specq.validation import problems_of

if TYPE_CHECKING:
    from specq.spec.session import Generation, Pipeline


SAVED_HINT = "/save FILE writes one that can be loaded"


@dataclass(frozen=True)
class Turn:
    """A question and its answer."""

    user: str
    answer: str


class ChatSession:
    """A chat with a loaded pipeline. `turns` is all that was said; the oldest may be out of the context."""

    def __init__(
        self,
        pipeline: Pipeline,
        *,
        system: str | None = None,
        is_raw: bool = False,
        stop: Sequence[str] = (),
        max_new_tokens: int | None = None,
        overflow: Overflow = Overflow.error,
        thinking: Thinking = Thinking.show,
    ) -> None:
        if not is_raw and pipeline.tokenizer.chat_template is None:
            raise UsageError("the model has no chat template", hint="base model: use --raw or --chat-template FILE")
        self.pipeline, self.is_raw = pipeline, is_raw
        self.system, self.stop, self.max_new_tokens = system or None, list(stop), max_new_tokens
        self.overflow, self.thinking = overflow, thinking
        self.sampling = Sampling.model_validate({})
        self.turns: list[Turn] = []
        self.results: list[Generation] = []
        self.num_dropped = 0  # turns that no longer fit and are left out of the prompt, oldest first
        self.starts_thinking = False  # whether the answer that streams now began inside <think>

    def ask(self, text: str) -> Generator[str, None, None]:
        """The answer, piece by piece; closing the iterator stops it. When it has ended `turns` holds the turn.

        Raises UsageError, with nothing changed, when the prompt does not fit the context.
        """
        ids = self._fitting_prompt(text)
        self.starts_thinking = opens_thinking(self.pipeline.tokenizer, ids)
        stream = self.pipeline.stream(ids, sampling=self.sampling, max_new_tokens=self.longest, stop=self.stop)
        return self._answer(text, stream)

    def _answer(self, text: str, stream: Any) -> Generator[str, None, None]:
        try:
            with closing(stream):
                for event in stream:
                    if event.text:
                        yield event.text
        finally:
            self._keep(text, stream.result)

    def _keep(self, text: str, result: Generation) -> None:
        self.results.append(result)
        answer = result.text
        if result.finish_reason == "interrupted" and not self.is_raw:
            said = without_thinking(answer, is_inside=self.starts_thinking)
            answer = answer if said and "</think>" in answer else said
        if answer or result.finish_reason != "interrupted":
            self.turns.append(Turn(text, answer))

    @property
    def longest(self) -> int:
        """Tokens an answer may have: as somebody chose, else by the model's generation config, else CHAT_TOKENS."""
        return self.max_new_tokens or self.pipeline.answer_length or CHAT_TOKENS

    @property
    def was_cut(self) -> bool:
        """Whether the last answer ended at the length that is the default, not one somebody chose."""
        last = self.results[-1]
        return self.max_new_tokens is None and last.finish_reason == "length" and last.tokens_out >= self.longest

    def messages(self) -> list[dict[str, str]]:
        """The whole chat as role and content, the system message first."""
        system = [{"role": "system", "content": self.system}] if self.system else []
        return [*system, *_as_messages(self.turns)]

    def reset(self) -> None:
        """Forgets every turn; the system message stays."""
        self.turns.clear()
        self.num_dropped = 0

    def undo(self) -> Turn:
        """The last turn, taken back. Raises UsageError when there is none."""
        if not self.turns:
            raise UsageError("there is no turn to take back")
        turn = self.turns.pop()
        self.num_dropped = min(self.num_dropped, len(self.turns))
        return turn

    @contextmanager
    def without_last(self) -> Iterator[Turn]:
        """Takes the last turn back; it is there again after the block unless another came in its place.

        Raises UsageError when there is none.
        """
        dropped = self.num_dropped
        turn = self.undo()
        kept = len(self.turns)
        try:
            yield turn
        finally:
            if len(self.turns) == kept:
                self.turns.append(turn)
                self.num_dropped = dropped

    def save(self, file: str | Path) -> None:
        """Writes the chat as JSON. Raises UsageError, DiskFullError when the file cannot be written."""
        text = json.dumps({"messages": self.messages()}, ensure_ascii=False, indent=2) + "\n"
        write_text(file, text)

    def load(self, text: str) -> None:
        """Replaces the chat by a saved one. Raises UsageError, nothing changed, when the text is no chat."""
        try:
            messages = json.loads(text)["messages"]
            pairs = [(message["role"], message["content"]) for message in messages]
        except (ValueError, KeyError, TypeError, RecursionError):
            raise UsageError("the file holds no chat", hint=SAVED_HINT) from None
        if not all(isinstance(content, str) and is_text(content) for _, content in pairs):
            raise UsageError("the file holds no chat: a message's content is not text", hint=SAVED_HINT)
        system = pairs.pop(0)[1] if pairs and pairs[0][0] == "system" else None
        if [role for role, _ in pairs] != ["user", "assistant"] * (len(pairs) // 2):
            raise UsageError("the file's messages do not take turns, user then assistant", hint=SAVED_HINT)
        texts = [content for _, content in pairs]
        self.turns = [Turn(*pair) for pair in zip(texts[::2], texts[1::2], strict=True)]
        self.system, self.num_dropped = system, 0

    def set(self, key: str, value: str) -> None:
        """Changes one setting from its text. Raises UsageError naming what can be set and what it takes."""
        key = key.replace("-", "_")  # as the flags are written
        if key in Sampling.model_fields:
            values = self.sampling.model_dump() | {key: None if value == "default" else value}
            try:
                self.sampling = Sampling.model_validate(values)
            except ValidationError as error:
                problem = problems_of(error, Sampling)[0]
                hint = f"/set {key} default takes the model's own"
                raise UsageError(f"`{key}` = `{problem.value}`: {problem.rule}", hint=hint) from None
        elif key == "max_new_tokens":
            self.max_new_tokens = None if value == "default" else _positive(key, value)
        elif key in ("overflow", "thinking"):
            kind: Any = Overflow if key == "overflow" else Thinking
            if value not in [member.value for member in kind]:
                choices = ", ".join(member.value for member in kind)
                raise UsageError(f"`{key}` = `{value}` is not one of {choices}")
            setattr(self, key, kind(value))
        else:
            raise UsageError(f"there is no setting `{key}`", hint=f"choose one of {', '.join(self.settings())}")

    def settings(self) -> dict[str, str]:
        """Every setting with what is in force, the model's own values where nothing was set."""
        sampler = self.pipeline.sampler(self.sampling)
        shown = {key: str(getattr(sampler, key)) for key in Sampling.model_fields}
        if self.sampling.seed is None and self.pipeline.recipe.sampling.seed is None:
            shown["seed"] = "random"
        shown["max_new_tokens"] = str(self.longest)
        return shown | {"overflow": self.overflow.value, "thinking": self.thinking.value}

    def _fitting_prompt(self, text: str) -> list[int]:
        """The prompt's ids, oldest turns left out as `overflow` allows; the system message always stays."""
        context = self.pipeline.context
        ids = self._encode(text, self.num_dropped)
        if len(ids) < context and self.overflow is Overflow.error:
            return ids
        # with room for an answer, so that a full chat does not drop one turn after every other token
        room = min(self.longest, max(1, context // 4))
        dropped = self.num_dropped
        while self.overflow is Overflow.drop_oldest and len(ids) > context - room and dropped < len(self.turns):
            dropped += 1
            ids = self._encode(text, dropped)
        if len(ids) >= context:
            shorter = "/reset or /undo, or start with --overflow drop-oldest" if self.turns[dropped:] else "less text"
            hint = f"{shorter} or a larger --context"
            raise UsageError(f"the chat has {len(ids)} tokens and the context holds {context}", hint=hint)
        self.num_dropped = dropped
        return ids

    def _encode(self, text: str, dropped: int) -> list[int]:
        turns = self.turns[dropped:]
        if self.is_raw:
            said = "".join(f"{turn.user}{turn.answer}\n" for turn in turns)
            return self.pipeline.encode(said + text, raw=True)
        thinking = False if self.thinking is Thinking.off else None
        messages = [*_as_messages(turns), {"role": "user", "content": text}]
        return self.pipeline.encode(messages, system=self.system, thinking=thinking)


def _as_messages(turns: Sequence[Turn]) -> list[dict[str, str]]:
    return [
        message
        for turn in turns
        for message in ({"role": "user", "content": turn.user}, {"role": "assistant", "content": turn.answer})
    ]


def _positive(key: str, value: str) -> int:
    if not value.isdecimal() or int(value) < 1:
        raise UsageError(f"`{key}` = `{value}` is not a number of at least 1")
    return int(value)
