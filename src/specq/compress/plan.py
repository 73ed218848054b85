"""What will be quantized and in which groups, and what that takes: known from config.json alone."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Literal

from specq.checkpoint import ModelSpec
from specq.compress.stages import PRODUCTS
from specq.errors import UnsupportedError, UsageError
from specq.models.loader import expected_tensors
from specq.quant.gptq import Grid

GROUP_SIZES = (128, 64, 32)
"""What a group may be, largest first: the one that divides every matrix is taken."""

PACK = 8
"""Codes a 32-bit word: rows and columns of a packed matrix are multiples of it."""

Method = Literal["gptq", "rtn"]
Format = Literal["gptq", "compressed-tensors"]


@dataclass(frozen=True)
class Settings:
    """Everything that decides the numbers written; `group_size` None takes the largest that fits, -1 whole rows."""

    method: Method = "gptq"
    group_size: int | None = None
    stored_order: bool = False
    symmetric: bool = True
    format: Format = "gptq"
    strict_shapes: bool = False


@dataclass(frozen=True)
class MatrixPlan:
    """One matrix [rows, columns] of every layer: quantized by `grid`, or left in 16 bits; and why, where odd."""

    name: str
    rows: int
    columns: int
    grid: Grid | None
    remark: str = ""


@dataclass(frozen=True)
class Plan:
    """The matrices of a layer (all layers are alike), the group of the model, and warnings to say once."""

    matrices: tuple[MatrixPlan, ...]
    group_size: int
    warnings: tuple[str, ...]

    @property
    def widest(self) -> int:
        """The most inputs any matrix has."""
        return max(matrix.columns for matrix in self.matrices)

    def of(self, name: str) -> MatrixPlan:
        """The plan of a matrix by its name inside a layer, such as "mlp.down_proj"."""
        return next(matrix for matrix in self.matrices if matrix.name == name)


def plan_quantization(spec: ModelSpec, settings: Settings) -> Plan:
    """Which matrix gets which groups.

    Raises UnsupportedError with `strict_shapes` where a matrix does not divide evenly, or when nothing can be
    packed; UsageError for settings that contradict each other.
    """
    if settings.stored_order and settings.method == "rtn":
        raise UsageError("`--act-order` orders columns by calibration, which `--method rtn` has not")
    if settings.stored_order and settings.format == "compressed-tensors":
        raise UsageError(
            "`--format compressed-tensors` no longer holds a column order",
            hint="leave out --act-order, or --format gptq",
        )
    if spec.quantization is not None and spec.quantization.method != "gguf":
        raise UsageError(
            f"the model is already in 4 bits (`{spec.quantization.method}`)",
            hint="give the 16-bit model it was made of",
        )
    shapes = {
        name: expected_tensors(spec)[f"model.layers.0.{name}.weight"] for names in PRODUCTS.values() for name in names
    }
    group_size = settings.group_size or _common_group([columns for _, columns in shapes.values()])
    if settings.stored_order and group_size == -1:
        raise UsageError("`--act-order` has no meaning with one group a row", hint="leave out --act-order")
    matrices = tuple(_plan(name, rows, columns, group_size, settings) for name, (rows, columns) in shapes.items())
    odd = [matrix for matrix in matrices if matrix.remark]
    if settings.strict_shapes and odd:
        raise UnsupportedError(
            f"`{odd[0].name}` [{odd[0].rows}, {odd[0].columns}] has {odd[0].remark}",
            hint="leave out --strict-shapes, or give a --group-size that divides it",
        )
    if all(matrix.grid is None for matrix in matrices):
        raise UnsupportedError(
            "no matrix of this model can be packed in 4 bits", hint=f"sizes must be multiples of {PACK}"
        )
    return Plan(matrices, group_size, _warnings(odd))


def peak_bytes(spec: ModelSpec, *, itemsize: int) -> int:
    """Bytes the device needs besides the calibration's activations, `itemsize` being a weight's.

    One layer's weights as they are and as they will be, and for its largest product what solving takes in fp32: four
    squares of the inputs beside three copies of the matrix while the Hessian is factored, then two beside six.
    """
    shapes = expected_tensors(spec)
    layer = [shape for name, shape in shapes.items() if name.startswith("model.layers.0.") and len(shape) == 2]
    weights = 2 * itemsize * sum(rows * columns for rows, columns in layer)
    solving = 0
    for names in PRODUCTS.values():
        parts = [shapes[f"model.layers.0.{name}.weight"] for name in names]
        rows, columns = sum(part[0] for part in parts), parts[0][1]
        square, matrix = columns * columns, rows * columns
        solving = max(solving, 4 * (4 * square + 3 * matrix), 4 * (2 * square + 6 * matrix))
    return weights + solving


def disk_bytes(spec: ModelSpec, plan: Plan) -> int:
    """Bytes the finished folder takes, within a percent or two."""
    shapes = expected_tensors(spec)
    total = sum(2 * _count(shape) for name, shape in shapes.items() if not name.startswith("model.layers."))
    for matrix in plan.matrices:
        numbers = matrix.rows * matrix.columns
        if matrix.grid is None:
            total += 2 * numbers * spec.layers
            continue
        size = matrix.columns if matrix.grid.group_size == -1 else matrix.grid.group_size
        groups = -(-matrix.columns // size)
        total += spec.layers * (numbers // 2 + matrix.rows * groups * 5 // 2 + 4 * matrix.columns)
    return total + (16 << 20)


def _count(shape: tuple[int, ...]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count


def _common_group(columns: list[int]) -> int:
    """The largest group that divides every matrix; those that 32 does not divide have no say."""
    dividable = [size for size in columns if size % GROUP_SIZES[-1] == 0]
    return next(size for size in GROUP_SIZES if all(count % size == 0 for count in dividable))


def _plan(name: str, rows: int, columns: int, group_size: int, settings: Settings) -> MatrixPlan:
    if rows % PACK or columns % PACK:
        size, what = (rows, "outputs") if rows % PACK else (columns, "inputs")
        return MatrixPlan(name, rows, columns, None, f"{size} {what}, no multiple of {PACK}: left in 16 bits")
    grid = Grid(
        min(group_size, columns) if group_size != -1 else -1,
        is_symmetric=settings.symmetric,
        has_stored_order=settings.stored_order and settings.method == "gptq",
    )
    remark = ""
    if group_size != -1 and columns % group_size:
        remark = f"a last group of {columns % group_size} columns, {columns} inputs in groups of {group_size}"
    return MatrixPlan(name, rows, columns, grid, remark)


def _warnings(odd: list[MatrixPlan]) -> tuple[str, ...]:
    said = []
    kinds = Counter("16" if matrix.grid is None else "short" for matrix in odd)
    if kinds["short"]:
        names = ", ".join(f"`{matrix.name}`" for matrix in odd if matrix.grid is not None)
        said.append(
            f"the group size does not divide the inputs of {names}: their last group is shorter, which vLLM, SGLang "
            "and compressed-tensors refuse; specq reads it"
        )
    if kinds["16"]:
        names = ", ".join(f"`{matrix.name}` ({matrix.remark})" for matrix in odd if matrix.grid is None)
        said.append(f"not quantized: {names}")
    return tuple(said)
