"""The work of one run of quantize: layer after layer, taken up where an earlier run stopped, and the measure of it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from specq.checkpoint import ModelSpec, read_config
from specq.compress import writer
from specq.compress.activations import Activations
from specq.compress.calibration import TokenSet
from specq.compress.evaluation import Score, evaluate
from specq.compress.head import dense_report, quantize_head
from specq.compress.layer_files import LayerWorkspace
from specq.compress.layers import LayerQuantizer, MatrixReport, Stream
from specq.compress.plan import Plan, Settings, activation_bytes, peak_bytes
from specq.errors import NotEnoughMemoryError
from specq.models.inventory import EMBEDDING
from specq.models.loader import choose_dtype
from specq.models.memory import free_bytes
from specq.models.rope import RopeTable
from specq.models.shared import LentWeights, SharedEmbeddings
from specq.quant.gptq import FIRST_DAMPING
from specq.tensors import WeightSource, open_weights

log = logging.getLogger("specq")

CHUNK_TOKENS = 2048
"""Tokens that run through a layer at once."""

LIBRARY_BYTES = 1 << 30
"""A GPU's libraries work in memory of their own: 0.3 GB at 8B width on an H200."""

DEVICE_SHARE = 0.9
"""Up to this share of a device's free memory is planned with; beyond it activations go to the host."""


class Job:
    """The parts of one run that share model, plan and device."""

    def __init__(
        self,
        spec: ModelSpec,
        weights: WeightSource,
        plan: Plan,
        settings: Settings,
        device: str,
        on_progress: Callable[[str], None],
        *,
        shared: SharedEmbeddings | None = None,
    ) -> None:
        """`shared` is what is read from `weights` and left out of what is written."""
        self.spec, self.weights, self.plan, self.settings, self.shared = spec, weights, plan, settings, shared
        self.device, self.say = device, on_progress
        self.dtype = choose_dtype("auto", spec, device)

    def require_memory(self, num_tokens: int) -> None:
        """Raise NotEnoughMemoryError when one layer, its largest product and the activations do not fit."""
        solving = self._solving_bytes()
        kept = activation_bytes(self.spec, num_tokens, itemsize=self.dtype.itemsize)
        spills = self._spills(num_tokens)
        for device, needed in ((self.device, solving if spills else solving + kept), ("cpu", kept if spills else 0)):
            free = free_bytes(device)
            if free is not None and needed > free:
                hint = "fewer --samples need less" if kept > solving else "stop what else uses it"
                raise NotEnoughMemoryError(
                    f"quantizing needs {needed / 1e9:.1f} GB on `{device}`, {free / 1e9:.1f} GB are free", hint=hint
                )

    def _solving_bytes(self) -> int:
        """Bytes on the device besides the activations."""
        libraries = LIBRARY_BYTES if self.device.startswith("cuda") else 0
        return peak_bytes(self.spec, itemsize=self.dtype.itemsize) + libraries

    def _spills(self, num_tokens: int) -> bool:
        """Whether the activations stay on the host, as they do not fit the GPU beside the solver."""
        if not self.device.startswith("cuda"):
            return False
        needed = self._solving_bytes() + activation_bytes(self.spec, num_tokens, itemsize=self.dtype.itemsize)
        free = free_bytes(self.device)
        return free is not None and needed > DEVICE_SHARE * free

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
            done = f"layer {index + 1} of {self.spec.layers}" if index < self.spec.layers else "the head"
            self.say(f"resuming: {done} is done already")
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
            _warn_of_damping(found)
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
        lent = self.shared.tensors if self.shared else ()
        yield from (named for named in writer.dense_tensors(self.spec, self.weights, self.plan) if named[0] not in lent)
        for index in range(self.spec.layers + self.plan.packs_head):
            yield from sorted(workspace.read_layer(index)[0].items())

    def evaluate(self, staged: Path, held_out: TokenSet) -> Mapping[str, Score]:
        """Scores of the staged files against the source."""
        written: WeightSource = open_weights(staged, ModelSpec.from_config(read_config(staged)))
        if self.shared is not None:
            written = LentWeights(written, self.weights, frozenset(self.shared.tensors))
        return evaluate(
            self.spec,
            self.weights,
            written,
            held_out.tokens,
            plan=self.plan,
            device=self.device,
            on_layer=lambda index: self.say(f"evaluating, layer {index + 1} of {self.spec.layers}"),
        )

    def _streams(self, tokens: Tensor) -> tuple[Stream, Stream]:
        """The embedded calibration text, twice; on the host where it does not fit beside the solver."""
        device = torch.device(self.device)
        table = self.weights.tensor(EMBEDDING)
        on_host = self._spills(tokens.numel())
        streams = tuple(
            Stream(Activations(device, on_host=on_host), Activations(device, on_host=on_host)) for _ in range(2)
        )
        for i, chunk in enumerate(tokens.split(max(1, CHUNK_TOKENS // tokens.shape[1]))):
            embedded = F.embedding(chunk, table).to(device, self.dtype)
            for stream in streams:
                stream.residual.write(i, embedded)
        return streams[0], streams[1]


def _warn_of_damping(reports: Sequence[MatrixReport]) -> None:
    """Say which matrices needed more damping than is usual; the report has every one's."""
    for report in reports:
        if report.damping is not None and report.damping > FIRST_DAMPING:
            log.warning("`%s`: damping raised to %g for a positive definite Hessian", report.name, report.damping)


def remaining(began: float, done: int, left: int) -> str:
    """ ", about 3 min left" once a layer is done, as a part of a line of progress."""
    if done == 0:
        return ""
    seconds = (time.monotonic() - began) / done * left
    return f", about {seconds / 60:.0f} min left" if seconds >= 90 else f", about {seconds:.0f} s left"
