"""What fits a GPU is judged by what is free there, and said with its sizes where it does not."""

from __future__ import annotations

import pytest
import torch

from specq.errors import NotEnoughMemoryError
from specq.train.memory import budget, left_on, require_left, states_budget

GPU = torch.device("cuda:0")


def test_kept_states_take_a_quarter_of_all_and_no_more_than_half_of_what_is_free() -> None:
    assert budget(total=80, left=70) == 20
    assert budget(total=80, left=10) == 5
    assert budget(total=80, left=0) == 0


def test_what_does_not_fit_is_said_with_its_sizes() -> None:
    require_left(1 << 30, "texts", device=GPU, left=1 << 30, hint="")
    require_left(1 << 60, "texts", device=GPU, left=None, hint="")
    with pytest.raises(NotEnoughMemoryError, match=r"texts need `3.00 GiB` and `cuda:0` has 0.50 GiB free") as caught:
        require_left(3 << 30, "texts", device=GPU, left=1 << 29, hint="end it")
    assert caught.value.hint == "end it"


def test_what_torch_holds_without_a_use_counts_as_free(monkeypatch) -> None:
    monkeypatch.setattr("specq.train.memory.free_bytes", lambda device: 100)
    monkeypatch.setattr("torch.cuda.memory_reserved", lambda device: 50)
    monkeypatch.setattr("torch.cuda.memory_allocated", lambda device: 20)
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda device: (100, 1000))
    assert left_on(GPU) == 130
    assert states_budget(GPU) == 65


def test_a_cpu_keeps_no_states_and_is_not_asked() -> None:
    assert left_on(torch.device("cpu")) is None
    assert states_budget(torch.device("cpu")) == 0
