"""Memory taken is seen, mapped files are not."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

from specq.compress.host_memory import INTERVAL_S, HostMemory

LARGE = 200 << 20
pytestmark = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux")


def peak_of(kind: str, file: Path) -> int:
    with HostMemory() as memory:
        before = memory.peak
        if kind == "taken":
            held = torch.ones(LARGE, dtype=torch.uint8)
        else:
            held = torch.from_file(str(file), size=LARGE, dtype=torch.uint8)
        held.max()
        time.sleep(3 * INTERVAL_S)
        del held
        after = memory.peak
    assert before is not None
    assert after is not None
    return after - before


def test_a_peak_that_has_passed_is_remembered_and_a_mapped_file_is_not_counted(tmp_path: Path) -> None:
    file = tmp_path / "mapped"
    file.write_bytes(bytes(LARGE))
    assert peak_of("mapped", file) < LARGE // 4
    assert peak_of("taken", file) > LARGE // 2


def test_without_the_systems_word_the_process_own_peak_counts(tmp_path: Path) -> None:
    with HostMemory(status=tmp_path / "nothing") as memory:
        assert memory.peak
