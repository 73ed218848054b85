"""The folder beside the output in which a run grows: one file a finished layer, what they are a result of, a lock.

A run that was killed is taken up from there; the output itself appears whole, by one rename.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from specq.checkpoint import write_atomically
from specq.errors import DiskFullError, UsageError

STATE = "state.json"
RECORD = "specq"
"""Key of a layer's record in its file's metadata."""


class Workspace:
    """The unfinished result for the folder `output`; made by `open_workspace`, which holds the lock."""

    def __init__(self, output: Path, folder: Path) -> None:
        self.output, self.folder = output, folder

    def finished_layers(self) -> int:
        """How many layers from the first on are done."""
        count = 0
        while self._layer(count).is_file():
            count += 1
        return count

    def write_layer(self, index: int, tensors: Mapping[str, Tensor], record: Mapping[str, Any]) -> None:
        """Keep a layer's tensors, durable before this returns. Raises DiskFullError."""
        with disk_errors(self.folder), write_atomically(self._layer(index)) as path:
            save_file(dict(tensors), path, metadata={RECORD: json.dumps(record)})

    def read_layer(self, index: int) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """The tensors and the record of a finished layer."""
        with safe_open(self._layer(index), framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            return tensors, json.loads(file.metadata()[RECORD])

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
            _sync(file)
        old = self.folder / "replaced"
        shutil.rmtree(old, ignore_errors=True)
        if self.output.exists():
            self.output.rename(old)
        staged.rename(self.output)
        shutil.rmtree(self.folder)

    def _layer(self, index: int) -> Path:
        return self.folder / f"layer-{index:05}.safetensors"


@contextmanager
def open_workspace(output: Path, fingerprint: Mapping[str, Any], *, overwrite: bool) -> Iterator[Workspace]:
    """The workspace of `output`: what an interrupted run of the same fingerprint left, else a new one.

    Raises UsageError when another run holds it, when it is the work of other settings, or when `output` is in the
    way; `overwrite` replaces both. Raises DiskFullError where the disk ends.
    """
    check_output(output, overwrite=overwrite)
    folder = output.with_name(f".{output.name}.specq")
    with disk_errors(output.parent):
        output.parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(output.with_name(f".{output.name}.specq.lock"))
    try:
        with lock.acquire(timeout=0):
            _match(folder, fingerprint, overwrite=overwrite)
            yield Workspace(output, folder)
            if not folder.exists():  # published: whoever waits for this lock will find the output instead
                Path(lock.lock_file).unlink(missing_ok=True)
    except Timeout:
        raise UsageError(
            f"another specq quantize is writing `{output}`", hint="wait for it, or choose another folder with -o"
        ) from None


def check_output(output: Path, *, overwrite: bool) -> None:
    """Raise UsageError when something is in the way of the output folder."""
    if output.is_symlink() or (output.exists() and not output.is_dir()):
        raise UsageError(f"`{output}` is not a folder", hint="choose another one with -o")
    if output.is_dir() and any(output.iterdir()) and not overwrite:
        raise UsageError(f"`{output}` is not empty", hint="--overwrite replaces it, or choose another folder with -o")


def require_disk(folder: Path, num_bytes: int) -> None:
    """Raise DiskFullError unless the disk of `folder`, which may not exist yet, has that much room."""
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    if free < num_bytes:
        raise DiskFullError(
            f"`{folder}` has {free / 1e9:.2f} GB left on its disk, {num_bytes / 1e9:.2f} GB are needed",
            hint="free some space, or choose a folder on another disk with -o",
        )


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
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise DiskFullError(f"no room left to write in `{folder}`", hint="free some space and run again") from error
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise UsageError(
                f"`{folder}` cannot be written: {error.strerror}", hint="choose another with -o"
            ) from error
        raise


def _match(folder: Path, fingerprint: Mapping[str, Any], *, overwrite: bool) -> None:
    """Make the folder one of this fingerprint. Raises UsageError naming the first setting that differs."""
    state = folder / STATE
    if state.is_file():
        earlier = json.loads(state.read_text(encoding="utf-8"))
        differing = [key for key in {**earlier, **fingerprint} if earlier.get(key) != fingerprint.get(key)]
        if not differing:
            return
        if not overwrite:
            key = differing[0]
            raise UsageError(
                f"an unfinished run for this folder has other settings: {key} was `{earlier.get(key)}`, "
                f"now `{fingerprint.get(key)}`",
                hint="run it again with the same options to resume, or drop it with --overwrite",
            )
    shutil.rmtree(folder, ignore_errors=True)
    with disk_errors(folder.parent):
        folder.mkdir()
        with write_atomically(state) as path:
            path.write_text(json.dumps(dict(fingerprint), indent=2) + "\n", encoding="utf-8")


def _sync(file: Path) -> None:
    with open(file, "rb+") as handle:
        os.fsync(handle.fileno())
