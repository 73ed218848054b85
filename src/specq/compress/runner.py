"""`quantize`: from a model on disk to a finished 4-bit folder, with everything checked before work starts."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from specq.checkpoint import ModelSpec, read_config
from specq.compress import card, writer
from specq.compress.activations import Activations
from specq.compress.calibration import TokenSet, calibration_tokens, evaluation_tokens
from specq.compress.digest import source_digest
from specq.compress.evaluation import evaluate
from specq.compress.head import dense_report, quantize_head
from specq.compress.layer_files import LayerWorkspace
from specq.compress.layers import LayerQuantizer, MatrixReport, Stream
from specq.compress.plan import Plan, Settings, disk_bytes, peak_bytes, plan_quantization
from specq.compress.report import Provenance, Report
from specq.environment import describe_environment, package_version
from specq.errors import NotEnoughMemoryError, UsageError
from specq.models.inventory import EMBEDDING, check_tensors
from specq.models.loader import choose_dtype, model_spec
from specq.models.memory import free_bytes
from specq.models.rope import RopeTable
from specq.storage import require_space
from specq.tensors import WeightSource, open_weights
from specq.tokenizer import Tokenizer
from specq.workspace import check_output, disk_errors, open_workspace

log = logging.getLogger("specq")

CHUNK_TOKENS = 2048
"""Tokens that run through a layer at once."""

TOKENS_AN_INPUT = 16
"""Calibration tokens for every input of the widest matrix, where their number is not given."""

DEVICE_SHARE = 0.9
"""Up to this share of a device's free memory is planned with; beyond it activations go to the host."""

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
    device: str = "cpu",
    offline: bool | None = None,
    overwrite: bool = False,
    on_progress: Callable[[str], None] = lambda text: None,
) -> Report:
    """Writes the model in `source` (a folder or .gguf file) to `output` in 4 bits, and reports what that cost.

    A run that was stopped is taken up after its last finished layer, to the same bits. `output` appears whole.
    Raises a SpecqError of the fitting kind before work starts when something is missing or in the way.
    """
    settings, calibration = settings or Settings(), calibration or Calibration()
    provenance = provenance or Provenance(source.name)
    started = time.monotonic()
    if device.startswith("cuda"):
        torch.cuda.reset_peak_memory_stats(device)
    output = output.absolute()
    here, there = output.resolve(), source.resolve()
    if here == there or here in there.parents or there in here.parents:
        raise UsageError(f"`{output}` is, holds or lies in the source itself", hint="choose another folder with -o")
    check_output(output, overwrite=overwrite)
    spec = model_spec(source)
    plan = plan_quantization(spec, settings)
    weights = open_weights(source, spec)
    check_tensors(spec, weights)
    require_space(output.parent, 2 * disk_bytes(spec, plan), hint="free some space, or choose another disk with -o")
    job = _Job(spec, weights, plan, settings, device, on_progress)
    job.require_memory()
    tokenizer = Tokenizer.load(source)
    tokens = None
    if settings.method == "gptq":
        length = min(calibration.seq_len, spec.max_context)
        samples = calibration.samples or -(-TOKENS_AN_INPUT * plan.widest // length)
        tokens = calibration_tokens(tokenizer, calibration.source, samples=samples, seq_len=length, offline=offline)
    held_out = evaluation_tokens(
        tokenizer, samples=EVALUATION_SAMPLES, seq_len=min(EVALUATION_LENGTH, spec.max_context)
    )
    _check_ids(spec, held_out if tokens is None else tokens)
    _announce(spec, plan, settings)
    on_progress("reading and checking the source")
    fingerprint = {
        "source": source_digest(spec, weights),
        **asdict(settings),
        "group_size": plan.group_size,
        "calibration": None if tokens is None else tokens.digest,
        "device": torch.device(device).type,
        "dtype": str(job.dtype).removeprefix("torch."),
        "torch": torch.__version__,
        "specq": package_version("specq"),
    }
    workspace = LayerWorkspace(output)
    with open_workspace(workspace, fingerprint, verb="quantize", overwrite=overwrite):
        resumed, matrices = job.quantize_layers(workspace, tokens)
        on_progress("writing")
        with disk_errors(output.parent):
            staged = workspace.staging()
            num_bytes = writer.write_weights(staged, job.all_tensors(workspace))
            writer.write_configs(staged, source, spec, plan, settings)
            writer.copy_companions(staged, source, tokenizer)
        scores = job.evaluate(staged, held_out)
        report = Report(
            output=output,
            provenance=provenance,
            settings=settings,
            plan=plan,
            calibration=None if tokens is None else _describe(tokens),
            matrices=tuple(matrices),
            scores=dict(scores),
            evaluation_tokens=held_out.tokens.numel(),
            num_bytes=num_bytes,
            resumed_layers=resumed,
            seconds=time.monotonic() - started,
            peak_device_bytes=torch.cuda.max_memory_allocated(device) if device.startswith("cuda") else None,
            peak_host_bytes=peak_host_bytes(),
            environment=describe_environment(device),
        )
        (staged / "README.md").write_text(card.model_card(report), encoding="utf-8")
        workspace.publish()
    return report


class _Job:
    """The parts of one run that share model, plan and device."""

    def __init__(
        self,
        spec: ModelSpec,
        weights: WeightSource,
        plan: Plan,
        settings: Settings,
        device: str,
        on_progress: Callable[[str], None],
    ) -> None:
        self.spec, self.weights, self.plan, self.settings = spec, weights, plan, settings
        self.device, self.say = device, on_progress
        self.dtype = choose_dtype("auto", spec, device)

    def require_memory(self) -> None:
        """Raise NotEnoughMemoryError when one layer and its largest product do not fit the device."""
        needed, free = peak_bytes(self.spec, itemsize=self.dtype.itemsize), free_bytes(self.device)
        if free is not None and needed > free:
            raise NotEnoughMemoryError(
                f"quantizing needs {needed / 1e9:.1f} GB on `{self.device}`, {free / 1e9:.1f} GB are free",
                hint="stop what else uses it, or quantize on the CPU with --device cpu",
            )

    def quantize_layers(self, workspace: LayerWorkspace, tokens: TokenSet | None) -> tuple[int, list[MatrixReport]]:
        """How many layers an earlier run had done, and the reports of all; the head counts as one after the last."""
        count = self.spec.layers + self.plan.packs_head
        resumed, reports = workspace.finished_layers(), []
        if resumed == count:
            tokens = None  # nothing is left that would read them
        rope = RopeTable(self.spec.rope, self.spec.head_dim, dtype=self.dtype, device=torch.device(self.device))
        streams = None
        if tokens is not None:
            rope.grow(tokens.tokens.shape[1])
            streams = self._streams(tokens.tokens)
        quantizer = LayerQuantizer(
            self.spec, self.weights, plan=self.plan, settings=self.settings, rope=rope, streams=streams
        )
        for index in range(resumed):
            self.say(f"resuming: layer {index + 1} of {self.spec.layers} is done already")
            tensors, record = workspace.read_layer(index)
            quantizer.replay(index, tensors)
            reports += [MatrixReport(**matrix) for matrix in record["matrices"]]
        began = time.monotonic()
        for index in range(resumed, count):
            left = remaining(began, index - resumed, count - index)
            if index < self.spec.layers:
                tensors, found = quantizer.quantize(index, on_product=partial(self._say_product, index, left))
            else:
                tensors, found = self._quantize_head(streams)
            workspace.write_layer(index, tensors, {"matrices": [asdict(report) for report in found]})
            reports += found
        if self.plan.head is not None and not self.plan.packs_head:
            reports.append(dense_report(self.plan.head, is_tied=self.spec.tie_embeddings))
        return resumed, reports

    def _quantize_head(self, streams: tuple[Stream, Stream] | None) -> tuple[dict[str, Tensor], list[MatrixReport]]:
        tensors, report = quantize_head(
            self.spec,
            self.weights,
            plan=self.plan,
            settings=self.settings,
            streams=streams,
            device=torch.device(self.device),
            dtype=self.dtype,
            on_rows=lambda rows: self.say(f"head, {rows}"),
        )
        return tensors, [report]

    def _say_product(self, index: int, left: str, product: str) -> None:
        self.say(f"layer {index + 1} of {self.spec.layers}, {product}{left}")

    def all_tensors(self, workspace: LayerWorkspace) -> Iterator[tuple[str, Tensor]]:
        """Every tensor of the finished model: what stays in 16 bits, then layer by layer what was quantized."""
        yield from writer.dense_tensors(self.spec, self.weights, self.plan)
        for index in range(self.spec.layers + self.plan.packs_head):
            yield from sorted(workspace.read_layer(index)[0].items())

    def evaluate(self, staged: Path, held_out: TokenSet) -> Any:
        """Scores of the staged files against the source."""
        written = ModelSpec.from_config(read_config(staged))
        return evaluate(
            self.spec,
            self.weights,
            open_weights(staged, written),
            held_out.tokens,
            plan=self.plan,
            device=self.device,
            on_layer=lambda index: self.say(f"evaluating, layer {index + 1} of {self.spec.layers}"),
        )

    def _streams(self, tokens: Tensor) -> tuple[Stream, Stream]:
        """The embedded calibration text, twice; on the host where it does not fit beside the solver."""
        device = torch.device(self.device)
        table = self.weights.tensor(EMBEDDING)
        width = self.spec.hidden + self.spec.heads * self.spec.head_dim
        needed = 2 * tokens.numel() * width * self.dtype.itemsize + peak_bytes(self.spec, itemsize=self.dtype.itemsize)
        free = free_bytes(self.device)
        on_host = free is not None and needed > DEVICE_SHARE * free
        streams = tuple(
            Stream(Activations(device, on_host=on_host), Activations(device, on_host=on_host)) for _ in range(2)
        )
        for i, chunk in enumerate(tokens.split(max(1, CHUNK_TOKENS // tokens.shape[1]))):
            embedded = F.embedding(chunk, table).to(device, self.dtype)
            for stream in streams:
                stream.residual.write(i, embedded)
        return streams[0], streams[1]


def _announce(spec: ModelSpec, plan: Plan, settings: Settings) -> None:
    """Say once what was chosen and what a reader should know."""
    if settings.group_size is None:
        log.info("groups of %d columns: the largest that divides the matrices' inputs", plan.group_size)
    if spec.quantization is not None:
        log.info("the source is a GGUF of 4 bits itself: scores are against its dequantized numbers")
    for warning in plan.warnings:
        log.warning("%s", warning)


def remaining(began: float, done: int, left: int) -> str:
    """ ", about 3 min left" once a layer is done, as a part of a line of progress."""
    if done == 0:
        return ""
    seconds = (time.monotonic() - began) / done * left
    return f", about {seconds / 60:.0f} min left" if seconds >= 90 else f", about {seconds:.0f} s left"


def peak_host_bytes() -> int | None:
    """The most memory this process has held, None where the system does not say."""
    try:
        import resource
    except ImportError:  # Windows
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


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
