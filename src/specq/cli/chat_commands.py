"""The commands of a chat, those lines that begin with a slash."""

from __future__ import annotations

from collections.abc import Callable
from difflib import get_close_matches

from specq.cli.chat_session import ChatSession
from specq.cli.console import Console, table
from specq.errors import UsageError
from specq.files import read_text
from specq.words import counted


class ChatCommands:
    """Runs commands on a session. `answer` shows the answer to a text; `is_over` is set by /quit."""

    def __init__(self, session: ChatSession, console: Console, *, answer: Callable[[str], None]) -> None:
        self._session, self._console, self._answer = session, console, answer
        self.is_over = False
        self._commands: dict[str, tuple[str, str, Callable[[str], None]]] = {
            "help": ("", "this list", self._help),
            "stats": ("", "figures of the last answer and of the chat", self._stats),
            "reset": ("", "forget every turn, keep the system message", self._reset),
            "undo": ("", "take the last turn back", self._undo),
            "retry": ("", "answer the last message again", self._retry),
            "system": ("[TEXT]", "show the system message, or set it (- for none)", self._system),
            "save": ("FILE", "write the chat to a file", self._save),
            "load": ("FILE", "go on with a saved chat", self._load),
            "spec": ("[PIPELINE|auto|off]", "show the pipelines, or decode with another", self._spec),
            "set": ("[KEY VALUE]", "show the settings, or change one (`default` undoes it)", self._set),
            "quit": ("", "leave", self._quit),
        }

    def run(self, line: str) -> None:
        """Runs one command line. Raises UsageError for what it cannot do."""
        name, _, argument = line[1:].strip().partition(" ")
        if name not in self._commands:
            near = get_close_matches(name, self._commands, n=1)
            hint = f"did you mean `/{near[0]}`?" if near else "/help lists them; // begins a message with a slash"
            raise UsageError(f"there is no command `/{name}`", hint=hint)
        form, _, action = self._commands[name]
        argument = argument.strip()
        if argument and not form:
            raise UsageError(f"`/{name}` takes nothing after it, not `{argument}`")
        if not argument and form and not form.startswith("["):
            raise UsageError(f"`/{name}` needs a file", hint=f"/{name} {form}")
        action(argument)

    def _help(self, argument: str) -> None:
        rows = [(f"/{name} {form}".strip(), says) for name, (form, says, _) in self._commands.items()]
        self._console.reply(table(rows))

    def _stats(self, argument: str) -> None:
        results = self._session.results
        if not results:
            raise UsageError("there is no answer yet")
        record = results[-1].record()
        rows = [
            (name, f"{value:.4g}" if isinstance(value, float) else str(value))
            for name, value in record.items()
            if value is not None and name not in ("text", "token_ids")
        ]
        tokens = sum(result.tokens_out for result in results)
        rows += [
            ("answers", str(len(results))),
            ("tokens in all", str(tokens)),
            (
                "turns",
                f"{len(self._session.turns)}, {self._session.num_dropped} of them no longer in the context",
            ),
        ]
        self._console.reply(table(rows))

    def _reset(self, argument: str) -> None:
        self._session.reset()
        self._console.reply("the chat begins anew")

    def _undo(self, argument: str) -> None:
        turn = self._session.undo()
        self._console.reply(f"taken back: {turn.user}")

    def _retry(self, argument: str) -> None:
        with self._session.without_last() as turn:
            self._answer(turn.user)

    def _system(self, argument: str) -> None:
        if argument and self._session.is_raw:
            raise UsageError("a system message needs a chat template, and `--raw` uses none")
        if argument:
            self._session.system = None if argument == "-" else argument
        self._console.reply(f"system: {self._session.system or '(none)'}")

    def _save(self, argument: str) -> None:
        self._session.save(argument)
        self._console.reply(f"saved {counted(len(self._session.turns), 'turn')} to {argument}")

    def _load(self, argument: str) -> None:
        self._session.load(read_text(argument))
        self._console.reply(f"loaded {counted(len(self._session.turns), 'turn')} from {argument}")

    def _spec(self, argument: str) -> None:
        pipeline = self._session.pipeline
        if argument:
            pipeline.use(argument)
        rows = []
        for name, reason in pipeline.available.items():
            is_running = name == pipeline.name
            chosen = " (auto: a profile chose it)" if is_running and pipeline.is_auto else ""
            rows.append(("*" if is_running else "", name, (reason or "available") + chosen))
        self._console.reply(table(rows))

    def _set(self, argument: str) -> None:
        key, _, value = argument.partition(" ")
        if key and not value.strip():
            raise UsageError(f"`/set {key}` lacks a value", hint="/set KEY VALUE, for example /set temperature 0.7")
        if key:
            self._session.set(key, value.strip())
        self._console.reply(table(list(self._session.settings().items())))

    def _quit(self, argument: str) -> None:
        self.is_over = True
