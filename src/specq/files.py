"""Files: what a name that a person gave means, and how one is read, or written whole or not at all."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
from collections.abc import Iterator
from pathlib import Path

from specq.errors import DiskFullError, SpecqError, UsageError

DISK_FULL = (errno.ENOSPC, errno.EDQUOT)
REFUSED = (errno.EACCES, errno.EPERM, errno.EROFS)
SHOWN_CHARS = 60


def named_path(name: str | Path) -> Path:
    """The path that a person means; `~` is their home folder, and `~nobody` a name like any other, as in a shell.

    Nothing needs to be there. Raises UsageError where it cannot even be asked: a text too long for a path, a folder
    that lets nobody in.
    """
    path = Path(os.path.expanduser(name))
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        pass
    except (OSError, ValueError) as error:
        why = reason(error) if isinstance(error, OSError) else str(error)
        raise UsageError(f"`{_shown(name)}` cannot be opened: {why}", hint="name a file or a folder") from None
    return path


def is_there(name: str) -> bool:
    """Whether the text, which may be anything, names a file or folder that exists."""
    return os.path.exists(os.path.expanduser(name))


def holds_config(folder: str | Path) -> bool:
    """Whether a config.json lies in what may be a folder; False, not an error, in one that lets nobody in."""
    return os.path.isfile(os.path.join(folder, "config.json"))


def read_text(file: str | Path, *, hint: str = "name a file of text in UTF-8") -> str:
    """The text of a file that a person named. Raises UsageError saying why it cannot be read."""
    try:
        return named_path(file).read_text(encoding="utf-8")
    except OSError as error:
        raise UsageError(f"`{file}` cannot be read: {reason(error)}", hint=hint) from None
    except UnicodeDecodeError:
        raise UsageError(f"`{file}` is not UTF-8 text", hint=hint) from None


def require_readable(file: Path) -> None:
    """Raises UsageError saying why a file cannot be read, for those whose readers say something else."""
    try:
        with open(file, "rb"):
            pass
    except OSError as error:
        raise UsageError(f"`{file}` cannot be read: {reason(error)}", hint="let specq read it") from error


def write_text(file: str | Path, text: str) -> None:
    """Replaces a file that a person named, whole or not at all.

    Raises UsageError saying why it cannot be written, DiskFullError.
    """
    try:
        with write_atomically(named_path(file)) as temporary:
            temporary.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"`{file}` cannot be written: {reason(error)}", hint="choose another file") from None


def is_text(text: str) -> bool:
    """Whether UTF-8 has all of it; bytes that were no text come from the system as halves of surrogate pairs."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def reason(error: OSError) -> str:
    """The system's own words, as our messages are written."""
    return (error.strerror or str(error)).lower()


def refusal(error: OSError) -> SpecqError | None:
    """What the system's error means to a person where it refuses a place on the disk; None for any other."""
    place = f"`{error.filename}`" if error.filename else "the output"  # no name: what is open already
    if error.errno in DISK_FULL:
        return DiskFullError(f"no room left to write {place}", hint="free some space and run again")
    if error.errno in REFUSED:
        hint = "let specq use it, or name another place"
        return UsageError(f"{place} cannot be used: {reason(error)}", hint=hint)
    return None


@contextlib.contextmanager
def write_atomically(path: Path) -> Iterator[Path]:
    """Yields a temporary path beside `path`; what was written there becomes `path` whole, or not at all.

    A link stays one, the file it leads to is replaced; a device or a pipe is written as it is.
    Raises DiskFullError when the disk has no room; `path` is then as it was before.
    """
    path = path.resolve()
    if path.exists() and not path.is_file():
        yield path
        return
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        yield temporary
        with open(temporary, "rb+") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
        _sync_folder(path.parent)
    except OSError as error:
        if error.errno in DISK_FULL:
            raise DiskFullError(
                f"no room left to write `{path}`", hint="free some space or choose another folder"
            ) from error
        raise
    finally:
        temporary.unlink(missing_ok=True)


def _sync_folder(folder: Path) -> None:
    """Makes the rename itself durable, where the platform lets a folder be opened."""
    if os.name == "posix":
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _shown(name: str | Path) -> str:
    text = str(name)
    return text if len(text) <= SHOWN_CHARS else f"{text[: SHOWN_CHARS - 3]}..."
