"""`specq cache`: what specq keeps on disk, listed and removed by name."""

from __future__ import annotations

import shutil
from datetime import datetime
from pathlib import Path
from typing import Annotated

import typer

from specq.cli.console import Console, size_text, table
from specq.cli.options import ListingGroup, OutputOptions, VerbCommand, takes_options
from specq.errors import SpecqError, UsageError
from specq.files import reason
from specq.storage import cache_dir

app = typer.Typer(cls=ListingGroup, rich_markup_mode=None, add_completion=False)


@app.callback()
def cache() -> None:
    """List or remove what specq keeps on disk: the demo model, profiles, tuned kernels, converted tokenizers,
    answers written for training, the history of chats.

    The folder is SPECQ_CACHE, or the platform's own place for caches. Hub models lie in the Hub's cache, not
    here. Without a verb the entries are listed.
    """


@app.command("ls", cls=VerbCommand)
@takes_options
def ls(*, output: OutputOptions) -> None:
    """List the entries of the cache with their sizes, and the Hub's cache beside it."""
    with Console(quiet=output.quiet).working() as console:
        from huggingface_hub.constants import HF_HUB_CACHE

        hub = Path(HF_HUB_CACHE)
        hub_bytes = size_of(hub) if hub.is_dir() else 0
        folder = cache_dir()
        found = entries(folder)
        sizes = {path: size_of(path) for path in found}
        changed = {path: datetime.fromtimestamp(path.stat().st_mtime).isoformat(" ", "minutes") for path in found}
        if output.as_json:
            listed = [{"name": path.name, "bytes": sizes[path], "modified": changed[path]} for path in found]
            about_hub = {"folder": str(hub), "bytes": hub_bytes}
            console.document({"folder": str(folder), "entries": listed, "hub": about_hub})
            return
        if found:
            console.line(table([(path.name, size_text(sizes[path]), changed[path]) for path in found]))
        console.note(f"{folder}: {size_text(sum(sizes.values()))}" if found else f"{folder} is empty")
        console.note(f"{hub}: {size_text(hub_bytes)}, the Hub's own cache, where fetched models lie")


@app.command("rm", cls=VerbCommand)
@takes_options
def rm(
    names: Annotated[list[str] | None, typer.Argument(metavar="NAME", help="Entries as `ls` shows them.")] = None,
    *,
    all_: Annotated[bool, typer.Option("--all", help="Every entry.")] = False,
    output: OutputOptions,
) -> None:
    """Remove entries of the cache; they are made or downloaded again when they are needed."""
    with Console(quiet=output.quiet).working() as console:
        known = {path.name: path for path in entries(cache_dir())}
        if names and all_:
            raise UsageError("entries and `--all` exclude each other", hint="leave one of them out")
        if not names and not all_:
            raise UsageError("give the entries to remove, or `--all`", hint="specq cache ls")
        wanted = list(known) if all_ else list(dict.fromkeys(names or []))
        for name in wanted:
            if name not in known:
                raise UsageError(f"there is no entry `{name}` in {cache_dir()}", hint="specq cache ls")
        freed = sum(_remove(known[name]) for name in wanted)
        if output.as_json:
            console.document({"removed": wanted, "bytes": freed})
        else:
            console.note(f"removed {', '.join(wanted) or 'nothing'}: {size_text(freed)}")


def _remove(path: Path) -> int:
    """Removes a file or a folder; the bytes that freed."""
    size = size_of(path)
    try:
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
    except OSError as error:
        raise SpecqError(f"`{path}` could not be removed: {reason(error)}") from None
    return size


def entries(folder: Path) -> list[Path]:
    """The entries of the cache by name; files that only guard its writing are none."""
    if not folder.is_dir():
        return []
    return sorted(path for path in folder.iterdir() if not path.name.endswith(".lock"))


def size_of(path: Path) -> int:
    """Bytes of a file, or of all files below a folder, links not followed."""
    if path.is_symlink() or path.is_file():
        return path.lstat().st_size
    return sum(file.lstat().st_size for file in path.rglob("*") if file.is_symlink() or file.is_file())
