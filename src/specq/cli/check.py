"""`specq check`: whether a target and a drafter fit, test by test; of a recipe, its own pairs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Annotated, Any

import typer

from specq.cli.console import Console, table
from specq.cli.options import Offline, OutputOptions, VerbCommand, takes_options
from specq.cli.pairs import DRAFTS_FOR, Models, Pair, same_model
from specq.errors import UnsupportedError, UsageError

app = typer.Typer(rich_markup_mode=None, add_completion=False)


@app.command(cls=VerbCommand)
@takes_options
def check(
    target: Annotated[
        str, typer.Argument(metavar="TARGET", help="The model that decides, as MODEL elsewhere; alone: a recipe.")
    ],
    drafter: Annotated[
        str | None,
        typer.Argument(metavar="DRAFTER", help="The model or EAGLE head that drafts for it.", show_default=False),
    ] = None,
    *,
    offline: Offline = False,
    output: OutputOptions,
) -> None:
    """Say test by test whether a target and a drafter fit, and why not.

    With a recipe alone its own pairs are checked: what drafts for the target, and for the intermediate. No weights are
    loaded, but a model that is not here yet is downloaded. Exit code 6 when a test fails.
    """
    with Console(quiet=output.quiet).working() as console:
        models = Models(console, is_offline=offline)
        pairs = _recipe_pairs(target, models) if drafter is None else [_pair(target, drafter, models)]
        misfits = [pair for pair in pairs if not pair.fits]
        if not output.as_json:
            console.write("\n".join(_lines(pair) for pair in pairs))
        elif drafter is None:
            console.document({"recipe": target, "fits": not misfits, "pairs": [_record(pair) for pair in pairs]})
        else:
            console.document(_record(pairs[0]))
        if misfits:
            raise UnsupportedError("; ".join(_reason(pair) for pair in misfits))


def _pair(target: str, drafter: str, models: Models) -> Pair:
    from specq.recipe import resolve

    return models.check(resolve(target).target, resolve(drafter).target)


def _recipe_pairs(name: str, models: Models) -> Sequence[Pair]:
    """The pairs that a recipe names, as its pipeline would use them. Raises UsageError when there is none."""
    from specq.recipe import resolve
    from specq.spec.load import model_refs

    recipe = resolve(name)
    refs = model_refs(recipe, recipe.pipeline.name)
    parts = [part for part in DRAFTS_FOR if part in refs]
    if not parts:
        raise UsageError(
            f"`{name}` names no drafter and no intermediate to check",
            hint=f"specq check {name} DRAFTER, or a recipe that names one; specq fetch --list shows known drafters",
        )
    return [models.pair(refs, part) for part in parts]


def _lines(pair: Pair) -> str:
    """What was compared, its tests and the verdict."""
    tests = table([(test.status, test.name, test.detail) for test in pair.tests])
    named = same_model(pair.target, pair.drafter)
    lines = [f"{pair.drafter} drafts for {pair.target}", *([named] if named else []), tests, pair.verdict]
    return "\n".join(lines) + "\n"


def _record(pair: Pair) -> dict[str, Any]:
    record: dict[str, Any] = {"target": pair.target, "drafter": pair.drafter, "fits": pair.fits}
    record |= {"verdict": pair.verdict, "tests": [asdict(test) for test in pair.tests]}
    named = same_model(pair.target, pair.drafter)
    return record | ({"same_model": named} if named else {})


def _reason(pair: Pair) -> str:
    return f"`{pair.drafter}` does not fit `{pair.target}`: {', '.join(test.name for test in pair.failed)}"
