"""Where a training run grows beside its output: a lock, its settings, its checkpoint; the output appears whole."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from specq.checkpoint import write_atomically
from specq.errors import UsageError


class Workspace:
    """The unfinished run for the folder `output`."""

    def __init__(self, output: Path, folder: Path) -> None:
        self.output, self.folder = output, folder

    @property
    def checkpoint(self) -> Path:
        return self.folder / "checkpoint.safetensors"

    def staging(self) -> Path:
        """An empty folder for the finished files."""
        folder = self.folder / "finished"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        return folder

    def publish(self) -> None:
        """Make the staged files the output, and drop what else the run left."""
        staged = self.folder / "finished"
        for file in staged.iterdir():
            file.chmod(0o644)  # safetensors writes for its owner only
            with open(file, "rb+") as handle:
                os.fsync(handle.fileno())
        if self.output.exists():
            self.output.rename(self.folder / "replaced")
        staged.rename(self.output)
        shutil.rmtree(self.folder)


def check_output(output: Path, *, overwrite: bool) -> None:
    """Raise UsageError when something is in the way of the output folder."""
    if output.is_symlink() or (output.exists() and not output.is_dir()):
        raise UsageError(f"`{output}` is not a folder", hint="choose another one with -o")
    if output.is_dir() and any(output.iterdir()) and not overwrite:
        raise UsageError(f"`{output}` is not empty", hint="--overwrite replaces it, or choose another folder with -o")


@contextmanager
def open_workspace(output: Path, settings: Mapping[str, Any], *, overwrite: bool) -> Iterator[Workspace]:
    """The workspace of `output`: what a killed run of the same settings left, else a new one.

    Raises UsageError when another run holds it or when it was begun with other settings; `overwrite` drops those.
    """
    check_output(output, overwrite=overwrite)
    output.parent.mkdir(parents=True, exist_ok=True)
    folder = output.with_name(f".{output.name}.specq")
    lock = FileLock(output.with_name(f".{output.name}.specq.lock"))
    try:
        with lock.acquire(timeout=0):
            _take(folder, settings, overwrite=overwrite)
            yield Workspace(output, folder)
    except Timeout:
        raise UsageError(
            f"another specq distill is writing `{output}`", hint="wait for it, or choose another folder with -o"
        ) from None


def _take(folder: Path, settings: Mapping[str, Any], *, overwrite: bool) -> None:
    state = folder / "settings.json"
    wanted = json.loads(json.dumps(dict(settings)))
    if state.is_file():
        earlier = json.loads(state.read_text(encoding="utf-8"))
        differing = sorted(key for key in {**earlier, **wanted} if earlier.get(key) != wanted.get(key))
        if not differing:
            return
        if not overwrite:
            key = differing[0]
            raise UsageError(
                f"an unfinished run for this folder has other settings: {key} was `{earlier.get(key)}`, "
                f"now `{wanted.get(key)}`",
                hint="run it again with the same options to resume, or drop it with --overwrite",
            )
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    with write_atomically(state) as path:
        path.write_text(json.dumps(wanted, indent=2) + "\n", encoding="utf-8")
