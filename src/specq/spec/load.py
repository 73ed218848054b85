"""From a recipe to a loaded pipeline: everything is resolved and checked before the first weight is read."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch

from specq.checkpoint import ModelSpec, read_generation_config
from specq.environment import num_processors
from specq.errors import UsageError
from specq.hub import Snapshot, resolve_model
from specq.models.causal_lm import CausalLM
from specq.models.loader import Engine, model_spec
from specq.models.shared import read_shared, without_lender
from specq.recipe import ModelRef, Recipe, Sampling, resolve
from specq.spec.check_head import is_head
from specq.spec.decision import ProfileKey
from specq.spec.parts import PartLoader, Space, naming
from specq.spec.pipelines import four_bits, require_pipeline, tree_shape
from specq.spec.session import Generation, Pipeline
from specq.spec.tree import chain
from specq.tokenizer import Tokenizer
from specq.words import counted

log = logging.getLogger("specq")

DEFAULT_CONTEXT = 8192
PROBE_STEPS = 3


def load_pipeline(
    recipe: Recipe | str | None = None,
    *,
    pipeline: str | None = None,
    device: str = "auto",
    dtype: str = "auto",
    context: int | None = None,
    threads: int | None = None,
    offline: bool | None = None,
    use_graphs: bool = True,
    also: Collection[str] = (),
    on_progress: Callable[[str], None] | None = None,
) -> Pipeline:
    """The recipe's models, ready to decode. A string is whatever the command line takes as MODEL.

    Loaded is what the pipeline needs, and the parts `also` as far as the recipe names them; the rest when another
    pipeline is used. `context` is in tokens (default: the model's, at most 8192). `threads` is for CPUs; by default it
    is probed. `use_graphs` False runs what would be CUDA graphs step by step.
    Raises a SpecqError of the fitting kind before any weight is read when something is missing or does not fit.
    """
    say = on_progress or (lambda text: None)
    recipe = recipe if isinstance(recipe, Recipe) else resolve(recipe)
    device = take_device(device)
    wanted = pipeline or recipe.pipeline.name
    refs = model_refs(recipe, wanted)
    snapshots = {role: find_model(role, ref, offline=offline, progress=say) for role, ref in refs.items()}
    target = snapshots["target"].path
    if (shared := read_shared(target)) is not None:
        raise without_lender(snapshots["target"].name, shared)
    if is_head(target):
        name = snapshots["target"].name
        raise UsageError(
            f"`{name}` is an EAGLE head and no whole model",
            hint=f"run it beside its target: specq chat TARGET --pipeline eagle2 --drafter {name}",
        )
    spec = model_spec(target)
    if recipe.quantize is not None and spec.quantization is None:
        raise UsageError(
            f"the recipe wants `{recipe.target.model}` in 4 bits, and it is in 16",
            hint="specq quantize RECIPE -o DIR, then --set target=DIR",
        )
    tokenizer = Tokenizer.load(target)
    limit = choose_context(spec, recipe.context if context is None else context)
    folders = {role: snapshot.path for role, snapshot in snapshots.items()}
    decision, undecided = ProfileKey.here(folders, device=device, dtype=dtype, use_graphs=use_graphs).find()
    # `/spec auto` may come later, so that there is room for its tree whatever runs first.
    scratch = max(tree_shape(each).scratch_rows for each in (recipe, decision.apply(recipe) if decision else recipe))
    is_auto = wanted == "auto" and decision is not None
    first = decision.pipeline if decision and is_auto else "plain" if wanted in ("auto", "off") else wanted
    needs = require_pipeline(first, snapshots.keys() | four_bits(spec)).needs
    space = Space(device, dtype, limit, scratch, Engine(use_graphs=use_graphs))
    loader = PartLoader(snapshots, tokenizer, space, head_bits=recipe.drafter.head_bits, say=say)
    parts = loader.load(None, [*needs, *also])
    loader.say = log.info  # what comes later comes alone
    if device == "cpu":
        set_threads(parts.target.model, threads or (decision.threads if decision and is_auto else None))
    generation = read_generation_config(target)
    loaded = Pipeline(
        recipe=recipe,
        parts=parts,
        tokenizer=tokenizer,
        context=limit,
        defaults=default_sampling(generation),
        answer_length=default_length(generation),
        models=named_models(snapshots),
        folders=folders,
        decision=decision,
        undecided=undecided,
        loader=loader,
    )
    loaded.use(wanted)
    return loaded


def named_models(snapshots: Mapping[str, Snapshot]) -> dict[str, tuple[str, str | None]]:
    """(name, revision) of each role's model for the record; folders of one name are told apart by their paths."""
    paths: dict[str, set[Path]] = {}
    for each in snapshots.values():
        paths.setdefault(each.name, set()).add(each.path)
    return {
        role: (each.name if len(paths[each.name]) == 1 else str(each.path), each.revision)
        for role, each in snapshots.items()
    }


def model_refs(recipe: Recipe, pipeline: str) -> dict[str, ModelRef]:
    """Every model a recipe names, by the part of a pipeline it fills.

    `drafter` is the target's head; in the hierarchical pipeline, where the head belongs to the intermediate, it is the
    intermediate's unless that has one of its own.
    """
    refs: dict[str, ModelRef] = {"target": recipe.target}
    inner, drafter = recipe.intermediate, recipe.drafter
    head = ModelRef(model=drafter.model, revision=drafter.revision) if drafter.model else None
    if inner is not None:
        refs["intermediate"] = inner
        if inner.drafter is not None:
            refs["intermediate_head"] = inner.drafter
        elif head is not None and pipeline == "hierarchical":
            refs["intermediate_head"], head = head, None
    if head is not None:
        refs["target_head"] = head
    return refs


def generate(pipeline: Pipeline, prompt: str | Sequence[dict[str, str]], **options: Any) -> Generation:
    """The whole answer to a prompt (a text, or messages {"role", "content"}).

    `options` are those of `Pipeline.stream`: sampling, max_new_tokens, stop, skip_special.
    """
    stream = pipeline.stream(pipeline.encode(prompt), **options)
    for _ in stream:
        pass
    return stream.result


def choose_device(name: str) -> str:
    """`cpu` or `cuda:N`. Raises UsageError when a GPU is asked for and there is none."""
    if name == "auto":
        return "cuda:0" if torch.cuda.is_available() else "cpu"
    kind, _, index = name.partition(":")
    if kind not in ("cpu", "cuda") or (index and not index.isdigit()) or (kind == "cpu" and index):
        raise UsageError(f"device `{name}` is unknown", hint="give auto, cpu, cuda or cuda:N")
    if kind == "cpu":
        return "cpu"
    count = torch.cuda.device_count()
    number = int(index or 0)
    if number >= count:
        found = f"this machine has {counted(count, 'GPU')} that torch can use"
        raise UsageError(f"device `{name}` is not there: {found}", hint="specq doctor shows what was found")
    return f"cuda:{number}"


def take_device(name: str) -> str:
    """As `choose_device`; a GPU is then the current one, and of several it is said which is used."""
    device = choose_device(name)
    if device != "cpu":
        torch.cuda.set_device(device)  # kernels, streams and graphs are made on the current one
        if name in ("auto", "cuda") and torch.cuda.device_count() > 1:
            log.warning("several GPUs: cuda:0 is used, choose another with --device cuda:N")
    return device


def choose_context(spec: ModelSpec, asked: int | None) -> int:
    """Tokens of context: what was asked for, else the model's own, at most 8192. Raises UsageError past the model's."""
    if asked is None:
        return min(spec.max_context, DEFAULT_CONTEXT)
    if not 2 <= asked <= spec.max_context:
        raise UsageError(
            f"context `{asked}` is outside what the model takes",
            hint=f"give 2 to {spec.max_context} tokens",
        )
    return asked


def default_sampling(config: Mapping[str, Any]) -> Sampling:
    """What a model's generation config asks for; greedy when it does not sample."""
    if not config.get("do_sample"):
        return Sampling(temperature=0.0)
    return Sampling(
        temperature=config.get("temperature", 1.0),
        top_p=config.get("top_p"),
        top_k=config.get("top_k"),
        repetition_penalty=config.get("repetition_penalty"),
    )


def default_length(config: Mapping[str, Any]) -> int | None:
    """Tokens of the longest answer by a model's generation config; None where it gives none."""
    length = config.get("max_new_tokens")
    return length if isinstance(length, int) and length >= 1 else None


def set_threads(model: CausalLM, threads: int | None) -> None:
    """Use this many CPU threads; None measures one decoding step with 1, half and all cores and takes the fastest.

    On a small or busy machine two threads can be several times slower than one: a barrier waits for the slower of them.
    """
    cores = num_processors()
    if threads is not None:
        if threads > cores:
            log.warning(f"{threads} threads share {cores} processors, which is slower than one each")
        torch.set_num_threads(threads)
        return
    candidates = sorted({1, max(1, cores // 2), cores})
    if len(candidates) == 1:
        return
    cache = model.new_cache(PROBE_STEPS)
    probe = chain([0], device=model.device)

    def step_s(count: int) -> float:
        torch.set_num_threads(count)
        times = []
        for _ in range(PROBE_STEPS):
            began = perf_counter()
            model.forward(probe, cache)
            times.append(perf_counter() - began)
        return median(times)

    with torch.inference_mode():
        step_s(cores)  # first calls pay for set-up
        best = min(candidates, key=step_s)
    torch.set_num_threads(best)


def find_model(
    role: str, ref: ModelRef, *, offline: bool | None, progress: Callable[[str], None] | None = None
) -> Snapshot:
    """The files of the model in a role; raises as `resolve_model`, naming the flag or key of what drafts."""
    with naming(role):
        return resolve_model(ref.model, revision=ref.revision, offline=offline, progress=progress)
