"""Intermediates saved without embedding and output head: those live in the target's memory, and are used from there.

The folder's manifest says which tensors are lent and how the lender is known again: by their shapes and a digest of
evenly spaced rows, never by a path. The tokenizer is the lender's too.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specq.checkpoint import ModelSpec
from specq.errors import UnsupportedError, UsageError
from specq.models.inventory import EMBEDDING, HEAD
from specq.quant.packed import PackedWeight
from specq.tensors import WeightSource

MANIFEST = "specq_intermediate.json"
KEY = "shared_embeddings"
LENDABLE = frozenset({EMBEDDING, HEAD})
DIGEST_ROWS = 256
"""Rows that a digest reads, the first and the last among them: of a large embedding not every byte is hashed."""


@dataclass(frozen=True)
class LentTensor:
    """How a lent matrix is known: shape [vocab, hidden], and the digest of some rows in bfloat16."""

    shape: tuple[int, int]
    digest: str


@dataclass(frozen=True)
class SharedEmbeddings:
    """What a folder leaves to the model it drafts for. `lender` is that model's name, for people."""

    lender: str
    tensors: Mapping[str, LentTensor]

    def among(self, names: Collection[str]) -> SharedEmbeddings:
        """Those of the tensors that have one of these names."""
        return SharedEmbeddings(self.lender, {name: each for name, each in self.tensors.items() if name in names})

    def record(self) -> dict[str, Any]:
        """The value of KEY in the manifest."""
        tensors = {name: {"shape": list(each.shape), "digest": each.digest} for name, each in self.tensors.items()}
        return {"lender": self.lender, "tensors": tensors}


@dataclass(frozen=True)
class Lender:
    """A model that lends: where it lies, and what people call it."""

    path: Path
    name: str


def read_shared(path: Path) -> SharedEmbeddings | None:
    """What the folder's manifest says is lent; None for a complete model. Raises UsageError for a broken manifest."""
    file = path / MANIFEST
    if not file.is_file():
        return None
    try:
        record = json.loads(file.read_text(encoding="utf-8")).get(KEY)
        if record is None:
            return None
        tensors = {
            str(name): LentTensor((int(entry["shape"][0]), int(entry["shape"][1])), str(entry["digest"]))
            for name, entry in record["tensors"].items()
        }
        return SharedEmbeddings(str(record["lender"]), tensors)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise UsageError(f"`{file}` is not a manifest of specq: {error}", hint="make the folder again") from error


def lent_names(path: Path) -> frozenset[str]:
    """The tensors that this folder leaves to another model."""
    shared = read_shared(path)
    return frozenset() if shared is None else frozenset(shared.tensors)


def describe_lender(lender: str, spec: ModelSpec, source: WeightSource, *, is_tied: bool) -> SharedEmbeddings:
    """What a model of this spec lends to an intermediate; `is_tied` says whether that has no head beside its embedding.

    Raises UnsupportedError where the two differ in that.
    """
    if is_tied != spec.tie_embeddings:
        raise UnsupportedError(
            f"`{lender}` {'has' if is_tied else 'has not'} an output head beside its embedding, the intermediate "
            f"{'has not' if is_tied else 'has'}",
            hint="share the embeddings of the model that it was cut from",
        )
    names = [EMBEDDING] if is_tied else [EMBEDDING, HEAD]
    return SharedEmbeddings(lender, {name: _describe(source, name) for name in names})


def require_lender(shared: SharedEmbeddings, source: WeightSource, *, name: str) -> None:
    """Raise UnsupportedError unless the model `name`, whose weights these are, is the one that lends.

    A matrix that this copy keeps in 4 or 8 bits is held to its shape only.
    """
    held = source.names()
    for tensor, lent in shared.tensors.items():
        # A lender whose head is its embedding lends that as both.
        found = tensor if tensor in held else EMBEDDING
        is_packed = source.is_packed(found.removesuffix(".weight"))
        if source.shape(found) != lent.shape or not (is_packed or _digest(source.tensor(found)) == lent.digest):
            raise UnsupportedError(
                f"its embedding and output head are those of `{shared.lender}`, and `{tensor}` of `{name}` is another",
                hint="name the model that it was distilled from, or a 4-bit copy of it, as the target",
            )


def require_same_rows(spec: ModelSpec, lender: ModelSpec) -> None:
    """Raise UnsupportedError unless the lender's embedding has the shape of the borrower's."""
    if (spec.vocab, spec.hidden) != (lender.vocab, lender.hidden):
        raise UnsupportedError(
            f"an intermediate of vocabulary {spec.vocab} and hidden size {spec.hidden} cannot use an embedding of "
            f"{lender.vocab} and {lender.hidden}",
            hint="name the model that it was distilled from as the target",
        )


def without_lender(name: str, shared: SharedEmbeddings) -> UsageError:
    """What there is to say to somebody who loads such a folder, called `name`, alone."""
    return UsageError(
        f"`{name}` is no model of its own: it was saved without embedding and output head, which are those of "
        f"`{shared.lender}`",
        hint=f"run it beside that model: specq chat {shared.lender} --pipeline sequence --intermediate {name}",
    )


class LentWeights:
    """The weights of a folder that lacks some tensors and those of the model that lends them, as one source."""

    def __init__(self, own: WeightSource, lender: WeightSource, names: frozenset[str]) -> None:
        """`names` are read from the lender, also where the folder holds them."""
        self._own, self._lender, self._lent = own, lender, names

    def _of(self, name: str) -> WeightSource:
        return self._lender if name in self._lent else self._own

    def names(self) -> frozenset[str]:
        return self._own.names() | self._lent

    def shape(self, name: str) -> tuple[int, ...]:
        return self._of(name).shape(name)

    def tensor(self, name: str) -> Tensor:
        return self._of(name).tensor(name)

    def linear(self, prefix: str) -> Tensor | PackedWeight:
        return self._of(f"{prefix}.weight").linear(prefix)

    def is_packed(self, prefix: str) -> bool:
        return self._of(f"{prefix}.weight").is_packed(prefix)

    def bytes(self) -> int:
        return self._own.bytes()


def _describe(source: WeightSource, name: str) -> LentTensor:
    rows, columns = source.shape(name)
    return LentTensor((rows, columns), _digest(source.tensor(name)))


def _digest(matrix: Tensor) -> str:
    """A hash of evenly spaced rows in bfloat16, so that copies in 16 and 32 bits of one model have the same."""
    count = min(DIGEST_ROWS, matrix.shape[0])
    index = torch.linspace(0, matrix.shape[0] - 1, count, dtype=torch.float64).round().long()
    rows = matrix[index].to(torch.bfloat16).contiguous()
    return hashlib.sha256(rows.view(torch.uint8).numpy().tobytes()).hexdigest()
