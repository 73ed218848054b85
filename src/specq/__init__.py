"""specq: 4-bit models and lossless speculative decoding. Importing it imports no torch."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from specq.recipe import Recipe, Sampling
    from specq.spec.load import generate, load_pipeline
    from specq.spec.session import Generation, Pipeline

__version__ = "0.1.0"

__all__ = ["Generation", "Pipeline", "Recipe", "Sampling", "generate", "load_pipeline"]

_HOMES = {
    "Generation": "specq.spec.session",
    "Pipeline": "specq.spec.session",
    "Recipe": "specq.recipe",
    "Sampling": "specq.recipe",
    "generate": "specq.spec.load",
    "load_pipeline": "specq.spec.load",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module `specq` has no attribute `{name}`")
