"""Models come into memory when a pipeline needs them, checked before, and the text is the same as with all there."""

from __future__ import annotations

from pathlib import Path

import pytest
from factories import random_weights, tiny_config, write_model
from tiny_heads import CONFIG, tiny_tensors

from specq.errors import NotEnoughMemoryError, UnsupportedError, UsageError
from specq.models.eagle_writer import write_head
from specq.models.inventory import EMBEDDING, HEAD
from specq.recipe import build_recipe
from specq.spec.load import load_pipeline
from specq.spec.parts import DRAFTING_ROLES
from specq.spec.session import Pipeline

OPTIONS = {"device": "cpu", "dtype": "float32", "threads": 1, "context": 128}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target, an intermediate with the same embedding, and a head that fits both."""
    folder = tmp_path_factory.mktemp("models")
    write_model(folder / "target", tiny_config())
    small = tiny_config(num_hidden_layers=1)
    lent = {name: weight for name, weight in random_weights(tiny_config()).items() if name in (EMBEDDING, HEAD)}
    write_model(folder / "small", small, weights=random_weights(small, seed=3) | lent)
    (folder / "head").mkdir()
    write_head(folder / "head", tiny_tensors(), CONFIG)
    return folder


def recipe_of(models: Path, **changes: object) -> dict[str, object]:
    names = {name: str(models / name) for name in ("target", "small", "head")}
    inner = {"model": names["small"], "drafter": names["head"]}
    return {"target": names["target"], "drafter": names["head"], "intermediate": inner, **changes}


def load(models: Path, pipeline: str, **options: object) -> Pipeline:
    return load_pipeline(build_recipe(recipe_of(models)), pipeline=pipeline, **{**OPTIONS, **options})  # type: ignore[arg-type]


def answer(pipeline: Pipeline) -> tuple[int, ...]:
    stream = pipeline.stream(pipeline.encode("the sea and the land", raw=True), max_new_tokens=20, ignore_stop_ids=True)
    for _ in stream:
        pass
    return stream.result.token_ids


@pytest.mark.parametrize(
    ("name", "roles"),
    [
        ("plain", {"target"}),
        ("auto", {"target"}),  # without a profile it is plain
        ("lookup", {"target"}),
        ("eagle2", {"target", "target_head"}),
        ("sequence", {"target", "intermediate"}),
        ("hierarchical", {"target", "intermediate", "intermediate_head"}),
    ],
)
def test_only_what_a_pipeline_needs_is_loaded(models, name, roles) -> None:
    pipeline = load(models, name)
    assert pipeline.parts.roles == roles
    assert {name for name, reason in pipeline.available.items() if reason is not None} == {"qspec"}  # in 16 bits


def test_a_later_pipeline_brings_its_models_in_the_middle_of_a_chat(models) -> None:
    pipeline = load(models, "plain")
    expected, target = answer(pipeline), pipeline.target
    for name in ("eagle2", "hierarchical", "sequence", "plain", "eagle2"):
        pipeline.use(name)
        assert answer(pipeline) == expected
    assert pipeline.parts.roles == {"target", *DRAFTING_ROLES}
    assert pipeline.target is target
    seats = pipeline.parts
    pipeline.use("hierarchical")
    assert pipeline.parts is seats


def test_what_is_asked_for_besides_is_loaded_as_far_as_it_is_named(models) -> None:
    assert load(models, "plain", also=DRAFTING_ROLES).parts.roles == {"target", *DRAFTING_ROLES}
    bare = load_pipeline(build_recipe({"target": str(models / "target")}), also=DRAFTING_ROLES, **OPTIONS)  # type: ignore[arg-type]
    assert bare.parts.roles == {"target"}


def test_a_drafter_that_does_not_fit_is_refused_when_it_is_needed_and_not_before(models, tmp_path) -> None:
    narrow = tiny_tensors()["fc.weight"][:, :96].contiguous()
    write_head(tmp_path, tiny_tensors() | {"fc.weight": narrow}, CONFIG)
    pipeline = load_pipeline(build_recipe(recipe_of(models, drafter=str(tmp_path))), pipeline="plain", **OPTIONS)  # type: ignore[arg-type]
    parts = pipeline.parts
    with pytest.raises(UnsupportedError, match="the head's fc is"):
        pipeline.use("eagle2")
    assert (pipeline.name, pipeline.parts) == ("plain", parts)


def test_memory_is_asked_for_again_when_more_is_loaded(models, monkeypatch) -> None:
    pipeline = load(models, "plain")
    monkeypatch.setattr("specq.models.loader.free_bytes", lambda device: 1000)
    with pytest.raises(NotEnoughMemoryError):
        pipeline.use("sequence")
    with pytest.raises(NotEnoughMemoryError):
        load(models, "plain")


def test_a_pipeline_that_lacks_a_model_is_refused_before_any_is_loaded(models, monkeypatch) -> None:
    monkeypatch.setattr("specq.spec.parts.load_model", lambda *args, **options: pytest.fail("weights were read"))
    recipe = build_recipe({"target": str(models / "target")})
    with pytest.raises(UnsupportedError, match="`eagle2` cannot run: it needs an EAGLE head of the target"):
        load_pipeline(recipe, pipeline="eagle2", **OPTIONS)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="there is no pipeline `fast`"):
        load_pipeline(recipe, pipeline="fast", **OPTIONS)  # type: ignore[arg-type]


def test_the_output_head_drafts_in_the_bits_that_the_recipe_names(models) -> None:
    exact = answer(load(models, "eagle2"))
    for bits in (4, 8):
        recipe = build_recipe(recipe_of(models), overrides=[f"drafter.head_bits={bits}"])
        pipeline = load_pipeline(recipe, pipeline="eagle2", **OPTIONS)  # type: ignore[arg-type]
        head = pipeline.parts.target_head
        assert head is not None
        assert head.head.output is not None
        assert answer(pipeline) == exact


def test_a_prompt_with_an_id_the_model_has_not_is_refused(models: Path) -> None:
    pipeline = load(models, "plain")
    vocab = pipeline.target.spec.vocab
    with pytest.raises(UsageError, match=f"has the id {vocab}, and the model knows {vocab}"):
        pipeline.stream([1, vocab])
    assert answer(pipeline)
