"""A model's chat template, rendered in jinja2's sandbox the way Hugging Face's own tools render it.

What the rendered text means as ids (BOS, turn ends) is the tokenizer's business.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from specq.errors import UsageError

TEMPLATE_FILE = "chat_template.jinja"

# What a template may raise as it runs: its own refusals, and Python's errors for messages it did not expect.
RENDER_ERRORS = (
    TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    RecursionError,
    TypeError,
    ValueError,
)

Message = Mapping[str, Any]


class ChatTemplate:
    """A compiled chat template; `variables` are the special tokens it may name, such as `bos_token`."""

    def __init__(self, source: str, variables: Mapping[str, str] | None = None) -> None:
        self.source = source
        self._variables = dict(variables or {})
        try:
            self._template = _environment().from_string(source)
        except TemplateError as error:
            raise UsageError(
                f"the chat template does not compile: `{error}`",
                hint="give another with --chat-template FILE, or use --raw",
            ) from error

    def render(self, messages: Sequence[Message], *, add_generation_prompt: bool = True, **variables: object) -> str:
        """The text the model reads for these messages.

        Raises: UsageError with the template's own words when it refuses them.
        """
        known = {"tools": None, "documents": None, **self._variables, **variables}
        try:
            return self._template.render(messages=messages, add_generation_prompt=add_generation_prompt, **known)
        except RENDER_ERRORS as error:
            raise UsageError(
                f"the chat template refuses these messages: `{error}`",
                hint="use --raw, or give another with --chat-template FILE",
            ) from error


def read_chat_template(folder: Path, tokenizer_config: Mapping[str, Any]) -> str | None:
    """The source of a folder's chat template, None for a base model.

    A chat_template.jinja is newer than the entry in tokenizer_config.json and wins over it; of several named
    templates the one called default is the chat.
    """
    file = folder / TEMPLATE_FILE
    if file.is_file():
        return file.read_text(encoding="utf-8")
    template = tokenizer_config.get("chat_template")
    file = folder / "chat_template.json"
    if template is None and file.is_file():
        template = json.loads(file.read_text(encoding="utf-8")).get("chat_template")
    if isinstance(template, list):
        template = {entry["name"]: entry["template"] for entry in template}
    if isinstance(template, Mapping):
        if "default" not in template:
            raise UsageError(
                f"none of the chat templates of `{folder}` is called default: {', '.join(sorted(template))}",
                hint="give one with --chat-template FILE",
            )
        template = template["default"]
    return template


def fold_system(messages: Sequence[Message]) -> list[Message]:
    """The messages with a leading system text put in front of the first user turn instead."""
    system, rest = messages[0], list(messages[1:])
    for index, message in enumerate(rest):
        if message["role"] == "user":
            rest[index] = {**message, "content": f"{system['content']}\n\n{message['content']}"}
            return rest
    return [{"role": "user", "content": system["content"]}, *rest]


class _GenerationTag(Extension):
    """`{% generation %}` marks what a trainer learns from; here its body is simply rendered."""

    tags = {"generation"}  # noqa: RUF012 jinja2 declares it as a plain class attribute

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals.update(
        raise_exception=_raise_exception,
        strftime_now=lambda form: datetime.now().strftime(form),
        dict=_new_dict,
    )
    return environment


def _new_dict(*args: Any, **entries: Any) -> dict:
    # in place of the type itself, whose unbound methods would change what the sandbox keeps constant
    return dict(*args, **entries)


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # jinja2's own filter escapes for HTML, which would change what the model reads
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise TemplateError(message)
