"""The training loop: a schedule by steps or minutes, a curve, checkpoints that survive a kill."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from specq.errors import SpecqError
from specq.recipe import DistillSection
from specq.train.data import Batch
from specq.train.optimizer import MasterWeights

MEASURE_EVERY = 25
SAVE_SECONDS = 60.0


class Task(Protocol):
    """What is trained: its parameters, and the loss of one batch."""

    @property
    def parameters(self) -> Mapping[str, nn.Parameter]: ...

    def state(self) -> dict[str, Tensor]:
        """What the next loss depends on beside the parameters: a checkpoint keeps it, `take_state` takes it over."""
        ...

    def take_state(self, state: Mapping[str, Tensor]) -> None: ...

    def loss(self, batch: Batch, draws: torch.Generator, *, done: float) -> tuple[Tensor, list[Tensor]]:
        """(loss, top-1 agreement with the target by depth); `done` is the part of training that is behind."""
        ...


class Source(Protocol):
    def batches(self, first: int) -> Iterator[Batch]: ...


@dataclass
class Progress:
    """Where training stands; `curve` holds a record every MEASURE_EVERY steps and one at the end, of means since the
    last."""

    step: int = 0
    seconds: float = 0.0
    tokens: int = 0
    curve: list[dict[str, Any]] | None = None

    def done(self, settings: DistillSection) -> float:
        """The part of training that is behind, 0 to 1."""
        by_time = self.seconds / (settings.minutes * 60) if settings.minutes else 0.0
        return min(1.0, max(self.step / settings.steps, by_time))


def learning_rate(settings: DistillSection, done: float) -> float:
    """The rate at this part of training: linear warm-up, then a cosine down to `last_rate` of the highest."""
    if done < settings.warmup:
        return settings.learning_rate * max(done / settings.warmup, 1e-3)
    falling = (done - settings.warmup) / (1 - settings.warmup)
    part = settings.last_rate + (1 - settings.last_rate) * 0.5 * (1 + math.cos(math.pi * falling))
    return settings.learning_rate * part


def estimated_accept_length(agreement: list[float]) -> float:
    """Tokens a round of a chain as deep as `agreement` (top-1 by depth), the target's own token included."""
    total = reached = 1.0
    for rate in agreement:
        reached *= rate
        total += reached
    return total


def train(
    task: Task, source: Source, settings: DistillSection, *, checkpoint: Path, say: Callable[[str], None]
) -> Progress:
    """Train until the steps or the minutes are used up; a checkpoint there is taken up where it was written.

    Raises SpecqError when the loss or a weight is no number any more; no such weights are saved.
    """
    optimizer = MasterWeights(task.parameters, kind=settings.optimizer)
    progress = Progress(curve=[])
    if checkpoint.is_file():
        saved_progress, state = optimizer.load(checkpoint)
        progress = Progress(**saved_progress)
        task.take_state(state)
        say(f"going on after step {progress.step}")
    device = next(iter(task.parameters.values())).device
    began, saved = perf_counter() - progress.seconds, perf_counter()
    recent: list[Tensor] = []
    rate = 0.0
    for batch in source.batches(progress.step):
        if (done := progress.done(settings)) >= 1.0:
            break
        rate = learning_rate(settings, done)
        draws = torch.Generator(device).manual_seed((settings.seed << 32) + progress.step)
        loss, agreement = task.loss(batch, draws, done=done)
        loss.backward()
        recent.append(torch.stack((loss.detach(), *agreement)))
        optimizer.step(rate)
        progress.step += 1
        progress.tokens += len(batch.positions)
        if progress.step % MEASURE_EVERY == 1 % MEASURE_EVERY:
            _measure(progress, rate, recent, settings, say)
        elif device.type == "cuda" and progress.step % 4 == 0:
            torch.cuda.current_stream(device).synchronize()  # or the clock below runs ahead of the device
        progress.seconds = perf_counter() - began
        if perf_counter() - saved > SAVE_SECONDS:
            _save(checkpoint, task, optimizer, progress, settings)
            saved = perf_counter()
    if recent:
        _measure(progress, rate, recent, settings, say)
    _save(checkpoint, task, optimizer, progress, settings)
    return progress


def _measure(
    progress: Progress, rate: float, recent: list[Tensor], settings: DistillSection, say: Callable[[str], None]
) -> None:
    """Put the means of what is recent on the curve. Raises SpecqError when the loss is no number."""
    record = _record(progress, rate, torch.stack(recent).mean(0).tolist())
    recent.clear()
    if not math.isfinite(record["loss"]):
        raise _diverged(progress, f"the loss is `{record['loss']}`", settings)
    assert progress.curve is not None
    progress.curve.append(record)
    say(progress_text(record, settings))


def _save(checkpoint: Path, task: Task, optimizer: MasterWeights, progress: Progress, settings: DistillSection) -> None:
    """Write a checkpoint. Raises SpecqError when a weight is no number."""
    for name, parameter in task.parameters.items():
        if not bool(parameter.isfinite().all()):
            raise _diverged(progress, f"`{name}` holds what is no number", settings)
    optimizer.save(checkpoint, vars(progress), task.state())


def _diverged(progress: Progress, what: str, settings: DistillSection) -> SpecqError:
    return SpecqError(
        f"training diverged before step {progress.step}: {what}",
        hint=f"start again with --overwrite --set distill.learning_rate={settings.learning_rate / 4:g}",
    )


def progress_text(record: Mapping[str, Any], settings: DistillSection) -> str:
    """One line on a record of the curve."""
    depths = " ".join(f"{rate:.3f}" for rate in record["top1"])
    return (
        f"step {record['step']} of {settings.steps}, {record['seconds']:.0f} s: loss {record['loss']:.3f}, "
        f"top-1 by depth {depths}, a chain of {len(record['top1'])} accepts {record['accept_len_estimate']:.2f}"
    )


def _record(progress: Progress, rate: float, means: list[float]) -> dict[str, Any]:
    top1 = [round(each, 4) for each in means[1:]]
    return {
        "step": progress.step,
        "seconds": round(progress.seconds, 1),
        "tokens": progress.tokens,
        "learning_rate": rate,
        "loss": round(means[0], 4),
        "top1": top1,
        "accept_len_estimate": round(estimated_accept_length(top1), 3),
    }
