"""A recipe: one typed description of an experiment, read from YAML, with overrides; knows no torch."""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from specq.errors import UsageError
from specq.files import holds_config, is_there, named_path, reason
from specq.validation import Problem, problems_of

PipelineName = Literal["auto", "plain", "lookup", "sequence", "eagle2", "hierarchical", "qspec"]
"""What `pipeline` may be; `auto` chooses among the others."""

DEMO_NAME = "specq:demo"
"""The name of the built-in demo model, wherever a model is named."""

DEMO_HEAD = "specq:demo-head"
DEMO_INTERMEDIATE = "specq:demo-intermediate"
DEMO_INTERMEDIATE_HEAD = "specq:demo-intermediate-head"
"""What drafts for it and comes with specq: its EAGLE head, an intermediate, and that one's head."""

OWN_NAMES = (DEMO_NAME, DEMO_HEAD, DEMO_INTERMEDIATE, DEMO_INTERMEDIATE_HEAD)

HUB_ID = re.compile(r"[\w][\w.-]*/[\w][\w.-]*")

FORM_HINT = "specq recipe show --all demo shows every key"

DEFAULT_RECIPE = "demo"
"""The recipe that runs when no model is named."""

DRAFT, SELF_DRAFT = 5, 3
"""Tokens drafted where `draft_length` is not set, and those of qspec: its drafts cost nearly what they save."""

NOT_YAML = (yaml.YAMLError, ValueError, RecursionError)
"""What the reader of YAML raises: ValueError for a date that is none, RecursionError for what is nested too deep."""

MAX_DRAFT = 56
"""Longest draft of a sequence: with the longest trunk of pending tokens it still fits one verification."""


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", validate_assignment=True)


class ModelRef(_Section):
    """A model: a folder, a .gguf file or a Hub id, and the revision of the latter."""

    model: str
    revision: str | None = None


def _as_ref(value: Any) -> Any:
    return {"model": value} if isinstance(value, str) else value


Ref = Annotated[ModelRef, BeforeValidator(_as_ref)]


class IntermediateSection(ModelRef):
    """The small model between drafter and target, and the EAGLE head that drafts for it."""

    drafter: Ref | None = None


class DrafterSection(_Section):
    """The target's EAGLE head, and the tree that a head drafts (for whichever model verifies it).

    `nodes` are the rows the verifier runs, root included; `depth` is in levels. `head_bits` is the precision of the
    output head that drafts: 8 and 4 make a copy of the target's for that; unset is what the EAGLE head's manifest says,
    else 16, the target's own. The target's decision never uses the copy.
    """

    model: str | None = None
    revision: str | None = None
    head_bits: Literal[4, 8, 16] | None = None
    nodes: int = Field(default=30, ge=2, le=64)
    depth: int = Field(default=5, ge=1, le=32)
    top_k: int = Field(default=10, ge=1, le=64)
    noise_scale: float = Field(default=1.0, gt=0.0)


class PipelineSection(_Section):
    """Which pipeline runs, and the length of what it drafts.

    `draft_length` is 5 unless set, and 3 for qspec; `act_bits` are those of the activations that qspec drafts with.
    """

    name: PipelineName = "auto"
    draft_length: int | None = Field(default=None, ge=1, le=MAX_DRAFT)
    min_draft: int = Field(default=6, ge=1, le=MAX_DRAFT)
    max_ngram: int = Field(default=3, ge=1, le=16)
    min_ngram: int = Field(default=2, ge=1, le=16)
    act_bits: Literal[8, 4] = 8

    def length_for(self, pipeline: str) -> int:
        """Tokens that the pipeline of this name drafts."""
        return self.draft_length or (SELF_DRAFT if pipeline == "qspec" else DRAFT)


def _as_pipeline(value: Any) -> Any:
    return {"name": value} if isinstance(value, str) else value


class Sampling(_Section):
    """How tokens are chosen; what is not set comes from the model's generation config."""

    temperature: float | None = Field(default=None, ge=0.0, le=100.0)
    top_p: float | None = Field(default=None, gt=0.0, le=1.0)
    top_k: int | None = Field(default=None, ge=0)
    repetition_penalty: float | None = Field(default=None, gt=0.0, le=10.0)
    seed: int | None = Field(default=None, ge=0, lt=2**64)


class QuantizeSection(_Section):
    """How `specq quantize` turns the target into 4 bits; without a group size the largest that fits is taken.

    The output head stays in 16 bits unless `head_bits` says 8 or 4.
    """

    method: Literal["gptq", "rtn"] = "gptq"
    group_size: Literal[128, 64, 32, -1] | None = None
    act_order: bool = False
    asym: bool = False
    calib: str = "bundled"
    samples: int | None = Field(default=None, ge=1)
    seq_len: int = Field(default=512, ge=32)
    max_kl: float | None = Field(default=None, gt=0.0)
    format: Literal["gptq", "compressed-tensors"] = "gptq"
    strict_shapes: bool = False
    head_bits: Literal[8, 4] | None = None


class DistillSection(_Section):
    """How `specq distill` trains a drafter on the target's own answers.

    `prompts` and `eval_prompts` are "bundled" or files; without the latter `held_out` prompts are kept from the former.
    `own_prompts` more are written by the target itself, in the user's place; fewer are left of them, since none counts
    twice and none that has no end. `minutes` ends training before `steps` do; `last_rate` is the learning rate at the
    end, as a part of the highest. `start` is the folder of a drafter whose weights training begins with. `unroll`
    levels are drafted in training, each weighing `unroll_decay` of the one before. For a head only: `width` of its MLP,
    by default the target's, and `bits`, 4 to store its matrices so. For an intermediate only: `layers`, how many are
    kept of the target, and `share_embeddings`, which leaves embedding, output head and tokenizer to the target.
    """

    prompts: str = "bundled"
    eval_prompts: str | None = None
    held_out: int = Field(default=16, ge=1)
    max_prompts: int | None = Field(default=None, ge=1)
    own_prompts: int = Field(default=0, ge=0)
    temperatures: tuple[Annotated[float, Field(ge=0.0, le=2.0)], ...] = Field(default=(0.0, 1.0), min_length=1)
    max_new_tokens: int = Field(default=256, ge=2)
    length: int = Field(default=1024, ge=8)
    steps: int = Field(default=2000, ge=1)
    minutes: float | None = Field(default=None, gt=0.0)
    batch_tokens: int = Field(default=8192, ge=16)
    learning_rate: float = Field(default=5e-4, gt=0.0)
    warmup: float = Field(default=0.03, ge=0.0, lt=1.0)
    last_rate: float = Field(default=0.02, ge=0.0, le=1.0)
    optimizer: Literal["adamw", "muon"] = "adamw"
    unroll: int = Field(default=4, ge=1, le=8)
    unroll_decay: float = Field(default=0.8, gt=0.0, le=1.0)
    feature_weight: float = Field(default=0.1, ge=0.0)
    ce_weight: float = Field(default=1.0, ge=0.0)
    noise: float = Field(default=0.1, ge=0.0)
    trim_vocab: int | None = Field(default=None, ge=1)
    start: str | None = None
    width: int | None = Field(default=None, ge=8)
    bits: Literal[4, 16] = 16
    layers: int | None = Field(default=None, ge=1)
    share_embeddings: bool = False
    eval_tokens: int = Field(default=128, ge=8)
    seed: int = Field(default=0, ge=0, lt=2**32)


class Recipe(_Section):
    """Everything that decides what runs. Unknown keys are errors."""

    target: Ref
    quantize: QuantizeSection | None = None
    intermediate: Annotated[IntermediateSection, BeforeValidator(_as_ref)] | None = None
    drafter: Annotated[DrafterSection, BeforeValidator(_as_ref)] = Field(default_factory=DrafterSection)
    pipeline: Annotated[PipelineSection, BeforeValidator(_as_pipeline)] = Field(default_factory=PipelineSection)
    sampling: Sampling = Field(default_factory=Sampling)
    distill: DistillSection = Field(default_factory=DistillSection)
    context: int | None = Field(default=None, ge=2)


class FlagOverride(str):
    """An override `key.key=value` that a flag of the command line stands for; errors name the flag instead of the key.

    The flag is called like the key's last part, or like the section where that is only `model` or `name`.
    """

    @property
    def flag(self) -> str:
        section, _, leaf = self.partition("=")[0].rpartition(".")
        return f"--{section if leaf in ('model', 'name') else leaf}".replace("_", "-")


def load_recipe(source: str | Path, *, overrides: Sequence[str] = ()) -> Recipe:
    """The recipe of a .yaml file or of a shipped name, with `key.key=value` overrides applied.

    Raises UsageError naming the file and the key.
    """
    path = _recipe_path(source)
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UsageError(f"recipe `{source}` does not exist", hint="specq recipe ls shows the shipped ones") from None
    except NOT_YAML as error:
        raise UsageError(f"recipe `{path}` is not YAML: {_one_line(error)}", hint=FORM_HINT) from None
    except OSError as error:
        raise UsageError(f"recipe `{path}` cannot be read: {reason(error)}", hint="name a .yaml file") from None
    if not isinstance(data, dict):
        raise UsageError(f"recipe `{path}` holds no keys", hint="a recipe begins with `target: MODEL`")
    return build_recipe(data, overrides=overrides, origin=str(source))


def build_recipe(data: dict[str, Any], *, overrides: Sequence[str] = (), origin: str = "recipe") -> Recipe:
    """The recipe of these keys, overrides applied. Raises UsageError naming each wrong key and what it takes."""
    data = dict(data)
    for override in overrides:
        _apply(data, override)
    try:
        return Recipe.model_validate(data)
    except ValidationError as error:
        given = {each.partition("=")[0].strip(): each for each in overrides}
        flags = {key: each.flag for key, each in given.items() if isinstance(each, FlagOverride)}
        problems = problems_of(error, Recipe)
        by_flag = [_text(problem, flags[problem.key]) for problem in problems if problem.key in flags]
        by_key = [_text(problem, problem.key) for problem in problems if problem.key not in flags]
        text = "; ".join([*by_flag, *([f"{origin}: {'; '.join(by_key)}"] if by_key else [])])
        raise UsageError(text, hint=_hint(problems[0]) if by_key else None) from None


def resolve(model: str | None, *, overrides: Sequence[str] = ()) -> Recipe:
    """The recipe a MODEL argument means: a .yaml path, a local folder, a shipped recipe, a Hub id, in this order.

    None is the demo set. Raises UsageError when it is none of these.
    """
    if model is None:
        return load_recipe(DEFAULT_RECIPE, overrides=overrides)
    if model.endswith((".yaml", ".yml")):
        return load_recipe(model, overrides=overrides)
    if model in list_recipes() and not is_local_model(model):
        return load_recipe(model, overrides=overrides)
    if is_local_model(model) or model in OWN_NAMES or HUB_ID.fullmatch(model):
        return build_recipe({"target": model}, overrides=overrides, origin=model)
    near = difflib.get_close_matches(model, [*list_recipes(), *_folders_here()], n=1)
    others = f"did you mean `{near[0]}`?" if near else "give a folder or a recipe (specq recipe ls);"
    hint = f"{others} Hub ids have the form org/name"
    raise UsageError(f"`{model}` is no .yaml file, no model folder, no recipe and no Hub id", hint=hint)


def is_model_name(text: str) -> bool:
    """Whether `run` should take its only argument for a model and not for a prompt."""
    if any(c.isspace() for c in text) and not is_there(text):
        return False
    return (
        text.endswith((".yaml", ".yml"))
        or text in OWN_NAMES
        or is_local_model(text)
        or text in list_recipes()
        or HUB_ID.fullmatch(text) is not None
    )


def is_local_model(text: str) -> bool:
    """Whether the text names a folder by its form (`./`, `/`, `~`), a .gguf file, or an existing model folder."""
    if text.startswith(("./", "../", "/", "~")) and not text.endswith((".yaml", ".yml")):
        return True
    return text.endswith(".gguf") or holds_config(text)


def list_recipes() -> dict[str, Path]:
    """Shipped recipes by name."""
    return {path.stem: path for path in sorted(_recipes_folder().glob("*.yaml"))}


def _recipes_folder() -> Path:
    """Inside the wheel, or the repository's own folder in an editable install."""
    inside = Path(__file__).parent / "recipes"
    return inside if inside.is_dir() else Path(__file__).parents[2] / "recipes"


def _recipe_path(source: str | Path) -> Path:
    text = str(source)
    if text.endswith((".yaml", ".yml")):
        return named_path(text)
    return list_recipes().get(text) or named_path(text)


def _text(problem: Problem, name: str) -> str:
    """What is wrong with a key, or with the flag that gave its value."""
    if problem.rule is not None:
        return f"`{name}` = `{problem.value}`: {problem.rule}"
    return f"unknown key `{name}`" if problem.near else f"`{name}` is missing"


def _hint(problem: Problem) -> str:
    if not problem.near:
        return FORM_HINT
    return f"did you mean `{problem.near[0]}`?" if len(problem.near) == 1 else f"known keys: {', '.join(problem.near)}"


def _apply(data: dict[str, Any], override: str) -> None:
    """Put one `a.b=value` into the nested keys; the value is read as YAML."""
    path, equals, text = override.partition("=")
    if not equals or not path:
        raise UsageError(f"--set `{override}` is not `key=value`", hint="for example --set pipeline.draft_length=8")
    *parents, leaf = path.strip().split(".")
    try:
        value = yaml.safe_load(text)
    except NOT_YAML as error:
        hint = "put quotes around a text, as in --set 'key=\"a: b\"'"
        raise UsageError(f"--set `{override}`: the value is not YAML: {_one_line(error)}", hint=hint) from None
    here = data
    for key in parents:
        inner = here.get(key)
        if isinstance(inner, str):
            inner = _as_pipeline(inner) if key == "pipeline" else _as_ref(inner)
        here[key] = dict(inner) if isinstance(inner, dict) else {}
        here = here[key]
    here[leaf] = value


def _folders_here() -> list[str]:
    return [p.name for p in Path().iterdir() if holds_config(p)]


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
