"""One distillation from prompts to a finished folder: answers, training, evaluation, model card."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from specq.checkpoint import ModelSpec, read_config
from specq.environment import describe_environment
from specq.errors import UsageError
from specq.hub import Snapshot
from specq.models.causal_lm import CausalLM
from specq.models.eagle_loader import HeadFiles, load_head
from specq.models.eagle_writer import BITS_KEY, HEAD_BITS_KEY, HEAD_MANIFEST, write_head
from specq.models.loader import Engine, check_memory, load_model, model_spec
from specq.models.shared import KEY as SHARED_KEY
from specq.models.shared import MANIFEST as INTERMEDIATE_MANIFEST
from specq.models.shared import describe_lender, read_shared, require_lender, without_lender
from specq.recipe import OWN_NAMES, DistillSection, Recipe
from specq.storage import cache_dir, require_space
from specq.tensors import gguf_config, open_weights
from specq.tokenizer import Tokenizer
from specq.train import card, evaluation
from specq.train.data import (
    AnswerStore,
    BatchSource,
    Sequences,
    choose_prompts,
    encode_prompts,
    frequent_ids,
)
from specq.train.eagle import HeadTask
from specq.train.generate import AnswerWriter
from specq.train.intermediate import IntermediateTask, choose_layers, layer_importance
from specq.train.loop import Progress, Task, train
from specq.workspace import Workspace, check_output, open_workspace

TRAINING = Engine(use_kernels=False)
"""What is trained needs gradients, and a student is cut from the target's dense matrices."""

IMPORTANCE_BATCHES = 4
DIGEST_BYTES = 1 << 16
WEIGHT_SUFFIXES = (".safetensors", ".bin", ".gguf")
ANSWERS_AT_ONCE = {"cpu": 16, "cuda": 2048}
DISK_BYTES = 28
"""Disk a trained parameter takes at most: two checkpoints of weight and moments in fp32, and the finished weight."""

CACHE_PART = 4
"""Answers written at once may take a quarter of a GPU's free memory for K and V."""

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "generation_config.json",
)

Say = Callable[[str], None]


@dataclass(frozen=True)
class Job:
    """What to train, from what, and where it goes; `start` is the folder of the head to begin with.

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


@dataclass(frozen=True)
class _Run:
    """A job with its models loaded and its data at hand."""

    job: Job
    model: CausalLM
    tokenizer: Tokenizer
    sequences: Sequences
    held_out: list[list[int]]
    digest: str

    @property
    def target_name(self) -> str:
        """The target's Hub id, or what the recipe calls it."""
        return self.job.target.repo_id or self.job.recipe.target.model

    @property
    def public_name(self) -> str:
        """The same without the path of a folder."""
        name = self.target_name
        return name if self.job.target.repo_id or name in OWN_NAMES else self.job.target.path.name


def distill(job: Job, *, say: Say) -> dict[str, Any]:
    """The manifest of the finished folder `job.output`.

    Raises a SpecqError of the fitting kind before weights are read when prompts, output or options do not fit. A run
    that was killed goes on where its last checkpoint or shard of answers ended.
    """
    settings = job.settings
    check_output(job.output, overwrite=job.overwrite)
    spec = model_spec(job.target.path)
    _check_settings(job.kind, settings, spec)
    _check_lender(job)
    training, held_out = choose_prompts(settings)
    tokenizer = Tokenizer.load(job.lender.path if job.lender else job.target.path)
    longest = settings.length - 1
    prompts, held_out_ids = (encode_prompts(tokenizer, each, longest=longest) for each in (training, held_out))
    digest = target_digest(job.target.path)
    check_memory(
        [(spec, job.target.path, settings.length)], device=job.device, dtype=job.dtype, use_kernels=TRAINING.use_kernels
    )
    workspace = Workspace(job.output)
    with open_workspace(workspace, _fingerprint(job, digest), verb="distill", overwrite=job.overwrite):
        say(f"loading {job.target.repo_id or job.target.path.name}")
        model = _load_target(job)
        sequences = _answers(job, model, tokenizer, prompts, digest, say)
        run = _Run(job, model, tokenizer, sequences, held_out_ids, digest)
        manifest = _distill_head(run, workspace, say) if job.kind == "eagle" else _distill_model(run, workspace, say)
        workspace.publish()
    return manifest


def _check_lender(job: Job) -> None:
    """Raise unless a target that was saved without its embedding has a lender, and is to get a head."""
    shared, lender = read_shared(job.target.path), job.lender
    if shared is None:
        return
    if lender is None or job.kind != "eagle":
        raise without_lender(job.target.path, shared)
    require_lender(shared, open_weights(lender.path, model_spec(lender.path)), name=shared.lender)


def _load_target(job: Job) -> CausalLM:
    place: dict[str, Any] = {"device": job.device, "dtype": job.dtype, "engine": TRAINING}
    # Of the lender only embedding and head outlive this.
    lender = None if job.lender is None else load_model(job.lender.path, **place)
    return load_model(job.target.path, lender=lender, **place)


def _check_settings(kind: str, settings: DistillSection, target: ModelSpec) -> None:
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
        (settings.start, "--from"),
        (settings.bits != 16 or None, "--bits"),
    ):
        if value is not None:
            raise UsageError(f"{flag} is for EAGLE heads", hint="leave it out, or give --kind eagle")
    if settings.layers is None:
        raise UsageError("an intermediate needs a number of layers", hint="give --layers N")
    if settings.layers >= target.layers:
        raise UsageError(
            f"{settings.layers} layers cannot be cut from a model of {target.layers}",
            hint=f"give --layers 1 to {target.layers - 1}",
        )


def target_digest(path: Path) -> str:
    """A hash of the target: its configs and, of every file of weights, name, size and both ends."""
    files = [path] if path.is_file() else sorted(f for f in path.iterdir() if f.suffix in WEIGHT_SUFFIXES)
    digest = hashlib.sha256()
    for file in files:
        size = file.stat().st_size
        digest.update(f"{file.name}:{size}".encode())
        with open(file, "rb") as handle:
            digest.update(handle.read(DIGEST_BYTES))
            handle.seek(max(0, size - DIGEST_BYTES))
            digest.update(handle.read(DIGEST_BYTES))
    return digest.hexdigest()


def _fingerprint(job: Job, digest: str) -> dict[str, Any]:
    """What a resumed run must have in common with the one it goes on with."""
    return {"kind": job.kind, "target": digest, "dtype": job.dtype, **job.settings.model_dump(mode="json")}


def _answers(
    job: Job, model: CausalLM, tokenizer: Tokenizer, prompts: list[list[int]], digest: str, say: Say
) -> Sequences:
    """The target's answers, from the cache as far as they are there: both kinds of drafter share them."""
    settings = job.settings
    kind = job.device.partition(":")[0]
    shard = _answers_at_once(model, kind, max(map(len, prompts)) + settings.max_new_tokens)
    shared = {
        "target": digest,
        "prompts": prompts,
        "temperatures": settings.temperatures,
        "max_new_tokens": settings.max_new_tokens,
        "seed": settings.seed,
        "shard": shard,
    }
    name = hashlib.sha256(json.dumps(shared).encode()).hexdigest()[:32]
    writer = AnswerWriter(
        model, vocab=tokenizer.size, stop_ids=tokenizer.eos_ids, max_new_tokens=settings.max_new_tokens
    )

    def write(part: Sequence[list[int]], temperature: float, number: int) -> list[list[int]]:
        return writer.answers(part, temperature=temperature, seed=(settings.seed << 20) + number)

    store = AnswerStore(cache_dir() / "answers" / name)
    return store.collect(prompts, write, temperatures=settings.temperatures, shard=shard, say=say)


def _answers_at_once(model: CausalLM, device: str, slots: int) -> int:
    """Prompts answered together: a fixed number, less where K and V would crowd the GPU (then a power of two)."""
    most = ANSWERS_AT_ONCE[device]
    if device == "cpu":
        return most
    one = 2 * model.spec.layers * model.spec.kv_heads * model.spec.head_dim * slots * model.dtype.itemsize
    fitting = torch.cuda.mem_get_info(model.device)[0] // CACHE_PART // one
    return min(most, 1 << max(0, int(fitting).bit_length() - 1))


def _distill_head(run: _Run, workspace: Workspace, say: Say) -> dict[str, Any]:
    settings, model = run.job.settings, run.model
    kept = None
    if settings.trim_vocab is not None:
        kept = frequent_ids(run.sequences, settings.trim_vocab, vocab=model.spec.vocab)
    start = None if run.job.start is None else HeadFiles(run.job.start)
    task = HeadTask(model, settings, kept_ids=kept, start=start)
    progress = _train(task, _source(run), run, workspace, say)
    folder = workspace.staging()
    write_head(folder, task.tensors(), task.config, bits=settings.bits)
    stored = {BITS_KEY: settings.bits, HEAD_BITS_KEY: run.job.recipe.drafter.head_bits or 16}
    card.write_json(folder / HEAD_MANIFEST, stored)
    head = load_head(folder, model)
    pipeline = evaluation.eagle2_pipeline(
        run.job.recipe, model, head, run.tokenizer, context=settings.length + settings.eval_tokens
    )
    results = evaluation.measure_accept_lengths(pipeline, run.held_out, max_new_tokens=settings.eval_tokens, say=say)
    manifest = _manifest(run, progress, results) | stored
    card.write_json(folder / HEAD_MANIFEST, manifest)
    use = f"specq chat {manifest['target']['name']} --pipeline eagle2 --drafter {run.job.output.name}"
    card.write_card(folder, manifest, title=f"EAGLE-2 head for {manifest['target']['name']}", use=use)
    return manifest


def _distill_model(run: _Run, workspace: Workspace, say: Say) -> dict[str, Any]:
    settings, model = run.job.settings, run.model
    assert settings.layers is not None
    source = _source(run)
    say("measuring what each layer matters")
    sample = [batch for batch, _ in zip(source.batches(0), range(IMPORTANCE_BATCHES), strict=False)]
    importance = layer_importance(model, sample)
    layers = choose_layers(importance, settings.layers)
    task = IntermediateTask(model, settings, layers=layers)
    progress = _train(task, source, run, workspace, say)
    folder, path = workspace.staging(), run.job.target.path
    card.write_json(folder / "config.json", task.config(source_config(path)))
    shared: dict[str, Any] = {}
    if settings.share_embeddings:
        weights = open_weights(path, model.spec)
        lent = describe_lender(run.public_name, model.spec, weights, is_tied=model.spec.tie_embeddings)
        shared = {SHARED_KEY: lent.record()}
        task.save_weights(folder, without=lent.tensors)
        card.write_json(folder / INTERMEDIATE_MANIFEST, shared)
    else:
        task.save_weights(folder)
        copy_tokenizer(path, folder)
    student = load_model(folder, device=run.job.device, dtype=run.job.dtype, lender=model if shared else None)
    pipeline = evaluation.sequence_pipeline(
        run.job.recipe, model, student, run.tokenizer, context=settings.length + settings.eval_tokens
    )
    results = evaluation.measure_accept_lengths(pipeline, run.held_out, max_new_tokens=settings.eval_tokens, say=say)
    manifest = _manifest(run, progress, results) | {
        "layers": layers,
        "importance_kl": [round(each, 5) for each in importance],
        **shared,
    }
    card.write_json(folder / INTERMEDIATE_MANIFEST, manifest)
    name = run.target_name
    use = f"specq chat {name} --pipeline sequence --intermediate {run.job.output.name}"
    card.write_card(folder, manifest, title=f"{len(layers)} layers of {name}, distilled", use=use)
    return manifest


def _train(task: Task, source: BatchSource, run: _Run, workspace: Workspace, say: Say) -> Progress:
    """Train, once there is room for the checkpoints."""
    require_space(workspace.folder, DISK_BYTES * sum(p.numel() for p in task.parameters.values()))
    return train(task, source, run.job.settings, checkpoint=workspace.folder / "checkpoint.safetensors", say=say)


def _source(run: _Run) -> BatchSource:
    settings = run.job.settings
    return BatchSource(run.sequences, length=settings.length, batch_tokens=settings.batch_tokens, seed=settings.seed)


def _manifest(run: _Run, progress: Progress, results: list[dict[str, Any]]) -> dict[str, Any]:
    job = run.job
    return {
        "kind": job.kind,
        "target": {
            "name": run.target_name,
            "revision": job.target.revision,
            "digest": run.digest,
            "dtype": str(run.model.dtype).removeprefix("torch."),
        },
        "evaluation": results,
        "training": {
            "steps": progress.step,
            "seconds": round(progress.seconds, 1),
            "answer_tokens_seen": progress.tokens,
            "sequences": len(run.sequences.ids),
            "answer_tokens": run.sequences.answer_tokens,
            "curve": progress.curve,
        },
        "settings": job.settings.model_dump(mode="json"),
        "environment": describe_environment(job.device),
    }


def source_config(path: Path) -> dict[str, Any]:
    """The target's config.json, or what its GGUF header makes of one."""
    if path.is_dir() and (path / "config.json").is_file():
        return dict(read_config(path))
    return dict(gguf_config(path if path.is_file() else next(path.glob("*.gguf"))))


def copy_tokenizer(path: Path, folder: Path) -> None:
    """Copy the target's tokenizer files, or those made of its GGUF file."""
    origin = path
    if path.is_file() or not (path / "tokenizer.json").is_file():
        from specq import gguf_tokenizer

        origin = gguf_tokenizer.convert(path) if path.is_file() or any(path.glob("*.gguf")) else path
    for name in TOKENIZER_FILES:
        if (origin / name).is_file():
            shutil.copyfile(origin / name, folder / name)
