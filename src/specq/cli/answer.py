"""What run and chat have in common: loading what the flags say, and showing an answer while it comes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from specq.cli.console import Console
from specq.cli.options import PipelineOptions, PromptOptions, SamplingOptions, Thinking
from specq.cli.thinking import Piece, ThinkingSplitter
from specq.errors import UsageError
from specq.recipe import resolve

if TYPE_CHECKING:
    from specq.spec.session import Pipeline


def open_pipeline(
    model: str | None,
    *,
    pipeline: PipelineOptions,
    sampling: SamplingOptions,
    prompt: PromptOptions,
    console: Console,
) -> Pipeline:
    """The pipeline a MODEL argument and the flags mean, with its models in memory."""
    overrides = [*pipeline.overrides(), *sampling.overrides()]
    recipe = resolve(model, overrides=overrides)
    template = prompt.template()
    from specq.spec.load import load_pipeline

    progress = console.progress()
    try:
        loaded = load_pipeline(
            recipe,
            device=pipeline.device,
            dtype=pipeline.dtype.value,
            threads=pipeline.threads,
            offline=pipeline.offline or None,
            use_graphs=not pipeline.no_graphs,
            on_progress=progress,
        )
    finally:
        progress.clear()
    use_template(loaded, template, prompt)
    return loaded


def use_template(pipeline: Pipeline, template: str | None, prompt: PromptOptions) -> None:
    """Puts the template in the place of the model's own. Raises UsageError for a system message and no template."""
    if template is not None:
        pipeline.tokenizer.use_chat_template(template)
    if prompt.system is not None and pipeline.tokenizer.chat_template is None:
        hint = "leave it out, or give --chat-template FILE"
        raise UsageError("`--system` needs a chat template, and the model has none", hint=hint)


class AnswerWriter:
    """Writes an answer as it comes: thinking grey on a terminal, or left out."""

    def __init__(self, console: Console, *, thinking: Thinking, is_inside: bool) -> None:
        self._console = console
        self._hides = thinking is Thinking.hide
        self._splitter = ThinkingSplitter(is_inside=is_inside)
        self._hid_something = False
        self._last = ""

    def push(self, text: str) -> None:
        self._show(self._splitter.push(text))

    def end(self) -> None:
        """Writes what was held back, and ends the line."""
        self._show(self._splitter.flush())
        if not self._last.endswith("\n"):
            self._console.write("\n")

    def _show(self, pieces: list[Piece]) -> None:
        for text, is_thinking in pieces:
            if is_thinking and self._hides:
                self._hid_something = True
                continue
            if self._hid_something and not self._last:
                text = text.lstrip()
            if text:
                self._console.write(self._console.dim(text, self._console.data) if is_thinking else text)
                self._last = text
