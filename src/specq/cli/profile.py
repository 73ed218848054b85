"""`specq profile`: what verification costs here, which pipeline that makes the fastest, and where `auto` finds it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from specq.cli.console import Console, table
from specq.cli.options import Model, OutputOptions, PipelineOptions, VerbCommand, flag, takes_options
from specq.errors import UsageError
from specq.words import counted

if TYPE_CHECKING:
    from specq.profile.result import Profile
    from specq.profile.subject import Request
    from specq.recipe import Recipe

MEASUREMENT, RESULT = "Measurement", "Result"

app = typer.Typer(rich_markup_mode=None, add_completion=False)


@app.command(cls=VerbCommand)
@takes_options
def profile(
    model: Model = None,
    *,
    seconds: Annotated[
        float | None,
        flag(
            "--seconds",
            metavar="S",
            min=1.0,
            panel=MEASUREMENT,
            help="About how long to measure after loading; default 90 on a GPU, 60 on a CPU. Below 30 a CPU times "
            "fewer sizes and runs only plain and the best pipeline again. There is a least, every size three times and "
            "every pipeline once: a CPU says how long that takes where it is much longer.",
        ),
    ] = None,
    prompts: Annotated[
        Path | None,
        flag(
            "--prompts",
            metavar="FILE",
            panel=MEASUREMENT,
            help="Prompts of your own kind, one a line or .jsonl; default a bundled dozen.",
        ),
    ] = None,
    max_new_tokens: Annotated[
        int | None,
        flag(
            "--max-new-tokens",
            metavar="N",
            min=8,
            panel=MEASUREMENT,
            help="Tokens of a calibration answer, as long as yours: long ones repeat themselves more. Default 128 on a "
            "GPU, 32 on a CPU.",
        ),
    ] = None,
    acceptance: Annotated[
        list[str] | None,
        flag(
            "--acceptance",
            metavar="NAME=P[,P...]",
            panel=MEASUREMENT,
            help="Plan with these chances by position (sequence, lookup, eagle2, inner, qspec) instead of measuring "
            "them; such a study is not stored.",
        ),
    ] = None,
    compare_fp16: Annotated[
        bool,
        flag("--compare-fp16", panel=MEASUREMENT, help="Time the target without 4-bit matrices too, where it fits."),
    ] = False,
    random_weights: Annotated[
        bool,
        flag(
            "--random-weights",
            panel=MEASUREMENT,
            help="A planning study: MODEL and --intermediate are shapes (8b, 70b, a config.json), their 4-bit weights "
            "made up on the device; --acceptance says what would be accepted.",
        ),
    ] = False,
    plot: Annotated[
        Path | None,
        flag("--plot", metavar="FILE", panel=RESULT, help="Draw curves and ranking: .png, .svg or .html."),
    ] = None,
    save: Annotated[
        Path | None,
        flag("--save", metavar="FILE.yaml", panel=RESULT, help="Write the chosen pipeline and sizes as a recipe."),
    ] = None,
    pipeline: PipelineOptions,
    output: OutputOptions,
) -> None:
    """Measure what verifying drafts costs on this device, and choose the fastest pipeline for it.

    Times steps of every model of the recipe as sequence and as tree, runs the pipelines on calibration prompts,
    ranks every candidate, plain decoding included, and runs the two best again beside it. The result is stored for
    these models on this device, and chat, run and bench use it for --pipeline auto.
    """
    with Console(quiet=output.quiet).working() as console:
        if random_weights:
            _check_study(model, pipeline, prompts=prompts, save=save)
        if save is not None and save.suffix not in (".yaml", ".yml"):
            raise UsageError(f"--save `{save}` is no recipe's name", hint="end it in .yaml")
        from specq.files import write_text
        from specq.profile.acceptance import parse_by_hand
        from specq.profile.plot import check_plot, write_plot
        from specq.profile.prompts import read_prompts
        from specq.profile.report import recipe_text
        from specq.profile.subject import Request
        from specq.recipe import resolve
        from specq.storage import require_writable_file

        if plot is not None:
            check_plot(plot)
        for path in (plot, save):
            if path is not None:
                require_writable_file(path)
        request = Request(
            recipe=_shapes(model, pipeline) if random_weights else resolve(model, overrides=pipeline.overrides()),
            prompts=read_prompts(prompts),
            device=pipeline.device,
            dtype=pipeline.dtype.value,
            threads=pipeline.threads,
            offline=pipeline.offline or None,
            use_graphs=not pipeline.no_graphs,
            seconds=seconds,
            max_new_tokens=max_new_tokens,
            by_hand=parse_by_hand(acceptance or []),
            compare_fp16=compare_fp16,
            is_random=random_weights,
        )
        found = _measure(request, console)
        if plot is not None:
            write_plot(found, plot)
            console.note(f"wrote {plot}")
        if save is not None:
            write_text(save, recipe_text(found, str(save)))
            console.note(f"wrote {save}")
        if output.as_json:
            console.document(found.record())
        else:
            _show(found, console)


def _check_study(model: str | None, pipeline: PipelineOptions, *, prompts: Path | None, save: Path | None) -> None:
    """Raise UsageError for what random weights have no use for."""
    if model is None:
        raise UsageError(
            "`--random-weights` needs a shape",
            hint="for example specq profile 70b --intermediate 8b --random-weights --acceptance sequence=0.8",
        )
    for name, value, why in (
        ("--prompts", prompts, "random weights accept nothing by sense: give --acceptance"),
        ("--drafter", pipeline.drafter, "heads are made up where --acceptance has eagle2 or inner"),
        ("--save", save, "there is no model that a recipe could name"),
    ):
        if value is not None:
            raise UsageError(f"`{name}` does not go with `--random-weights`", hint=why)


def _shapes(model: str | None, pipeline: PipelineOptions) -> Recipe:
    """The recipe whose models are shapes; a .yaml file may name them too."""
    from specq.recipe import build_recipe, load_recipe

    if model is not None and model.endswith((".yaml", ".yml")):
        return load_recipe(model, overrides=pipeline.overrides())
    return build_recipe({"target": model}, overrides=pipeline.overrides(), origin=str(model))


def _measure(request: Request, console: Console) -> Profile:
    """The profile, stored; of an interrupted one what is there is kept and said so."""
    from specq.profile import run
    from specq.profile.result import save
    from specq.storage import CACHE_HINT, cache_dir, require_writable

    is_stored = not (request.is_random or request.by_hand)
    if is_stored:
        require_writable(cache_dir(), hint=CACHE_HINT)
    progress = console.progress()
    begun: list[Profile] = []
    try:
        found = run.profile(request, on_progress=progress, on_start=begun.append)
    except KeyboardInterrupt:
        progress.clear()
        if begun and begun[0].costs is not None and not request.is_random:
            console.note(f"interrupted: what was measured is in {save(begun[0])}, and `auto` does not use it")
        raise
    finally:
        progress.clear()
    if is_stored:
        console.note(f"stored in {save(found)}")
    else:
        console.note(f"not stored: {'weights are random' if request.is_random else 'acceptance was given by hand'}")
    return found


def _show(found: Profile, console: Console) -> None:
    from specq.profile.report import closing_lines, sections

    environment = found.environment
    versions = ", ".join(
        f"{name} {environment[name]}" for name in ("driver", "torch", "triton", "specq") if environment.get(name)
    )
    count = environment.get("threads")
    threads = f", {counted(count, 'thread')}" if count else ""
    console.line(f"{environment['device']}{threads}, {versions}")
    if found.is_random:
        console.line("random weights: the times are measured, acceptance is as given")
    for title, rows in sections(found):
        console.line(f"\n{title}\n{table(rows, indent='  ')}")
    console.line()
    for line in closing_lines(found):
        console.line(line)
