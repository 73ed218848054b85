"""`specq check`: whether a target and a drafter fit, test by test."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from specq.cli.console import Console, table
from specq.cli.options import Offline, OutputOptions, VerbCommand, takes_options
from specq.errors import UnsupportedError

app = typer.Typer(rich_markup_mode=None, add_completion=False)


@app.command(cls=VerbCommand)
@takes_options
def check(
    target: Annotated[str, typer.Argument(metavar="TARGET", help="The model that decides: as MODEL elsewhere.")],
    drafter: Annotated[str, typer.Argument(metavar="DRAFTER", help="The model that drafts for it.")],
    *,
    offline: Offline = False,
    output: OutputOptions,
) -> None:
    """Say test by test whether a target and a drafter fit, and why not.

    No weights are loaded. Exit code 6 when a test fails.
    """
    with Console(quiet=output.quiet).working() as console:
        from specq.spec.check import check_pair

        folders = [_folder(name, is_offline=offline, console=console) for name in (target, drafter)]
        results = check_pair(*folders)
        failed = [result.name for result in results if result.status == "fail"]
        if output.as_json:
            tests = [asdict(result) for result in results]
            console.document({"target": target, "drafter": drafter, "fits": not failed, "tests": tests})
        else:
            console.line(table([(result.status, result.name, result.detail) for result in results]))
        if failed:
            raise UnsupportedError(f"`{drafter}` does not fit `{target}`: {', '.join(failed)}")


def _folder(name: str, *, is_offline: bool, console: Console) -> Path:
    from specq.hub import resolve_model
    from specq.recipe import resolve

    target = resolve(name).target
    progress = console.progress()
    try:
        return resolve_model(target.model, revision=target.revision, offline=is_offline or None, progress=progress).path
    finally:
        progress.clear()
