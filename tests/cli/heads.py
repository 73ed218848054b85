"""EAGLE heads of zeros for the tiny model: what checks read is names, shapes and settings."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from factories import TINY
from safetensors.torch import save_file


def write_head(folder: Path, *, hidden: int = 64) -> Path:
    """A folder with an EAGLE-2 head in bfloat16 for a target of this hidden size; returns the folder."""
    attention = {"q": hidden, "k": hidden // 2, "v": hidden // 2, "o": hidden}
    shapes = {
        "fc.weight": (hidden, 2 * hidden),
        **{f"layers.0.self_attn.{name}_proj.weight": (rows, hidden) for name, rows in attention.items()},
        **{f"layers.0.mlp.{name}_proj.weight": (176, hidden) for name in ("gate", "up")},
        "layers.0.mlp.down_proj.weight": (hidden, 176),
        "layers.0.post_attention_layernorm.weight": (hidden,),
    }
    folder.mkdir()
    tensors = {name: torch.zeros(shape, dtype=torch.bfloat16) for name, shape in shapes.items()}
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({**TINY, "hidden_size": hidden, "num_hidden_layers": 1}))
    return folder
