"""What a distillation is asked to do, what must be right before it begins, and the target it learns from."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specq.checkpoint import ModelSpec, model_digest
from specq.errors import UsageError
from specq.files import is_there
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

PACKED = 8
"""4-bit codes are stored eight a word: sizes are multiples of it."""

DIGEST_CHARS = 16


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
        """The recipe's section, which may serve both kinds: an intermediate has no width of its own."""
        found = self.recipe.distill
        return found if self.kind == "eagle" else found.model_copy(update={"width": None})


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
        if settings.bits == 4:
            _check_multiples(settings, target)
        return
    for value, flag in (
        (settings.trim_vocab, "--trim-vocab"),
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


def _check_multiples(settings: DistillSection, target: ModelSpec) -> None:
    """Raise UsageError for a size that 4 bits do not hold."""
    if settings.width is not None and settings.width % PACKED:
        nearest = max(PACKED, round(settings.width / PACKED) * PACKED)
        raise UsageError(
            f"`distill.width` = `{settings.width}`: 4 bits need a multiple of {PACKED}",
            hint=f"--set distill.width={nearest}, or leave out --bits 4",
        )
    for size in (target.hidden, target.heads * target.head_dim, target.kv_heads * target.head_dim):
        if size % PACKED:
            raise UsageError(f"a head {size} wide cannot be in 4 bits", hint="leave out --bits 4")
    if settings.width is None and target.intermediate % PACKED:
        nearest = round(target.intermediate / PACKED) * PACKED
        raise UsageError(
            f"a head as wide as the target, {target.intermediate}, cannot be in 4 bits",
            hint=f"--set distill.width={nearest}, or leave out --bits 4",
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
    if spec.layers >= target.layers:
        raise UsageError(
            f"`{start.name}` has {spec.layers} layers and the target {target.layers}",
            hint="--from takes an intermediate cut from this target",
        )
    if (found := _layer_shape(spec)) != (wanted := _layer_shape(target)):
        key = next(key for key in wanted if found[key] != wanted[key])
        raise UsageError(
            f"`{start.name}` has {key} {found[key]}, the target {wanted[key]}",
            hint="--from takes an intermediate cut from this target",
        )
    if settings.layers not in (None, spec.layers):
        raise UsageError(f"`{start.name}` has {spec.layers} layers, not {settings.layers}", hint="leave out --layers")


def _layer_shape(spec: ModelSpec) -> dict[str, int]:
    """The sizes that a layer keeps when it is cut from a model."""
    return {
        "attention heads": spec.heads,
        "key heads": spec.kv_heads,
        "head size": spec.head_dim,
        "MLP width": spec.intermediate,
    }


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


def fingerprint(job: Job, digest: str, *, training: Sequence[str], held_out: Sequence[str]) -> dict[str, Any]:
    """What a resumed run must have in common with the one it goes on with: settings, and what their files hold."""
    return {
        "kind": job.kind,
        "target": digest,
        "dtype": job.dtype,
        **job.settings.model_dump(mode="json"),
        "text of the prompts": _text_digest(training),
        "text of the held-out prompts": _text_digest(held_out),
        "head of --from": None if job.start is None else model_digest(job.start)[:DIGEST_CHARS],
    }


def _text_digest(texts: Sequence[str]) -> str:
    return hashlib.sha256(json.dumps(list(texts)).encode()).hexdigest()[:DIGEST_CHARS]


def public_settings(settings: DistillSection) -> dict[str, Any]:
    """The settings as JSON takes them, files and folders without the path that they have here."""
    found = settings.model_dump(mode="json")
    for key in ("prompts", "eval_prompts", "start"):
        if found[key] is not None and is_there(found[key]):
            found[key] = Path(found[key]).name
    return found
