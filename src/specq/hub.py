"""Where models lie: local folders, GGUF files, Hub ids at a pinned revision, the demo set, and the cache."""

from __future__ import annotations

import contextlib
import difflib
import errno
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from specq.errors import DiskFullError, OfflineError, UsageError

DEMO_NAME = "specq:demo"
SHIPPED = {"specq:demo-head": Path(__file__).parent / "demo_heads" / "demo-head"}
"""Drafters of the demo model that come with specq itself."""

HUB_ID = re.compile(r"[\w][\w.-]*/[\w][\w.-]*")
DISK_FULL = (errno.ENOSPC, errno.EDQUOT)
NOT_WRITABLE = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST)

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
    """The local files of a model: `specq:demo` and its drafters, a GGUF file, a folder with a config.json, or a Hub id.

    What a Hub model lacks on this machine is downloaded, code never.
    Raises: UsageError for a name that is none of these, AccessError, OfflineError, DiskFullError.
    """
    if name == DEMO_NAME:
        from specq.demo import demo_folder

        return Snapshot(demo_folder(offline=offline, progress=progress))
    if name in SHIPPED:
        return Snapshot(SHIPPED[name])
    path = Path(name).expanduser()
    is_hub_id = HUB_ID.fullmatch(name) is not None
    if _holds_model(path) or name.startswith(("/", "./", "../", "~")) or (path.exists() and not is_hub_id):
        return Snapshot(_check_local(path))
    if not is_hub_id:
        raise UsageError(
            f"`{name}` is neither a folder, a .gguf file nor a Hub id",
            hint=_suggest(path) or "Hub ids have the form org/name, such as HuggingFaceTB/SmolLM2-135M-Instruct",
        )
    from specq.hub_download import cached_snapshot, download

    if is_offline(offline):
        folder = cached_snapshot(name, revision)
        if folder is None:
            raise OfflineError(
                f"`{name}`{f' at revision `{revision}`' if revision else ''} is not in the Hub cache, "
                "or only in part, and specq is offline",
                hint="run once without --offline and HF_HUB_OFFLINE, or name a local folder",
            )
    else:
        folder = download(name, revision, progress=progress)
    return Snapshot(folder, repo_id=name, revision=folder.name)


def _check_local(path: Path) -> Path:
    """The path itself when it holds a model; what was found there instead is in the message."""
    if not path.exists():
        raise UsageError(f"`{path}` does not exist", hint=_suggest(path))
    if _holds_model(path):
        return path
    if path.is_file():
        raise UsageError(
            f"`{path}` is not a model: it is neither a folder nor a .gguf file",
            hint=f"name its folder: {path.parent}" if (path.parent / "config.json").is_file() else None,
        )
    found = sorted(entry.name for entry in path.iterdir())
    shown = ", ".join(found[:6]) + (", ..." if len(found) > 6 else "")
    below = [child for child in sorted(path.iterdir()) if (child / "config.json").is_file()]
    raise UsageError(
        f"`{path}` holds neither a config.json nor a .gguf file: {shown or 'it is empty'}",
        hint=f"did you mean {below[0]}?" if below else "name the folder that a Hugging Face model was saved to",
    )


def _holds_model(path: Path) -> bool:
    return (path / "config.json").is_file() or any(path.glob("*.gguf")) or (path.is_file() and path.suffix == ".gguf")


def _suggest(path: Path) -> str | None:
    """A hint with the entry beside `path` whose name comes closest."""
    if not path.parent.is_dir():
        return None
    names = [entry.name for entry in path.parent.iterdir() if entry.is_dir() or entry.suffix == ".gguf"]
    close = difflib.get_close_matches(path.name, names, n=1)
    return f"did you mean {path.parent / close[0]}?" if close else None


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
                f"`{destination.parent}` cannot be written: {error.strerror}",
                hint="set SPECQ_CACHE to a folder of yours",
            ) from error
        raise
    return destination


def _sync(file: Path) -> None:
    with open(file, "rb+") as handle:
        os.fsync(handle.fileno())
