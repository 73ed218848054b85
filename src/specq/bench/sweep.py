"""From `--pipeline` and `--set key=1,2,3` to the rows of a benchmark, each a pipeline with its settings."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import product

from specq.errors import UnsupportedError, UsageError
from specq.spec.pipelines import PIPELINES

TREE = ("drafter.nodes", "drafter.depth", "drafter.top_k", "drafter.noise_scale", "drafter.head_bits")

SETTINGS: dict[str, tuple[str, ...]] = {
    "auto": (),
    "plain": (),
    "lookup": ("pipeline.draft_length", "pipeline.max_ngram", "pipeline.min_ngram"),
    "sequence": ("pipeline.draft_length",),
    "eagle2": TREE,
    "hierarchical": ("pipeline.min_draft", *TREE),
    "qspec": ("pipeline.draft_length", "pipeline.act_bits"),
}
"""The keys of a recipe that change what a pipeline drafts, with the same models in memory; a profile sets auto's."""


@dataclass(frozen=True)
class Row:
    """A pipeline and the settings that tell it from the other rows of the same pipeline."""

    pipeline: str
    settings: tuple[tuple[str, str], ...] = ()

    @property
    def name(self) -> str:
        """As tables show it, such as `eagle2 nodes=16`."""
        return " ".join([self.pipeline, *(f"{key.rpartition('.')[2]}={value}" for key, value in self.settings)])

    @property
    def overrides(self) -> list[str]:
        """The settings as `--set` takes them."""
        return [f"{key}={value}" for key, value in self.settings]


def split_sweeps(assignments: Sequence[str]) -> tuple[list[str], dict[str, list[str]]]:
    """(overrides for every row, values by swept key) of what `--set` was given.

    Raises UsageError for a list of values of a key that needs other models, or none that pipelines know.
    """
    fixed: list[str] = []
    swept: dict[str, list[str]] = {}
    keys = sorted({key for names in SETTINGS.values() for key in names})
    for assignment in assignments:
        key, equals, text = assignment.partition("=")
        key, text = key.strip(), text.strip()
        if not equals or "," not in text or text[0] in "[{\"'":
            fixed.append(assignment)
            continue
        if key not in keys:
            raise UsageError(
                f"`{key}` cannot take several values in one run",
                hint=f"run once for each value; lists are for {', '.join(keys)}",
            )
        values = [value.strip() for value in text.split(",")]
        if not all(values):
            raise UsageError(f"--set `{assignment}` has an empty value", hint=f"for example --set {key}=4,8")
        swept[key] = list(dict.fromkeys(values))
    return fixed, swept


def make_rows(pipelines: Iterable[str], swept: dict[str, list[str]]) -> list[Row]:
    """A row for each pipeline and each combination of those swept values that matter to it, plain first.

    Raises UsageError when a swept key matters to none of them.
    """
    names = list(dict.fromkeys(["plain", *pipelines]))
    idle = [key for key in swept if not any(key in SETTINGS[name] for name in names)]
    if idle:
        raise UsageError(f"`{idle[0]}` changes nothing in {', '.join(names)}", hint="leave it out, or add a --pipeline")
    rows = []
    for name in names:
        keys = [key for key in swept if key in SETTINGS[name]]
        rows += [Row(name, tuple(zip(keys, values, strict=True))) for values in product(*(swept[key] for key in keys))]
    return rows


def choose_pipelines(asked: Sequence[str] | None, parts: Iterable[str]) -> list[str]:
    """The names in `--pipeline` (several options, or one with commas), without any all that these parts allow.

    `parts` are the models at hand, by the names pipelines need them under, as `PipelineKind.missing` takes them.
    Raises UsageError for a name that is none, UnsupportedError with the reason for one that lacks a part.
    """
    have = set(parts)
    names = split_names(asked)
    if not names:
        return [name for name, kind in PIPELINES.items() if kind.missing(have) is None]
    for name in names:
        if name != "auto" and (reason := PIPELINES[name].missing(have)):
            raise UnsupportedError(f"pipeline `{name}` cannot run: it {reason}")
    return names


def split_names(asked: Sequence[str] | None) -> list[str]:
    """The names of `--pipeline`, each once. Raises UsageError for one that is no pipeline's."""
    names = [name.strip() for text in asked or [] for name in text.split(",")]
    unknown = next((name for name in names if name not in SETTINGS), None)
    if unknown is not None:
        raise UsageError(f"there is no pipeline `{unknown}`", hint=f"choose among {', '.join(SETTINGS)}")
    return list(dict.fromkeys(names))
