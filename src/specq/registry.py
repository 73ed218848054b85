"""Which drafters are known for a target: the registry of registry.yaml, and what model a name or folder stands for.

Nothing here fetches weights; whether a pair fits is spec/check.py's to say.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, TypeAdapter

from specq.checkpoint import ModelSpec

Kind = Literal["eagle", "intermediate"]
KINDS: tuple[Kind, ...] = ("eagle", "intermediate")

COPY_MARKS = re.compile(
    r"([-_.]("
    r"gptq|awq|w4a16|quantized|specq|int4|4-?bit|4bits?|g(32|64|128)|(32|64|128)g|sym|asym|hf|gguf|q4_0|q4_1|q4_k|q4_k_[sm]"
    r"))+$"
)
"""What the name of a 4-bit copy adds at its end, in lower case."""


class _Record(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Head(_Record):
    """A published EAGLE head. `gb` is its size in GB, `revision` None means `main` as it is then."""

    model: str
    form: Literal["EAGLE-2", "EAGLE-3"]
    gb: float
    licence: str | None = None
    revision: str | None = None
    note: str | None = None


class Target(_Record):
    """A model with what drafts for it. `shape` is hidden size, layers and rows of the embedding."""

    model: str
    series: str
    family: str
    shape: tuple[int, int, int]
    gb: float
    licence: str | None = None
    revision: str | None = None
    also: tuple[str, ...] = ()
    eagle: tuple[Head, ...] = ()
    smaller: tuple[str, ...] = ()


@dataclass(frozen=True)
class Drafter:
    """One thing that can be fetched for a target; `form` is the head's, or the layers of an intermediate."""

    target: str
    kind: Kind
    model: str
    form: str
    gb: float
    licence: str | None
    revision: str | None
    note: str | None


@dataclass(frozen=True)
class Match:
    """The target that a name or folder stands for; `why` says how that was seen where it is no id of the registry."""

    target: Target
    why: str = ""


class Registry:
    """The known targets, in the order of the file."""

    def __init__(self, targets: tuple[Target, ...]) -> None:
        self.targets = targets
        self._by_name = {name.lower(): target for target in targets for name in (target.model, *target.also)}
        self._by_plain_name = {_plain(name): target for name, target in self._by_name.items()}

    def find(self, name: str) -> Match | None:
        """The target with this Hub id, or of which the last part of the name says that it is a copy."""
        if target := self._by_name.get(name.lower()):
            return Match(target)
        if target := self._by_plain_name.get(_plain(name)):
            return Match(target, f"`{name}`, by its name,")
        return None

    def same_shape(self, spec: ModelSpec) -> list[Target]:
        """The targets of which a model of this spec may be a fine-tune."""
        shape = (spec.hidden, spec.layers, spec.vocab)
        return [target for target in self.targets if (target.family, target.shape) == (spec.family, shape)]

    def drafters(self, target: Target, kind: Kind | None = None) -> list[Drafter]:
        """What is known for a target, heads before intermediates, in each kind the first choice first."""
        heads = [
            Drafter(target.model, "eagle", head.model, head.form, head.gb, head.licence, head.revision, head.note)
            for head in target.eagle
        ]
        smaller = [_intermediate(target, self._by_name[name.lower()]) for name in target.smaller]
        return [drafter for drafter in (*heads, *smaller) if kind in (None, drafter.kind)]


def load_registry(path: Path | None = None) -> Registry:
    """The shipped registry, or one from a file of the same form."""
    path = path or Path(__file__).with_name("registry.yaml")
    return Registry(TypeAdapter(tuple[Target, ...]).validate_python(yaml.safe_load(path.read_text(encoding="utf-8"))))


def quantized_from(config: Mapping[str, Any], card: str = "") -> list[str]:
    """The names that a quantized model's config.json and model card give for what it was made from, surest first.

    Empty for a model that is not quantized: there the same keys name what it was tuned from.
    """
    if not config.get("quantization_config"):
        return []
    front = card.split("---")[1] if card.startswith("---") and card.count("---") > 1 else ""
    try:
        metadata = yaml.safe_load(front)
    except yaml.YAMLError:
        metadata = None
    stated = metadata.get("base_model") if isinstance(metadata, dict) else None
    named = [*(stated if isinstance(stated, list) else [stated]), config.get("base_model"), config.get("_name_or_path")]
    return [name for name in named if isinstance(name, str) and name]


def _intermediate(target: Target, model: Target) -> Drafter:
    layers, of = model.shape[1], target.shape[1]
    note = f"{layers} layers for {of}: measure whether it pays" if 4 * layers > 3 * of else None
    return Drafter(
        target.model, "intermediate", model.model, f"{layers} layers", model.gb, model.licence, model.revision, note
    )


def _plain(name: str) -> str:
    """The last part of a name in lower case, without what marks a copy in 4 bits."""
    last = name.rstrip("/").rpartition("/")[2].lower().removesuffix(".gguf")
    return COPY_MARKS.sub("", last)
