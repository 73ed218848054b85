"""Quantizing one decoder layer after another: what each product reads is seen through everything quantized before.

Two copies of the calibration text run side by side: through the layers as they were, and as they are written.
Each matrix is solved for what the second reads, and aims at what the first would have put out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from specq.checkpoint import ModelSpec
from specq.compress.activations import Activations
from specq.compress.plan import MatrixPlan, Plan, Settings
from specq.compress.stages import PRODUCTS, StagedLayer
from specq.errors import SpecqError
from specq.models.rope import RopeTable
from specq.quant.formats import FORMATS
from specq.quant.gptq import InputMoments, Solution, round_to_nearest, solve
from specq.quant.packed import PackedWeight
from specq.tensors import WeightSource


@dataclass(frozen=True)
class MatrixReport:
    """What became of one matrix: shape, columns a group (None: left in 16 bits), output error relative to the output
    (None where nothing was solved), bytes written, damping used, columns without input, a remark, bits."""

    name: str
    rows: int
    columns: int
    group_size: int | None
    error: float | None
    num_bytes: int
    damping: float | None = None
    dead_columns: int = 0
    remark: str = ""
    bits: int = 4

    @property
    def place(self) -> tuple[str, str]:
        """(layer, name inside it); the layer is "-" for a matrix outside of them."""
        parts = self.name.split(".", 3)
        return (parts[2], parts[3]) if len(parts) == 4 else ("-", self.name)


def matrix_report(
    name: str,
    matrix: MatrixPlan,
    stored: Mapping[str, Tensor],
    solutions: Sequence[Solution],
    index: Tensor | None = None,
) -> MatrixReport:
    """The report of a packed matrix whose rows lie in `solutions`: all of them, or those of `index`."""
    assert matrix.grid is not None
    error = damping = None
    if solutions:
        rows = slice(None) if index is None else index
        energy = sum(float(solution.energies[rows].sum()) for solution in solutions)
        error = sum(float(solution.errors[rows].sum()) for solution in solutions) / energy if energy > 0 else 0.0
        damping = max(solution.damping for solution in solutions)
    size = matrix.grid.group_size
    return MatrixReport(
        name,
        matrix.rows,
        matrix.columns,
        matrix.columns if size == -1 else size,
        error,
        sum(tensor.nbytes for tensor in stored.values()),
        damping,
        solutions[0].dead_columns if solutions else 0,
        matrix.remark,
        matrix.grid.bits,
    )


@dataclass
class Stream:
    """The calibration text at one point of the model: the residual stream, and what o reads."""

    residual: Activations
    attended: Activations


class LayerQuantizer:
    """Turns the layers of a source into 4 bits, in order; `streams` are empty where nothing is calibrated."""

    def __init__(
        self,
        spec: ModelSpec,
        source: WeightSource,
        *,
        plan: Plan,
        settings: Settings,
        rope: RopeTable,
        streams: tuple[Stream, Stream] | None,
    ) -> None:
        self._spec, self._source, self._plan, self._settings = spec, source, plan, settings
        self._rope, self._streams = rope, streams
        self._format = FORMATS[settings.format]
        self._device, self._dtype = rope.cos.device, rope.cos.dtype

    def quantize(
        self, index: int, *, on_product: Callable[[str], None] = lambda name: None
    ) -> tuple[dict[str, Tensor], list[MatrixReport]]:
        """The tensors to write for layer `index`, on the CPU, and a report a matrix; the streams move on behind it."""
        original, layer = self._staged(index), self._staged(index)
        tensors: dict[str, Tensor] = {}
        reports: list[MatrixReport] = []
        for product in PRODUCTS:
            on_product(product)
            written, found = self._quantize_product(index, product, original, layer)
            tensors |= written
            reports += found
            self._advance(product, original, layer)
        return tensors, reports

    def _quantize_product(
        self, index: int, product: str, original: StagedLayer, layer: StagedLayer
    ) -> tuple[dict[str, Tensor], list[MatrixReport]]:
        """What is written of the product's matrices; both layers get its numbers, and nothing else is kept of it."""
        tensors: dict[str, Tensor] = {}
        reports: list[MatrixReport] = []
        weight, names = self._read(index, product), PRODUCTS[product]
        original.weights[product] = weight.to(self._dtype)
        matrices = [self._plan.of(name) for name in names]
        try:
            solved = self._solve(weight.float(), product, matrices, original, layer)
        except SpecqError as error:
            name = f"model.layers.{index}.{names[0]}"
            raise SpecqError(f"`{name}`: {error.message}", hint=error.hint) from error
        layer.weights[product] = torch.cat([part.dense.to(self._dtype) for part in solved])
        for matrix, part in zip(matrices, solved, strict=True):
            prefix = f"model.layers.{index}.{matrix.name}"
            stored = {} if part.packed is None else self._format.pack(part.packed)
            tensors |= {f"{prefix}.{suffix}": tensor.cpu() for suffix, tensor in stored.items()}
            reports.append(part.report(prefix, matrix, stored))
        return tensors, reports

    def replay(self, index: int, tensors: Mapping[str, Tensor]) -> None:
        """Move the streams behind layer `index`, whose quantized tensors are known from an earlier run."""
        if self._streams is None:
            return
        original, layer = self._staged(index), self._staged(index)
        for product, names in PRODUCTS.items():
            weight = self._read(index, product)
            original.weights[product] = weight.to(self._dtype)
            matrices = [self._plan.of(name) for name in names]
            parts = weight.split([matrix.rows for matrix in matrices])
            dense = [
                part if matrix.grid is None else self._unpack(f"model.layers.{index}.{matrix.name}", matrix, tensors)
                for matrix, part in zip(matrices, parts, strict=True)
            ]
            layer.weights[product] = torch.cat([part.to(self._dtype) for part in dense])
            self._advance(product, original, layer)

    def _staged(self, index: int) -> StagedLayer:
        return StagedLayer(self._spec, index, self._source, self._rope)

    def _read(self, index: int, product: str) -> Tensor:
        """The product's matrices below each other, in the file's type, on the device."""
        names = [f"model.layers.{index}.{name}.weight" for name in PRODUCTS[product]]
        return torch.cat([self._source.tensor(name).to(self._device) for name in names])

    def _unpack(self, prefix: str, matrix: MatrixPlan, tensors: Mapping[str, Tensor]) -> Tensor:
        suffixes = self._format.required + self._format.optional
        found = {suffix: tensors[f"{prefix}.{suffix}"] for suffix in suffixes if f"{prefix}.{suffix}" in tensors}
        assert matrix.grid is not None
        return self._format.unpack(found, matrix.grid.group_size).to(self._device).dequantize(self._dtype)

    def _solve(
        self, weight: Tensor, product: str, matrices: list[MatrixPlan], original: StagedLayer, layer: StagedLayer
    ) -> list[_Part]:
        """Every matrix of the product in 4 bits where planned, all solved in one go since they share their input."""
        rows = [matrix.rows for matrix in matrices]
        grid = next((matrix.grid for matrix in matrices if matrix.grid is not None), None)
        if grid is None:
            return [_Part(part) for part in weight.split(rows)]
        packs = torch.cat([torch.full((matrix.rows,), matrix.grid is not None) for matrix in matrices])
        chosen = slice(None) if bool(packs.all()) else packs.to(weight.device)
        solution: Solution | None = None
        if self._settings.method == "rtn":
            packed = round_to_nearest(weight[chosen], grid)
        else:
            moments = self._collect(product, original, layer)
            hessian, shortfall = moments.hessian(), moments.shortfall(weight)
            del moments
            lacking = None if shortfall is None else shortfall[chosen]
            solution = solve(weight[chosen], hessian, grid, shortfall=lacking)
            packed = solution.weight
        parts, start = [], 0
        for matrix, dense in zip(matrices, weight.split(rows), strict=True):
            if matrix.grid is None:
                parts.append(_Part(dense))
                continue
            index = torch.arange(start, start + matrix.rows, device=weight.device)
            start += matrix.rows
            taken = packed.take_rows(index)
            parts.append(_Part(taken.dequantize(), taken, solution, index))
        return parts

    def _collect(self, product: str, original: StagedLayer, layer: StagedLayer) -> InputMoments:
        """Moments of the product's inputs over all chunks."""
        assert self._streams is not None
        before, now = self._streams
        moments: InputMoments | None = None
        for i in now.residual.indices():
            x = _input(product, layer, now, i)
            if moments is None:
                moments = InputMoments(x.shape[-1], device=x.device)
            residual = before.residual.read(i) - now.residual.read(i) if product in ADDED else None
            with exact_in_tf32(x.dtype):
                moments.add(x, drift=_input(product, original, before, i) - x, residual=residual)
        assert moments is not None
        return moments

    def _advance(self, product: str, original: StagedLayer, layer: StagedLayer) -> None:
        """Move both streams behind the product."""
        for stream, staged in zip(self._streams or (), (original, layer), strict=False):
            for i in stream.residual.indices():
                x = stream.residual.read(i)
                if product == "qkv":
                    stream.attended.write(i, staged.attended(x))
                elif product in ADDED:
                    stream.residual.write(i, x + staged.apply(product, _input(product, staged, stream, i)))


ADDED = ("o", "down")
"""The products whose outputs are added to the residual stream."""


@dataclass(frozen=True)
class _Part:
    """One matrix of a solved product: its numbers, its codes if it has them, and its rows of the solution."""

    dense: Tensor
    packed: PackedWeight | None = None
    solution: Solution | None = None
    index: Tensor | None = None

    def report(self, name: str, matrix: MatrixPlan, stored: Mapping[str, Tensor]) -> MatrixReport:
        if self.packed is None:
            num_bytes = 2 * self.dense.numel()
            return MatrixReport(name, matrix.rows, matrix.columns, None, None, num_bytes, remark=matrix.remark, bits=16)
        solutions = [] if self.solution is None else [self.solution]
        return matrix_report(name, matrix, stored, solutions, self.index)


def _input(product: str, layer: StagedLayer, stream: Stream, chunk: int) -> Tensor:
    """What the product reads of a chunk."""
    if product == "o":
        return stream.attended.read(chunk)
    x = stream.residual.read(chunk)
    if product == "qkv":
        return layer.attention_input(x)
    return layer.mlp_input(x) if product == "gate_up" else layer.gated(x)


@contextmanager
def exact_in_tf32(dtype: torch.dtype) -> Iterator[None]:
    """Lets a GPU multiply numbers that were in 16 bits as TF32, which holds them exactly; sums stay fp32."""
    if dtype == torch.float32:
        yield
        return
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
