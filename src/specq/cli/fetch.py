"""`specq fetch`: known drafters for a target, fetched at one commit and checked against it."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import asdict
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from specq.cli.console import Console, table
from specq.cli.options import Model, Offline, OutputOptions, VerbCommand, assignments, takes_options
from specq.errors import SpecqError, UnsupportedError

if TYPE_CHECKING:
    from specq.checkpoint import ModelSpec
    from specq.hub import Snapshot
    from specq.recipe import ModelRef
    from specq.registry import Drafter, Match, Registry
    from specq.registry import Kind as KindName
    from specq.spec.check import CheckResult

app = typer.Typer(rich_markup_mode=None, add_completion=False)

NAMES = {"eagle": "EAGLE head", "intermediate": "intermediate"}
PIPELINES = {"eagle": "eagle2", "intermediate": "sequence"}
NAMED = 4
"""How many models a message names."""


class Kind(str, Enum):
    eagle = "eagle"
    intermediate = "intermediate"


@app.command(cls=VerbCommand)
@takes_options
def fetch(
    model: Model = None,
    *,
    kind: Annotated[
        Kind | None,
        typer.Option("--kind", help="What to fetch; default a head, else an intermediate.", show_default=False),
    ] = None,
    is_list: Annotated[
        bool, typer.Option("--list", help="Only list what is known for MODEL, or without MODEL for every model.")
    ] = False,
    revision: Annotated[
        str | None,
        typer.Option("--revision", metavar="R", help="Branch, tag or commit of MODEL.", show_default=False),
    ] = None,
    offline: Offline = False,
    output: OutputOptions,
) -> None:
    """Fetch a known drafter for a model, and check that they fit.

    The drafter's folder is printed on standard output, how it is used on standard error. MODEL's own files are fetched
    too where they are missing, since the two are compared; a local copy in 4 bits will do. Exit code 6 when they do
    not fit.
    """
    with Console(quiet=output.quiet).working() as console:
        from specq.recipe import resolve
        from specq.registry import load_registry

        registry = load_registry()
        wanted: KindName | None = kind.value if kind else None
        if is_list and model is None:
            rows = [row for target in registry.targets for row in registry.drafters(target, wanted)]
            return _list(rows, console, as_json=output.as_json)
        ref = resolve(model, overrides=assignments({"target.revision": revision})).target
        drafters = _known(registry, ref, wanted, is_offline=offline, console=console)
        if is_list:
            return _list(drafters, console, as_json=output.as_json)
        _take(drafters[0], ref, model, is_offline=offline, console=console, as_json=output.as_json)
        own_heads = registry.drafters(found.target, "eagle") if (found := registry.find(drafters[0].model)) else []
        if own_heads:
            console.note(f"a head of its own makes the pair hierarchical: specq fetch {drafters[0].model}")


def _known(
    registry: Registry, ref: ModelRef, kind: KindName | None, *, is_offline: bool, console: Console
) -> Sequence[Drafter]:
    """What the registry has for this model. Raises SpecqError with what there is instead when it has nothing."""
    match, spec = _identify(registry, ref, is_offline=is_offline)
    if match is None:
        raise SpecqError(f"`{ref.model}` is not in the registry", hint=_instead(registry, ref, spec, kind))
    if match.why:
        console.note(f"{match.why} is taken for a copy of {match.target.model}")
    drafters = registry.drafters(match.target, kind)
    if drafters:
        return drafters
    what = f"no {NAMES[kind]}" if kind else "no drafter"
    other = registry.drafters(match.target)
    hint = f"there is an {NAMES[other[0].kind]}: specq fetch {ref.model} --kind {other[0].kind}" if other else None
    raise SpecqError(
        f"{what} is known for `{ref.model}`", hint=hint or _distill(ref.model, kind) or "specq fetch --list"
    )


def _identify(registry: Registry, ref: ModelRef, *, is_offline: bool) -> tuple[Match | None, ModelSpec | None]:
    """The target a model is, by its name or by what its files say; where that is not known, its spec.

    Raises UnsupportedError for an architecture that specq does not run.
    """
    from specq.registry import Match, quantized_from

    if match := registry.find(ref.model):
        return match, None
    folder = _description(ref, is_offline=is_offline)
    if folder.is_dir() and (folder / "config.json").is_file():
        from specq.checkpoint import ModelSpec, read_config

        config, card = read_config(folder), folder / "README.md"
        text = card.read_text(encoding="utf-8", errors="replace") if card.is_file() else ""
        for name in quantized_from(config, text):
            if match := registry.find(name):
                return Match(match.target, f"`{ref.model}`, quantized from `{name}`,"), None
        return None, ModelSpec.from_config(config)
    from specq.models.loader import model_spec

    return None, model_spec(folder)


def _description(ref: ModelRef, *, is_offline: bool) -> Path:
    """Where the files lie that say what a model is; of a Hub model only those are fetched."""
    from specq.hub import resolve_model
    from specq.recipe import is_local_model
    from specq.storage import is_offline as must_stay_offline

    if is_local_model(ref.model) or must_stay_offline(is_offline or None):
        return resolve_model(ref.model, revision=ref.revision, offline=True).path
    from specq.hub_download import fetch_description

    return fetch_description(ref.model, ref.revision)


def _instead(registry: Registry, ref: ModelRef, spec: ModelSpec | None, kind: KindName | None) -> str:
    """What a user whose model has no entry can do: try what fits its shape, look at its family, or train one."""
    alike = registry.same_shape(spec) if spec else []
    rows = [row for target in alike for row in registry.drafters(target, kind)]
    if rows:
        named = ", ".join(f"{row.model} (made for {row.target})" for row in rows[:NAMED])
        advice = f"for models of its shape there are: {named}; try: specq check {ref.model} {rows[0].model}"
    else:
        family = [target for target in registry.targets if spec and target.family == spec.family]
        series = dict.fromkeys(target.series for target in family if registry.drafters(target, kind))
        known = f"drafters are known for {', '.join(series)}" if series else "nothing is known for its family either"
        advice = f"{known}: specq fetch --list"
    distill = _distill(ref.model, kind)
    return f"{advice}; {distill}" if distill else advice


def _distill(model: str, kind: KindName | None) -> str | None:
    """How to train a drafter oneself, if this specq has the verb."""
    from specq.cli.app import VERBS

    return f"train one: specq distill {model} --kind {kind or 'eagle'} -o DIR" if "distill" in VERBS else None


def _take(
    drafter: Drafter, ref: ModelRef, model: str | None, *, is_offline: bool, console: Console, as_json: bool
) -> None:
    """Fetches the drafter and, where it is missing, the target; prints the folder and how it is used."""
    target = _snapshot(ref.model, ref.revision, is_offline=is_offline, console=console)
    found = _snapshot(drafter.model, drafter.revision, is_offline=is_offline, console=console)

    from specq.spec.check import check_pair

    results = check_pair(target.path, found.path)
    failed = [result for result in results if result.status == "fail"]
    recipe = _recipe(ref, drafter, found)
    flag = "--drafter" if drafter.kind == "eagle" else "--intermediate"
    words = ["specq", "chat", *([model] if model else []), flag, drafter.model, "--pipeline", PIPELINES[drafter.kind]]
    command = shlex.join(words)
    if as_json:
        told = asdict(drafter) | {"target": ref.model, "target_revision": target.revision}
        told |= {"revision": found.revision, "is_pinned": drafter.revision is not None, "folder": str(found.path)}
        tests = [asdict(result) for result in results]
        console.document({**told, "fits": not failed, "tests": tests, "recipe": recipe, "command": command})
    if failed:
        raise UnsupportedError(
            f"`{drafter.model}` does not fit `{ref.model}`: {failed[0].name}: {failed[0].detail}",
            hint=f"specq check {ref.model} {drafter.model} shows every test",
        )
    if drafter.revision is None and found.revision is not None:
        console.note(f"the registry pins no commit of {drafter.model}: fetched was `main`, today {found.revision}")
    _say_how(results, recipe, command, console)
    if not as_json:
        console.line(str(found.path))


def _snapshot(name: str, revision: str | None, *, is_offline: bool, console: Console) -> Snapshot:
    from specq.hub import resolve_model

    progress = console.progress()
    try:
        return resolve_model(name, revision=revision, offline=is_offline or None, progress=progress)
    finally:
        progress.clear()


def _recipe(ref: ModelRef, drafter: Drafter, found: Snapshot) -> dict[str, Any]:
    """The keys of a recipe that runs the pair, the drafter pinned to the commit that was fetched."""
    target = {"model": ref.model, "revision": ref.revision} if ref.revision else ref.model
    part = "drafter" if drafter.kind == "eagle" else "intermediate"
    pinned = {"model": drafter.model, "revision": found.revision}
    return {"target": target, part: pinned, "pipeline": PIPELINES[drafter.kind]}


def _say_how(results: Sequence[CheckResult], recipe: dict[str, Any], command: str, console: Console) -> None:
    import yaml

    warned = [(result.status, result.name, result.detail) for result in results if result.status == "warn"]
    console.note(f"it fits: {len(results) - len(warned)} tests passed, {len(warned)} with a warning")
    if warned:
        console.note(table(warned))
    console.note(f"\nuse it:\n  {command}\nor as a recipe:")
    console.note("".join(f"  {line}\n" for line in yaml.safe_dump(recipe, sort_keys=False).splitlines()))


def _size(gb: float) -> str:
    return f"{gb:.1f} GB" if gb >= 0.05 else f"{1000 * gb:.0f} MB"


def _list(drafters: Sequence[Drafter], console: Console, *, as_json: bool) -> None:
    """Prints what is known, under each target its drafters."""
    if as_json:
        console.document([asdict(drafter) for drafter in drafters])
        return
    rows = [
        (each.kind, each.model, each.form, _size(each.gb), each.licence or "licence unknown", each.note or "")
        for each in drafters
    ]
    target = None
    for each, line in zip(drafters, table(rows, indent="  ").splitlines(), strict=True):
        if each.target != target:
            target = each.target
            console.line(target)
        console.line(line)
