"""`specq recipe`: the recipes, listed, shown in full and checked."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from specq.cli.console import Console, table
from specq.cli.options import NearMissGroup, OutputOptions, Overrides, VerbCommand, takes_options
from specq.errors import UsageError

app = typer.Typer(cls=NearMissGroup, rich_markup_mode=None, add_completion=False)

Source = Annotated[str, typer.Argument(metavar="RECIPE", help="A .yaml file, or a name from `ls`.")]


@app.callback()
def recipe() -> None:
    """List, show or check recipes. A recipe is one YAML file that says everything that decides what runs."""


@app.command("ls", cls=VerbCommand)
@takes_options
def ls(*, output: OutputOptions) -> None:
    """List the shipped recipes with the command that runs each."""
    with Console(quiet=output.quiet).working() as console:
        from specq.recipe import list_recipes

        found = [
            {"name": name, "command": command_of(path), "path": str(path)} for name, path in list_recipes().items()
        ]
        if output.as_json:
            console.document(found)
        else:
            console.line(table([(each["name"], each["command"]) for each in found]))


@app.command("show", cls=VerbCommand)
@takes_options
def show(source: Source, *, overrides: Overrides = None, output: OutputOptions) -> None:
    """Show a recipe with every key it takes, defaults and overrides included."""
    with Console(quiet=output.quiet).working() as console:
        import yaml

        values = _load(source, overrides)
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


def command_of(path: Path) -> str:
    """The command in the recipe's first comment line."""
    first = path.read_text(encoding="utf-8").partition("\n")[0]
    return first.lstrip("# ").strip()


def _reason(source: str, overrides: list[str] | None) -> str | None:
    """What is wrong with the recipe, or None."""
    try:
        _load(source, overrides)
    except UsageError as error:
        return error.message
    return None


def _load(source: str, overrides: list[str] | None) -> dict[str, Any]:
    from specq.recipe import load_recipe

    return load_recipe(source, overrides=overrides or ()).model_dump(mode="json")
