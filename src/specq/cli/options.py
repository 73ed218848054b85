"""The flags that several verbs share, each written once, and what they mean as overrides of a recipe."""

from __future__ import annotations

import inspect
import json
import typing
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from difflib import get_close_matches
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from specq.errors import UsageError
from specq.files import read_text

Model = Annotated[
    str | None,
    typer.Argument(
        metavar="MODEL",
        help="A recipe (.yaml file or name), a local folder or a Hub id; without it the built-in demo model.",
        show_default=False,
    ),
]


class Dtype(str, Enum):
    auto = "auto"
    bfloat16 = "bfloat16"
    float16 = "float16"
    float32 = "float32"


class Overflow(str, Enum):
    error = "error"
    drop_oldest = "drop-oldest"


class Thinking(str, Enum):
    show = "show"
    hide = "hide"
    off = "off"


MAX_NEW_TOKENS, CHAT_TOKENS = 512, 2048
"""The longest answer where none is given. A small model that repeats itself ends there, not at the context's end."""


def flag(*names: str, help: str, panel: str | None = None, metavar: str | None = None, **limits: Any) -> Any:
    """An option without a shown default, under the title `panel` in the help."""
    return typer.Option(*names, help=help, metavar=metavar, show_default=False, rich_help_panel=panel, **limits)


Overrides = Annotated[
    list[str] | None,
    flag(
        "--set",
        metavar="KEY=VALUE",
        help="Override any key of the recipe, such as pipeline.draft_length=8; again for more.",
    ),
]
Offline = Annotated[bool, flag("--offline", help="Use only what is on this machine.")]


@dataclass(frozen=True)
class PlanOptions:
    """What would run, and where."""

    pipeline: Annotated[
        str | None,
        flag("--pipeline", metavar="NAME", help="auto, plain, lookup, sequence, eagle2, hierarchical or qspec."),
    ] = None
    intermediate: Annotated[
        str | None,
        flag("--intermediate", metavar="MODEL", help="The smaller model with the same tokenizer that drafts."),
    ] = None
    set: Overrides = None
    drafter: Annotated[str | None, flag("--drafter", metavar="HEAD", help="The target's EAGLE head.")] = None
    device: Annotated[str, flag("--device", metavar="cpu|cuda[:N]", help="Default: the GPU if there is one.")] = "auto"
    dtype: Annotated[Dtype, flag("--dtype", help="Number format of computation; default auto.")] = Dtype.auto
    context: Annotated[
        int | None,
        flag(
            "--context",
            metavar="N",
            min=2,
            help="Longest prompt and answer together; default the model's, at most 8192.",
        ),
    ] = None
    offline: Offline = False
    revision: Annotated[str | None, flag("--revision", metavar="R", help="Branch, tag or commit of a Hub model.")] = (
        None
    )

    def overrides(self) -> list[str]:
        """Recipe overrides in the order of precedence: what --set says, then the flags, which win."""
        flags = {
            "pipeline.name": self.pipeline,
            "intermediate.model": self.intermediate,
            "drafter.model": self.drafter,
            "context": self.context,
            "target.revision": self.revision,
        }
        return [*(self.set or []), *assignments(flags)]


@dataclass(frozen=True)
class PipelineOptions(PlanOptions):
    """What runs, and where."""

    threads: Annotated[
        int | None,
        flag("--threads", metavar="N", min=1, help="CPU threads; default: tried out on the first tokens."),
    ] = None
    no_graphs: Annotated[bool, flag("--no-graphs", help="On a GPU, no CUDA graphs: slower, for finding faults.")] = (
        False
    )


@dataclass(frozen=True)
class SeveralPipelines(PipelineOptions):
    """As PipelineOptions, for a verb that runs several pipelines side by side."""

    pipeline: Annotated[
        list[str] | None,
        flag(
            "--pipeline",
            metavar="NAMES",
            help="plain, lookup, sequence, eagle2, hierarchical, qspec; again or with commas; default: all that can.",
        ),
    ] = None  # type: ignore[assignment]

    def overrides(self) -> list[str]:
        """As above; which pipelines run is no setting of one recipe."""
        return PipelineOptions.overrides(replace(self, pipeline=None))


@dataclass(frozen=True)
class SamplingOptions:
    """How the answer is chosen and cut."""

    max_new_tokens: Annotated[
        int | None,
        flag(
            "--max-new-tokens",
            metavar="N",
            min=1,
            help="Longest answer; default 512, in chat the model's own or 2048.",
        ),
    ] = None
    temperature: Annotated[
        float | None,
        flag(
            "--temperature",
            metavar="T",
            min=0.0,
            help="0 takes the likeliest token; default the model's own, in bench and verify 0.",
        ),
    ] = None
    top_p: Annotated[
        float | None,
        flag(
            "--top-p",
            metavar="P",
            help="Sample from the likeliest tokens of this total probability; default as temperature's.",
        ),
    ] = None
    top_k: Annotated[
        int | None,
        flag(
            "--top-k",
            metavar="K",
            min=0,
            help="Sample from the K likeliest tokens, 0 from all; default as temperature's.",
        ),
    ] = None
    repetition_penalty: Annotated[
        float | None,
        flag("--repetition-penalty", metavar="R", help="Above 1 makes tokens that occurred less likely."),
    ] = None
    seed: Annotated[
        int | None,
        flag("--seed", metavar="S", min=0, help="Same seed, same answer; default random, and recorded."),
    ] = None

    def overrides(self) -> list[str]:
        keys = ("temperature", "top_p", "top_k", "repetition_penalty", "seed")
        return assignments({f"sampling.{key}": getattr(self, key) for key in keys})


@dataclass(frozen=True)
class PromptOptions:
    """How the prompt is made, and what of the answer is shown."""

    stop: Annotated[
        list[str] | None,
        flag("--stop", metavar="TEXT", help="End the answer before this text; again for more."),
    ] = None
    system: Annotated[str | None, flag("--system", metavar="TEXT", help="The system message.")] = None
    raw: Annotated[bool, flag("--raw", help="No chat template, no special tokens: the text as it is.")] = False
    chat_template: Annotated[
        Path | None,
        flag("--chat-template", metavar="FILE", help="A Jinja chat template instead of the model's."),
    ] = None
    overflow: Annotated[
        Overflow,
        flag(
            "--overflow",
            help="When the context is full: an error (default), or the oldest turns are dropped.",
        ),
    ] = Overflow.error
    thinking: Annotated[
        Thinking,
        flag("--thinking", help="What to do with `<think>` sections; off asks the template for none."),
    ] = Thinking.show

    def template(self) -> str | None:
        """The chat template of --chat-template; UsageError when it cannot be read, or for what --raw excludes."""
        for name, value in (("--system", self.system), ("--chat-template", self.chat_template)):
            if self.raw and value is not None:
                hint = "leave one of them out"
                raise UsageError(f"`--raw` uses no chat template, so `{name}` would change nothing", hint=hint)
        return None if self.chat_template is None else read_text(self.chat_template)


@dataclass(frozen=True)
class OutputOptions:
    """What is printed where."""

    as_json: Annotated[bool, flag("--json", help="One JSON document on standard output.")] = False
    quiet: Annotated[bool, flag("--quiet", "-q", help="Only errors on standard error.")] = False


PANELS: dict[type, str] = {
    PlanOptions: "Pipeline",
    PipelineOptions: "Pipeline",
    SeveralPipelines: "Pipeline",
    SamplingOptions: "Sampling",
    PromptOptions: "Prompt and answer",
    OutputOptions: "Output",
}
"""The title of each group in the help."""


class VerbCommand(TyperCommand):
    """A verb whose help lists its options by group, in plain text."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        for title, params in grouped_params(self, ctx):
            records = [record for p in params if (record := p.get_help_record(ctx)) is not None]
            if records:
                with formatter.section(title):
                    formatter.write_dl(records)


class NearMissGroup(TyperGroup):
    """A group that answers an unknown word with the nearest one it knows."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        known = self.list_commands(ctx)
        if args[0] not in known and not args[0].startswith("-") and not ctx.resilient_parsing:
            path = ctx.command_path
            hint = nearest(args[0], known, f"{path} {{}}", f"{path} --help")
            raise UsageError(f"`{path}` has no `{args[0]}`", hint=hint)
        return super().resolve_command(ctx, args)


class ListingGroup(NearMissGroup):
    """A group that lists what there is when no verb of it is named."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        names_verb = args and (not args[0].startswith("-") or args[0] in ctx.help_option_names)
        if not names_verb and not ctx.resilient_parsing:
            args = ["ls", *args]
        return super().parse_args(ctx, args)


def nearest(word: str, known: Sequence[str], form: str, otherwise: str) -> str:
    """A hint with the nearest known word put into `form`, or else `otherwise`."""
    near = get_close_matches(word, known, n=1, cutoff=0.6)
    return f"did you mean `{form.format(near[0])}`?" if near else otherwise


def grouped_params(command: Any, ctx: Any) -> list[tuple[str, list[Any]]]:
    """The parameters of a command under the titles its help shows them with, in this order."""
    groups: dict[str, list[Any]] = {title: [] for title in ("Arguments", "Options", *PANELS.values())}
    for param in command.get_params(ctx):
        default = "Arguments" if param.param_type_name == "argument" else "Options"
        title = "Output" if param.name == "help" else getattr(param, "rich_help_panel", None) or default
        groups.setdefault(title, []).append(param)
    groups["Output"] = groups.pop("Output")  # last, after the verb's own titles
    return [(title, params) for title, params in groups.items() if params]


def takes_options(function: Callable[..., None]) -> Callable[..., None]:
    """The verb with each parameter that is an options class spread into that class's flags."""
    hints = typing.get_type_hints(function, include_extras=True)
    spread = {name: hint for name, hint in hints.items() if hint in PANELS}
    parameters = [
        p.replace(annotation=hints[name])
        for name, p in inspect.signature(function).parameters.items()
        if name not in spread
    ]
    for group in spread.values():
        parameters.extend(_parameters(group))

    def verb(**values: Any) -> None:
        options = {name: group(**{f.name: values.pop(f.name) for f in fields(group)}) for name, group in spread.items()}
        function(**values, **options)

    verb.__name__, verb.__doc__ = function.__name__, function.__doc__
    verb.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    verb.__annotations__ = {p.name: p.annotation for p in parameters}
    return verb


def _parameters(group: type) -> Iterator[inspect.Parameter]:
    hints = typing.get_type_hints(group, include_extras=True)
    for option in fields(group):
        flag = hints[option.name].__metadata__[0]
        flag.rich_help_panel = PANELS[group]
        yield inspect.Parameter(
            option.name, inspect.Parameter.KEYWORD_ONLY, annotation=hints[option.name], default=option.default
        )


def assignments(values: dict[str, Any]) -> list[str]:
    """An override for each value of a flag that was given; JSON is YAML, so any text survives."""
    from specq.recipe import FlagOverride

    return [FlagOverride(f"{key}={json.dumps(value)}") for key, value in values.items() if value is not None]
