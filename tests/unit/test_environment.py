"""What is noted of the machine that measures."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from specq import environment
from specq.environment import device_state, gpu_driver, num_processors


@pytest.fixture
def tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An nvidia-smi that notes what it was asked; what it answers is to be written into it."""
    tool = tmp_path / "nvidia-smi"
    tool.write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/asked\ncat {tmp_path}/answer\n', encoding="ascii")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr(environment, "gpu_id", lambda device: "GPU-abc")
    return tmp_path / "answer"


def test_clock_temperature_power_and_throttling_are_those_of_the_gpu_that_runs(tool: Path) -> None:
    tool.write_text("1980, 2010, 41, 312.50, 0x0000000000000004\n", encoding="ascii")
    state = device_state("cuda:0")
    assert state.pop("load") >= 0
    assert state == {
        "clock_mhz": 1980.0,
        "max_clock_mhz": 2010.0,
        "temperature_c": 41.0,
        "power_w": 312.5,
        "is_throttled": True,
    }
    # a number would be that of another GPU where CUDA_VISIBLE_DEVICES is set
    assert "--id=GPU-abc --query-gpu=clocks.sm," in (tool.parent / "asked").read_text()


def test_an_idle_clock_is_no_throttling_and_what_is_not_told_is_left_out(tool: Path) -> None:
    tool.write_text("345, 1980, 30, [N/A], 0x0000000000000001\n", encoding="ascii")
    state = device_state("cuda:0")
    assert (state["is_throttled"], "power_w" in state) == (False, False)


def test_without_an_answer_only_the_load_is_known(tool: Path) -> None:
    assert set(device_state("cuda:0")) == {"load"}  # the file is missing, so the tool fails
    assert gpu_driver() is None
    assert {"load"} <= set(device_state("cpu")) <= {"load", "clock_mhz"}


def test_processors_are_those_this_process_may_run_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {3, 5}, raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    assert num_processors() == 2
    monkeypatch.delattr(os, "sched_getaffinity")
    assert num_processors() == 8
