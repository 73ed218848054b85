"""Quantizing on a GPU: bf16 activations, TF32 sums, activations on the host where they do not fit."""

from __future__ import annotations

import hashlib
import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from factories import tiny_config, write_model

from specq.checkpoint import ModelSpec
from specq.compress.plan import Settings, peak_bytes
from specq.compress.report import Report
from specq.compress.runner import Calibration, quantize
from specq.models.loader import expected_tensors

pytestmark = pytest.mark.gpu

CALIBRATION = Calibration(samples=32, seq_len=256)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = tiny_config(hidden_size=256, intermediate_size=512, num_attention_heads=4)
    return write_model(tmp_path_factory.mktemp("models") / "source", config, dtype=torch.bfloat16)


def run(source: Path, output: Path, **options: Any) -> Report:
    return quantize(source, output, settings=Settings(), calibration=CALIBRATION, device="cuda:0", **options)


def digest(report: Report) -> str:
    return hashlib.sha256((report.output / "model.safetensors").read_bytes()).hexdigest()


def test_the_gpus_result_is_as_close_as_the_cpus(source: Path, tmp_path: Path) -> None:
    on_gpu = run(source, tmp_path / "gpu")
    on_cpu = quantize(source, tmp_path / "cpu", settings=Settings(), calibration=CALIBRATION)
    assert on_gpu.scores["quantized"].kl < 0.8 * on_gpu.scores["rtn"].kl
    assert on_gpu.scores["quantized"].kl == pytest.approx(on_cpu.scores["quantized"].kl, rel=0.15)
    assert on_gpu.peak_device_bytes


def test_activations_on_the_host_change_no_bit(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    on_device = run(source, tmp_path / "device")
    monkeypatch.setattr("specq.compress.job.DEVICE_SHARE", 0.0)
    assert digest(run(source, tmp_path / "host")) == digest(on_device)


def test_a_stopped_run_resumes_to_the_same_bits(source: Path, tmp_path: Path) -> None:
    def stop(line: str) -> None:
        if line.startswith("layer 2 of 2, gate_up"):
            raise KeyboardInterrupt

    whole = run(source, tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        run(source, tmp_path / "out", on_progress=stop)
    resumed = run(source, tmp_path / "out")
    assert resumed.resumed_layers == 1
    assert digest(resumed) == digest(whole)


def test_memory_stays_within_the_formula_at_8b_width(tmp_path_factory: pytest.TempPathFactory) -> None:
    """SPECQ_8B_LAYERS=32 makes it a whole model; the peak is that of one layer."""
    layers = int(os.environ.get("SPECQ_8B_LAYERS", "2"))
    samples, seq_len = int(os.environ.get("SPECQ_8B_SAMPLES", "16")), 2048
    config = tiny_config(
        hidden_size=4096,
        intermediate_size=14336,
        num_attention_heads=32,
        num_key_value_heads=8,
        num_hidden_layers=layers,
        max_position_embeddings=8192,
        vocab_size=128256,
    )
    spec = ModelSpec.from_config(config)
    folder = tmp_path_factory.mktemp("8b")
    write_model(folder / "source", config, weights=random_matrices(spec), dtype=torch.bfloat16, shards=8)
    torch.cuda.empty_cache()
    report = quantize(
        folder / "source",
        folder / "out",
        calibration=Calibration(samples=samples, seq_len=seq_len),
        device="cuda:0",
        on_progress=lambda line: print(f"{time.monotonic():.1f} {line}", flush=True),
    )
    activations = 4 * samples * seq_len * spec.hidden * 2
    print(json.dumps({key: value for key, value in report.record().items() if key != "matrices"}))
    assert report.peak_device_bytes is not None
    assert report.peak_device_bytes < peak_bytes(spec, itemsize=2) + activations + (1 << 30)


def random_matrices(spec: ModelSpec) -> dict[str, torch.Tensor]:
    """Random bf16 weights, made on the GPU since the CPU takes minutes."""
    weights = {}
    for name, shape in expected_tensors(spec).items():
        values = torch.randn(shape, device="cuda", dtype=torch.bfloat16)
        weights[name] = (torch.ones_like(values) if len(shape) == 1 else values / shape[1] ** 0.5).cpu()
    return weights
