"""`specq cache`: what specq keeps on disk, listed and removed by name."""

from __future__ import annotations

import shutil
from datetime import datetime
from pathlib import Path
from typing import Annotated

import typer

from specq.cli.console import Console, size_text, table
from specq.cli.options import NearMissGroup, OutputOptions, VerbCommand, takes_options
from specq.errors import SpecqError, UsageError
from specq.hub import cache_dir

app = typer.Typer(cls=NearMissGroup, rich_markup_mode=None, add_completion=False)


@app.callback()
def cache() -> None:
    """List or remove what specq keeps on disk: the demo model, converted tokenizers, the history of chats.

    The folder is SPECQ_CACHE, or the platform's own place for caches. Hub models lie in the Hub's cache, not
    here.
    """


@app.command("ls", cls=VerbCommand)
@takes_options
def ls(*, output: OutputOptions) -> None:
    """List the entries of the cache with their sizes."""
    console = Console(quiet=output.quiet)
    folder = cache_dir()
    found = [
        {
            "name": path.name,
            "bytes": size_of(path),
            "modified": datetime.fromtimestamp(path.stat().st_mtime).isoformat(" ", "minutes"),
        }
        for path in entries(folder)
    ]
    if output.as_json:
        console.document({"folder": str(folder), "entries": found})
        return
    rows = [(str(e["name"]), size_text(float(str(e["bytes"]))), str(e["modified"])) for e in found]
    if rows:
        console.line(table(rows))
    console.note(f"{folder}: {size_text(size_of(folder))}" if rows else f"{folder} is empty")


@app.command("rm", cls=VerbCommand)
@takes_options
def rm(
    names: Annotated[list[str] | None, typer.Argument(metavar="NAME", help="Entries as `ls` shows them.")] = None,
    *,
    all_: Annotated[bool, typer.Option("--all", help="Every entry.")] = False,
    output: OutputOptions,
) -> None:
    """Remove entries of the cache; they are made or downloaded again when they are needed."""
    console = Console(quiet=output.quiet)
    known = {path.name: path for path in entries(cache_dir())}
    if bool(names) == all_:
        raise UsageError("give the entries to remove, or `--all`", hint="specq cache ls")
    wanted = list(known) if all_ else list(dict.fromkeys(names or []))
    for name in wanted:
        if name not in known:
            raise UsageError(f"there is no entry `{name}` in {cache_dir()}", hint="specq cache ls")
    freed = 0
    for name in wanted:
        path = known[name]
        freed += size_of(path)
        try:
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
        except OSError as error:
            raise SpecqError(f"`{path}` could not be removed: {(error.strerror or str(error)).lower()}") from None
    if output.as_json:
        console.document({"removed": wanted, "bytes": freed})
    else:
        console.note(f"removed {', '.join(wanted) or 'nothing'}: {size_text(freed)}")


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
