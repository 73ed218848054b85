"""Tuned tile sizes: JSON keyed by kernel, shape and device; a conservative default where a device has no entry.

A device's file holds {"<kernel>": {"<n>x<k>[g<group>]": {"parts": 4, "split": 1, "tail_split": 4, "tail_from": 33792,
"rows": {"4": {"lanes": 1, ...}, "16": {"block_n": 128, "warps": 4, ...}, "32": {...}, "64": {...}}}}}. How K is summed
is one choice for all row counts, because a row's result must not depend on how many rows there are: in `parts` parts,
which are added in order within each of `split` runs (`tail_split` for columns from `tail_from` on), then the runs. All
else, `fma` (how words of codes are taken apart, w4_device.py) included, changes no bit of a result. The user's own file
(written by `python -m specq_kernels.tune`) wins over the one in the package.
"""

from __future__ import annotations

import functools
import json
import os
import re
import sys
import warnings
from pathlib import Path
from typing import Any

from torch import Tensor

from specq_kernels.lane_order import lanes_rows
from specq_kernels.launch import device_name, interpreted, num_multiprocessors, row_bucket

Config = dict[str, int]
DEFAULT_TILES: dict[str, dict[int, Config]] = {  # each fits 48 KB of shared memory
    "w4a16": {
        16: {"block_n": 64, "warps": 4, "stages": 3},
        32: {"block_n": 64, "warps": 4, "stages": 2},
        64: {"block_n": 64, "warps": 4, "stages": 2, "step": 128},
    },
    "w16a16": {
        16: {"block_n": 64, "warps": 4, "stages": 4},
        32: {"block_n": 64, "warps": 4, "stages": 3},
        64: {"block_n": 64, "warps": 4, "stages": 2},
    },
}


def product_config(kernel: str, x: Tensor, *, n: int, k: int, group: int | None = None, lanes: bool = False) -> Config:
    """Tile sizes of a product of x [rows, k] with a weight [n, k], both padded: splits, block_n, block_m, warps, ...

    `lanes` says whether x can be had in lane order, which some tiles read.
    """
    bucket = row_bucket(x.shape[0])
    if not x.is_cuda:
        return {"split": 1, "tail_split": 2, "tail_from": n // 256 * 128, "block_n": 64, "block_m": bucket, "stages": 1}
    entry = lookup(device_name(x.device.index), kernel, shape_key(n, k, group))
    if entry is None:
        warn_untuned(device_name(x.device.index), kernel)
        split = default_split(n, k, num_multiprocessors(x.device.index))
        return {"split": split, "block_m": bucket, **DEFAULT_TILES[kernel][bucket]}
    splits = {key: value for key, value in entry.items() if key != "rows"}  # w16a16 has no tail
    rows = min(int(count) for count in entry["rows"] if int(count) >= x.shape[0])
    tile = entry["rows"][str(rows)]
    if not tile.get("lanes"):
        return {**splits, "block_m": bucket, **entry["rows"][str(bucket)]}
    if lanes:
        return {**splits, "block_m": lanes_rows(x.shape[0]), **tile}
    tile = entry["rows"][str(bucket)]
    return {**splits, "block_m": bucket, **(DEFAULT_TILES[kernel][bucket] if tile.get("lanes") else tile)}


def split_of(config: Config, *, n: int, k: int) -> tuple[int, int, int]:
    """(split, tail_split, tail_from) of a weight [n, k], at most one part a step of 256 k."""
    split = min(config["split"], k // 256)
    return split, min(config.get("tail_split", split), k // 256), config.get("tail_from", n)


def parts_of(config: Config, *, n: int, k: int) -> tuple[int, int]:
    """(parts of K, those of columns in the tail) of a weight [n, k]; each a multiple of its split."""
    split, tail_split, _ = split_of(config, n=n, k=k)
    return config.get("parts", split), config.get("parts", tail_split)


def split_bound(split: int) -> int:
    """The compiled bound on the number of parts: few values, so that shapes share kernels."""
    return next(bound for bound in (1, 4, 8, 16, 32) if split <= bound)


def launch_options(config: Config, *, early: bool) -> dict[str, object]:
    """Triton's own launch options; the interpreter takes none."""
    if interpreted():
        return {}
    registers = {"maxnreg": config["registers"]} if config.get("registers") else {}
    return {"num_warps": config["warps"], "launch_pdl": early, **registers}


def default_split(n: int, k: int, processors: int) -> int:
    """Parts of K so that about two tiles of 64 columns run on each multiprocessor, four steps of 256 at least each."""
    tiles = max(1, n // 64)
    wanted = max(1, round(2 * processors / tiles))
    return max(1, min(wanted, k // 1024, 16))


def shape_key(n: int, k: int, group: int | None = None) -> str:
    return f"{n}x{k}" + ("" if group is None else f"g{group}")


@functools.cache
def lookup(device: str, kernel: str, key: str) -> Any | None:
    """The entry of the user's file, else the package's, else None."""
    for path in (user_file(device), Path(__file__).parent / "configs" / f"{slug(device)}.json"):
        entry = read(path).get(kernel, {}).get(key)
        if entry is not None:
            return entry
    return None


@functools.cache
def read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text()) if path.is_file() else {}


def user_file(device: str) -> Path:
    """Where `python -m specq_kernels.tune` writes this device's configurations."""
    root = os.environ.get("SPECQ_CACHE")
    if root is None:
        home = Path.home()
        base = home / "Library" / "Caches" if sys.platform == "darwin" else home / ".cache"
        root = str(Path(os.environ.get("XDG_CACHE_HOME", base)) / "specq")
    return Path(root) / "kernels" / f"{slug(device)}.json"


def slug(device: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-")


@functools.cache
def warn_untuned(device: str, kernel: str) -> None:
    """Say once for a device and kernel that defaults run, and the command that tunes."""
    warnings.warn(f"`{kernel}` is not tuned for `{device}`: run `python -m specq_kernels.tune` once", stacklevel=2)
