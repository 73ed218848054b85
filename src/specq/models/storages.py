"""What tensors take in memory, wherever modules keep them: packed weights are no parameters."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from specq.models.cache import KVCache


def storages(value: Any) -> dict[int, int]:
    """Bytes by address of every tensor below a value, shared ones once.

    On a CPU caches count nothing: their pages are taken only when they are written.
    """
    found: dict[int, int] = {}
    for tensor in _tensors(value, set()):
        # Not the storage's size: vectors of a mapped file are views of all that follows them there.
        size = min(tensor.nbytes, tensor.untyped_storage().nbytes())
        found[tensor.data_ptr()] = max(size, found.get(tensor.data_ptr(), 0))
    return found


def _tensors(value: Any, seen: set[int]) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
        return
    if id(value) in seen:
        return
    seen.add(id(value))
    children: list[Any] = []
    if isinstance(value, nn.Module):
        children = list(vars(value).values())
    elif isinstance(value, KVCache):
        children = [] if value.k.device.type == "cpu" else list(vars(value).values())
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        children = [getattr(value, field.name) for field in dataclasses.fields(value)]
    elif isinstance(value, Mapping):
        children = list(value.values())
    elif isinstance(value, (list, tuple)):
        children = list(value)
    for child in children:
        yield from _tensors(child, seen)
