"""What a source's numbers are, as one hash, and that all of them are numbers."""

from __future__ import annotations

import hashlib
from concurrent.futures import ThreadPoolExecutor

import torch

from specq.checkpoint import ModelSpec
from specq.errors import UsageError
from specq.models.inventory import expected_tensors
from specq.tensors import WeightSource

HASHING_THREADS = 4


def source_digest(spec: ModelSpec, weights: WeightSource) -> str:
    """A hash of every tensor's name, shape and numbers.

    Raises UsageError naming the tensors that hold NaN or Inf.
    """

    def digest(name: str) -> tuple[str, bool]:
        tensor = weights.tensor(name).contiguous()
        content = hashlib.blake2b(f"{name}:{tensor.dtype}:{list(tensor.shape)}:".encode(), digest_size=16)
        content.update(tensor.view(torch.uint8).numpy().data)
        return content.hexdigest(), bool(torch.isfinite(tensor).all())

    names = sorted(expected_tensors(spec))
    with ThreadPoolExecutor(HASHING_THREADS) as pool:
        found = list(pool.map(digest, names))
    broken = [name for name, (_, is_finite) in zip(names, found, strict=True) if not is_finite]
    if broken:
        more = f" and {len(broken) - 3} more" if len(broken) > 3 else ""
        raise UsageError(
            f"the source holds NaN or Inf in {', '.join(f'`{name}`' for name in broken[:3])}{more}",
            hint="download the model again",
        )
    return hashlib.blake2b("".join(digest for digest, _ in found).encode(), digest_size=16).hexdigest()
