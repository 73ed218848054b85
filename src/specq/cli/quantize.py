"""`specq quantize`: a model to 4 bits, its progress and what it lost."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from specq.cli.console import Console
from specq.cli.options import Model, Offline, OutputOptions, Overrides, VerbCommand, assignments, flag, takes_options
from specq.cli.quantize_report import show_head, show_model, show_shared
from specq.cli.quantize_settings import (
    command_line,
    job_settings,
    public_name,
    recipe_of,
    require_rounding,
    require_unset,
)
from specq.errors import GateError, UsageError
from specq.files import named_path

if TYPE_CHECKING:
    from specq.compress.eagle import HeadReport
    from specq.compress.report import Report
    from specq.hub import Snapshot
    from specq.models.shared import Lender
    from specq.recipe import ModelRef, Recipe

METHOD, TEXT, RESULT = "Method", "Calibration", "Result"

OF_MODELS = ("calib", "samples", "seq_len", "max_kl")
"""Settings that only what is calibrated and evaluated has."""

app = typer.Typer(rich_markup_mode=None, add_completion=False)


class Method(str, Enum):
    gptq = "gptq"
    rtn = "rtn"


class Format(str, Enum):
    gptq = "gptq"
    compressed_tensors = "compressed-tensors"


@app.command(cls=VerbCommand)
@takes_options
def quantize(
    model: Model = None,
    *,
    out: Annotated[
        Path, flag("--output", "-o", metavar="DIR", panel=RESULT, help="The folder to write, whole or not at all.")
    ],
    method: Annotated[
        Method | None,
        flag("--method", panel=METHOD, help="GPTQ (default), or rounding to nearest, which needs no text."),
    ] = None,
    group_size: Annotated[
        int | None,
        flag(
            "--group-size",
            metavar="N",
            panel=METHOD,
            help="Columns that share a scale: 128, 64, 32, or -1 for whole rows; default the largest that fits.",
        ),
    ] = None,
    act_order: Annotated[
        bool | None,
        flag(
            "--act-order",
            panel=METHOD,
            help="Store a column order (desc_act): slower in most engines, and vLLM refuses it.",
        ),
    ] = None,
    asym: Annotated[
        bool | None, flag("--asym", panel=METHOD, help="A zero point a group; vLLM refuses it in GPTQ files.")
    ] = None,
    head_bits: Annotated[
        int | None,
        flag(
            "--head-bits",
            metavar="8|4",
            panel=METHOD,
            help="Quantize the output head too (a tied one gets a copy of its own); default: it stays in 16 bits.",
        ),
    ] = None,
    strict_shapes: Annotated[
        bool | None,
        flag("--strict-shapes", panel=METHOD, help="Refuse a model that has a matrix the group size does not divide."),
    ] = None,
    calib: Annotated[
        str | None,
        flag(
            "--calib",
            metavar="bundled|FILE|hub:DATASET",
            panel=TEXT,
            help="Text that shows what inputs look like: specq's own (default), a .txt or .jsonl file, a Hub dataset.",
        ),
    ] = None,
    samples: Annotated[
        int | None,
        flag(
            "--samples",
            metavar="N",
            min=1,
            panel=TEXT,
            help="Sequences; default 16 tokens for every input of the widest matrix.",
        ),
    ] = None,
    seq_len: Annotated[
        int | None, flag("--seq-len", metavar="L", min=32, panel=TEXT, help="Tokens a sequence; default 512.")
    ] = None,
    max_kl: Annotated[
        float | None,
        flag(
            "--max-kl",
            metavar="X",
            panel=RESULT,
            help="Exit 3 when the mean KL divergence from the source is above this.",
        ),
    ] = None,
    format: Annotated[
        Format | None,
        flag("--format", panel=RESULT, help="How it is stored: gptq (version 1, default) or compressed-tensors."),
    ] = None,
    share_embeddings: Annotated[
        str | None,
        flag(
            "--share-embeddings",
            metavar="TARGET",
            panel=RESULT,
            help="For an intermediate of TARGET: leave embedding, output head and tokenizer to that model; 4 bits stay "
            "as they are.",
        ),
    ] = None,
    overwrite: Annotated[
        bool, flag("--overwrite", panel=RESULT, help="Replace DIR, and drop an unfinished run with other options.")
    ] = False,
    device: Annotated[
        str, flag("--device", metavar="cpu|cuda[:N]", panel=METHOD, help="Default: the GPU if there is one.")
    ] = "auto",
    revision: Annotated[
        str | None, flag("--revision", metavar="R", panel=METHOD, help="Branch, tag or commit of a Hub model.")
    ] = None,
    overrides: Overrides = None,
    offline: Offline = False,
    output: OutputOptions,
) -> None:
    """Write a model in 4 bits, layer by layer, as a Hugging Face folder that other engines load too.

    The layer at work, not the model, has to fit the device. After every layer the run is saved: the same command
    takes it up where it stopped, to the same bits. At the end perplexity, KL divergence and top-1 agreement are
    measured on text kept apart, beside those of rounding to nearest.

    MODEL may be an EAGLE head: its matrices are always rounded to nearest, and --head-bits is for the copy of the
    target's output head that it drafts with.
    """
    flags = {
        "quantize.method": method and method.value,
        "quantize.group_size": group_size,
        "quantize.act_order": act_order,
        "quantize.asym": asym,
        "quantize.head_bits": head_bits,
        "quantize.calib": calib,
        "quantize.samples": samples,
        "quantize.seq_len": seq_len,
        "quantize.max_kl": max_kl,
        "quantize.format": format and format.value,
        "quantize.strict_shapes": strict_shapes,
        "target.revision": revision,
    }
    out = named_path(out)
    recipe = recipe_of(model, [*(overrides or []), *assignments(flags)])
    from specq.spec.check_head import is_head

    with Console(quiet=output.quiet).working() as console:
        snapshot = _find(recipe.target, offline=offline, console=console)
        if is_head(snapshot.path):
            if share_embeddings is not None:
                raise UsageError("--share-embeddings is for models, and this is an EAGLE head", hint="leave it out")
            require_unset(recipe, OF_MODELS, "is for models, and this is an EAGLE head")
            require_rounding(recipe)
            head = _run_head(recipe, snapshot, out, overwrite=overwrite)
            console.document(head.record()) if output.as_json else show_head(console, head)
            return
        lender = None
        if share_embeddings is not None:
            from specq.compress.sharing import is_quantized, leave_embeddings
            from specq.recipe import QuantizeSection

            lender = _lender(share_embeddings, offline=offline, console=console)
            if is_quantized(snapshot.path):
                require_unset(recipe, QuantizeSection.model_fields, "changes nothing: the model is in 4 bits already")
                left = leave_embeddings(snapshot.path, out, lender=lender, overwrite=overwrite)
                console.document(left.record()) if output.as_json else show_shared(console, left)
                return
        report = _run(
            recipe, snapshot, out, lender=lender, device=device, overwrite=overwrite, offline=offline, console=console
        )
        if output.as_json:
            console.document(report.record())
        else:
            show_model(console, report)
    limit, found = recipe.quantize.max_kl if recipe.quantize else None, report.scores["quantized"].kl
    if limit is not None and found > limit:
        raise GateError(
            f"the mean KL divergence from the source is {found:.3g}, above `--max-kl {limit:g}`",
            hint=f"the model is written to {out}; smaller groups (--group-size 32) or more text (--samples) lose less",
        )


def _lender(model: str, *, offline: bool, console: Console) -> Lender:
    """The model that `--share-embeddings` names."""
    from specq.models.shared import Lender
    from specq.recipe import resolve

    ref = resolve(model).target
    snapshot = _find(ref, offline=offline, console=console)
    return Lender(snapshot.path, snapshot.repo_id or public_name(ref.model, snapshot.path))


def _find(ref: ModelRef, *, offline: bool, console: Console) -> Snapshot:
    """The files of a model."""
    from specq.hub import resolve_model

    progress = console.progress()
    try:
        return resolve_model(ref.model, revision=ref.revision, offline=offline or None, progress=progress)
    finally:
        progress.clear()


def _run_head(recipe: Recipe, snapshot: Snapshot, out: Path, *, overwrite: bool) -> HeadReport:
    from specq.compress.eagle import quantize_eagle
    from specq.compress.report import Provenance

    section = recipe.quantize
    assert section is not None
    name = snapshot.repo_id or public_name(recipe.target.model, snapshot.path)
    return quantize_eagle(
        snapshot.path,
        out,
        settings=job_settings(section)[0],
        draft_head_bits=section.head_bits,
        provenance=Provenance(name, snapshot.revision, command_line(name, section)),
        overwrite=overwrite,
    )


def _run(
    recipe: Recipe,
    snapshot: Snapshot,
    out: Path,
    *,
    lender: Lender | None,
    device: str,
    overwrite: bool,
    offline: bool,
    console: Console,
) -> Report:
    from specq.compress.report import Provenance
    from specq.compress.runner import quantize
    from specq.spec.load import choose_device

    section = recipe.quantize
    assert section is not None
    progress = console.progress()
    try:
        name = snapshot.repo_id or public_name(recipe.target.model, snapshot.path)
        settings, calibration = job_settings(section)
        return quantize(
            snapshot.path,
            out,
            settings=settings,
            calibration=calibration,
            provenance=Provenance(name, snapshot.revision, command_line(name, section, lender)),
            lender=lender,
            device=choose_device(device),
            offline=offline or None,
            overwrite=overwrite,
            on_progress=progress,
        )
    except KeyboardInterrupt:
        progress.clear()
        console.note("stopped; the same command goes on after the last finished layer")
        raise
    finally:
        progress.clear()
