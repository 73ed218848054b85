"""What will be quantized and in which groups, and what that takes: known from config.json alone."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Literal

from specq.checkpoint import ModelSpec
from specq.compress.stages import PRODUCTS
from specq.errors import UnsupportedError, UsageError
from specq.models.inventory import HEAD, expected_tensors
from specq.quant.gptq import Grid

GROUP_SIZES = (128, 64, 32)
"""What a group may be, largest first: the one that divides every matrix is taken."""

HEAD_NAME = "lm_head"
"""The output head in tables and files."""

Method = Literal["gptq", "rtn"]
Format = Literal["gptq", "compressed-tensors"]


@dataclass(frozen=True)
class Settings:
    """Everything that decides the numbers written; `group_size` None takes the largest that fits, -1 whole rows.

    `head_bits` None leaves the output head in 16 bits.
    """

    method: Method = "gptq"
    group_size: int | None = None
    stored_order: bool = False
    symmetric: bool = True
    format: Format = "gptq"
    strict_shapes: bool = False
    head_bits: Literal[8, 4] | None = None


@dataclass(frozen=True)
class MatrixPlan:
    """One matrix [rows, columns] of every layer, or the head: quantized by `grid` or left in 16 bits; why, if odd."""

    name: str
    rows: int
    columns: int
    grid: Grid | None
    remark: str = ""


@dataclass(frozen=True)
class Plan:
    """The matrices of a layer (all layers are alike), the group of the model, warnings to say once, and the output
    head where it was asked for, solved `head_rows` rows at a time."""

    matrices: tuple[MatrixPlan, ...]
    group_size: int
    warnings: tuple[str, ...]
    head: MatrixPlan | None = None
    head_rows: int = 1

    @property
    def packs_head(self) -> bool:
        """Whether the head is written packed, in a matrix of its own also where the source ties it."""
        return self.head is not None and self.head.grid is not None

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
            f"the model is already in {spec.quantization.bits} bits (`{spec.quantization.method}`)",
            hint="give the 16-bit model it was made of",
        )
    shapes = {
        name: expected_tensors(spec)[f"model.layers.0.{name}.weight"] for names in PRODUCTS.values() for name in names
    }
    group_size = settings.group_size or _common_group([columns for _, columns in shapes.values()])
    if settings.stored_order and group_size == -1:
        raise UsageError("`--act-order` has no meaning with one group a row", hint="leave out --act-order")
    matrices = tuple(_plan(name, rows, columns, group_size, settings) for name, (rows, columns) in shapes.items())
    head = None
    if settings.head_bits is not None:
        head = _plan(HEAD_NAME, spec.vocab, spec.hidden, group_size, settings, bits=settings.head_bits)
    odd = [matrix for matrix in (*matrices, head) if matrix is not None and matrix.remark]
    if settings.strict_shapes and odd:
        raise UnsupportedError(
            f"`{odd[0].name}` [{odd[0].rows}, {odd[0].columns}] has {odd[0].remark}",
            hint="leave out --strict-shapes, or give a --group-size that divides it",
        )
    if all(matrix.grid is None for matrix in matrices):
        raise UnsupportedError("no matrix of this model can be packed in 4 bits", hint="sizes must be multiples of 8")
    warnings = _refusals(settings) + _warnings(odd)
    if head is not None and head.grid is not None:
        warnings += _head_warnings(spec, head, settings)
    return Plan(matrices, group_size, warnings, head, head_rows=2 * spec.intermediate)


def peak_bytes(spec: ModelSpec, *, itemsize: int) -> int:
    """Bytes the device needs besides the calibration's activations, `itemsize` being a weight's.

    One layer's weights as they are and as they will be, and for its largest product what solving takes in fp32: four
    squares of the inputs beside three copies of the matrix while the Hessian is factored, then two beside six. A head
    takes no more: it is solved in parts of as many rows as gate and up have.
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


def activation_bytes(spec: ModelSpec, num_tokens: int, *, itemsize: int) -> int:
    """Bytes of the calibration's activations: the residual stream and what o reads, of two copies of the text."""
    return 2 * num_tokens * (spec.hidden + spec.heads * spec.head_dim) * itemsize


def disk_bytes(spec: ModelSpec, plan: Plan) -> int:
    """Bytes the finished folder takes, within a percent or two."""
    dense = {name: shape for name, shape in expected_tensors(spec).items() if not name.startswith("model.layers.")}
    if plan.packs_head:
        dense.pop(HEAD, None)
    total = sum(2 * _count(shape) for shape in dense.values())
    total += spec.layers * sum(_matrix_bytes(matrix) for matrix in plan.matrices)
    if plan.head is not None and plan.packs_head:
        total += _matrix_bytes(plan.head)
    return total + (16 << 20)


def _matrix_bytes(matrix: MatrixPlan) -> int:
    """Bytes of a matrix in the file: codes, a 16-bit scale and a zero a group, the columns' groups."""
    numbers, grid = matrix.rows * matrix.columns, matrix.grid
    if grid is None:
        return 2 * numbers
    groups = 1 if grid.group_size == -1 else -(-matrix.columns // grid.group_size)
    return numbers * grid.bits // 8 + matrix.rows * groups * (16 + grid.bits) // 8 + 4 * matrix.columns


def _count(shape: tuple[int, ...]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count


def _common_group(columns: list[int]) -> int:
    """The largest group that divides every matrix; those that 32 does not divide have no say."""
    dividable = [size for size in columns if size % GROUP_SIZES[-1] == 0]
    return next(size for size in GROUP_SIZES if all(count % size == 0 for count in dividable))


def _plan(name: str, rows: int, columns: int, group_size: int, settings: Settings, *, bits: int = 4) -> MatrixPlan:
    pack = 32 // bits  # codes a word
    if rows % pack or columns % pack:
        size, what = (rows, "outputs") if rows % pack else (columns, "inputs")
        return MatrixPlan(name, rows, columns, None, f"{size} {what}, no multiple of {pack}: left in 16 bits")
    is_uneven = group_size != -1 and columns % group_size != 0
    if is_uneven and settings.format == "compressed-tensors":
        reason = f"{columns} inputs, no multiple of {group_size}, and no shorter last group in the format"
        return MatrixPlan(name, rows, columns, None, f"{reason}: left in 16 bits")
    grid = Grid(
        min(group_size, columns) if group_size != -1 else -1,
        is_symmetric=settings.symmetric,
        has_stored_order=settings.stored_order and settings.method == "gptq",
        bits=bits,
    )
    remark = ""
    if is_uneven:
        remark = f"a last group of {columns % group_size} columns, {columns} inputs in groups of {group_size}"
    return MatrixPlan(name, rows, columns, grid, remark)


def _refusals(settings: Settings) -> tuple[str, ...]:
    """Warnings of engines that refuse what was asked for, whatever the model."""
    said = []
    if settings.stored_order:
        said.append("vLLM (0.33) refuses a stored column order; the static order of the default needs nothing stored")
    if not settings.symmetric and settings.format == "gptq":
        said.append(
            "vLLM (0.33) refuses asymmetric GPTQ files, and GPTQModel those it did not write; "
            "--format compressed-tensors holds zero points too"
        )
    return tuple(said)


def _warnings(odd: list[MatrixPlan]) -> tuple[str, ...]:
    said = []
    kinds = Counter("16" if matrix.grid is None else "short" for matrix in odd)
    if kinds["short"]:
        names = ", ".join(f"`{matrix.name}`" for matrix in odd if matrix.grid is not None)
        said.append(
            f"the group size does not divide the inputs of {names}: their last group is shorter, which specq reads and "
            "vLLM, SGLang and GPTQModel refuse"
        )
    if kinds["16"]:
        names = ", ".join(f"`{matrix.name}` ({matrix.remark})" for matrix in odd if matrix.grid is None)
        said.append(f"not quantized: {names}")
    return tuple(said)


def _head_warnings(spec: ModelSpec, head: MatrixPlan, settings: Settings) -> tuple[str, ...]:
    said = []
    if settings.format == "gptq":
        said.append(
            "a quantized head is read by specq, GPTQModel, vLLM and SGLang; transformers loads GPTQ through optimum, "
            "which leaves the head out"
        )
    if spec.tie_embeddings:
        size = _matrix_bytes(head) / 1e6
        said.append(
            f"the head was the embedding's own matrix: that one stays in 16 bits, the head gets a copy of {size:.0f} MB"
        )
    return tuple(said)
