"""A folder beside an output in which a long run grows: a lock, the run's settings, what is finished so far.

A run that was killed is taken up from there; the output itself appears whole, by one rename.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from safetensors import SafetensorError

from specq.errors import DiskFullError, UsageError
from specq.files import DISK_FULL, REFUSED, named_path, reason, write_atomically
from specq.storage import require_writable

STATE = "settings.json"
DIGEST = re.compile("[0-9a-f]{16,}")


class Workspace:
    """The unfinished run for the folder `output`; `open_workspace` makes its folder and holds the lock."""

    def __init__(self, output: Path) -> None:
        self.output = output
        self.folder = output.with_name(f".{output.name}.specq")

    def staging(self) -> Path:
        """An empty folder for the finished files."""
        folder = self.folder / "finished"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        return folder

    def publish(self) -> None:
        """Make the staged files the output, and drop everything else of the run."""
        staged = self.folder / "finished"
        for file in staged.iterdir():
            file.chmod(0o644)  # safetensors writes for its owner only
            with open(file, "rb+") as handle:
                os.fsync(handle.fileno())
        old = self.folder / "replaced"
        shutil.rmtree(old, ignore_errors=True)
        if self.output.exists():
            self.output.rename(old)
        staged.rename(self.output)
        shutil.rmtree(self.folder)


@contextmanager
def open_workspace(workspace: Workspace, settings: Mapping[str, Any], *, verb: str, overwrite: bool) -> Iterator[None]:
    """Holds the workspace: what an interrupted run of the same settings left is in it, else it is new.

    Raises UsageError when another run of `verb` holds it, when it is the work of other settings, or when the output
    is in the way; `overwrite` replaces both. Raises DiskFullError where the disk ends.
    """
    output = workspace.output
    check_output(output, overwrite=overwrite)
    with disk_errors(output.parent):
        output.parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(_lock_file(output))
    try:
        with lock.acquire(timeout=0):
            _match(workspace.folder, settings, overwrite=overwrite)
            yield
            if not workspace.folder.exists():  # published: whoever waits for this lock will find the output instead
                Path(lock.lock_file).unlink(missing_ok=True)
    except Timeout:
        raise UsageError(
            f"another specq {verb} is writing `{output}`", hint="wait for it, or choose another folder with -o"
        ) from None


def check_output(output: Path, *, overwrite: bool, sources: Sequence[Path] = ()) -> None:
    """Raise UsageError when something is in the way of the output folder, `sources` would be replaced with it, or
    nothing can be written there."""
    named_path(_lock_file(output))  # the longest of the names beside it
    there = output.resolve()
    for source in sources:
        if there in (source.resolve(), *source.resolve().parents):
            raise UsageError(f"`{output}` is or holds `{source.name}`, which is read", hint="choose another with -o")
    if output.is_symlink() or (output.exists() and not output.is_dir()):
        raise UsageError(f"`{output}` is not a folder", hint="choose another one with -o")
    names = sorted(entry.name for entry in output.iterdir()) if output.is_dir() else []
    if names and not overwrite:
        raise UsageError(f"`{output}` is not empty", hint="--overwrite replaces it, or choose another folder with -o")
    if names and not (output / "config.json").is_file():
        shown = ", ".join(names[:4]) + (", ..." if len(names) > 4 else "")
        raise UsageError(
            f"`{output}` holds no model for --overwrite to replace, but {shown}", hint="choose another with -o"
        )
    require_writable(output.absolute().parent, hint="choose another folder with -o")


def _lock_file(output: Path) -> Path:
    return output.with_name(f".{output.name}.specq.lock")


@contextmanager
def disk_errors(folder: Path) -> Iterator[None]:
    """Turns a full disk and a folder that cannot be written into errors of their kind."""
    try:
        yield
    except SafetensorError as error:  # it wraps the system's error in a text
        if "No space" not in str(error) and "os error 28" not in str(error):
            raise
        raise DiskFullError(f"no room left to write in `{folder}`", hint="free some space and run again") from error
    except OSError as error:
        if error.errno in DISK_FULL:
            raise DiskFullError(f"no room left to write in `{folder}`", hint="free some space and run again") from error
        if error.errno in REFUSED:
            raise UsageError(f"`{folder}` cannot be written: {reason(error)}", hint="choose another with -o") from error
        raise


def _match(folder: Path, settings: Mapping[str, Any], *, overwrite: bool) -> None:
    """Make the folder one of these settings. Raises UsageError naming the first that differs."""
    state = folder / STATE
    wanted = json.loads(json.dumps(dict(settings)))
    if state.is_file():
        earlier = json.loads(state.read_text(encoding="utf-8"))
        differing = [key for key in {**earlier, **wanted} if earlier.get(key) != wanted.get(key)]
        if not differing:
            return
        if not overwrite:
            raise UsageError(
                f"an unfinished run for this folder has other settings: "
                f"{_difference(differing[0], earlier.get(differing[0]), wanted.get(differing[0]))}",
                hint="run it again with the same options to resume, or drop it with --overwrite",
            )
    shutil.rmtree(folder, ignore_errors=True)
    with disk_errors(folder.parent):
        folder.mkdir()
        with write_atomically(state) as path:
            path.write_text(json.dumps(wanted, indent=2) + "\n", encoding="utf-8")


def _difference(key: str, before: Any, now: Any) -> str:
    """What changed, without the hashes where it is known by its content only."""
    if any(isinstance(value, str) and DIGEST.fullmatch(value) for value in (before, now)):
        return f"{key} is another"
    return f"{key} was `{before}`, now `{now}`"
