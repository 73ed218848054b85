"""The output head in 4 or 8 bits, solved some rows at a time for what the last norm puts out."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from specq.checkpoint import ModelSpec
from specq.compress.layers import MatrixReport, Stream, exact_in_tf32, matrix_report
from specq.compress.plan import HEAD_NAME, MatrixPlan, Plan, Settings
from specq.errors import SpecqError
from specq.models.inventory import EMBEDDING, HEAD, NORM
from specq.quant.formats import FORMATS, format_name
from specq.quant.gptq import Grid, InputMoments, Solution, round_to_nearest, solve
from specq.quant.packed import PackedWeight, concat_rows
from specq.tensors import WeightSource


def head_weight(spec: ModelSpec, source: WeightSource) -> Tensor:
    """The matrix [vocab, hidden] that makes the logits, in the file's type: the embedding where they are tied."""
    return source.tensor(EMBEDDING if spec.tie_embeddings else HEAD)


def rounded_head(weight: Tensor, grid: Grid, *, rows_at_once: int, device: str) -> Tensor:
    """fp32 [vocab, hidden] on the device: every number of the head at its nearest code."""
    parts = (part.to(device, torch.float32) for part in weight.split(rows_at_once))
    return torch.cat([round_to_nearest(part, grid).dequantize() for part in parts])


def dense_report(matrix: MatrixPlan, *, is_tied: bool) -> MatrixReport:
    """The report of a head that could not be packed; a tied one is stored with the embedding."""
    num_bytes = 0 if is_tied else 2 * matrix.rows * matrix.columns
    return MatrixReport(HEAD_NAME, matrix.rows, matrix.columns, None, None, num_bytes, remark=matrix.remark, bits=16)


def quantize_head(
    spec: ModelSpec,
    source: WeightSource,
    *,
    plan: Plan,
    settings: Settings,
    streams: tuple[Stream, Stream] | None,
    device: torch.device,
    dtype: torch.dtype,
    on_rows: Callable[[str], None] = lambda text: None,
) -> tuple[dict[str, Tensor], MatrixReport]:
    """The tensors to write for the head, on the CPU, and its report; the streams are behind the last layer.

    Raises SpecqError naming the head where it cannot be solved.
    """
    matrix = plan.head
    assert matrix is not None
    assert matrix.grid is not None
    weight = head_weight(spec, source)
    moments = hessian = None
    if settings.method == "gptq":
        moments = _moments(spec, source, streams, dtype)
        hessian = moments.hessian()
    solutions: list[Solution] = []
    packed: list[PackedWeight] = []
    done = 0
    for rows in weight.split(plan.head_rows):
        on_rows(f"rows {done} of {matrix.rows}")
        part = rows.to(device, torch.float32)
        done += len(rows)
        if moments is None or hessian is None:
            packed.append(round_to_nearest(part, matrix.grid).to("cpu"))
            continue
        try:
            solution = solve(part, hessian, matrix.grid, shortfall=moments.shortfall(part))
        except SpecqError as error:
            raise SpecqError(f"`{HEAD_NAME}`: {error.message}", hint=error.hint) from error
        packed.append(solution.weight.to("cpu"))
        solutions.append(solution)
    whole = concat_rows(packed)
    assert whole is not None  # the rows' order of columns is the Hessian's
    stored = FORMATS[format_name(settings.format, matrix.grid.bits)].pack(whole)
    report = matrix_report(HEAD_NAME, matrix, stored, solutions)
    return {f"{HEAD_NAME}.{suffix}": tensor for suffix, tensor in stored.items()}, report


def _moments(
    spec: ModelSpec, source: WeightSource, streams: tuple[Stream, Stream] | None, dtype: torch.dtype
) -> InputMoments:
    """What the head reads, and what that lacks of the original model's."""
    assert streams is not None
    moments: InputMoments | None = None
    for before, now in zip(*(_normed(spec, source, stream, dtype) for stream in streams), strict=True):
        if moments is None:
            moments = InputMoments(spec.hidden, device=now.device)
        with exact_in_tf32(now.dtype):
            moments.add(now, drift=before - now)
    assert moments is not None
    return moments


def _normed(spec: ModelSpec, source: WeightSource, stream: Stream, dtype: torch.dtype) -> Iterator[Tensor]:
    """The residual stream after the last norm, chunk by chunk."""
    norm: Tensor | None = None
    for index in stream.residual.indices():
        x = stream.residual.read(index)
        norm = source.tensor(NORM).to(x.device, dtype) if norm is None else norm
        yield F.rms_norm(x, norm.shape, norm, spec.norm_eps)
