"""A loaded pipeline and the streams of text that come out of it: what chat, run, bench and Python programs use."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter
from typing import Any, Protocol

from specq.environment import describe_environment
from specq.errors import UsageError
from specq.models.causal_lm import CausalLM
from specq.recipe import Recipe, Sampling
from specq.spec.adaptive import AdaptiveSpeculator, Governor
from specq.spec.decision import Decision
from specq.spec.parts import PartLoader
from specq.spec.pipelines import PIPELINES, Parts, require_pipeline
from specq.spec.sampling import Sampler
from specq.spec.speculator import Speculator, StopRule, generate
from specq.spec.warm_up import warm_up
from specq.tokenizer import TextStream, Tokenizer

log = logging.getLogger("specq")


@dataclass(frozen=True)
class StreamEvent:
    """One decided token and the text that became complete with it (often several tokens late, sometimes empty)."""

    text: str
    token_ids: tuple[int, ...]


@dataclass(frozen=True)
class Generation:
    """The run record of one answer; named as in `specq run --json`. Rates are None when nothing was timed."""

    text: str
    token_ids: tuple[int, ...]
    tokens_out: int
    finish_reason: str
    prompt_tokens: int
    reused_tokens: int
    ttft_s: float | None
    decode_tps: float | None
    e2e_tps: float | None
    accept_len: float | None
    accept_len_inner: float | None
    rounds: int
    draft_ms: float
    intermediate_ms: float
    verify_ms: float
    overhead_ms: float
    pipeline: str
    seed: int

    def record(self) -> dict[str, Any]:
        """The fields as JSON takes them."""
        return asdict(self) | {"token_ids": list(self.token_ids)}


def pooled_accept_length(answers: Iterable[Generation]) -> float | None:
    """Tokens that the rounds of all these answers decided, a round; None without rounds."""
    known = [(answer.accept_len, answer.rounds) for answer in answers if answer.accept_len is not None]
    return sum(length * rounds for length, rounds in known) / sum(rounds for _, rounds in known) if known else None


class Pipeline:
    """Models in memory, their caches, and the pipeline that decodes with them.

    One context at a time: a new prompt keeps what its beginning shares with the last one (`reused_tokens`).
    """

    def __init__(
        self,
        *,
        recipe: Recipe,
        parts: Parts,
        tokenizer: Tokenizer,
        context: int,
        defaults: Sampling,
        models: Mapping[str, tuple[str, str | None]],
        answer_length: int | None = None,
        folders: Mapping[str, Path] | None = None,
        decision: Decision | None = None,
        undecided: str | None = None,
        loader: PartLoader | None = None,
    ) -> None:
        """`models` are name and revision by role, and `folders` where they lie, also of those that `loader` brings into
        memory when a pipeline needs them.

        `decision` is what a profile chose for these models here; `auto` runs it, and without one plain decoding.
        `undecided` says in a few words what there is instead of a decision. `answer_length` is the longest answer that
        the model's generation config asks for, for those who chat.
        """
        self.recipe, self.parts, self.tokenizer = recipe, parts, tokenizer
        self.context, self.defaults = context, defaults
        self.answer_length = answer_length
        self.name, self.is_auto = "plain", False
        self.folders, self.decision = dict(folders or {}), decision
        self._undecided = undecided or "these models have no profile on this device"
        self._loader, self._models = loader, dict(models)
        self._running = recipe
        self._governor: Governor | None = None
        self._tokens: list[int] = []

    @property
    def target(self) -> CausalLM:
        """The model that decides every token."""
        return self.parts.target.model

    @property
    def revisions(self) -> dict[str, str | None]:
        """The models in memory by name, with the revision of those that have one."""
        return dict(model for role, model in self._models.items() if role in self.parts.roles)

    @property
    def available(self) -> dict[str, str | None]:
        """Every pipeline by name; None, or the reason why it cannot run here."""
        return {name: kind.missing(self._roles) for name, kind in PIPELINES.items()}

    @property
    def _roles(self) -> frozenset[str]:
        """The parts in memory and those that can be loaded; whether matrices have 4 bits the loaded target says."""
        return self.parts.roles | (self._loader.roles if self._loader else frozenset())

    def use(self, name: str) -> None:
        """Decode with this pipeline from the next prompt on; `off` means plain, `auto` what the profile chose.

        Under `auto` drafts become shorter, or none, where they earn nothing on a text; without a profile it is plain.
        Models that it needs and that are not in memory yet are loaded.
        Raises UnsupportedError with the reason when it cannot run, UsageError when there is none of this name, and what
        loading raises.
        """
        decision = self.decision if name == "auto" else None
        if name == "auto" and decision is None:
            log.warning(f"pipeline auto: {self._undecided}, so plain decoding runs; `specq profile` measures one")
        name = "plain" if name in ("auto", "off") else name
        name = decision.pipeline if decision is not None else name
        kind = require_pipeline(name, self._roles)
        if self._loader is not None:
            self.parts = self._loader.load(self.parts, kind.needs)
        self.name, self.is_auto = name, decision is not None
        self._running = decision.apply(self.recipe) if decision is not None else self.recipe
        self._governor = None
        if decision is not None and name != "plain":
            self._governor = Governor(decision.levels, name=name)

    def environment(self) -> dict[str, Any]:
        """Device, versions and the revision of every model in memory."""
        return describe_environment(str(self.target.device)) | {"models": self.revisions}

    def encode(
        self,
        prompt: str | Sequence[dict[str, str]],
        *,
        raw: bool = False,
        system: str | None = None,
        thinking: bool | None = None,
    ) -> list[int]:
        """Token ids of a prompt: as it is when `raw`, else through the chat template.

        `prompt` is a text (one user message) or a list of messages {"role", "content"}. A model without a template
        takes plain text. Raises UsageError when the prompt is empty.
        """
        if raw or (isinstance(prompt, str) and self.tokenizer.chat_template is None):
            if not isinstance(prompt, str):
                raise UsageError("raw decoding takes one text, not a list of messages")
            ids = self.tokenizer.encode(prompt, special_tokens=not raw)
        else:
            messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
            if system is not None:
                messages = [{"role": "system", "content": system}, *messages]
            ids = self.tokenizer.encode_chat(messages, thinking=thinking)
        if not ids:
            raise UsageError("the prompt is empty", hint="give at least one character")
        return ids

    def stream(
        self,
        prompt_ids: Sequence[int],
        *,
        sampling: Sampling | None = None,
        max_new_tokens: int | None = None,
        stop: Sequence[str] = (),
        skip_special: bool = True,
        ignore_stop_ids: bool = False,
    ) -> Stream:
        """The answer to a prompt, token by token.

        Raises UsageError when the prompt leaves no room in the context, or holds an id that the model has not.
        """
        ids = list(prompt_ids)
        vocab = self.target.spec.vocab
        if (highest := max(ids, default=0)) >= vocab:
            raise UsageError(
                f"the prompt has the id {highest}, and the model knows {vocab}: its tokenizer has more",
                hint="leave out what its tokenizer was given beyond the model, such as <pad>",
            )
        if len(ids) >= self.context:
            raise UsageError(
                f"the prompt has {len(ids)} tokens and the context holds {self.context}",
                hint="shorten the prompt, or give a larger --context if the model takes one",
            )
        if max_new_tokens is not None and max_new_tokens < 1:
            raise UsageError(f"max_new_tokens is `{max_new_tokens}`", hint="give at least 1")
        if not all(stop):
            raise UsageError("a stop text is empty", hint="give the text that ends an answer")
        sampler = self.sampler(sampling)
        reused = self._reuse(ids)
        speculator = PIPELINES[self.name].build(self.parts, sampler, self._running)
        if self._governor is not None:
            speculator = AdaptiveSpeculator(speculator.drafter, speculator.verifier, self._governor)
        reader = TextStream(self.tokenizer, skip_special=skip_special)
        rule = StopRule(
            start=len(ids),
            stop_ids=frozenset() if ignore_stop_ids else self.tokenizer.eos_ids,
            max_new_tokens=max_new_tokens,
            context_limit=self.context,
            stop_strings=list(stop),
            read_text=reader.push,
        )
        self._tokens = ids
        return Stream(speculator, ids, rule, reader, reused_tokens=reused, pipeline=self.name, seed=sampler.seed)

    def warm_up(self, sampling: Sampling | None = None) -> None:
        """On a GPU, compile and capture now what answers of the pipeline in use would stop for; empties the caches."""
        if self.target.device.type == "cuda":
            warm_up(PIPELINES[self.name].build(self.parts, self.sampler(sampling), self._running))
        self.parts.rollback(0)
        self._tokens = []

    def sampler(self, sampling: Sampling | None = None) -> Sampler:
        """The sampler of these settings; what is unset comes from the recipe, then from the model's own defaults."""
        layers = [s for s in (sampling, self.recipe.sampling, self.defaults) if s is not None]
        chosen: dict[str, Any] = {}
        for layer in layers:
            for key, value in layer.model_dump(exclude_none=True).items():
                chosen.setdefault(key, value)
        chosen.setdefault("seed", secrets.randbits(32))
        return Sampler(vocab=self.tokenizer.size, **chosen)

    def _reuse(self, ids: list[int]) -> int:
        """Truncate every cache to what this prompt shares with the last context; the tokens the target keeps."""
        shared = 0
        for old, new in zip(self._tokens, ids[:-1], strict=False):
            if old != new:
                break
            shared += 1
        self.parts.rollback(shared)
        return self.parts.target.cache.length


class Reader(Protocol):
    """Makes text of ids, one after the other, as TextStream does."""

    def push(self, token_id: int) -> str: ...

    def flush(self) -> str: ...


class Stream:
    """Iterate for StreamEvents; `close` stops early. `result` is there when either has happened."""

    def __init__(
        self,
        speculator: Speculator,
        context: list[int],
        rule: StopRule,
        reader: Reader,
        *,
        reused_tokens: int,
        pipeline: str,
        seed: int,
    ) -> None:
        self._speculator, self._context, self._rule, self._reader = speculator, context, rule, reader
        self._start = len(context)
        self._shown = 0
        self._reused_tokens, self._pipeline, self._seed = reused_tokens, pipeline, seed
        self._times: list[float] = [perf_counter()]  # start, first token, last token
        self._tokens = generate(speculator, context, rule)
        self._result: Generation | None = None

    def __iter__(self) -> Iterator[StreamEvent]:
        return self

    def __next__(self) -> StreamEvent:
        if self._result is not None:
            raise StopIteration
        token = next(self._tokens, None)
        if token is None:
            # Decoding is over; text that only now became certain is one last event.
            rest = self._end(self._rule.reason or "length")
            if rest:
                return StreamEvent(rest, ())
            raise StopIteration
        self._times[1:] = [self._times[1] if len(self._times) > 1 else perf_counter(), perf_counter()]
        self._rule(self._context)  # so that the text has this token even if nothing more is read
        return StreamEvent(self._new_text(), (token,))

    def close(self) -> None:
        """Stop decoding; the caches are left with what was decided. `result.finish_reason` is then `interrupted`."""
        if self._result is None:
            self._end("interrupted")

    @property
    def result(self) -> Generation:
        """The run record. Raises UsageError while the stream is still running."""
        if self._result is None:
            raise UsageError("the answer is not finished", hint="read the stream to its end or close it first")
        return self._result

    def _new_text(self) -> str:
        visible = len(self._rule.text) - self._rule.held_back()
        text = self._rule.text[self._shown : visible]
        self._shown = max(self._shown, visible)
        return text

    def _end(self, reason: str) -> str:
        self._tokens.close()  # type: ignore[attr-defined]
        if isinstance(self._speculator, AdaptiveSpeculator):
            self._speculator.governor.report()
        self._rule.finish_text(self._reader.flush())
        text = self._rule.text[self._shown :]
        self._shown = len(self._rule.text)
        if reason != "interrupted":
            reason = self._rule.reason or reason
        self._result = self._summarize(reason)
        return text

    def _summarize(self, reason: str) -> Generation:
        ids = tuple(self._context[self._start :])
        start, *rest = self._times
        first, last = rest if rest else (None, None)
        decode_s = last - first if first is not None and last is not None else 0.0
        outer, *inner = self._speculator.levels()
        decode = [r for r in outer.rounds if not r.is_prefill]
        intermediate_ms = sum(r.verify_ms for level in inner for r in level.rounds)
        draft_ms = sum(r.draft_ms for r in decode) - intermediate_ms
        verify_ms = sum(r.verify_ms for r in decode)
        inner_rounds = [r for level in inner[:1] for r in level.rounds if not r.is_prefill]
        later = len(ids) - 1
        in_rounds = later if len(decode) < len(outer.rounds) else len(ids)  # a prompt read before leaves no prefill
        return Generation(
            text=self._rule.text,
            token_ids=ids,
            tokens_out=len(ids),
            finish_reason=reason,
            prompt_tokens=self._start,
            reused_tokens=self._reused_tokens,
            ttft_s=first - start if first is not None else None,
            decode_tps=later / decode_s if later > 0 and decode_s > 0 else None,
            e2e_tps=len(ids) / (last - start) if last is not None else None,
            accept_len=in_rounds / len(decode) if decode else None,
            accept_len_inner=(sum(r.decided for r in inner_rounds) / len(inner_rounds) if inner_rounds else None),
            rounds=len(decode),
            draft_ms=draft_ms,
            intermediate_ms=intermediate_ms,
            verify_ms=verify_ms,
            overhead_ms=max(0.0, decode_s * 1e3 - draft_ms - intermediate_ms - verify_ms),
            pipeline=self._pipeline,
            seed=self._seed,
        )
