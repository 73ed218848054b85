"""Finished layers of a run of quantize, one file each, durable before the next layer begins."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from specq.files import write_atomically
from specq.workspace import Workspace, disk_errors

RECORD = "specq"
"""Key of a layer's record in its file's metadata."""


class LayerWorkspace(Workspace):
    """A workspace that keeps finished layers."""

    def finished_layers(self) -> int:
        """How many layers from the first on are done."""
        count = 0
        while self._layer(count).is_file():
            count += 1
        return count

    def write_layer(self, index: int, tensors: Mapping[str, Tensor], record: Mapping[str, Any]) -> None:
        """Keep a layer's tensors, durable before this returns. Raises DiskFullError."""
        with disk_errors(self.folder), write_atomically(self._layer(index)) as path:
            save_file(dict(tensors), path, metadata={RECORD: json.dumps(record)})

    def read_layer(self, index: int) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """The tensors and the record of a finished layer."""
        with safe_open(self._layer(index), framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            return tensors, json.loads(file.metadata()[RECORD])

    def _layer(self, index: int) -> Path:
        return self.folder / f"layer-{index:05}.safetensors"
