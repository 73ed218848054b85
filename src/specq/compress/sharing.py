"""A folder that is in 4 bits already, rid of the embedding and output head that its target lends."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from specq.checkpoint import ModelSpec
from specq.compress import writer
from specq.models.inventory import check_tensors
from specq.models.loader import model_spec, open_sharing
from specq.models.shared import Lender, SharedEmbeddings
from specq.storage import require_space
from specq.tensor_files import find_files, open_file, safe_path
from specq.workspace import Workspace, check_output, disk_errors, open_workspace

KEPT = (
    "config.json",
    "quantize_config.json",
    "generation_config.json",
    "README.md",
    "LICENSE",
    "LICENSE.txt",
    "NOTICE",
)


@dataclass(frozen=True)
class SharingReport:
    """What was written, and what it leaves to whom."""

    output: Path
    shared: SharedEmbeddings
    num_bytes: int

    def record(self) -> dict[str, Any]:
        """The fields as JSON takes them."""
        return {"output": str(self.output), "shared": self.shared.record(), "num_bytes": self.num_bytes}


def is_quantized(source: Path) -> bool:
    """Whether the folder is in 4 bits already, other than as a GGUF."""
    quantization = model_spec(source).quantization
    return quantization is not None and quantization.method != "gguf"


def leave_embeddings(source: Path, output: Path, *, lender: Lender, overwrite: bool = False) -> SharingReport:
    """Writes the quantized folder `source` to `output` without what the lender has; every other number stays as it is.

    Raises a SpecqError before anything is written when the source's embedding is not the lender's.
    """
    output = output.absolute()
    check_output(output, overwrite=overwrite, sources=[source, lender.path])
    spec: ModelSpec = model_spec(source)
    weights, shared = open_sharing(source, spec, lender)
    check_tensors(spec, weights)
    require_space(output.parent, weights.bytes())
    workspace = Workspace(output)
    settings = {"source": str(source), "lender": lender.name}
    with open_workspace(workspace, settings, verb="quantize", overwrite=overwrite), disk_errors(output.parent):
        staged = workspace.staging()
        num_bytes = writer.write_weights(staged, _kept_tensors(source, shared))
        for name in KEPT:
            if (source / name).is_file():
                (staged / name).write_bytes(safe_path(source, name).read_bytes())
        writer.write_manifest(staged, source, shared)
        workspace.publish()
    return SharingReport(output, shared, num_bytes)


def _kept_tensors(source: Path, shared: SharedEmbeddings) -> Iterator[tuple[str, Tensor]]:
    """Every stored tensor, packed parts as they lie, but those of lent matrices."""
    lent = {name.removesuffix(".weight") for name in shared.tensors}
    for name, promised in find_files(source).items():
        file = open_file(safe_path(source, name))
        for tensor in promised or file.headers:
            if tensor.rpartition(".")[0] not in lent:
                yield tensor, file.read(tensor)
