"""The command `specq`: its verbs, imported when used, and the one place where errors become messages."""

from __future__ import annotations

import importlib
import re
import sys
import traceback
from collections.abc import Sequence
from typing import Annotated, Any, NoReturn

import typer

from specq.cli.console import (
    TEXT_HINT,
    ClosedOutput,
    Terminated,
    discard_output,
    is_debugging,
    open_missing_streams,
    raised_at_sigterm,
    report,
)
from specq.cli.options import NearMissGroup, nearest
from specq.errors import NotEnoughMemoryError, SpecqError, UsageError
from specq.files import is_text, refusal

# verb: what the overview says of it; the module specq.cli.VERB holds the typer app that runs it
VERBS = {
    "chat": "Chat with a model on the terminal, or with lines from standard input.",
    "run": "Write one answer to standard output.",
    "quantize": "Write a model in 4 bits, layer by layer, and measure what that lost.",
    "distill": "Train a drafter on text that the target writes itself.",
    "fetch": "Fetch a known drafter for a model, and check that they fit.",
    "profile": "Measure what verification costs here, and choose the pipeline for it.",
    "bench": "Time pipelines side by side on the same prompts.",
    "verify": "Prove or refute that pipelines give plain decoding's text.",
    "check": "Say test by test whether a target and a drafter fit.",
    "doctor": "Show what this machine has, and what a model would need.",
    "recipe": "List, show or check recipes.",
    "cache": "List or remove what specq keeps on disk.",
}
INTERRUPTED, TERMINATED = 130, 143


class Verbs(NearMissGroup):
    """The overview; a verb's own module is imported only when the verb is called."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(VERBS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in VERBS:
            return None
        module = importlib.import_module(f"specq.cli.{cmd_name}")
        command = typer.main.get_command(module.app)
        command.name = cmd_name
        return command

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        with formatter.section("Verbs"):
            formatter.write_dl(list(VERBS.items()))

    def invoke(self, ctx: Any) -> Any:
        try:
            result = super().invoke(ctx)
            sys.stdout.flush()
        except BrokenPipeError as error:
            raise ClosedOutput from error  # before the parser's own main turns it into exit code 1
        except Terminated as error:
            raise typer.Exit(TERMINATED) from error  # else it takes it for Ctrl-C
        return result


app = typer.Typer(
    cls=Verbs,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback(invoke_without_command=True)
def overview(
    ctx: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Show the version and exit.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="With --version: one JSON document.")] = False,
) -> None:
    """Quantize a language model to 4 bits and decode it with the fastest lossless pipeline.

    MODEL is a recipe (a name or a .yaml file), a local folder or a Hub id; without it the built-in demo model
    runs.
    """
    if version:
        _print_version(as_json=as_json)
        raise typer.Exit()
    if as_json:
        hint = f"specq {ctx.invoked_subcommand or 'VERB'} --json"
        raise UsageError("`--json` stands after the verb", hint=hint)
    if ctx.invoked_subcommand is None:
        print(ctx.get_help(), file=sys.stderr)
        raise typer.Exit(UsageError.exit_code)


def _print_version(*, as_json: bool) -> None:
    import json
    import platform
    from importlib.metadata import PackageNotFoundError, version

    versions: dict[str, str | None] = {"specq": version("specq"), "python": platform.python_version()}
    for package in ("torch", "triton", "transformers", "tokenizers"):
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = None
    print(json.dumps(versions) if as_json else f"specq {versions['specq']}")


@raised_at_sigterm()
def main(argv: Sequence[str] | None = None) -> int:
    """The exit code of one command line; every error has become a message on standard error.

    SIGTERM ends it as Ctrl-C does.
    """
    open_missing_streams()
    command = typer.main.get_command(app)
    args = list(sys.argv[1:] if argv is None else argv)
    try:
        if wrong := next((number for number, text in enumerate(args, 1) if not is_text(text)), None):
            raise UsageError(f"argument {wrong} is not UTF-8 text", hint=TEXT_HINT)
        try:
            code = command.main(args=args, prog_name="specq", standalone_mode=False)
        except typer.TyperException as error:  # the parser's own words, in our form
            raise _usage_error(error) from None
        return code if isinstance(code, int) else 0
    except SpecqError as error:
        report(error)
        return error.exit_code
    except (KeyboardInterrupt, typer.Abort):
        return INTERRUPTED
    except ClosedOutput:
        discard_output()
        return 0
    except Exception as error:  # noqa: BLE001 - the last line of defence: a bug becomes one line, not a wall
        if is_out_of_memory(error):
            said = "".join(f": {line.rstrip('.')}" for line in str(error).splitlines()[:1])
            hint = "a smaller --context, a smaller or 4-bit model, or end what else uses the device"
            report(NotEnoughMemoryError(f"the memory ran out{said}", hint=hint))
            return NotEnoughMemoryError.exit_code
        if isinstance(error, OSError) and (refused := refusal(error)):
            report(refused)
            return refused.exit_code
        if is_debugging():
            traceback.print_exc()
        else:
            what = f"{type(error).__name__}: {error}".splitlines()[0]
            report(SpecqError(f"unexpected {what}", hint="set SPECQ_DEBUG=1 for the traceback"))
        return 1


def entry() -> NoReturn:
    """Runs `specq` and leaves with its exit code."""
    sys.exit(main())


def is_out_of_memory(error: Exception) -> bool:
    """Whether torch or Python could get no more memory, of a GPU or of the machine; told without importing torch."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    signs = ("CUDA error: out of memory", "CUBLAS_STATUS_ALLOC_FAILED", "DefaultCPUAllocator: can't allocate memory")
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in signs)


def _usage_error(error: typer.TyperException) -> UsageError:
    """The parser's error in specq's form: lower case, no full stop, values in backticks, a hint."""
    context = getattr(error, "ctx", None)
    help_command = f"{context.command_path if context else 'specq'} --help"
    option = getattr(error, "option_name", None)
    if option is not None and type(error).__name__ == "NoSuchOption":
        known = [name for p in context.command.get_params(context) for name in p.opts] if context else []
        return UsageError(f"no such option `{option}`", hint=nearest(option, known, "{}", help_command))
    said = (
        " ".join(error.format_message().split()).replace(": Value error, ", ": ").replace(". Choose from:", ": one of")
    )
    text = re.sub(r"'([^']*)'", r"`\1`", said).rstrip(".")
    text = re.sub(r"(^|: )([A-Z])(?![A-Z])", lambda m: m[1] + m[2].lower(), text)
    return UsageError(text, hint=help_command)
