"""Where models lie: local folders, GGUF files, Hub ids at a pinned revision, the demo set, and the cache."""

from __future__ import annotations

import errno
import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from specq.errors import DiskFullError, UsageError

DEMO_NAME = "specq:demo"

# called with a line that says what is going on, several times a second while bytes come
Progress = Callable[[str], None]


@dataclass(frozen=True)
class Snapshot:
    """A model on this machine; a Hub model has its id and the commit it is pinned to."""

    path: Path
    repo_id: str | None = None
    revision: str | None = None


def resolve_model(
    name: str, *, revision: str | None = None, offline: bool | None = None, progress: Progress | None = None
) -> Snapshot:
    """The local files of a model: `specq:demo`, a GGUF file, a folder with a config.json, or a Hub id.

    Raises: UsageError for a name that is none of these.
    """
    if name == DEMO_NAME:
        from specq.demo import demo_folder

        return Snapshot(demo_folder(offline=offline, progress=progress))
    path = Path(name).expanduser()
    if path.exists() or name.startswith(("/", "./", "../", "~")):
        return Snapshot(_check_local(path))
    raise UsageError(f"`{name}` is neither a folder nor a GGUF file")


def _check_local(path: Path) -> Path:
    """The path itself when it holds a model; what was found there instead is in the message."""
    if not path.exists():
        raise UsageError(f"`{path}` does not exist", hint="look for a misspelt name")
    if path.is_file():
        if path.suffix == ".gguf":
            return path
        raise UsageError(f"`{path}` is not a model: it is neither a folder nor a .gguf file")
    if (path / "config.json").is_file() or any(path.glob("*.gguf")):
        return path
    found = sorted(entry.name for entry in path.iterdir())
    shown = ", ".join(found[:6]) + (", ..." if len(found) > 6 else "")
    raise UsageError(
        f"`{path}` holds neither a config.json nor a .gguf file: {shown or 'it is empty'}",
        hint="name the folder that a Hugging Face model was saved to",
    )


def cache_dir() -> Path:
    """The folder of profiles, converted tokenizers and the demo set: SPECQ_CACHE, or the platform's."""
    named = os.environ.get("SPECQ_CACHE")
    if named:
        return Path(named).expanduser()
    if sys.platform == "win32":
        base = os.environ.get("LOCALAPPDATA") or "~/AppData/Local"
    elif sys.platform == "darwin":
        base = "~/Library/Caches"
    else:
        base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "specq"


def is_offline(flag: bool | None = None) -> bool:
    """Whether the network must not be used: the flag, else HF_HUB_OFFLINE."""
    if flag is not None:
        return flag
    return os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE")


def progress_line(what: str, done: int, total: int) -> str:
    """A line of progress, in megabytes."""
    return f"{what}: {min(done, total) / 1e6:.0f} of {total / 1e6:.0f} MB"


def require_space(folder: Path, num_bytes: int) -> None:
    """Raises DiskFullError when the disk of `folder` has less than `num_bytes` left."""
    free = shutil.disk_usage(folder).free
    if free < num_bytes:
        raise DiskFullError(
            f"`{folder}` has {free / 1e9:.2f} GB left on its disk, {num_bytes / 1e9:.2f} GB are needed",
            hint="free some space, or set SPECQ_CACHE and HF_HOME to another disk",
        )


def build_folder(destination: Path, build: Callable[[Path], None]) -> Path:
    """`destination`, made by `build(empty folder)` unless it is there; it appears whole or not at all.

    Other processes wait for the one that builds; what a killed one left behind is removed by the next.
    Raises: DiskFullError, UsageError when the place cannot be written.
    """
    from filelock import FileLock

    if destination.is_dir():
        return destination
    prefix = f".{destination.name}.part-"
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
                for file in partial.iterdir():
                    _sync(file)
                partial.chmod(0o755)
                partial.rename(destination)
            finally:
                shutil.rmtree(partial, ignore_errors=True)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise DiskFullError(
                f"no room left on the disk of `{destination.parent}`",
                hint="free some space, or set SPECQ_CACHE to another disk",
            ) from error
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST):
            raise UsageError(
                f"`{destination.parent}` cannot be written: {error.strerror}",
                hint="set SPECQ_CACHE to a folder of yours",
            ) from error
        raise
    return destination


def _sync(file: Path) -> None:
    with open(file, "rb+") as handle:
        os.fsync(handle.fileno())
