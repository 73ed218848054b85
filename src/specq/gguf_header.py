"""The header of a GGUF file: its metadata and where its tensors lie, every length checked against the file.

The reader of package gguf takes 3 s over a vocabulary of 49152 (one numpy view an entry), so the header is walked
here, and arrays, which are vocabulary, are only counted. Source: the GGUF specification, versions 2 and 3.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from specq.errors import UnsupportedError, UsageError

ARRAY, STRING = 9, 8
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
MAX_DIMENSIONS = 4
# Types read here: number -> (name, columns a block, bytes a block). All others are looked up in package gguf.
OWN_TYPES = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    8: ("Q8_0", 32, 34),
    12: ("Q4_K", 256, 144),
    30: ("BF16", 1, 2),
}


@dataclass(frozen=True)
class GgufArray:
    """An array in the metadata, by its length and place; `read_array` reads its entries."""

    count: int
    kind: int
    offset: int


@dataclass(frozen=True)
class GgufTensor:
    """Where a tensor lies in the file and how it is stored."""

    type: str
    shape: tuple[int, ...]  # [out, in], the reverse of the file's order
    offset: int  # bytes from the start of the file
    row_bytes: int

    @property
    def num_rows(self) -> int:
        """Rows of `row_bytes`: all dimensions but the last."""
        return prod(self.shape[:-1])


@dataclass(frozen=True)
class GgufHeader:
    """Everything a GGUF file says before its tensors' data."""

    metadata: Mapping[str, Any]
    tensors: Mapping[str, GgufTensor]


def read_header(path: Path) -> GgufHeader:
    """The header of the file.

    Raises UsageError for a file that is no GGUF, cut short or damaged, UnsupportedError for one part of several and
    for types without a reader.
    """
    try:
        with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            header = _Walker(data).header()
    except (struct.error, ValueError, OSError) as error:
        raise UsageError(f"`{path}` is not a whole GGUF file: {error}", hint="download it again") from error
    if header.metadata.get("split.count", 1) > 1:
        raise UnsupportedError(f"`{path}` is one part of several", hint="merge them with llama.cpp's gguf-split")
    return header


def read_array(path: Path, array: GgufArray) -> list[Any]:
    """The entries of an array in the header of the same file."""
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        return _Walker(data).entries(array)


class _Walker:
    """Reads the header from front to back."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data, self._size, self._position = data, len(data), 0

    def header(self) -> GgufHeader:
        if self._data[:4] != b"GGUF":
            raise ValueError("it does not start with `GGUF`")
        self._position = 4
        version, num_tensors, num_pairs = self._unpack("IQQ")
        if version not in (2, 3):
            raise ValueError(f"version {version} is not 2 or 3")
        metadata = {self._text(): self._value(self._unpack("I")[0]) for _ in range(num_pairs)}
        infos = [self._info() for _ in range(num_tensors)]
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 8 or alignment & (alignment - 1):
            raise ValueError(f"an alignment of {alignment} is no power of two")
        start = -(-self._position // alignment) * alignment
        tensors = {name: self._tensor(name, shape, kind, start + offset) for name, shape, kind, offset in infos}
        if len(tensors) != num_tensors:
            raise ValueError("a tensor is named twice")
        return GgufHeader(metadata, tensors)

    def _info(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self._text()
        (dimensions,) = self._unpack("I")
        if not 1 <= dimensions <= MAX_DIMENSIONS:
            raise ValueError(f"`{name}` has {dimensions} dimensions")
        shape = self._unpack(f"{dimensions}Q")
        kind, offset = self._unpack("IQ")
        return name, shape[::-1], kind, offset

    def _tensor(self, name: str, shape: tuple[int, ...], kind: int, offset: int) -> GgufTensor:
        type_name, block_columns, block_bytes = _type(name, kind)
        if shape[-1] % block_columns:
            raise ValueError(f"`{name}` has rows of {shape[-1]}, not whole blocks of {block_columns}")
        tensor = GgufTensor(type_name, shape, offset, shape[-1] // block_columns * block_bytes)
        if offset % 8 or offset + tensor.num_rows * tensor.row_bytes > self._size:
            raise ValueError(f"`{name}` runs past the end")
        return tensor

    def _value(self, kind: int) -> Any:
        if kind == STRING:
            return self._text()
        if kind != ARRAY:
            return self._unpack(_scalar(kind))[0]
        kind, count = self._unpack("IQ")
        if count > self._size:
            raise ValueError(f"an array of {count} entries is longer than the file")
        array = GgufArray(count, kind, self._position)
        if kind != STRING:
            self._skip(count * struct.calcsize(_scalar(kind)))
            return array
        for _ in range(count):
            self._skip(self._unpack("Q")[0])
        return array

    def entries(self, array: GgufArray) -> list[Any]:
        self._position = array.offset
        if array.kind == STRING:
            return [self._text() for _ in range(array.count)]
        return list(self._unpack(f"{array.count}{_scalar(array.kind)}"))

    def _unpack(self, form: str) -> tuple[Any, ...]:
        values = struct.unpack_from(f"<{form}", self._data, self._position)
        self._position += struct.calcsize(f"<{form}")
        return values

    def _skip(self, length: int) -> int:
        start = self._position
        self._position += length
        if self._position > self._size:
            raise ValueError("an entry runs past the end")
        return start

    def _text(self) -> str:
        start = self._skip_text()
        return self._data[start : self._position].decode("utf-8", errors="replace")

    def _skip_text(self) -> int:
        (length,) = self._unpack("Q")
        return self._skip(length)


def _scalar(kind: int) -> str:
    if kind not in SCALARS:
        raise ValueError(f"a value of kind {kind} is unknown")
    return SCALARS[kind]


def _type(name: str, kind: int) -> tuple[str, int, int]:
    if kind in OWN_TYPES:
        return OWN_TYPES[kind]
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

    known = next((entry for entry in GGMLQuantizationType if entry.value == kind), None)
    if known is None or known.name.startswith(("I8", "I16", "I32", "I64", "F64")):
        raise UnsupportedError(f"`{name}` has GGUF type `{known.name if known else kind}`, which is not read")
    block_columns, block_bytes = GGML_QUANT_SIZES[known]
    return known.name, block_columns, block_bytes
