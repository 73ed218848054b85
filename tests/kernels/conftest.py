"""Run every kernel of this folder in Triton's interpreter: set before any kernel is imported."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

os.environ["TRITON_INTERPRET"] = "1"

from triton.runtime import interpreter


def _scalar_index(patch: Any) -> Any:
    """`patch` followed by an `__index__` that numpy 2.4 allows (int() of a one-element array raises there)."""

    def patched(tensor: type, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    return patched


interpreter._patch_lang_tensor = _scalar_index(interpreter._patch_lang_tensor)


@pytest.fixture(autouse=True)
def _fixed_seed() -> None:
    torch.manual_seed(0)
