"""`specq run`: one answer for scripts and pipes."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated

import typer

from specq.cli.console import Console, Interrupt, read_text
from specq.cli.options import (
    MAX_NEW_TOKENS,
    OutputOptions,
    PipelineOptions,
    PromptOptions,
    SamplingOptions,
    Thinking,
    VerbCommand,
    takes_options,
)
from specq.errors import UsageError

if TYPE_CHECKING:
    from specq.cli.answer import AnswerWriter
    from specq.spec.session import Generation, Pipeline, Stream, StreamEvent

app = typer.Typer(rich_markup_mode=None, add_completion=False)


@app.command(cls=VerbCommand)
@takes_options
def run(
    first: Annotated[
        str | None,
        typer.Argument(metavar="MODEL", help="As for chat. Alone and no model's name: the prompt.", show_default=False),
    ] = None,
    second: Annotated[
        str | None,
        typer.Argument(
            metavar="PROMPT", help="The prompt; text on standard input comes before it.", show_default=False
        ),
    ] = None,
    *,
    jsonl: Annotated[
        bool,
        typer.Option("--jsonl", help="One JSON event a line while the answer comes.", rich_help_panel="Output"),
    ] = False,
    pipeline: PipelineOptions,
    sampling: SamplingOptions,
    prompt: PromptOptions,
    output: OutputOptions,
) -> None:
    """Write one answer to standard output.

    The prompt is the argument, standard input, or both (the input first). With --thinking hide the printed
    text leaves thinking out; the JSON record always holds the whole text.
    """
    if jsonl and output.as_json:
        raise UsageError(
            "`--json` and `--jsonl` exclude each other", hint="--json for one document, --jsonl for events"
        )
    with Console(quiet=output.quiet).working() as console:
        from specq.cli.answer import AnswerWriter, open_pipeline
        from specq.cli.thinking import opens_thinking

        model, argument = _arguments(first, second)
        text = join_prompt(_piped_input(), argument, is_raw=prompt.raw)
        loaded = open_pipeline(model, pipeline=pipeline, sampling=sampling, prompt=prompt, console=console)
        ids = _encode(loaded, text, prompt)
        interrupt = Interrupt()
        stream = loaded.stream(ids, max_new_tokens=sampling.max_new_tokens or MAX_NEW_TOKENS, stop=prompt.stop or ())
        if output.as_json:
            result = _follow(stream, interrupt)
            console.document(result.record() | {"environment": loaded.environment()})
        elif jsonl:
            result = _write_events(console, loaded, stream, interrupt)
        else:
            writer = AnswerWriter(console, thinking=prompt.thinking, is_inside=opens_thinking(loaded.tokenizer, ids))
            result = _write_text(writer, stream, interrupt)
    if result.finish_reason == "interrupted":
        raise interrupt.cause or KeyboardInterrupt


def join_prompt(piped: str | None, text: str | None, *, is_raw: bool) -> str:
    """The prompt of standard input and argument: a line each, or with --raw put together as they are.

    Raises UsageError when there is neither.
    """
    parts = [part for part in (piped, text) if part]
    if not is_raw:
        parts = [stripped for part in parts if (stripped := part.strip("\n")).strip()]
    if not parts:
        raise UsageError("there is no prompt", hint='specq run "your question", or pipe the text in')
    return ("" if is_raw else "\n").join(parts)


def _arguments(first: str | None, second: str | None) -> tuple[str | None, str | None]:
    """Model and prompt: a single argument is the prompt unless it names a model."""
    from specq.recipe import is_model_name

    if first is None or second is not None or is_model_name(first):
        return first, second
    return None, first


def _piped_input() -> str | None:
    if sys.stdin is None or sys.stdin.isatty():
        return None
    return read_text(sys.stdin.read)


def _encode(loaded: Pipeline, text: str, prompt: PromptOptions) -> list[int]:
    thinking = False if prompt.thinking is Thinking.off else None
    return loaded.encode(text, raw=prompt.raw, system=prompt.system, thinking=thinking)


def _follow(
    stream: Stream, interrupt: Interrupt, each: Callable[[StreamEvent], None] = lambda event: None
) -> Generation:
    """The record of the answer, each event handed on; Ctrl-C and SIGTERM end it between two tokens."""
    with interrupt.watch():
        try:
            for event in stream:
                each(event)
                if interrupt.cause is not None:
                    break
        finally:
            stream.close()
    return stream.result


def _write_text(writer: AnswerWriter, stream: Stream, interrupt: Interrupt) -> Generation:
    try:
        return _follow(stream, interrupt, lambda event: writer.push(event.text))
    finally:
        writer.end()


def _write_events(console: Console, loaded: Pipeline, stream: Stream, interrupt: Interrupt) -> Generation:
    """`start` with the environment, `text` for every piece, `end` with the run record."""
    console.event({"event": "start", "environment": loaded.environment()})
    result = _follow(
        stream,
        interrupt,
        lambda event: console.event({"event": "text", "text": event.text, "token_ids": list(event.token_ids)}),
    )
    console.event({"event": "end"} | result.record())
    return result
