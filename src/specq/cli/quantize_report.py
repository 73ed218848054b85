"""What `specq quantize` says at its end: matrix by matrix what was written, and what the model lost."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from specq.cli.console import Console, size_text, table
from specq.words import counted

if TYPE_CHECKING:
    from specq.compress.eagle import HeadReport
    from specq.compress.layers import MatrixReport
    from specq.compress.report import Report
    from specq.compress.sharing import SharingReport


def show_model(console: Console, report: Report) -> None:
    """A row for each kind of matrix, the scores beside those of rounding, and what the run took."""
    from specq.compress.card import evaluation_rows, what_stays

    console.line(table(matrix_rows(report.matrices)))
    console.line(what_stays(report))
    console.line()
    console.line(table(evaluation_rows(report)))
    memory = f"{size_text(report.peak_host_bytes)} of host memory" if report.peak_host_bytes else ""
    if report.peak_device_bytes is not None:
        memory += f", {size_text(report.peak_device_bytes)} on the device"
    console.line()
    took = f"{report.seconds / 60:.1f} minutes" if report.seconds >= 90 else counted(round(report.seconds), "second")
    console.line(f"{report.output}: {size_text(report.num_bytes)}, {took}, at most {memory}")


def show_shared(console: Console, report: SharingReport) -> None:
    """What an intermediate in 4 bits left to its lender."""
    console.line(f"{report.output}: {size_text(report.num_bytes)}, the 4 bits as they were; embedding, output head and")
    console.line(f"tokenizer are those of {report.shared.lender}")


def show_head(console: Console, report: HeadReport) -> None:
    """A row for each matrix of an EAGLE head."""
    rows = [["matrix", "shape", "group", "error"]]
    for matrix in report.matrices:
        rows.append([matrix.name, f"{matrix.rows}x{matrix.columns}", str(report.group_size), f"{matrix.error:.4f}"])
    console.line(table(rows))
    console.line()
    console.line(
        f"{report.output}: {size_text(report.num_bytes)}, rounded to nearest; drafts with {report.draft_head_bits} bits"
    )


def matrix_rows(matrices: Sequence[MatrixReport]) -> list[list[str]]:
    """A table with a row for each kind of matrix: shape, bits, group, mean and worst output error, bytes, remark."""
    from specq.compress.card import error_text

    kinds: dict[str, list[MatrixReport]] = {}
    for matrix in matrices:
        kinds.setdefault(matrix.place[1], []).append(matrix)
    rows = [["matrix", "shape", "bits", "group", "error", "worst", "bytes", "remark"]]
    for name, found in kinds.items():
        first = found[0]
        errors = [(matrix.error, matrix.place[0]) for matrix in found if matrix.error is not None]
        mean = error_text(sum(error for error, _ in errors) / len(errors)) if errors else "-"
        worst = "-"
        if len(errors) > 1:
            error, layer = max(errors)
            worst = f"{error_text(error)} in layer {layer}"
        group = "-" if first.group_size is None else str(first.group_size)
        size = size_text(sum(matrix.num_bytes for matrix in found))
        rows.append([name, f"{first.rows}x{first.columns}", str(first.bits), group, mean, worst, size, first.remark])
    return rows
