"""Folders specq keeps on this machine: where its cache lies, and how something is put there whole or not at all."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from specq.errors import DiskFullError, UsageError
from specq.files import DISK_FULL, REFUSED, named_path, reason

NOT_WRITABLE = (*REFUSED, errno.ENOTDIR, errno.EEXIST)

CACHE_HINT = "set SPECQ_CACHE to a folder of yours"

# called with a line that says what is going on, several times a second while bytes come
Progress = Callable[[str], None]


def cache_dir() -> Path:
    """The folder of profiles, converted tokenizers and the demo set: SPECQ_CACHE, or the platform's."""
    named = os.environ.get("SPECQ_CACHE")
    if named:
        return Path(os.path.expanduser(named))
    if sys.platform == "win32":
        base = os.environ.get("LOCALAPPDATA") or "~/AppData/Local"
    elif sys.platform == "darwin":
        base = "~/Library/Caches"
    else:
        base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(os.path.expanduser(base)) / "specq"


def is_offline(flag: bool | None = None) -> bool:
    """Whether the network must not be used: the flag, else HF_HUB_OFFLINE as the Hub's own tools read it."""
    if flag is not None:
        return flag
    value = os.environ.get("HF_HUB_OFFLINE") or os.environ.get("TRANSFORMERS_OFFLINE") or ""
    return value.upper() in ("1", "ON", "YES", "TRUE")


def progress_line(what: str, done: int, total: int) -> str:
    """A line of progress, in megabytes."""
    return f"{what}: {min(done, total) / 1e6:.0f} of {total / 1e6:.0f} MB"


def bytes_below(folder: Path) -> int:
    """The size of all files below a folder, also while others write there."""
    total = 0
    for root, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(FileNotFoundError):  # moved meanwhile
                total += os.lstat(os.path.join(root, name)).st_size
    return total


def require_space(
    folder: Path, num_bytes: int, *, hint: str = "free some space, or set SPECQ_CACHE and HF_HOME to another disk"
) -> None:
    """Raises DiskFullError when the disk of `folder`, which may not exist yet, has less than `num_bytes` left."""
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    if free < num_bytes:
        raise DiskFullError(
            f"`{folder}` has {free / 1e9:.2f} GB left on its disk, {num_bytes / 1e9:.2f} GB are needed", hint=hint
        )


def require_writable(folder: Path, *, hint: str) -> None:
    """Raises UsageError when no file can be made in `folder` or, where it is not there yet, in the one above it."""
    while not folder.exists():
        folder = folder.parent
    if not folder.is_dir():
        raise UsageError(f"`{folder}` cannot be written: it is not a folder", hint=hint)
    try:
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        if error.errno in DISK_FULL:
            raise DiskFullError(f"no room left to write in `{folder}`", hint="free some space and run again") from error
        raise UsageError(f"`{folder}` cannot be written: {reason(error)}", hint=hint) from error


def require_writable_file(path: Path) -> None:
    """Raises UsageError when `path` is a folder, or its folder is not there or takes no files."""
    path = named_path(path)
    if path.is_dir():
        raise UsageError(f"`{path}` cannot be written: it is a folder", hint="name a file in it")
    if not path.absolute().parent.is_dir():
        raise UsageError(f"`{path}` cannot be written: its folder does not exist", hint=f"mkdir -p {path.parent}")
    require_writable(path.absolute().parent, hint="choose another file")


def build_folder(destination: Path, build: Callable[[Path], None]) -> Path:
    """`destination`, made by `build(empty folder)` unless it is there; it appears whole or not at all.

    Other processes wait for the one that builds; what a killed one left behind is removed by the next.
    Raises: DiskFullError, UsageError when the place cannot be written.
    """
    from filelock import FileLock

    if destination.is_dir():
        return destination
    prefix = f".{destination.name}.part-"
    require_writable(destination.parent, hint=CACHE_HINT)
    try:
        destination.parent.mkdir(parents=True, exist_ok=True)
        # a lock of the kernel: it is gone when its holder is killed
        with FileLock(destination.parent / f".{destination.name}.lock"):
            if destination.is_dir():
                return destination
            for leftover in destination.parent.glob(f"{prefix}*"):
                shutil.rmtree(leftover, ignore_errors=True)
            partial = Path(tempfile.mkdtemp(prefix=prefix, dir=destination.parent))
            try:
                build(partial)
                for file in partial.rglob("*"):
                    if file.is_file():
                        _sync(file)
                partial.chmod(0o755)
                partial.rename(destination)
            finally:
                shutil.rmtree(partial, ignore_errors=True)
    except OSError as error:
        if error.errno in DISK_FULL:
            raise DiskFullError(
                f"no room left on the disk of `{destination.parent}`",
                hint="free some space, or set SPECQ_CACHE to another disk",
            ) from error
        if error.errno in NOT_WRITABLE:
            raise UsageError(
                f"`{destination.parent}` cannot be written: {reason(error)}",
                hint=CACHE_HINT,
            ) from error
        raise
    return destination


def _sync(file: Path) -> None:
    with open(file, "rb+") as handle:
        os.fsync(handle.fileno())
