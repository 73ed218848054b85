"""Training learns, ends by steps or minutes, and a run that was killed goes on as if it had not been."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
import torch
from factories import tiny_model
from safetensors.torch import load_file
from torch import nn

from specq.errors import SpecqError
from specq.recipe import DistillSection
from specq.train.data import Batch, BatchSource, Sequences
from specq.train.eagle import HeadTask
from specq.train.loop import Progress, estimated_accept_length, learning_rate, train

SETTINGS = DistillSection(steps=12, learning_rate=2e-3, unroll=2, batch_tokens=256)


def source() -> BatchSource:
    draws = torch.Generator().manual_seed(0)
    ids = [torch.randint(0, 290, (20,), generator=draws).tolist() for _ in range(20)]
    return BatchSource(Sequences(ids, [5] * 20), length=64, batch_tokens=256, seed=0)


class Killed(Exception):
    pass


class KilledAfter:
    """The same batches, until the process dies."""

    def __init__(self, count: int) -> None:
        self.count = count

    def batches(self, first: int) -> Iterator[Batch]:
        yield from itertools.islice(source().batches(first), self.count)
        raise Killed


def weights(task: HeadTask) -> list[torch.Tensor]:
    return [p.detach().clone() for p in task.parameters.values()]


def head(dtype: str = "float32", **changes: object) -> HeadTask:
    return HeadTask(tiny_model(dtype=dtype), SETTINGS.model_copy(update=changes))


def run(task: HeadTask, folder, **changes) -> Progress:
    settings = SETTINGS.model_copy(update=changes)
    return train(task, source(), settings, checkpoint=folder / "checkpoint", say=lambda text: None)


@pytest.mark.parametrize(
    ("dtype", "optimizer", "bits", "killed"),
    [
        ("float32", "adamw", 16, 5),
        ("bfloat16", "adamw", 16, 5),
        ("float32", "muon", 16, 5),
        ("float32", "adamw", 4, 5),
        ("float32", "adamw", 4, 10),  # rounded since step 8
        ("bfloat16", "muon", 4, 10),
    ],
)
def test_a_killed_run_goes_on_to_the_weights_of_one_that_was_not(
    tmp_path, monkeypatch, dtype, optimizer, bits, killed
) -> None:
    whole, settings = head(dtype, bits=bits), SETTINGS.model_copy(update={"optimizer": optimizer})
    run(whole, tmp_path, optimizer=optimizer)
    folder = tmp_path / "killed"
    folder.mkdir()
    monkeypatch.setattr("specq.train.loop.SAVE_SECONDS", 0.0)  # a checkpoint after every step
    task = head(dtype, bits=bits)
    with pytest.raises(Killed):
        train(task, KilledAfter(killed), settings, checkpoint=folder / "checkpoint", say=lambda text: None)
    resumed = head(dtype, bits=bits)
    progress = run(resumed, folder, optimizer=optimizer)
    assert progress.step == 12
    assert all(torch.equal(a, b) for a, b in zip(weights(whole), weights(resumed), strict=True))


def test_training_lowers_the_loss_and_counts_what_it_saw(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("specq.train.loop.MEASURE_EVERY", 1)
    said: list[str] = []
    settings = SETTINGS.model_copy(update={"steps": 40})
    progress = train(head(), source(), settings, checkpoint=tmp_path / "c", say=said.append)
    losses = [record["loss"] for record in progress.curve or []]
    assert len(losses) == len(said) == 40
    assert sum(losses[-5:]) < sum(losses[:5]) - 1.5  # random texts leave little to learn but frequencies
    assert progress.tokens == sum(len(batch.positions) for batch in itertools.islice(source().batches(0), 40))


def test_minutes_end_a_run_before_its_steps(tmp_path) -> None:
    progress = run(head(), tmp_path, steps=100000, minutes=1 / 60)
    assert progress.step < 10000
    assert 1.0 <= progress.seconds < 20.0


def test_only_the_head_is_trained(tmp_path) -> None:
    task = head()
    before = [p.detach().clone() for p in task.target.parameters()]
    started = weights(task)
    run(task, tmp_path)
    assert all(torch.equal(a, b) for a, b in zip(before, task.target.parameters(), strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(started, weights(task), strict=True))


def test_master_weights_keep_updates_too_small_for_bfloat16(tmp_path) -> None:
    class Slope:
        """Pulls its weight of 1 down by a little every step."""

        def __init__(self) -> None:
            self.parameters = {"w": nn.Parameter(torch.ones(1, dtype=torch.bfloat16))}

        def loss(self, batch, draws, *, done):
            return self.parameters["w"].sum().float(), []

        def state(self):
            return {}

    task = Slope()
    settings = SETTINGS.model_copy(update={"steps": 40, "learning_rate": 5e-4, "warmup": 0.0})
    train(task, source(), settings, checkpoint=tmp_path / "c", say=lambda text: None)
    # each update is an eighth of bf16's step below 1; together they are several
    assert float(task.parameters["w"].detach()) < 0.995


def test_a_loss_that_is_no_number_ends_training(tmp_path) -> None:
    task = head()
    with torch.no_grad():
        task.parameters["fc.weight"].fill_(torch.nan)
    with pytest.raises(SpecqError, match="training diverged before step 1: the loss is `nan`"):
        run(task, tmp_path)


@pytest.mark.parametrize("steps", [2, 10])
def test_weights_that_are_no_numbers_are_never_saved(tmp_path, monkeypatch, steps) -> None:
    monkeypatch.setattr("specq.train.loop.SAVE_SECONDS", 0.0)
    with pytest.raises(SpecqError, match="training diverged before step") as caught:
        run(head(), tmp_path, steps=steps, learning_rate=1e30)
    assert "distill.learning_rate=2.5e+29" in str(caught.value.hint)
    if (tmp_path / "checkpoint").is_file():
        assert all(bool(tensor.isfinite().all()) for tensor in load_file(tmp_path / "checkpoint").values())


def test_steps_after_the_last_record_are_on_the_curve_too(tmp_path) -> None:
    progress = run(head(), tmp_path)
    assert [record["step"] for record in progress.curve or []] == [1, 12]
    assert len(run(head(), tmp_path).curve or []) == 2  # finished: nothing is added


def test_rate_rises_then_falls() -> None:
    settings = DistillSection(learning_rate=1.0, warmup=0.1)
    rates = [learning_rate(settings, i / 100) for i in range(101)]
    assert rates.index(max(rates)) == 10
    assert rates[:11] == sorted(rates[:11])
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert rates[100] == pytest.approx(0.02)
    halved = settings.model_copy(update={"last_rate": 0.5})
    assert learning_rate(halved, 1.0) == pytest.approx(0.5)


def test_estimate_is_the_mean_length_of_a_chain_that_stops_at_its_first_miss() -> None:
    assert estimated_accept_length([]) == 1.0
    assert estimated_accept_length([0.5, 0.5]) == 1.75
    assert estimated_accept_length([1.0] * 4) == 5.0
