"""From flags to rows."""

from __future__ import annotations

import pytest

from specq.bench.sweep import SETTINGS, Row, choose_pipelines, make_rows, split_names, split_sweeps
from specq.errors import UnsupportedError, UsageError
from specq.recipe import build_recipe
from specq.spec.pipelines import FOUR_BITS, PIPELINES


def test_every_pipeline_says_what_can_be_swept_and_the_recipe_has_it() -> None:
    assert set(SETTINGS) == {*PIPELINES, "auto"}
    for key in {key for keys in SETTINGS.values() for key in keys}:
        build_recipe({"target": "x"}, overrides=[f"{key}=4"])


def test_lists_are_swept_and_all_else_is_left_as_it_is() -> None:
    given = ["pipeline.draft_length=4, 8,4", "drafter.nodes=16", "distill.temperatures=[0,1]", "target.model='a,b'"]
    fixed, swept = split_sweeps(given)
    assert fixed == given[1:]
    assert swept == {"pipeline.draft_length": ["4", "8"]}


@pytest.mark.parametrize("text", ["intermediate.model=a,b", "sampling.temperature=0,1", "pipeline.name=plain,lookup"])
def test_what_needs_other_models_or_another_baseline_is_not_swept(text: str) -> None:
    with pytest.raises(UsageError, match="cannot take several values"):
        split_sweeps([text])


def test_an_empty_value_is_refused() -> None:
    with pytest.raises(UsageError, match="empty value"):
        split_sweeps(["drafter.nodes=16,"])


def test_each_combination_that_matters_is_a_row_and_plain_is_first() -> None:
    swept = {"pipeline.draft_length": ["4", "8"], "drafter.nodes": ["16", "32", "60"]}
    rows = make_rows(["eagle2", "sequence"], swept)
    assert [row.name for row in rows] == [
        "plain",
        "eagle2 nodes=16",
        "eagle2 nodes=32",
        "eagle2 nodes=60",
        "sequence draft_length=4",
        "sequence draft_length=8",
    ]
    assert rows[-1].overrides == ["pipeline.draft_length=8"]


def test_combinations_of_one_pipeline_multiply() -> None:
    swept = {"pipeline.min_draft": ["4", "8"], "drafter.nodes": ["16", "32"]}
    assert len(make_rows(["hierarchical"], swept)) == 5
    assert Row("hierarchical", (("pipeline.min_draft", "4"), ("drafter.nodes", "16"))) in make_rows(
        ["hierarchical", "plain"], swept
    )


def test_a_sweep_that_changes_nothing_is_refused() -> None:
    with pytest.raises(UsageError, match=r"`drafter\.nodes` changes nothing in plain, lookup"):
        make_rows(["lookup"], {"drafter.nodes": ["16", "32"]})


def test_without_names_all_run_whose_models_are_there() -> None:
    assert choose_pipelines(None, ["target"]) == ["plain", "lookup"]
    assert choose_pipelines([], ["target", "intermediate"]) == ["plain", "lookup", "sequence"]
    everything = ["target", "intermediate", "target_head", "intermediate_head", FOUR_BITS]
    assert choose_pipelines(None, everything) == list(PIPELINES)


def test_names_come_in_one_option_or_several() -> None:
    assert split_names(["plain,sequence", "lookup", "plain"]) == ["plain", "sequence", "lookup"]
    assert choose_pipelines(["lookup , plain"], ["target"]) == ["lookup", "plain"]
    with pytest.raises(UsageError, match="there is no pipeline `sequnce`"):
        split_names(["plain,sequnce"])


def test_a_pipeline_without_its_model_is_refused_with_the_reason() -> None:
    with pytest.raises(UnsupportedError, match=r"pipeline `sequence` cannot run: it needs an intermediate model"):
        choose_pipelines(["plain,sequence"], ["target"])
