"""One distillation from prompts to a finished folder: answers, training, evaluation, model card."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch.nn.attention import sdpa_kernel

from specq.checkpoint import model_digest, write_json
from specq.companions import companion_files, copy_companions
from specq.environment import describe_environment
from specq.models.causal_lm import CausalLM
from specq.models.eagle_files import HeadFiles
from specq.models.eagle_loader import load_head
from specq.models.eagle_writer import BITS_KEY, HEAD_BITS_KEY, HEAD_MANIFEST, write_head
from specq.models.layers import GPU_ATTENTION
from specq.models.loader import check_memory, load_model, model_config, model_spec
from specq.models.shared import KEY as SHARED_KEY
from specq.models.shared import MANIFEST as INTERMEDIATE_MANIFEST
from specq.models.shared import describe_lender
from specq.recipe import OWN_NAMES
from specq.storage import require_space
from specq.tensors import open_weights
from specq.tokenizer import Tokenizer
from specq.train import card, evaluation
from specq.train.answers import Say, written_answers, written_prompts
from specq.train.data import (
    BatchSource,
    Sequences,
    choose_prompts,
    encode_prompts,
    frequent_ids,
)
from specq.train.eagle import HeadTask
from specq.train.intermediate import IntermediateTask, choose_layers, layer_importance
from specq.train.job import (
    TRAINING,
    Job,
    check_drafters,
    check_lender,
    check_settings,
    check_target,
    fingerprint,
    load_start,
    load_target,
    public_settings,
)
from specq.train.loop import Progress, Task, train
from specq.train.memory import MEMORY_HINT, TRAINED_BYTES, left_on, require_left
from specq.workspace import Workspace, check_output, open_workspace

IMPORTANCE_BATCHES = 4
DISK_BYTES = 36
"""Disk a trained parameter takes at most: two checkpoints of weight, moments and its move to 4 bits in fp32, and the
finished weight."""


@dataclass(frozen=True)
class _Run:
    """A job with its models loaded and its data at hand."""

    job: Job
    model: CausalLM
    tokenizer: Tokenizer
    sequences: Sequences
    held_out: list[list[int]]
    digest: str
    own_prompts: int  # prompts of the target's own that it learns from

    @property
    def target_name(self) -> str:
        """The target's Hub id, specq's own name of it, or that of its folder without the path."""
        target, name = self.job.target, self.job.recipe.target.model
        return target.repo_id or (name if name in OWN_NAMES else target.path.name)


def distill(job: Job, *, say: Say) -> dict[str, Any]:
    """The manifest of the finished folder `job.output`.

    Raises a SpecqError of the fitting kind before weights are read when prompts, output or options do not fit. A run
    that was killed goes on where its last checkpoint or shard of answers ended.
    """
    settings = job.settings
    lender = None if job.lender is None else job.lender.path
    sources = [path for path in (job.target.path, job.start, lender) if path is not None]
    check_output(job.output, overwrite=job.overwrite, sources=sources)
    check_target(job)
    spec = model_spec(job.target.path)
    check_settings(job.kind, settings, spec)
    check_lender(job)
    check_drafters(job, spec)
    companion_files(job.target.path)  # a link out of the folder is refused now, not after training
    training, held_out = choose_prompts(settings)
    tokenizer = Tokenizer.load(job.lender.path if job.lender else job.target.path)
    longest = settings.length - 1
    prompts, held_out_ids = (encode_prompts(tokenizer, each, longest=longest) for each in (training, held_out))
    digest = model_digest(job.target.path)
    check_memory(
        [(spec, job.target.path, settings.length)], device=job.device, dtype=job.dtype, use_kernels=TRAINING.use_kernels
    )
    workspace = Workspace(job.output)
    asked = fingerprint(job, digest, training=training, held_out=held_out)
    with (
        open_workspace(workspace, asked, verb="distill", overwrite=job.overwrite),
        sdpa_kernel(list(GPU_ATTENTION)),  # batches come in hundreds of shapes, each of which cuDNN would plan for
    ):
        say(f"loading {job.target.name}")
        model = load_target(job)
        own: list[list[int]] = []
        if settings.own_prompts:
            own = written_prompts(job, model, tokenizer, digest, without=[*training, *held_out], say=say)
        sequences = written_answers(job, model, tokenizer, prompts + own, digest, say)
        run = _Run(job, model, tokenizer, sequences, held_out_ids, digest, len(own))
        manifest = _distill_head(run, workspace, say) if job.kind == "eagle" else _distill_model(run, workspace, say)
        workspace.publish()
    return manifest


def _distill_head(run: _Run, workspace: Workspace, say: Say) -> dict[str, Any]:
    settings, model = run.job.settings, run.model
    kept = None
    if settings.trim_vocab is not None:
        kept = frequent_ids(run.sequences, settings.trim_vocab, vocab=model.spec.vocab)
    start = None if run.job.start is None else HeadFiles(run.job.start)
    source = _source(run)
    task = HeadTask(model, settings, kept_ids=kept, start=start, lengths=source.lengths)
    progress = _train(task, source, run, workspace, say)
    folder = workspace.staging()
    write_head(folder, task.tensors(), task.config, bits=settings.bits)
    stored = {BITS_KEY: settings.bits, HEAD_BITS_KEY: run.job.recipe.drafter.head_bits or 16}
    write_json(folder / HEAD_MANIFEST, stored)
    head = load_head(folder, model)
    pipeline = evaluation.eagle2_pipeline(
        run.job.recipe, model, head, run.tokenizer, context=settings.length + settings.eval_tokens
    )
    results = evaluation.measure_accept_lengths(pipeline, run.held_out, max_new_tokens=settings.eval_tokens, say=say)
    manifest = _manifest(run, progress, results) | stored
    write_json(folder / HEAD_MANIFEST, manifest)
    use = f"specq chat {manifest['target']['name']} --pipeline eagle2 --drafter {run.job.output.name}"
    card.write_card(folder, manifest, title=f"EAGLE-2 head for {manifest['target']['name']}", use=use)
    return manifest


def _distill_model(run: _Run, workspace: Workspace, say: Say) -> dict[str, Any]:
    settings, model, source = run.job.settings, run.model, _source(run)
    begin: list[int] | CausalLM
    if run.job.start is None:
        say("measuring what each layer matters")
        sample = [batch for batch, _ in zip(source.batches(0), range(IMPORTANCE_BATCHES), strict=False)]
        importance = layer_importance(model, sample)
        assert settings.layers is not None
        begin = choose_layers(importance, settings.layers)
        history = {"layers": begin, "importance_kl": [round(each, 5) for each in importance]}
    else:
        begin, history = load_start(run.job, model)
    task = IntermediateTask(model, settings, begin=begin, lengths=source.lengths)
    progress = _train(task, source, run, workspace, say)
    folder, path = workspace.staging(), run.job.target.path
    write_json(folder / "config.json", task.config(model_config(run.job.start or path)))
    shared: dict[str, Any] = {}
    if settings.share_embeddings:
        weights = open_weights(path, model.spec)
        lent = describe_lender(run.target_name, model.spec, weights, is_tied=model.spec.tie_embeddings)
        shared = {SHARED_KEY: lent.record()}
        task.save_weights(folder, without=lent.tensors)
        write_json(folder / INTERMEDIATE_MANIFEST, shared)
    else:
        task.save_weights(folder)
        copy_companions(companion_files(path), folder, chat_template=run.tokenizer.chat_template)
    student = load_model(folder, device=run.job.device, dtype=run.job.dtype, lender=model if shared else None)
    pipeline = evaluation.sequence_pipeline(
        run.job.recipe, model, student, run.tokenizer, context=settings.length + settings.eval_tokens
    )
    results = evaluation.measure_accept_lengths(pipeline, run.held_out, max_new_tokens=settings.eval_tokens, say=say)
    manifest = _manifest(run, progress, results) | history | shared
    write_json(folder / INTERMEDIATE_MANIFEST, manifest)
    name = run.target_name
    use = f"specq chat {name} --pipeline sequence --intermediate {run.job.output.name}"
    card.write_card(folder, manifest, title=f"{student.spec.layers} layers of {name}, distilled", use=use)
    return manifest


def _train(task: Task, source: BatchSource, run: _Run, workspace: Workspace, say: Say) -> Progress:
    """Train, once there is room for the checkpoints and for what an update needs."""
    count, device = sum(p.numel() for p in task.parameters.values()), run.model.device
    require_space(workspace.folder, DISK_BYTES * count)
    require_left(
        TRAINED_BYTES * count,
        f"{count:,} parameters in training",
        device=device,
        left=left_on(device),
        hint=MEMORY_HINT,
    )
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
            "own_prompts": run.own_prompts,
            "sequences": len(run.sequences.ids),
            "answer_tokens": run.sequences.answer_tokens,
            "curve": progress.curve,
        },
        "settings": public_settings(job.settings),
        "environment": describe_environment(job.device),
    }
