"""The measurement itself: who answers which prompt when, and what is kept of it. No numbers are worked out here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

from specq.bench.contestants import Answer, Contestant, Decoding
from specq.bench.prompts import Prompt
from specq.environment import device_state
from specq.errors import UsageError
from specq.spec.session import Generation, Pipeline
from specq.spec.stopwatch import quiet_heap

ROOM = 16
"""Tokens of answer a prompt has to leave room for; a longer one is left out, for every contestant."""


@dataclass(frozen=True)
class Sample:
    """One answer of one contestant: which prompt, turn (from 0) and repeat (from 0) it was, and its place in time."""

    contestant: str
    prompt: Prompt
    turn: int
    repeat: int
    order: int
    prompt_ids: tuple[int, ...]
    index: int
    answer: Answer

    @property
    def generation(self) -> Generation:
        return self.answer.generation

    def record(self) -> dict[str, Any]:
        """The raw sample as JSON takes it: names as in the run record."""
        return {
            "row": self.contestant,
            "prompt": self.prompt.id,
            "category": self.prompt.category,
            "turn": self.turn,
            "repeat": self.repeat,
            "order": self.order,
            "peak_memory_bytes": self.answer.peak_bytes,
            **self.generation.record(),
        }


@dataclass
class Run:
    """All samples of a benchmark, the seconds each contestant warmed up, and what the machine was like meanwhile."""

    samples: list[Sample] = field(default_factory=list)
    warmup_s: dict[str, list[float]] = field(default_factory=dict)
    skipped: list[str] = field(default_factory=list)
    machine: list[dict[str, Any]] = field(default_factory=list)


@dataclass(frozen=True)
class Asking:
    """How prompts are put to the model: through its chat template unless `is_raw` or it has none."""

    pipeline: Pipeline
    is_raw: bool = False
    system: str | None = None
    thinking: bool | None = None
    drops_oldest: bool = False

    def fitting_ids(self, prompt: Prompt, answers: Sequence[str]) -> list[int] | None:
        """The ids of the turn that follows these answers; None when it leaves no room in the context.

        With `drops_oldest` a later turn is asked without as many of the first turns as it takes.
        """
        for dropped in range(len(answers) + 1 if self.drops_oldest else 1):
            ids = self.ids(prompt, answers, dropped=dropped)
            if len(ids) + ROOM <= self.pipeline.context:
                return ids
        return None

    def ids(self, prompt: Prompt, answers: Sequence[str], *, dropped: int = 0) -> list[int]:
        """The ids of the turn that follows these answers, the first `dropped` turns left out."""
        turns = list(prompt.turns[: len(answers) + 1])
        if self.is_raw or self.pipeline.tokenizer.chat_template is None:
            if prompt.raw is not None:
                turns[0] = prompt.raw
            pairs = list(zip(turns, answers, strict=False))[dropped:]
            said = "".join(f"{turn}\n{answer}\n" for turn, answer in pairs)
            return self.pipeline.encode(said + turns[-1], raw=self.is_raw)
        messages = []
        for turn, answer in list(zip(turns, [*answers, None], strict=True))[dropped:]:
            messages.append({"role": "user", "content": turn})
            if answer is not None:
                messages.append({"role": "assistant", "content": answer})
        return self.pipeline.encode(messages, system=self.system, thinking=self.thinking)


def run_benchmark(
    contestants: Sequence[Contestant],
    prompts: Sequence[Prompt],
    asking: Asking,
    decoding: Decoding,
    *,
    repeats: int = 1,
    warmups: int = 1,
    say: Callable[[str], None] = lambda text: None,
) -> Run:
    """Every contestant's answer to every turn, `repeats` times; the first contestant is the baseline.

    The order turns round with every repetition (A B, B A), so that what drifts hits all alike. Later turns follow the
    baseline's answers, so that all are asked the same. Raises UsageError when no prompt fits the context.
    """
    run = Run()
    fitting = _fitting(prompts, asking, run)
    for contestant in contestants:
        run.warmup_s[contestant.name] = []
        for number in range(warmups):
            say(f"warming up {contestant.name} ({number + 1} of {warmups})")
            began = perf_counter()
            if number == 0:
                contestant.prepare(decoding)
            contestant.answer(asking.ids(fitting[0], []), decoding, sampling=decoding.seeded(0))
            run.warmup_s[contestant.name].append(perf_counter() - began)
    with quiet_heap():
        _answer_all(contestants, fitting, asking, decoding, run, repeats=repeats, say=say)
    run.machine.append({"prompt": None, **device_state(str(asking.pipeline.target.device))})
    return run


def _answer_all(
    contestants: Sequence[Contestant],
    prompts: Sequence[Prompt],
    asking: Asking,
    decoding: Decoding,
    run: Run,
    *,
    repeats: int,
    say: Callable[[str], None],
) -> None:
    """Fill the run with everybody's answers."""
    num_round = 0
    for index, prompt in enumerate(prompts):
        run.machine.append({"prompt": prompt.id, **device_state(str(asking.pipeline.target.device))})
        answers: list[str] = []
        for turn in range(len(prompt.turns)):
            ids = asking.fitting_ids(prompt, answers)
            if ids is None:
                run.skipped.append(f"{prompt.id} from turn {turn + 1} on")
                break
            for repeat in range(repeats):
                say(f"prompt {index + 1} of {len(prompts)} ({prompt.id}), turn {turn + 1}, repeat {repeat + 1}")
                for contestant in contestants if num_round % 2 == 0 else contestants[::-1]:
                    answer = contestant.answer(ids, decoding, sampling=decoding.seeded(index))
                    place = len(run.samples)
                    sample = Sample(contestant.name, prompt, turn, repeat, place, tuple(ids), index, answer)
                    run.samples.append(sample)
                num_round += 1
            own = next(s for s in run.samples[::-1] if s.contestant == contestants[0].name)
            answers.append(own.generation.text)


def _fitting(prompts: Sequence[Prompt], asking: Asking, run: Run) -> list[Prompt]:
    fitting = []
    for prompt in prompts:
        if asking.fitting_ids(prompt, []) is not None:
            fitting.append(prompt)
        else:
            run.skipped.append(prompt.id)
    if not fitting:
        raise UsageError(
            f"no prompt of the suite fits the context of {asking.pipeline.context} tokens", hint="a larger --context"
        )
    return fitting
