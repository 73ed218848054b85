"""Writes docs/cli.md from the verbs themselves: `python -m specq.cli.reference`; with --check only compares."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer

from specq.cli.app import app
from specq.cli.options import grouped_params

PAGE = Path(__file__).parents[3] / "docs" / "cli.md"
COMMAND = "python -m specq.cli.reference"
HEAD = f"""# The command line

Written by `{COMMAND}` from the verbs' own help; edit those. For every verb:

- 0 done, 1 failed, 2 usage, 3 a gate failed, 4 gated or not authorised, 5 not in the cache while offline, 6 not
  supported or not fitting, 7 not enough memory, 8 disk full, 130 interrupted, 143 ended by SIGTERM, which keeps what
  Ctrl-C keeps. A closed standard output ends quietly.
- Standard output is the answer and nothing else; with `--json` one JSON document. All the rest goes to standard
  error. `NO_COLOR`, `TERM=dumb` or no terminal: no colour, and a line of progress every ten seconds at most.
- An answer in JSON: `text`, `token_ids`, `tokens_out`, `finish_reason`, `prompt_tokens`, `reused_tokens`, `ttft_s`,
  `decode_tps`, `e2e_tps`, `accept_len` (tokens a round decided), `accept_len_inner`, `rounds`, `pipeline`, `seed`, and
  what decoding it took in milliseconds: `draft_ms`, `intermediate_ms`, `verify_ms`, `overhead_ms`. In `bench` these
  answers are the `samples`; a row's four times are milliseconds a token, over all its answers.
- `SPECQ_DEBUG=1` shows the traceback of an error. `SPECQ_CACHE` is the folder of `specq cache`; the Hub's own
  variables (`HF_HOME`, `HF_HUB_OFFLINE`, `HF_TOKEN` ...) mean what they mean to its tools.
- MODEL is, in this order: a .yaml file; a local folder; a name of `specq recipe ls`; a Hub id. `run` with one
  argument takes it for the prompt when it is none of these.
- A flag wins over `--set`, `--set` over the recipe, the recipe over the environment and the defaults.
"""


def render() -> str:
    """The whole page."""
    command = typer.main.get_command(app)
    context = command.make_context("specq", [], resilient_parsing=True)
    sections = [
        section for name, each, ctx in _commands("specq", command, context) for section in _section(name, each, ctx)
    ]
    return HEAD + "\n" + "\n".join(sections)


def main(arguments: list[str]) -> int:
    """0 when the page is current or was written, 1 when --check found it old."""
    page = render()
    if arguments not in ([], ["--check"]):
        print(f"usage: {COMMAND} [--check]", file=sys.stderr)
        return 2
    if arguments:
        if PAGE.is_file() and PAGE.read_text(encoding="utf-8") == page:
            return 0
        print(f"error: `{PAGE}` is not what the verbs say\n\nhint: {COMMAND}", file=sys.stderr)
        return 1
    PAGE.write_text(page, encoding="utf-8")
    return 0


def _commands(name: str, command: Any, context: Any) -> Iterator[tuple[str, Any, Any]]:
    yield name, command, context
    if not hasattr(command, "list_commands"):
        return
    for word in command.list_commands(context):
        inner = command.get_command(context, word)
        inner_context = inner.make_context(word, [], parent=context, resilient_parsing=True)
        yield from _commands(f"{name} {word}", inner, inner_context)


def _section(name: str, command: Any, context: Any) -> Iterator[str]:
    yield f"## {name}\n"
    yield f"```\n{' '.join([name, *_usage(command)])}\n```\n"
    yield "\n\n".join(" ".join(part.split()) for part in (command.help or "").split("\n\n")) + "\n"
    for title, params in grouped_params(command, context):
        rows = [_row(param) for param in params if getattr(param, "help", None) and not getattr(param, "hidden", False)]
        if rows:
            yield f"| {title} | |\n|---|---|"
            yield "\n".join(rows) + "\n"


def _usage(command: Any) -> Iterator[str]:
    if hasattr(command, "list_commands"):
        yield "VERB"
    for param in command.params:
        if param.param_type_name == "argument":
            name = param.metavar + ("..." if param.nargs == -1 else "")
            yield name if param.required else f"[{name}]"
    yield "[OPTIONS]"


def _row(param: Any) -> str:
    # shortest first: the parser keeps the names of --help in a set, in another order each time
    opts = sorted(param.opts, key=len)
    names = ", ".join(f"`{name}`" for name in opts) if param.param_type_name == "option" else f"`{param.metavar}`"
    value = "" if param.param_type_name == "argument" or getattr(param, "is_flag", False) else f" `{_value(param)}`"
    return f"| {names}{value} | {param.help} |"


def _value(param: Any) -> str:
    """What the option takes; a bar would begin a new column of the table."""
    return (param.metavar or "|".join(param.type_descriptor.choices or ("VALUE",))).replace("|", "\\|")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
