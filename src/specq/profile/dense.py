"""The same model with its 4-bit matrices dequantised, to show what quantization changes about verification."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from torch import Tensor

from specq.models.causal_lm import CausalLM
from specq.models.loader import build_model, choose_dtype, model_spec
from specq.models.memory import estimate_bytes, free_bytes, require_memory
from specq.tensors import WeightSource, open_weights


class DequantizedWeights:
    """A weight source that gives every matrix dense."""

    def __init__(self, source: WeightSource) -> None:
        self._source = source

    def names(self) -> frozenset[str]:
        return self._source.names()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._source.shape(name)

    def tensor(self, name: str) -> Tensor:
        return self._source.tensor(name)

    def linear(self, prefix: str) -> Tensor:
        return self._source.tensor(f"{prefix}.weight")

    def is_packed(self, prefix: str) -> bool:
        return False

    def bytes(self) -> int:
        return self._source.bytes()


def load_dense(path: Path, *, device: str, dtype: str, context: int) -> CausalLM:
    """The model of a local folder without 4-bit matrices. Raises NotEnoughMemoryError before it reads weights."""
    spec = model_spec(path)
    plain = replace(spec, quantization=None)
    needed = estimate_bytes(plain, dtype=choose_dtype(dtype, plain, device), context=context, device=device)
    require_memory([needed], context, device=device, free=free_bytes(device))
    return build_model(plain, DequantizedWeights(open_weights(path, spec)), device=device, dtype=dtype)
