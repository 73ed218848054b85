"""`quantize`: from a model on disk to a finished 4-bit folder, with everything checked before work starts."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from specq.checkpoint import ModelSpec
from specq.companions import companion_files, copy_companions
from specq.compress import card, writer
from specq.compress.calibration import TokenSet, calibration_tokens, evaluation_tokens
from specq.compress.digest import source_digest
from specq.compress.host_memory import HostMemory
from specq.compress.job import Job
from specq.compress.layer_files import LayerWorkspace
from specq.compress.plan import Plan, Settings, disk_bytes, plan_quantization
from specq.compress.report import Provenance, Report
from specq.environment import describe_environment, package_version
from specq.errors import UsageError
from specq.models.inventory import check_tensors
from specq.models.loader import model_spec, open_sharing
from specq.models.shared import Lender, SharedEmbeddings, read_shared
from specq.storage import require_space
from specq.tensors import WeightSource, open_weights
from specq.tokenizer import Tokenizer
from specq.workspace import check_output, disk_errors, open_workspace

log = logging.getLogger("specq")

TOKENS_AN_INPUT = 16
"""Calibration tokens for every input of the widest matrix, where their number is not given."""

EVALUATION_SAMPLES, EVALUATION_LENGTH = 24, 256


@dataclass(frozen=True)
class Calibration:
    """Which text calibrates: its source, at most how many sequences (None: by the model's width), their length."""

    source: str = "bundled"
    samples: int | None = None
    seq_len: int = 512


@torch.inference_mode()
def quantize(
    source: Path,
    output: Path,
    *,
    settings: Settings | None = None,
    calibration: Calibration | None = None,
    provenance: Provenance | None = None,
    lender: Lender | None = None,
    device: str = "cpu",
    offline: bool | None = None,
    overwrite: bool = False,
    on_progress: Callable[[str], None] = lambda text: None,
) -> Report:
    """Writes the model in `source` (a folder or .gguf file) to `output` in 4 bits, and reports what that cost.

    A run that was stopped is taken up after its last finished layer, to the same bits. `output` appears whole.
    With a `lender`, of whose embedding and output head the source is, these and the tokenizer are left to it.
    Raises a SpecqError of the fitting kind before work starts when something is missing or in the way.
    """
    settings, calibration = settings or Settings(), calibration or Calibration()
    provenance = provenance or Provenance(source.name)
    started = time.monotonic()
    with HostMemory() as host:
        task = _prepare(
            source,
            output.absolute(),
            settings,
            calibration,
            lender=lender,
            device=device,
            offline=offline,
            overwrite=overwrite,
            on_progress=on_progress,
        )
        workspace = LayerWorkspace(task.output)
        with open_workspace(workspace, task.fingerprint, verb="quantize", overwrite=overwrite):
            resumed, matrices = task.job.quantize_layers(workspace, task.tokens)
            on_progress("writing")
            staged, num_bytes = _write(task, workspace)
            report = Report(
                output=task.output,
                provenance=provenance,
                settings=settings,
                plan=task.job.plan,
                calibration=None if task.tokens is None else _describe(task.tokens),
                matrices=tuple(matrices),
                scores=dict(task.job.evaluate(staged, task.held_out)),
                evaluation_tokens=task.held_out.tokens.numel(),
                num_bytes=num_bytes,
                resumed_layers=resumed,
                seconds=time.monotonic() - started,
                peak_device_bytes=torch.cuda.max_memory_allocated(device) if device.startswith("cuda") else None,
                peak_host_bytes=host.peak,
                environment=describe_environment(device),
                shared=task.job.shared,
            )
            (staged / "README.md").write_text(card.model_card(report), encoding="utf-8")
            workspace.publish()
    return report


@dataclass(frozen=True)
class _Task:
    """A run whose checks have passed: from where to where, its tokens, and what an earlier run must agree with."""

    source: Path
    output: Path
    tokenizer: Tokenizer
    companions: Mapping[str, Path]
    job: Job
    tokens: TokenSet | None
    held_out: TokenSet
    fingerprint: dict[str, Any]


def _prepare(
    source: Path,
    output: Path,
    settings: Settings,
    calibration: Calibration,
    *,
    lender: Lender | None,
    device: str,
    offline: bool | None,
    overwrite: bool,
    on_progress: Callable[[str], None],
) -> _Task:
    """Everything that can be found wrong before work starts, the cheapest first."""
    here, there = output.resolve(), source.resolve()
    if here == there or here in there.parents or there in here.parents:
        raise UsageError(f"`{output}` is, holds or lies in the source itself", hint="choose another folder with -o")
    check_output(output, overwrite=overwrite)
    spec = model_spec(source)
    plan = plan_quantization(spec, settings)
    weights, shared = _open(source, spec, settings, lender)
    check_tensors(spec, weights)
    require_space(output.parent, 2 * disk_bytes(spec, plan), hint="free some space, or choose another disk with -o")
    if device.startswith("cuda"):
        torch.cuda.init()  # before it the device is unknown to the next line
        torch.cuda.reset_peak_memory_stats(device)
    job = Job(spec, weights, plan, settings, device, on_progress, shared=shared)
    tokenizer = Tokenizer.load(source if lender is None else lender.path)
    companions = companion_files(source) if lender is None else {}
    tokens = None
    if settings.method == "gptq":
        tokens = _calibrate(spec, plan, tokenizer, calibration, offline)
        _check_ids(spec, tokens)
    job.require_memory(0 if tokens is None else tokens.tokens.numel())
    held_out = evaluation_tokens(
        tokenizer, samples=EVALUATION_SAMPLES, seq_len=min(EVALUATION_LENGTH, spec.max_context)
    )
    _check_ids(spec, held_out)
    _announce(spec, plan, settings)
    on_progress("reading and checking the source")
    fingerprint = {
        "source": source_digest(spec, weights),
        "method": settings.method,
        "group_size": plan.group_size,
        "act_order": settings.stored_order,
        "asym": not settings.symmetric,
        "head_bits": settings.head_bits,
        "format": settings.format,
        "calibration": None if tokens is None else tokens.digest,
        "shared": shared is not None,
        "device": torch.device(device).type,
        "dtype": str(job.dtype).removeprefix("torch."),
        "torch": torch.__version__,
        "specq": package_version("specq"),
    }
    return _Task(source, output, tokenizer, companions, job, tokens, held_out, fingerprint)


def _calibrate(
    spec: ModelSpec, plan: Plan, tokenizer: Tokenizer, calibration: Calibration, offline: bool | None
) -> TokenSet:
    """The calibration's tokens; says where there are fewer or shorter sequences than asked for."""
    length = min(calibration.seq_len, spec.max_context)
    if length < calibration.seq_len:
        log.info("sequences of %d tokens: the model sees no more", length)
    samples = calibration.samples or -(-TOKENS_AN_INPUT * plan.widest // length)
    tokens = calibration_tokens(tokenizer, calibration.source, samples=samples, seq_len=length, offline=offline)
    if len(tokens.tokens) < samples:
        log.warning("the text has %d sequences of %d tokens, not %d", len(tokens.tokens), length, samples)
    return tokens


def _write(task: _Task, workspace: LayerWorkspace) -> tuple[Path, int]:
    """The folder with the finished model but its card, and the bytes of its weights."""
    job = task.job
    with disk_errors(task.output.parent):
        staged = workspace.staging()
        num_bytes = writer.write_weights(staged, job.all_tensors(workspace))
        writer.write_configs(staged, task.source, job.spec, job.plan, job.settings)
        if job.shared is None:
            copy_companions(task.companions, staged, chat_template=task.tokenizer.chat_template)
        else:
            writer.write_manifest(staged, task.source, job.shared)
    return staged, num_bytes


def _open(
    source: Path, spec: ModelSpec, settings: Settings, lender: Lender | None
) -> tuple[WeightSource, SharedEmbeddings | None]:
    """The source's weights, and what it is to leave to the lender. Raises UsageError where it needs one."""
    if lender is not None:
        if settings.head_bits is not None:
            raise UsageError("the output head is shared, so it has no bits of its own", hint="leave out --head-bits")
        return open_sharing(source, spec, lender)
    if (shared := read_shared(source)) is not None:
        raise UsageError(
            f"`{source.name}` was saved without embedding and output head, which calibration needs",
            hint=f"name the model that lends them: --share-embeddings {shared.lender}",
        )
    return open_weights(source, spec), None


def _announce(spec: ModelSpec, plan: Plan, settings: Settings) -> None:
    """Say once what was chosen and what a reader should know."""
    if settings.group_size is None:
        log.info("groups of %d columns: the largest that divides the matrices' inputs", plan.group_size)
    if spec.quantization is not None:
        log.info("the source is a GGUF of 4 bits itself: scores are against its dequantized numbers")
    for warning in plan.warnings:
        log.warning("%s", warning)


def _describe(tokens: TokenSet) -> dict[str, Any]:
    samples, length = tokens.tokens.shape
    return {"source": tokens.origin, "samples": samples, "seq_len": length, "sha256": tokens.digest}


def _check_ids(spec: ModelSpec, tokens: TokenSet) -> None:
    largest = int(tokens.tokens.max())
    if largest >= spec.vocab:
        raise UsageError(
            f"the tokenizer makes id {largest}, the model has {spec.vocab} embeddings",
            hint="the tokenizer is not this model's: download the model again",
        )
