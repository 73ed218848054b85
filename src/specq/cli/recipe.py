"""`specq recipe`: the recipes, listed, shown in full and checked."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from specq.cli.console import Console, table
from specq.cli.options import ListingGroup, OutputOptions, Overrides, VerbCommand, takes_options
from specq.errors import UsageError

if TYPE_CHECKING:
    from specq.recipe import Recipe

app = typer.Typer(cls=ListingGroup, rich_markup_mode=None, add_completion=False)

Source = Annotated[str, typer.Argument(metavar="RECIPE", help="A .yaml file, or a name from `ls`.")]


@app.callback()
def recipe() -> None:
    """List, show or check recipes. A recipe is one YAML file that says everything that decides what runs.

    Without a verb they are listed.
    """


@app.command("ls", cls=VerbCommand)
@takes_options
def ls(*, output: OutputOptions) -> None:
    """List the shipped recipes with the command that runs each, and what it is."""
    with Console(quiet=output.quiet).working() as console:
        from specq.recipe import list_recipes

        found = []
        for name, path in list_recipes().items():
            command, about = comments_of(path)
            found.append({"name": name, "command": command, "about": about, "path": str(path)})
        if output.as_json:
            console.document(found)
        else:
            rows = [row for each in found for row in ((each["name"], each["command"]), ("", each["about"]))]
            console.line(table(rows))


@app.command("show", cls=VerbCommand)
@takes_options
def show(
    source: Source,
    *,
    overrides: Overrides = None,
    all_: Annotated[bool, typer.Option("--all", help="Every key a recipe takes, with the defaults.")] = False,
    output: OutputOptions,
) -> None:
    """Show the keys that a recipe and the overrides set; with --all every key it takes."""
    with Console(quiet=output.quiet).working() as console:
        import yaml

        values = _load(source, overrides).model_dump(mode="json", exclude_unset=not all_)
        if output.as_json:
            console.document(values)
        else:
            console.write(yaml.safe_dump(values, sort_keys=False, allow_unicode=True))


@app.command("check", cls=VerbCommand)
@takes_options
def check(
    sources: Annotated[list[str], typer.Argument(metavar="RECIPE", help="A .yaml file, or a name from `ls`.")],
    *,
    overrides: Overrides = None,
    output: OutputOptions,
) -> None:
    """Check recipes: every key known, every value in its range. Models are not looked for."""
    with Console(quiet=output.quiet).working() as console:
        results = [(source, _reason(source, overrides)) for source in sources]
        if output.as_json:
            console.document([{"recipe": name, "ok": not why, "reason": why} for name, why in results])
        else:
            console.line(table([(name, why or "ok") for name, why in results]))
    wrong = [name for name, why in results if why]
    if wrong:
        raise UsageError(f"not right: {', '.join(f'`{name}`' for name in wrong)}")


def comments_of(path: Path) -> tuple[str, str]:
    """The comments that open a recipe: the command that runs it, and what it is; empty where they are missing."""
    lines = [*path.read_text(encoding="utf-8").splitlines(), "", ""]
    command, about = (line.lstrip("# ").strip() if line.startswith("#") else "" for line in lines[:2])
    return command, about


def _reason(source: str, overrides: list[str] | None) -> str | None:
    """What is wrong with the recipe, or None."""
    try:
        _load(source, overrides)
    except UsageError as error:
        return error.message
    return None


def _load(source: str, overrides: list[str] | None) -> Recipe:
    from specq.recipe import load_recipe

    return load_recipe(source, overrides=overrides or ())
