"""Everything of a measurement that comes before the first prompt: which rows, which models, which sampling."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from specq.bench.contestants import (
    PipelineContestant,
    TransformersContestant,
    transformers_dtypes,
)
from specq.bench.sweep import Row, choose_pipelines, make_rows, split_names
from specq.bench.transformers_baseline import TransformersModel
from specq.errors import UsageError
from specq.hub import resolve_model
from specq.models.loader import model_spec
from specq.models.memory import estimate_bytes, free_bytes, require_memory
from specq.models.storages import storages
from specq.recipe import Recipe, Sampling
from specq.spec.decision import Decision, ProfileKey
from specq.spec.load import choose_device, find_model, load_pipeline, model_refs
from specq.spec.pipelines import PIPELINES, four_bits
from specq.spec.session import Pipeline

Say = Callable[[str], None]

NO_PROFILE = "these models have no profile on this device"


@dataclass(frozen=True)
class Plan:
    """The rows to run and the recipe of each; `wanted` is the pipeline that models are loaded for."""

    recipe: Recipe
    rows: list[Row]
    recipes: list[Recipe]
    wanted: str


@dataclass(frozen=True)
class Loading:
    """Where and how models are loaded; as the flags of the same names."""

    device: str = "auto"
    dtype: str = "auto"
    threads: int | None = None
    offline: bool | None = None
    use_graphs: bool = True


def plan_rows(
    resolve: Callable[[Sequence[str]], Recipe],
    loading: Loading,
    *,
    asked: Sequence[str] | None,
    swept: dict[str, list[str]],
    say: Say = lambda text: None,
) -> Plan:
    """The rows that `--pipeline` and swept settings mean; `resolve` makes the recipe of some more overrides.

    The target's config is looked at, and for that fetched, where a row may need its matrices to have 4 bits.

    Raises UsageError or UnsupportedError, before anything is loaded, when one of them cannot run.
    """
    recipe = resolve([])
    names = split_names(asked)
    # A head that is not said to be the intermediate's is the target's, unless only the former is asked for.
    is_inner = (
        recipe.pipeline.name == "hierarchical" if not names else "hierarchical" in names and "eagle2" not in names
    )
    wanted = "hierarchical" if is_inner else "plain"
    parts = {*model_refs(recipe, wanted)}
    if not names or any(PIPELINES[name].needs_four_bits for name in names if name in PIPELINES):
        parts |= four_bits(model_spec(target_path(recipe, loading, say=say)))
    rows = make_rows(choose_pipelines(asked, parts), swept)
    return Plan(recipe, rows, [resolve(row.overrides) for row in rows], wanted)


def exact_sampling(recipe: Recipe) -> Sampling:
    """What a recipe asks for and nothing the model's own defaults would add: greedy unless told otherwise."""
    asked = recipe.sampling
    return Sampling(
        temperature=asked.temperature or 0.0,
        top_p=asked.top_p or 1.0,
        top_k=asked.top_k or 0,
        repetition_penalty=asked.repetition_penalty or 1.0,
        seed=secrets.randbits(32) if asked.seed is None else asked.seed,
    )


def find_decision(plan: Plan, loading: Loading) -> Decision | None:
    """What a profile chose for these models here, when there is an `auto` row. Raises UsageError without a profile."""
    if not any(row.pipeline == "auto" for row in plan.rows):
        return None
    decision, instead = profile_key(plan, loading).find()
    if decision is None:
        why = instead or NO_PROFILE
        raise UsageError(f"`auto` cannot run: {why}", hint="specq profile measures one, or leave `auto` out")
    return decision


def profile_key(plan: Plan, loading: Loading) -> ProfileKey:
    """The key under which a profile of the plan's models on this device would be stored."""
    refs = model_refs(plan.recipe, plan.wanted)
    paths = {role: find_model(role, ref, offline=loading.offline).path for role, ref in refs.items()}
    device = choose_device(loading.device)
    return ProfileKey.here(paths, device=device, dtype=loading.dtype, use_graphs=loading.use_graphs)


def profiled_rows(plan: Plan, resolve: Callable[[Sequence[str]], Recipe], loading: Loading) -> Plan:
    """The plan with each pipeline at the sizes that the stored profile predicts fastest for it.

    Raises UsageError without a profile.
    """
    key = profile_key(plan, loading)
    forecasts = key.forecasts()
    if forecasts is None:
        why = key.find()[1] or NO_PROFILE
        raise UsageError(f"`--profiled` cannot run: {why}", hint="specq profile measures one")
    best = {row.pipeline: forecasts.best(row.pipeline) for row in plan.rows}
    rows = [
        Row(name, tuple((key, str(value)) for key, value in each.settings) if each else ())
        for name, each in best.items()
    ]
    return replace(plan, rows=rows, recipes=[resolve(row.overrides) for row in rows])


def open_models(
    plan: Plan, loading: Loading, *, say: Say = lambda text: None
) -> tuple[Pipeline, list[PipelineContestant]]:
    """The models of all rows in memory, and a contestant for each row, plain decoding first.

    There is room for the largest tree that any row drafts. Raises UsageError for an `auto` row without a profile.
    """
    decision = find_decision(plan, loading)
    recipes = [
        decision.apply(recipe) if decision and row.pipeline == "auto" else recipe
        for row, recipe in zip(plan.rows, plan.recipes, strict=True)
    ]
    largest = plan.recipe.model_copy(deep=True)
    for key in ("depth", "top_k"):
        setattr(largest.drafter, key, max(getattr(recipe.drafter, key) for recipe in recipes))
    pipeline = load_pipeline(
        largest,
        pipeline=plan.wanted,
        device=loading.device,
        dtype=loading.dtype,
        threads=loading.threads,
        offline=loading.offline,
        use_graphs=loading.use_graphs,
        also=_needs(row.pipeline for row in plan.rows) | _needs([decision.pipeline] if decision else []),
        on_progress=say,
    )
    rows = [
        PipelineContestant(row.name, pipeline, kind=row.pipeline, recipe=recipe)
        for row, recipe in zip(plan.rows, recipes, strict=True)
    ]
    return pipeline, rows


def _needs(pipelines: Iterable[str]) -> set[str]:
    """The parts that these pipelines cannot do without."""
    return {role for name in pipelines if name in PIPELINES for role in PIPELINES[name].needs}


def target_path(recipe: Recipe, loading: Loading, *, say: Say = lambda text: None) -> Path:
    """Where the target's files lie."""
    target = recipe.target
    return resolve_model(target.model, revision=target.revision, offline=loading.offline, progress=say).path


def transformers_contestants(
    plan: Plan, ours: Sequence[PipelineContestant], loading: Loading, *, say: Say = lambda text: None
) -> list[TransformersContestant]:
    """transformers' generate on the same weights in each number format, and assisted by the same intermediate.

    What they take is added to the idle memory of `ours`.
    Raises NotEnoughMemoryError when these further copies do not fit.
    """
    pipeline = ours[0].pipeline
    device = pipeline.target.device
    paths = [target_path(plan.recipe, loading)]
    if plan.recipe.intermediate is not None:
        ref = plan.recipe.intermediate
        paths.append(resolve_model(ref.model, revision=ref.revision, offline=loading.offline).path)
    specs = [replace(model_spec(path), quantization=None) for path in paths]
    contestants: list[TransformersContestant] = []
    for dtype in transformers_dtypes(pipeline.target):
        name = str(dtype).removeprefix("torch.")
        # Dense there, whatever the file holds.
        needed = [estimate_bytes(spec, dtype=dtype, context=pipeline.context, device=str(device)) for spec in specs]
        require_memory(needed, pipeline.context, device=str(device), free=free_bytes(str(device)))
        say(f"loading {', '.join(path.name for path in paths)} into transformers in {name}")
        target, *others = [TransformersModel(path, dtype=dtype, device=device, lender=paths[0]) for path in paths]
        for contestant in ours:
            contestant.idle_bytes += sum(storages([model.model for model in (target, *others)]).values())
        contestants.append(TransformersContestant(f"transformers {name}", target, pipeline))
        for other in others:
            label = f"transformers {name} assisted"
            contestants.append(TransformersContestant(label, target, pipeline, assistant=other))
    return contestants
