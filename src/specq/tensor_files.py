"""Tensor files of a model folder, opened safely and lazily: headers first, data on request, nothing executed."""

from __future__ import annotations

import json
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from specq.errors import UnsupportedError, UsageError
from specq.files import require_readable
from specq.quant.formats import Header

SAFETENSORS_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}
DOWNLOAD_AGAIN = "download the model again"


class TensorFile(Protocol):
    """One file: what it holds, and its tensors one by one."""

    headers: Mapping[str, Header]

    def read(self, name: str) -> Tensor: ...


class SafetensorsFile:
    """A .safetensors file, memory-mapped."""

    def __init__(self, path: Path) -> None:
        from safetensors import SafetensorError, safe_open

        require_readable(path)
        try:
            self._file = safe_open(path, framework="pt", device="cpu")
        except (SafetensorError, OSError) as error:
            raise UsageError(f"`{path}` is not a whole safetensors file: {error}", hint=DOWNLOAD_AGAIN) from error
        self.headers: Mapping[str, Header] = {name: self._header(path, name) for name in self._file.keys()}  # noqa: SIM118

    def _header(self, path: Path, name: str) -> Header:
        part = self._file.get_slice(name)
        dtype = SAFETENSORS_DTYPES.get(part.get_dtype())
        if dtype is None:
            raise UnsupportedError(f"`{name}` in `{path.name}` has type `{part.get_dtype()}`, which is not read")
        return Header(dtype, tuple(part.get_shape()))

    def read(self, name: str) -> Tensor:
        """The tensor, on the CPU."""
        return self._file.get_tensor(name)


class TorchFile:
    """A .bin file of torch.save, through torch's weights-only reader, memory-mapped."""

    def __init__(self, path: Path) -> None:
        try:
            tensors = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except (pickle.UnpicklingError, RuntimeError, OSError, EOFError) as error:
            reason = str(error).strip().splitlines()[0]
            raise UsageError(f"`{path}` is not read: {reason}", hint="give a model with .safetensors files") from error
        if not isinstance(tensors, dict) or not all(isinstance(value, Tensor) for value in tensors.values()):
            raise UsageError(f"`{path}` does not hold tensors by name", hint="give a model with .safetensors files")
        self._tensors: dict[str, Tensor] = tensors
        self.headers: Mapping[str, Header] = {
            name: Header(value.dtype, tuple(value.shape)) for name, value in tensors.items()
        }

    def read(self, name: str) -> Tensor:
        """The tensor, on the CPU."""
        return self._tensors[name]


def find_files(folder: Path) -> dict[str, tuple[str, ...]]:
    """File name -> the tensor names an index promises in it (empty without an index), for a model folder.

    A single model.safetensors comes first, then its index, then one lone .safetensors file; only a folder without any
    is searched for pytorch_model.bin and its index.
    Raises UsageError when there are no weights, or the choice is not clear.
    """
    for stem, suffix in (("model", ".safetensors"), ("pytorch_model", ".bin")):
        if (folder / f"{stem}{suffix}").exists():
            return {f"{stem}{suffix}": ()}
        index = folder / f"{stem}{suffix}.index.json"
        if index.exists():
            return _read_index(safe_path(folder, index.name), suffix)
        lone = sorted(path.name for path in folder.glob("*.safetensors")) if suffix == ".safetensors" else []
        if lone == ["adapter_model.safetensors"]:
            raise UnsupportedError(f"`{folder}` holds an adapter, not a model", hint="merge it into its model first")
        if len(lone) == 1:
            return {lone[0]: ()}
        if lone:
            raise UsageError(f"`{folder}` holds {len(lone)} .safetensors files without an index", hint=DOWNLOAD_AGAIN)
    raise UsageError(f"`{folder}` holds no weights", hint="give a folder with .safetensors files, or a .gguf file")


def _read_index(path: Path, suffix: str) -> dict[str, tuple[str, ...]]:
    try:
        weight_map = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
        entries = {str(name): str(file) for name, file in weight_map.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UsageError(f"`{path}` is not an index of weights", hint=DOWNLOAD_AGAIN) from error
    files: dict[str, list[str]] = {}
    for name, file in entries.items():
        if not file.endswith(suffix):
            raise UsageError(f"`{path.name}` points to `{file}`, which is not a {suffix} file")
        files.setdefault(file, []).append(name)
    return {file: tuple(names) for file, names in files.items()}


def safe_path(folder: Path, name: str) -> Path:
    """The file `name` of the folder, after its links were followed.

    `name` must be a bare file name and the file must lie in the folder; in a snapshot of the Hugging Face cache,
    whose files are links, in that model's part of the cache. Raises UsageError otherwise.
    """
    if not name or name in (".", "..") or "/" in name or "\\" in name or Path(name).is_absolute():
        raise UsageError(f"the weights name the file `{name}`, which is not a bare file name")
    path = (folder / name).resolve()
    root = folder.resolve()
    if root.parent.name == "snapshots" and (root.parent.parent / "blobs").is_dir():
        root = root.parent.parent
    if not path.is_relative_to(root):
        raise UsageError(f"`{folder / name}` is a link out of the model's folder", hint="copy the file into the folder")
    if not path.is_file():
        raise UsageError(f"`{folder / name}` is missing", hint=DOWNLOAD_AGAIN)
    return path


def open_file(path: Path) -> TensorFile:
    """The file's reader, by its suffix."""
    return TorchFile(path) if path.suffix == ".bin" else SafetensorsFile(path)
