"""Which device is taken, and what is said of it."""

from __future__ import annotations

import logging

import pytest
import torch

from specq.errors import UsageError
from specq.spec.load import choose_device, take_device


@pytest.fixture
def current(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Two GPUs; the devices that became the current one."""
    taken: list[str] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", taken.append)
    return taken


@pytest.mark.parametrize("name", ["auto", "cuda"])
def test_of_several_gpus_the_first_is_used_and_said_so_once(
    name: str, current: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, logger="specq"):
        assert choose_device(name) == take_device(name) == "cuda:0"
    assert current == ["cuda:0"]
    assert [record.message.split(",")[0] for record in caplog.records] == ["several GPUs: cuda:0 is used"]


def test_a_gpu_that_is_named_becomes_the_current_one(current: list[str], caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="specq"):
        assert take_device("cuda:1") == "cuda:1"
    assert (current, caplog.records) == (["cuda:1"], [])
    with pytest.raises(UsageError, match="device `cuda:2` is not there: this machine has 2 GPUs"):
        take_device("cuda:2")
    assert take_device("cpu") == "cpu"
    assert current == ["cuda:1"]
