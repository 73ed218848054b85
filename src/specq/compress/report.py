"""What a finished run says of itself, and where its source comes from."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from specq.compress.evaluation import Score
from specq.compress.layers import MatrixReport
from specq.compress.plan import Plan, Settings
from specq.models.shared import SharedEmbeddings


@dataclass(frozen=True)
class Provenance:
    """Where the source comes from, without the paths of this machine: a Hub id or a folder's name, and its revision."""

    name: str
    revision: str | None = None
    command: str = ""


@dataclass(frozen=True)
class Report:
    """What a finished run says of itself."""

    output: Path
    provenance: Provenance
    settings: Settings
    plan: Plan
    calibration: dict[str, Any] | None
    matrices: tuple[MatrixReport, ...]
    scores: dict[str, Score]
    evaluation_tokens: int
    num_bytes: int
    resumed_layers: int
    seconds: float
    peak_device_bytes: int | None
    peak_host_bytes: int | None
    environment: dict[str, Any]
    shared: SharedEmbeddings | None = None

    def record(self) -> dict[str, Any]:
        """The report as JSON values."""
        return {
            "output": str(self.output),
            "source": {"name": self.provenance.name, "revision": self.provenance.revision},
            "settings": {**asdict(self.settings), "group_size": self.plan.group_size},
            "calibration": self.calibration,
            "evaluation": {name: asdict(score) for name, score in self.scores.items()}
            | {"tokens": self.evaluation_tokens},
            "matrices": [asdict(matrix) for matrix in self.matrices],
            "bytes": self.num_bytes,
            "resumed_layers": self.resumed_layers,
            "seconds": round(self.seconds, 1),
            "peak_device_bytes": self.peak_device_bytes,
            "peak_host_bytes": self.peak_host_bytes,
            "environment": self.environment,
        }
