"""The training loop: AdamW on fp32 master weights, a schedule by steps or minutes, checkpoints that survive a kill."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any, Protocol

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from specq.checkpoint import write_atomically
from specq.errors import SpecqError
from specq.recipe import DistillSection
from specq.train.data import Batch

BETAS = (0.9, 0.95)
CLIP_NORM = 1.0
MEASURE_EVERY = 25
SAVE_SECONDS = 60.0
LOWEST_RATE = 0.02
"""The learning rate at the end, as a part of its highest."""


class Task(Protocol):
    """What is trained: its parameters, and the loss of one batch."""

    @property
    def parameters(self) -> Mapping[str, nn.Parameter]: ...

    def loss(self, batch: Batch, draws: torch.Generator, *, measure: bool) -> tuple[Tensor, list[Tensor]]:
        """(loss, top-1 agreement with the target by depth, only when `measure`)."""
        ...


class Source(Protocol):
    def batches(self, first: int) -> Iterator[Batch]: ...


@dataclass
class Progress:
    """Where training stands; `curve` holds a record every MEASURE_EVERY steps."""

    step: int = 0
    seconds: float = 0.0
    tokens: int = 0
    curve: list[dict[str, Any]] | None = None

    def done(self, settings: DistillSection) -> float:
        """The part of training that is behind, 0 to 1."""
        by_time = self.seconds / (settings.minutes * 60) if settings.minutes else 0.0
        return min(1.0, max(self.step / settings.steps, by_time))


def learning_rate(settings: DistillSection, done: float) -> float:
    """The rate at this part of training: linear warm-up, then a cosine down to LOWEST_RATE of the highest."""
    if done < settings.warmup:
        return settings.learning_rate * max(done / settings.warmup, 1e-3)
    falling = (done - settings.warmup) / (1 - settings.warmup)
    part = LOWEST_RATE + (1 - LOWEST_RATE) * 0.5 * (1 + math.cos(math.pi * falling))
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

    Raises SpecqError when the loss is no number any more.
    """
    optimizer = MasterWeights(task.parameters)
    progress = Progress(curve=[])
    if checkpoint.is_file():
        progress = optimizer.load(checkpoint)
        say(f"going on after step {progress.step}")
    assert progress.curve is not None
    device = next(iter(task.parameters.values())).device
    began, saved = perf_counter() - progress.seconds, perf_counter()
    for batch in source.batches(progress.step):
        if progress.done(settings) >= 1.0:
            break
        rate = learning_rate(settings, progress.done(settings))
        measure = progress.step % MEASURE_EVERY == 0
        draws = torch.Generator(device).manual_seed((settings.seed << 32) + progress.step)
        loss, agreement = task.loss(batch, draws, measure=measure)
        loss.backward()
        optimizer.step(rate)
        progress.step += 1
        progress.tokens += len(batch.positions)
        if measure:
            record = _record(progress, rate, loss, agreement)
            if not math.isfinite(record["loss"]):
                raise SpecqError(
                    f"training diverged before step {progress.step}: the loss is `{record['loss']}`",
                    hint=f"start again with --overwrite --set distill.learning_rate={settings.learning_rate / 4:g}",
                )
            progress.curve.append(record)
            say(progress_text(record, settings))
        elif device.type == "cuda" and progress.step % 4 == 0:
            torch.cuda.current_stream(device).synchronize()  # or the clock below runs ahead of the device
        progress.seconds = perf_counter() - began
        if perf_counter() - saved > SAVE_SECONDS:
            optimizer.save(checkpoint, progress)
            saved = perf_counter()
    optimizer.save(checkpoint, progress)
    return progress


def progress_text(record: Mapping[str, Any], settings: DistillSection) -> str:
    """One line on a record of the curve."""
    depths = " ".join(f"{rate:.3f}" for rate in record["top1"])
    return (
        f"step {record['step']} of {settings.steps}, {record['seconds']:.0f} s: loss {record['loss']:.3f}, "
        f"top-1 by depth {depths}, a chain of {len(record['top1'])} accepts {record['accept_len_estimate']:.2f}"
    )


def _record(progress: Progress, rate: float, loss: Tensor, agreement: list[Tensor]) -> dict[str, Any]:
    top1 = [round(float(each), 4) for each in agreement]
    return {
        "step": progress.step,
        "seconds": round(progress.seconds, 1),
        "tokens": progress.tokens,
        "learning_rate": rate,
        "loss": round(float(loss.detach()), 4),
        "top1": top1,
        "accept_len_estimate": round(estimated_accept_length(top1), 3),
    }


class MasterWeights:
    """AdamW whose weights are fp32, whatever the dtype the parameters compute in; no weight decay, as for EAGLE."""

    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        self._parameters = dict(parameters)
        self._masters = {name: nn.Parameter(p.detach().float().clone()) for name, p in parameters.items()}
        self._adam = torch.optim.AdamW(self._masters.values(), lr=0.0, betas=BETAS, weight_decay=0.0)

    def step(self, rate: float) -> None:
        """One update from the parameters' gradients, which are cleared."""
        for name, parameter in self._parameters.items():
            self._masters[name].grad = None if parameter.grad is None else parameter.grad.float()
            parameter.grad = None
        torch.nn.utils.clip_grad_norm_(self._masters.values(), CLIP_NORM)
        self._adam.param_groups[0]["lr"] = rate
        self._adam.step()
        self._publish()

    @torch.no_grad()
    def _publish(self) -> None:
        for name, parameter in self._parameters.items():
            parameter.copy_(self._masters[name])

    def save(self, file: Path, progress: Progress) -> None:
        """Weights, moments and progress as one file that is whole or not there."""
        tensors = {f"weight/{name}": master.detach() for name, master in self._masters.items()}
        for name, master in self._masters.items():
            for key, value in self._adam.state.get(master, {}).items():
                tensors[f"{key}/{name}"] = value
        metadata = {"progress": json.dumps(vars(progress))}
        with write_atomically(file) as path:
            save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path, metadata=metadata)

    def load(self, file: Path) -> Progress:
        """The progress of a saved file, whose weights and moments are taken over."""
        with safe_open(file, framework="pt") as saved:
            progress = Progress(**json.loads(saved.metadata()["progress"]))
            names = set(saved.keys())
            for name, master in self._masters.items():
                with torch.no_grad():
                    master.copy_(saved.get_tensor(f"weight/{name}"))
                state = {}
                for key in ("step", "exp_avg", "exp_avg_sq"):
                    if f"{key}/{name}" in names:
                        value = saved.get_tensor(f"{key}/{name}")
                        state[key] = value if key == "step" else value.to(master.device)
                if state:
                    self._adam.state[master] = state
        self._publish()
        return progress
