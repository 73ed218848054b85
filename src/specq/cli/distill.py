"""`specq distill`: a drafter trained on text that the target wrote."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import typer

from specq.cli.console import Console, table
from specq.cli.options import (
    Dtype,
    Model,
    Offline,
    OutputOptions,
    Overrides,
    VerbCommand,
    assignments,
    flag,
    takes_options,
)
from specq.errors import UsageError
from specq.files import named_path
from specq.words import counted

app = typer.Typer(rich_markup_mode=None, add_completion=False)


class Kind(str, Enum):
    eagle = "eagle"
    intermediate = "intermediate"


@app.command(cls=VerbCommand)
@takes_options
def distill(
    model: Model = None,
    *,
    kind: Annotated[Kind, typer.Option("--kind", help="An EAGLE-2 head, or a smaller model of the same tokenizer.")],
    folder: Annotated[Path, typer.Option("--output", "-o", metavar="DIR", help="The folder of the drafter.")],
    layers: Annotated[
        int | None,
        flag("--layers", metavar="N", help="For an intermediate: how many of the target's layers it keeps.", min=1),
    ] = None,
    prompts: Annotated[
        str | None,
        flag(
            "--prompts",
            metavar="FILE",
            help="One prompt a line, or .jsonl with `prompt` or `turns`; default a few of specq's.",
        ),
    ] = None,
    own_prompts: Annotated[
        int | None,
        flag("--own-prompts", metavar="N", help="Prompts the target writes itself, beside those of --prompts.", min=0),
    ] = None,
    eval_prompts: Annotated[
        str | None,
        flag(
            "--eval-prompts",
            metavar="FILE",
            help="What accept length is measured on; default some of --prompts, held out.",
        ),
    ] = None,
    minutes: Annotated[float | None, flag("--minutes", metavar="M", help="End training after this time.")] = None,
    steps: Annotated[int | None, flag("--steps", metavar="N", help="End training after these steps.", min=1)] = None,
    trim_vocab: Annotated[
        int | None,
        flag("--trim-vocab", metavar="N", help="For a head: draft only the N ids the target writes most.", min=1),
    ] = None,
    bits: Annotated[
        int | None, flag("--bits", metavar="16|4", help="For a head: how its matrices are stored; default 16.")
    ] = None,
    head_bits: Annotated[
        int | None,
        flag(
            "--head-bits",
            metavar="16|8|4",
            help="For a head: precision of the copy of the output head that it drafts with.",
        ),
    ] = None,
    share_embeddings: Annotated[
        bool,
        typer.Option(
            "--share-embeddings",
            help="For an intermediate: leave embedding, output head and tokenizer to the target, which lends them.",
        ),
    ] = False,
    start: Annotated[
        str | None,
        flag(
            "--from", metavar="DRAFTER", help="Begin with the weights of this head, or intermediate, of an earlier run."
        ),
    ] = None,
    device: Annotated[
        str,
        flag("--device", metavar="cpu|cuda[:N]", help="Default: the GPU if there is one."),
    ] = "auto",
    dtype: Annotated[
        Dtype, typer.Option("--dtype", help="Number format of computation; default auto.", show_default=False)
    ] = Dtype.auto,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace what is in DIR, and drop an unfinished run of other settings.")
    ] = False,
    set: Overrides = None,
    offline: Offline = False,
    revision: Annotated[
        str | None, flag("--revision", metavar="R", help="Branch, tag or commit of a Hub model.")
    ] = None,
    output: OutputOptions,
) -> None:
    """Train a drafter on text that the target writes itself.

    The target answers the prompts, the drafter learns to foresee the answers, and its accept length is measured on
    prompts it has not seen. What was done so far survives a stop: run the same command again. All settings are keys
    of the recipe's `distill` section.
    """
    with Console(quiet=output.quiet).working() as console:
        from specq.recipe import resolve

        flags = {
            "distill.layers": layers,
            "distill.prompts": prompts,
            "distill.own_prompts": own_prompts,
            "distill.eval_prompts": eval_prompts,
            "distill.minutes": minutes,
            "distill.steps": steps,
            "distill.trim_vocab": trim_vocab,
            "distill.start": start,
            "distill.bits": bits,
            "distill.share_embeddings": share_embeddings or None,
            "drafter.head_bits": head_bits,
            "target.revision": revision,
        }
        if head_bits is not None and kind is Kind.intermediate:
            raise UsageError("--head-bits is for EAGLE heads", hint="leave it out, or give --kind eagle")
        if kind is Kind.intermediate and any(each.startswith("distill.width=") for each in set or []):
            # In a recipe it may stand beside what is for intermediates.
            raise UsageError("distill.width is for EAGLE heads", hint="leave it out, or give --kind eagle")
        # Steps that are asked for are not cut short by the minutes of a recipe.
        unlimited = [] if steps is None else ["distill.minutes=null"]
        recipe = resolve(model, overrides=[*unlimited, *(set or []), *assignments(flags)])

        from specq.hub import resolve_model
        from specq.models.shared import read_shared
        from specq.spec.load import choose_device
        from specq.train.distill import distill
        from specq.train.job import Job

        progress = console.progress()
        try:
            target = resolve_model(
                recipe.target.model, revision=recipe.target.revision, offline=offline or None, progress=progress
            )
            begin, shared = recipe.distill.start, read_shared(target.path)
            job = Job(
                kind.value,
                recipe,
                target,
                named_path(folder),
                choose_device(device),
                dtype=dtype.value,
                start=resolve_model(begin, offline=offline or None, progress=progress).path if begin else None,
                lender=resolve_model(shared.lender, offline=offline or None, progress=progress) if shared else None,
                overwrite=overwrite,
            )
            manifest = distill(job, say=progress)
        except KeyboardInterrupt:
            console.note(
                "stopped; the same command goes on after the last answers and the last checkpoint that were kept"
            )
            raise
        finally:
            progress.clear()
        if output.as_json:
            console.document({"folder": str(folder), **manifest})
            return
        console.line(table([_row(result) for result in manifest["evaluation"]]))
        console.note(f"{folder}: trained on {manifest['training']['answer_tokens_seen']} answer tokens; see README.md")


def _row(result: dict[str, Any]) -> tuple[str, ...]:
    prompts = counted(result["prompts"], "prompt")
    return (
        result["pipeline"],
        f"temperature {result['temperature']:g}",
        f"accept length {result['accept_len']} over {prompts}, the target's own token included",
    )
