"""Tiny models on disk and little text."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from factories import tiny_config, write_model

import specq.compress
from specq.compress.plan import Settings
from specq.compress.report import Report
from specq.compress.runner import Calibration, quantize


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A file with the beginning of the bundled calibration text: the whole takes a second to tokenize."""
    bundled = Path(specq.compress.__file__).parent / "text" / "calibration.txt"
    file = tmp_path_factory.mktemp("text") / "calibration.txt"
    file.write_text(bundled.read_text("utf-8")[:20_000], "utf-8")
    return str(file)


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Evaluate on little text: what it says is not what these tests look at."""
    monkeypatch.setattr("specq.compress.runner.EVALUATION_SAMPLES", 2)
    monkeypatch.setattr("specq.compress.runner.EVALUATION_LENGTH", 48)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A tiny Llama whose matrices 32 divides."""
    return write_model(tmp_path / "source", tiny_config(intermediate_size=192), dtype=torch.bfloat16)


@pytest.fixture
def run(tmp_path: Path, text: str) -> Callable[..., Report]:
    """Quantizes to the folder `out` (or another name) with these settings."""

    def run(source: Path, name: str = "out", *, calibration: Calibration | None = None, **rest: Any) -> Report:
        options = {key: rest.pop(key) for key in ("overwrite", "on_progress", "provenance") if key in rest}
        calibration = calibration or Calibration(text, samples=16, seq_len=64)
        return quantize(source, tmp_path / name, settings=Settings(**rest), calibration=calibration, **options)

    return run
