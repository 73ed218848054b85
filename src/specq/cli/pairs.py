"""The pairs of a recipe: its models, found here or fetched, and each drafter checked against what it drafts for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from specq.cli.console import Console

if TYPE_CHECKING:
    from specq.hub import Snapshot
    from specq.recipe import ModelRef
    from specq.spec.check import CheckResult

DRAFTS_FOR = {"intermediate": "target", "target_head": "target", "intermediate_head": "intermediate"}
"""Each part of a pipeline that drafts, and the part that decides over its drafts."""

DEMO_ORIGIN = "HuggingFaceTB/SmolLM2-135M-Instruct"


@dataclass(frozen=True)
class Pair:
    """A model, what drafts for it, and how the tests of the two ended."""

    target: str
    drafter: str
    tests: Sequence[CheckResult]

    @property
    def failed(self) -> list[CheckResult]:
        return [test for test in self.tests if test.status == "fail"]

    @property
    def fits(self) -> bool:
        return not self.failed

    @property
    def verdict(self) -> str:
        """One line: whether they fit, else the tests that failed."""
        if self.failed:
            return f"does not fit: {', '.join(test.name for test in self.failed)}"
        warned = sum(test.status == "warn" for test in self.tests)
        return f"fits: {len(self.tests)} tests passed" + (f", {warned} of them with a warning" if warned else "")


class Models:
    """The models that refs name; each is looked for once, and each pair is checked once."""

    def __init__(self, console: Console, *, is_offline: bool) -> None:
        self._console = console
        self._is_offline = is_offline
        self._found: dict[tuple[str, str | None], Snapshot] = {}
        self._pairs: dict[tuple[Snapshot, Snapshot, str | None], Pair] = {}

    def snapshot(self, ref: ModelRef) -> Snapshot:
        """The local files of a model, fetched where they are missing. Raises as hub.resolve_model does."""
        from specq.hub import resolve_model

        key = ref.model, ref.revision
        if key not in self._found:
            progress = self._console.progress()
            try:
                self._found[key] = resolve_model(
                    ref.model, revision=ref.revision, offline=self._is_offline or None, progress=progress
                )
            finally:
                progress.clear()
        return self._found[key]

    def pair(self, refs: Mapping[str, ModelRef], part: str) -> Pair:
        """The tests of one drafting part of a pipeline and what it drafts for; also that it is of the right kind."""
        return self.check(refs[DRAFTS_FOR[part]], refs[part], part=part)

    def check(self, target: ModelRef, drafter: ModelRef, *, part: str | None = None) -> Pair:
        """The tests of these two; a `part` says what kind of drafter it has to be."""
        from specq.spec.check import check_pair

        folders = self.snapshot(target), self.snapshot(drafter)
        key = (*folders, part)
        if key not in self._pairs:
            tests = check_pair(folders[0].path, folders[1].path, role=part)
            self._pairs[key] = Pair(target.model, drafter.model, tests)
        return self._pairs[key]


def same_model(*models: str) -> str | None:
    """The names of the demo model where it is among these, since nothing shows that they mean the same."""
    from specq.recipe import DEFAULT_RECIPE, DEMO_NAME

    if not {DEMO_NAME, DEMO_ORIGIN} & set(models):
        return None
    return f"`{DEFAULT_RECIPE}`, `{DEMO_NAME}` and {DEMO_ORIGIN} (4-bit) are the same model"
