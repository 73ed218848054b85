"""`specq chat`: reading lines, showing answers; turns are in chat_session.py, commands in chat_commands.py."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from typing import TYPE_CHECKING, NamedTuple

import typer

from specq.cli.console import Console, Interrupt, Terminated, read_text, report
from specq.cli.options import (
    Model,
    OutputOptions,
    PipelineOptions,
    PromptOptions,
    SamplingOptions,
    VerbCommand,
    takes_options,
)
from specq.errors import SpecqError
from specq.words import counted

if TYPE_CHECKING:
    from specq.cli.chat_session import ChatSession
    from specq.spec.session import Generation

FENCE = '"""'
HISTORY_LENGTH = 1000

app = typer.Typer(rich_markup_mode=None, add_completion=False)


@app.command(cls=VerbCommand)
@takes_options
def chat(
    model: Model = None,
    *,
    pipeline: PipelineOptions,
    sampling: SamplingOptions,
    prompt: PromptOptions,
    output: OutputOptions,
) -> None:
    """Chat with a model on the terminal, or with lines from standard input.

    Ctrl-C stops an answer and keeps the chat; at an empty prompt it leaves, as Ctrl-D does. A line that ends
    with a backslash goes on in the next one; lines between two lines of three double quotes are one message.
    /help lists the commands. Piped in, every line is a turn; a line that cannot be taken is said and passed over,
    and the exit code is that of the first. With --json nothing is streamed, and the whole chat is one document.
    """
    is_interactive = sys.stdin.isatty() and sys.stdout.isatty() and not output.as_json
    with Console(quiet=output.quiet).working(divert=not is_interactive) as console:
        from specq.cli.answer import open_pipeline
        from specq.cli.chat_session import ChatSession

        session = ChatSession(
            open_pipeline(model, pipeline=pipeline, sampling=sampling, prompt=prompt, console=console),
            system=prompt.system,
            is_raw=prompt.raw,
            stop=prompt.stop or (),
            max_new_tokens=sampling.max_new_tokens,
            overflow=prompt.overflow,
            thinking=prompt.thinking,
        )
        if sys.stdin.isatty():
            console.note(console.dim(_greeting(session)))
        with _line_history(is_interactive):
            code = converse(session, console, is_streamed=not output.as_json)
        if output.as_json:
            answers = [result.record() for result in session.results]
            environment = session.pipeline.environment()
            console.document({"messages": session.messages(), "answers": answers, "environment": environment})
    if code:
        raise typer.Exit(code)


def converse(session: ChatSession, console: Console, *, is_streamed: bool) -> int:
    """Reads messages and commands until the input ends or /quit; the exit code.

    What a line does wrong is said, and the chat goes on: nothing that was piped in is lost by one slip. Where nobody
    sees that at a prompt the exit code is that of the first error.
    """
    from specq.cli.chat_commands import ChatCommands

    is_terminal, code = sys.stdin.isatty(), 0

    def answer(text: str) -> None:
        show_answer(session, text, console, is_streamed=is_streamed)

    commands = ChatCommands(session, console, answer=answer)
    while not commands.is_over:
        try:
            message = read_message(is_terminal=is_terminal)
        except SpecqError as error:
            if not is_terminal:  # what follows bytes that are no text cannot be read either
                raise
            report(error)
            continue
        if message is None:
            break
        try:
            if message.is_command:
                commands.run(message.text)
            elif message.text.strip():
                answer(message.text)
        except SpecqError as error:
            report(error)
            code = code or error.exit_code
    return 0 if is_terminal else code


def show_answer(session: ChatSession, text: str, console: Console, *, is_streamed: bool = True) -> None:
    """Writes the answer to a message as it comes, then the status line; Ctrl-C stops the answer.

    SIGTERM does too, and is raised after the status line; so is Ctrl-C where nobody could go on typing.
    """
    from specq.cli.answer import AnswerWriter

    dropped, interrupt = session.num_dropped, Interrupt()
    with interrupt.watch(), closing(session.ask(text)) as pieces:
        if session.num_dropped > dropped:
            console.note(f"the context is full: it no longer holds the oldest {counted(session.num_dropped, 'turn')}")
        writer = AnswerWriter(console, thinking=session.thinking, is_inside=session.starts_thinking)
        try:
            for piece in pieces:
                if is_streamed:
                    writer.push(piece)
                if interrupt.cause is not None:
                    break
        except KeyboardInterrupt:  # pressed again before the next token came
            pass
        if is_streamed:
            writer.end()
    decision = session.pipeline.decision
    plain_tps = decision.plain_tps if decision is not None else None
    console.note(console.dim(status_line(session.results[-1], plain_tps=plain_tps)))
    if session.was_cut:
        console.note(
            f"cut at {session.longest} tokens: --max-new-tokens N, or /set max_new_tokens N, allows longer answers"
        )
    if interrupt.cause is Terminated or (interrupt.cause is not None and not sys.stdin.isatty()):
        raise interrupt.cause


def status_line(result: Generation, *, plain_tps: float | None = None) -> str:
    """Tokens a second, accept length, pipeline and the rest of one answer, by the names of the run record.

    `plain_tps` is the rate of plain decoding that a profile measured; a draft's gain is over that.
    """
    parts = [counted(result.tokens_out, "token")]
    if result.decode_tps is not None:
        parts.append(f"{result.decode_tps:.1f} tokens/s")
    if result.accept_len is not None and result.pipeline != "plain":
        parts.append(f"accept length {result.accept_len:.2f}")
    if plain_tps and result.decode_tps is not None and result.pipeline != "plain":
        parts.append(f"{result.decode_tps / plain_tps:.2f} times plain")
    parts.append(result.pipeline)
    parts.append(f"prompt {result.prompt_tokens}, {result.reused_tokens} reused")
    if result.finish_reason != "stop":
        parts.append(result.finish_reason)
    return " · ".join(parts)


class Message(NamedTuple):
    """What was typed: a message to answer, or a command."""

    text: str
    is_command: bool = False


def read_message(*, is_terminal: bool) -> Message | None:
    """The next message or command, of one line or several; None at the end of the input.

    Ctrl-C drops what was typed of a message; with nothing typed it raises KeyboardInterrupt, and SIGTERM Terminated.
    """
    lines: list[str] = []
    is_fenced = False
    while True:
        try:
            line = _read_line("... " if lines or is_fenced else "> ", is_terminal=is_terminal)
        except KeyboardInterrupt as interrupt:
            print(file=sys.stderr)
            if isinstance(interrupt, Terminated) or not (lines or is_fenced or _typed_text()):
                raise
            lines, is_fenced = [], False
            continue
        if line is None:
            if is_terminal:
                print(file=sys.stderr)
            return _message(lines, is_fenced) if lines else None
        if line.strip() == FENCE:
            if is_fenced:
                return _message(lines, is_fenced)
            if not lines:
                is_fenced = True
                continue
        if is_fenced:
            lines.append(line)
        elif line.endswith("\\"):
            lines.append(line[:-1])
        else:
            return _message([*lines, line], is_fenced)


def _message(lines: Sequence[str], is_fenced: bool) -> Message:
    """The lines as one; a slash that begins them makes a command, two do not, and between fences it is text."""
    text = "\n".join(lines)
    if is_fenced or not text.startswith("/"):
        return Message(text)
    return Message(text[1:]) if text.startswith("//") else Message(text, is_command=True)


def _read_line(prompt: str, *, is_terminal: bool) -> str | None:
    try:
        if is_terminal:
            return read_text(lambda: input(prompt))
        line = read_text(sys.stdin.readline)
    except EOFError:
        return None
    return line.rstrip("\r\n") if line else None


def _typed_text() -> str:
    """What stood on the line when Ctrl-C was pressed."""
    readline = sys.modules.get("readline")
    return readline.get_line_buffer() if readline is not None else ""


@contextmanager
def _line_history(is_interactive: bool) -> Iterator[None]:
    """Line editing with the messages of earlier chats, where the platform has readline."""
    if not is_interactive:
        yield
        return
    try:
        import readline
    except ImportError:
        yield
        return
    from specq.storage import cache_dir

    file = cache_dir() / "chat_history"
    with suppress(OSError):  # the first chat, or a file of another kind of readline
        readline.read_history_file(file)
    readline.set_history_length(HISTORY_LENGTH)
    try:
        yield
    finally:
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.touch(mode=0o600)
            readline.write_history_file(file)
        except OSError:
            print(f"warning: the history could not be written to `{file}`", file=sys.stderr)


def _greeting(session: ChatSession) -> str:
    pipeline = session.pipeline
    models = ", ".join(pipeline.revisions)
    parts = [
        models,
        pipeline.name,
        f"context {pipeline.context} tokens",
        "/help lists the commands, Ctrl-D leaves",
    ]
    return " · ".join(parts)
