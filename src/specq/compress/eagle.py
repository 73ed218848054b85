"""An EAGLE head to 4 bits: its matrices rounded to nearest, its manifest and card carried over.

No text is needed. Rounding the demo model's head costs 0.6 % of its accept length, so nothing is calibrated.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specq.compress.plan import Settings
from specq.compress.report import Provenance
from specq.errors import UsageError
from specq.models.eagle_files import HeadFiles
from specq.models.eagle_writer import BITS_KEY, HEAD_BITS_KEY, HEAD_MANIFEST, is_packable, write_head
from specq.storage import require_space
from specq.workspace import Workspace, check_output, open_workspace

CARD = "README.md"


@dataclass(frozen=True)
class HeadMatrix:
    """One matrix of the head: shape, and the error of its numbers relative to them (root mean squares)."""

    name: str
    rows: int
    columns: int
    error: float


@dataclass(frozen=True)
class HeadReport:
    """What became of a head."""

    output: Path
    group_size: int
    draft_head_bits: int
    matrices: tuple[HeadMatrix, ...]
    num_bytes: int

    def record(self) -> dict[str, Any]:
        """The fields as JSON takes them."""
        return asdict(self) | {"output": str(self.output), "method": "rtn"}


def quantize_eagle(
    source: Path,
    output: Path,
    *,
    settings: Settings,
    draft_head_bits: int | None = None,
    provenance: Provenance,
    overwrite: bool = False,
) -> HeadReport:
    """Writes the head in `source` to `output` in 4 bits; `draft_head_bits` goes into its manifest.

    Raises a SpecqError before anything is written when the folder is no dense head, or an option is not for heads.
    """
    _require_for_heads(settings)
    output = output.absolute()
    check_output(output, overwrite=overwrite, sources=[source])
    files = HeadFiles(source)
    if files.config.get("quantization_config"):
        raise UsageError(f"`{provenance.name}` is already in 4 bits", hint="give the 16-bit head it was made of")
    tensors = files.tensors()
    require_space(output.parent, sum(tensor.nbytes for tensor in tensors.values()))
    workspace = Workspace(output)
    with open_workspace(workspace, {"source": str(source), **asdict(settings)}, verb="quantize", overwrite=overwrite):
        staged = workspace.staging()
        write_head(staged, tensors, files.config, bits=4, group_size=settings.group_size)
        written = HeadFiles(staged)
        matrices = tuple(
            _compared(name, tensor, written) for name, tensor in tensors.items() if is_packable(name, tensor)
        )
        manifest = _manifest(source) | {BITS_KEY: 4, HEAD_BITS_KEY: draft_head_bits or files.head_bits}
        (staged / HEAD_MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")
        report = HeadReport(
            output,
            int(written.config["quantization_config"]["group_size"]),
            int(manifest[HEAD_BITS_KEY]),
            matrices,
            (staged / "model.safetensors").stat().st_size,
        )
        (staged / CARD).write_text(_card(source, report, provenance), encoding="utf-8")
        workspace.publish()
    return report


def _require_for_heads(settings: Settings) -> None:
    """Raise UsageError naming the first option that only models have."""
    default = Settings()
    for flag, is_set in (
        ("--act-order", settings.stored_order),
        ("--asym", not settings.symmetric),
        ("--format", settings.format != default.format),
        ("--strict-shapes", settings.strict_shapes),
    ):
        if is_set:
            raise UsageError(f"{flag} is for models, and this is an EAGLE head", hint="leave it out")


def _compared(name: str, tensor: Tensor, written: HeadFiles) -> HeadMatrix:
    exact = tensor.float()
    error = (written.tensor(name).float() - exact).pow(2).mean().sqrt() / exact.pow(2).mean().sqrt().clamp_min(1e-30)
    return HeadMatrix(name, tensor.shape[0], tensor.shape[1], float(torch.nan_to_num(error)))


def _manifest(source: Path) -> dict[str, Any]:
    file = source / HEAD_MANIFEST
    return dict(json.loads(file.read_text(encoding="utf-8"))) if file.is_file() else {}


def _card(source: Path, report: HeadReport, provenance: Provenance) -> str:
    """The head's own card, and below it what was done here."""
    file = source / CARD
    own = file.read_text(encoding="utf-8") if file.is_file() else f"# {provenance.name}, an EAGLE head\n"
    worst = max(report.matrices, key=lambda matrix: matrix.error)
    drafts = (
        "the target's own output head"
        if report.draft_head_bits == 16
        else (f"a copy of the target's output head in {report.draft_head_bits} bits, made when it is loaded")
    )
    lines = [
        own.rstrip(),
        "",
        "## In 4 bits",
        "",
        f"`fc` and the layer's matrices are in 4 bits, groups of {report.group_size}, rounded to nearest with searched "
        f"scales, stored as GPTQ version 1; norms stay in 16 bits. The largest error is that of `{worst.name}`: "
        f"{worst.error:.3f} of its size. It drafts with {drafts}. Accept lengths above are those of 16 bits unless the "
        "text says otherwise.",
        "",
        "```",
        provenance.command,
        "```",
        "",
    ]
    return "\n".join(lines)
