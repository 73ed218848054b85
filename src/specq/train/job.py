"""What a distillation is asked to do, what must be right before it begins, and the target it learns from."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specq.checkpoint import ModelSpec
from specq.errors import UsageError
from specq.hub import Snapshot
from specq.models.causal_lm import CausalLM
from specq.models.eagle_files import HeadFiles
from specq.models.loader import Engine, load_model, model_spec
from specq.models.shared import MANIFEST, read_shared, require_lender, without_lender
from specq.recipe import DistillSection, Recipe
from specq.spec.check_head import is_head
from specq.tensors import open_weights
from specq.train.eagle import check_start

TRAINING = Engine(use_kernels=False)
"""What is trained needs gradients, and a student is cut from the target's dense matrices."""


@dataclass(frozen=True)
class Job:
    """What to train, from what, and where it goes; `start` is the folder of the drafter to begin with.

    `lender` is the model whose embedding the target uses, where that was saved without one.
    """

    kind: str  # "eagle" or "intermediate"
    recipe: Recipe
    target: Snapshot
    output: Path
    device: str
    dtype: str = "auto"
    start: Path | None = None
    lender: Snapshot | None = None
    overwrite: bool = False

    @property
    def settings(self) -> DistillSection:
        return self.recipe.distill


def check_lender(job: Job) -> None:
    """Raise unless a target that was saved without its embedding has a lender, and is to get a head."""
    shared, lender = read_shared(job.target.path), job.lender
    if shared is None:
        return
    if lender is None or job.kind != "eagle":
        raise without_lender(job.target.name, shared)
    require_lender(shared, open_weights(lender.path, model_spec(lender.path)), name=shared.lender)


def check_settings(kind: str, settings: DistillSection, target: ModelSpec) -> None:
    """Raise UsageError naming the first setting that does not go with this kind of drafter and this target."""
    if kind == "eagle":
        if settings.layers is not None:
            raise UsageError("a head has no layers to choose", hint="leave out --layers, or give --kind intermediate")
        if settings.share_embeddings:
            raise UsageError(
                "--share-embeddings is for intermediates: a head always uses the target's embedding",
                hint="leave it out, or give --kind intermediate",
            )
        if settings.trim_vocab is not None and settings.trim_vocab >= target.vocab:
            raise UsageError(
                f"--trim-vocab {settings.trim_vocab} leaves nothing out of a vocabulary of {target.vocab}",
                hint="give a smaller number, or leave it out",
            )
        return
    for value, flag in (
        (settings.trim_vocab, "--trim-vocab"),
        (settings.width, "distill.width"),
        (settings.bits != 16 or None, "--bits"),
    ):
        if value is not None:
            raise UsageError(f"{flag} is for EAGLE heads", hint="leave it out, or give --kind eagle")
    if settings.layers is None and settings.start is None:
        raise UsageError("an intermediate needs a number of layers", hint="give --layers N")
    if settings.layers is not None and settings.layers >= target.layers:
        raise UsageError(
            f"{settings.layers} layers cannot be cut from a model of {target.layers}",
            hint=f"give --layers 1 to {target.layers - 1}",
        )


def check_drafters(job: Job, target: ModelSpec) -> None:
    """Raise unless the drafter to begin with, if any, is of this kind and goes with the target and with --layers."""
    settings, start = job.settings, job.start
    if start is None:
        return
    if is_head(start) != (job.kind == "eagle"):
        what, other = ("an EAGLE head", "eagle") if is_head(start) else ("a whole model", "intermediate")
        raise UsageError(
            f"`{start.name}` is {what}, and what is trained is not", hint=f"give --kind {other}, or another --from"
        )
    if job.kind == "eagle":
        check_start(HeadFiles(start), target, width=settings.width)
        return
    spec = model_spec(start)
    if (spec.hidden, spec.vocab) != (target.hidden, target.vocab):
        raise UsageError(
            f"`{start.name}` has hidden size {spec.hidden} and {spec.vocab} ids, "
            f"the target {target.hidden} and {target.vocab}",
            hint="--from takes an intermediate cut from this target",
        )
    if settings.layers not in (None, spec.layers):
        raise UsageError(f"`{start.name}` has {spec.layers} layers, not {settings.layers}", hint="leave out --layers")


def check_target(job: Job) -> None:
    """Raise UsageError for a head, which nothing can be trained for."""
    if is_head(job.target.path):
        raise UsageError(
            f"`{job.target.name}` is an EAGLE head and no whole model",
            hint="name the model it drafts for; --from HEAD goes on with it",
        )


def load_start(job: Job, target: CausalLM) -> tuple[CausalLM, dict[str, Any]]:
    """(the intermediate to begin with, what its manifest says of the layers it was cut of)."""
    assert job.start is not None
    model = load_model(job.start, device=job.device, dtype=job.dtype, lender=target, engine=TRAINING)
    file = job.start / MANIFEST
    manifest = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    return model, {key: manifest[key] for key in ("layers", "importance_kl") if key in manifest}


def load_target(job: Job) -> CausalLM:
    """The target in memory, on plain torch."""
    place: dict[str, Any] = {"device": job.device, "dtype": job.dtype, "engine": TRAINING}
    # Of the lender only embedding and head outlive this.
    lender = None if job.lender is None else load_model(job.lender.path, **place)
    return load_model(job.target.path, lender=lender, **place)


def fingerprint(job: Job, digest: str) -> dict[str, Any]:
    """What a resumed run must have in common with the one it goes on with."""
    return {"kind": job.kind, "target": digest, "dtype": job.dtype, **job.settings.model_dump(mode="json")}


def public_settings(settings: DistillSection) -> dict[str, Any]:
    """The settings as JSON takes them, files and folders without the path that they have here."""
    found = settings.model_dump(mode="json")
    for key in ("prompts", "eval_prompts", "start"):
        if found[key] is not None and Path(found[key]).expanduser().exists():
            found[key] = Path(found[key]).name
    return found
