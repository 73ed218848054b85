"""Weights of a model by their Hugging Face names, whatever files they lie in.

Headers are read and checked when a source is opened; data only when it is asked for. Opening files safely is
tensor_files.py's part, GGUF is gguf_file.py's, the layouts of packed matrices quant/formats.py's.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from specq.checkpoint import FORMATS_HINT, ModelSpec, QuantSpec
from specq.errors import UnsupportedError, UsageError
from specq.gguf_file import GgufWeights, gguf_config
from specq.quant.formats import FORMATS, Header, PackedWeight, QuantFormat, format_name
from specq.tensor_files import TensorFile, find_files, open_file, safe_path

__all__ = ["FolderWeights", "GgufWeights", "WeightSource", "gguf_config", "open_weights"]

DENSE_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
PACKED_MARKERS = ("qweight", "weight_packed")
HEAD = "lm_head"
"""The matrix that may be stored in a way of its own."""


class WeightSource(Protocol):
    """Tensors by name; a packed matrix appears as its "....weight" too."""

    def names(self) -> frozenset[str]: ...

    def shape(self, name: str) -> tuple[int, ...]:
        """[out, in] of a matrix, without reading data."""
        ...

    def tensor(self, name: str) -> Tensor:
        """The dense tensor in the file's type; a quantised one dequantised to fp32."""
        ...

    def linear(self, prefix: str) -> Tensor | PackedWeight:
        """The matrix `prefix`.weight, packed where the file holds 4 or 8 bits."""
        ...

    def is_packed(self, prefix: str) -> bool:
        """Whether `linear` gives a packed matrix of 4 bits, which a product may keep so; without reading data."""
        ...

    def bytes(self) -> int:
        """Bytes on disk."""
        ...


def open_weights(path: Path, spec: ModelSpec) -> WeightSource:
    """The weights in a model folder or a .gguf file, headers read and checked.

    Raises UsageError for missing, broken or unsafe files, UnsupportedError for layouts without a reader.
    """
    if path.is_file():
        return GgufWeights(path, spec)
    if not path.is_dir():
        raise UsageError(f"`{path}` is neither a folder nor a file", hint="give a model's folder or a .gguf file")
    has_others = any(next(path.glob(pattern), None) for pattern in ("*.safetensors*", "pytorch_model*.bin*"))
    blocks = sorted(file.name for file in path.glob("*.gguf"))
    if blocks and not has_others:
        if len(blocks) > 1:
            raise UsageError(f"`{path}` holds {len(blocks)} .gguf files", hint=f"name one: `{path / blocks[0]}`")
        return GgufWeights(safe_path(path, blocks[0]), spec)
    return FolderWeights(path, spec.quantization)


class FolderWeights:
    """The weights of a folder of .safetensors or .bin files, dense or of 4 or 8 bits."""

    def __init__(self, folder: Path, quantization: QuantSpec | None) -> None:
        self._files: dict[str, TensorFile] = {}  # tensor name -> its file
        self._bytes = 0
        for file, promised in find_files(folder).items():
            self._add(safe_path(folder, file), promised)
        self._storage = None if quantization is None else _Storage.of(quantization)
        self._head_storage = None
        if quantization is not None and quantization.head is not None:
            self._head_storage = _Storage.of(quantization.head)
        self._packed = self._find_packed()
        parts = {name for packed in self._packed.values() for name in packed.values()}
        self._dense = frozenset(self._files.keys() - parts)
        self._refuse_unread()
        self._shapes = {prefix: self._check(prefix) for prefix in self._packed}
        self._has_warned = False

    def _add(self, path: Path, promised: tuple[str, ...]) -> None:
        file = open_file(path)
        self._bytes += path.stat().st_size
        missing = [name for name in promised if name not in file.headers]
        if missing:
            raise UsageError(f"`{path.name}` does not hold `{missing[0]}`, which its index promises")
        for name in promised or file.headers:
            self._files[name] = file

    def _find_packed(self) -> dict[str, dict[str, str]]:
        """Prefix -> suffix -> tensor name of every packed matrix."""
        if self._storage is None:
            return {}
        form = self._storage.form  # a head's own has the same suffixes
        packed: dict[str, dict[str, str]] = {}
        marker = f".{form.required[0]}"
        for name in self._files:
            if not name.endswith(marker):
                continue
            prefix = name.removesuffix(marker)
            parts = {suffix: f"{prefix}.{suffix}" for suffix in form.required + form.optional}
            missing = [part for suffix, part in parts.items() if suffix in form.required and part not in self._files]
            if missing:
                raise UsageError(f"`{name}` comes without `{missing[0]}`", hint="download the model again")
            packed[prefix] = {suffix: part for suffix, part in parts.items() if part in self._files}
        return packed

    def _refuse_unread(self) -> None:
        for name in self._dense:
            if ".experts." in name:
                raise UnsupportedError(
                    f"`{name}` belongs to a mixture of experts, which specq does not run", hint=FORMATS_HINT
                )
            if name.rsplit(".", 1)[-1] in PACKED_MARKERS:
                raise UnsupportedError(
                    f"`{name}` is quantized, but not by the method config.json names", hint=FORMATS_HINT
                )
        if self._storage is not None and not self._packed:
            raise UnsupportedError(
                f"config.json promises `{self._storage.form.name}` weights, the files hold none", hint=FORMATS_HINT
            )

    def _header(self, name: str) -> Header:
        return self._files[name].headers[name]

    def _how(self, prefix: str) -> _Storage:
        """How a packed matrix is stored."""
        own = self._head_storage if prefix == HEAD else None
        storage = own or self._storage
        assert storage is not None
        return storage

    def _check(self, prefix: str) -> tuple[int, int]:
        storage = self._how(prefix)
        headers = {suffix: self._header(name) for suffix, name in self._packed[prefix].items()}
        try:
            return storage.form.check(headers, storage.group_size)
        except ValueError as error:
            raise UsageError(
                f"`{prefix}` is not a {storage.bits}-bit `{storage.form.name}` matrix in groups of "
                f"{storage.group_size}: {error}",
                hint=FORMATS_HINT,
            ) from error

    def names(self) -> frozenset[str]:
        """Every dense tensor and every packed matrix's ".weight"."""
        return self._dense | {f"{prefix}.weight" for prefix in self._packed}

    def shape(self, name: str) -> tuple[int, ...]:
        """The logical shape. Raises UnsupportedError when the type is none of bf16, fp16, fp32."""
        prefix = name.removesuffix(".weight")
        if prefix in self._packed:
            return self._shapes[prefix]
        self._require(name)
        header = self._header(name)
        if header.dtype not in DENSE_DTYPES:
            raise UnsupportedError(f"`{name}` has type `{header.dtype}`, which is not read", hint=FORMATS_HINT)
        return header.shape

    def tensor(self, name: str) -> Tensor:
        """The dense tensor in the file's type; a packed one dequantised to fp32."""
        prefix = name.removesuffix(".weight")
        if prefix in self._packed:
            return self._read_packed(prefix).dequantize()
        self.shape(name)
        return self._files[name].read(name)

    def integers(self, name: str) -> Tensor:
        """A tensor of whole numbers or booleans (a vocabulary map), as int64."""
        self._require(name)
        return self._files[name].read(name).long()

    def linear(self, prefix: str) -> Tensor | PackedWeight:
        """The matrix, packed where the files hold 4 or 8 bits. Raises UsageError for scales that are not finite."""
        return self._read_packed(prefix) if prefix in self._packed else self.tensor(f"{prefix}.weight")

    def is_packed(self, prefix: str) -> bool:
        """Whether the files hold the matrix in 4 bits."""
        return prefix in self._packed and self._how(prefix).bits == 4

    def bytes(self) -> int:
        """Bytes of all weight files."""
        return self._bytes

    def _require(self, name: str) -> None:
        if name not in self._dense:
            raise UsageError(f"the weights hold no `{name}`")

    def _read_packed(self, prefix: str) -> PackedWeight:
        storage = self._how(prefix)
        tensors = {suffix: self._files[name].read(name) for suffix, name in self._packed[prefix].items()}
        try:
            weight = storage.form.unpack(tensors, storage.group_size)
        except ValueError as error:
            raise UsageError(f"`{prefix}` is broken: {error}", hint="download the model again") from error
        if not weight.is_finite():
            raise UsageError(f"`{prefix}` has scales that are not finite", hint="download the model again")
        self._warn_of_zero_16(prefix, weight)
        return weight

    def _warn_of_zero_16(self, prefix: str, weight: PackedWeight) -> None:
        if self._has_warned or weight.bits != 4 or weight.zeros is None or int(weight.zeros.max()) <= 15:
            return
        self._has_warned = True
        logging.getLogger("specq").warning(
            "`%s` stores a zero of 15, read here as 16; other readers take it for 0 or carry it into the next", prefix
        )


@dataclass(frozen=True)
class _Storage:
    """The file format of packed matrices, the bits of their codes and the columns of their groups."""

    form: QuantFormat
    bits: int
    group_size: int

    @classmethod
    def of(cls, quantization: QuantSpec) -> _Storage:
        """What the config names. Raises UnsupportedError where there is no reader."""
        by_method: Mapping[str, str] = {
            "gptq": quantization.checkpoint_format,
            "awq": "awq",
            "compressed-tensors": "compressed-tensors",
        }
        name = format_name(by_method.get(quantization.method, ""), quantization.bits)
        if name not in FORMATS:
            raise UnsupportedError(
                f"{quantization.bits}-bit `{quantization.method}` weights stored as `{quantization.checkpoint_format}` "
                "are not read",
                hint=FORMATS_HINT,
            )
        return cls(FORMATS[name], quantization.bits, quantization.group_size)
