"""Text that calibrates and text that evaluates, as token ids of one model; the two never share a document."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from specq.errors import OfflineError, UsageError
from specq.files import named_path, read_text
from specq.storage import is_offline
from specq.tokenizer import Tokenizer

BUNDLED = "bundled"
HUB_PREFIX = "hub:"
DOCUMENT_SEPARATOR = "\n\f\n"
HUB_SUFFIXES = (".jsonl", ".txt")
LEAST_TOKENS = 16
"""A shorter sequence says nothing."""


@dataclass(frozen=True)
class TokenSet:
    """Sequences of equal length [samples, seq_len] (int64), where they come from, and a hash of their ids."""

    tokens: Tensor
    origin: str

    @property
    def digest(self) -> str:
        """sha256 of shape and ids: two runs with the same digest saw the same tokens."""
        shape = "x".join(map(str, self.tokens.shape))
        return hashlib.sha256(f"{shape}:".encode() + self.tokens.numpy().tobytes()).hexdigest()


def calibration_tokens(
    tokenizer: Tokenizer, source: str, *, samples: int, seq_len: int, offline: bool | None = None
) -> TokenSet:
    """At most `samples` sequences of `seq_len` tokens, spread evenly over the text of `source`.

    `source` is "bundled", a .txt or .jsonl file, or hub:ORG/DATASET[/FILE]. Raises UsageError where there is not
    one whole sequence in it.
    """
    if source == BUNDLED:
        documents, origin = _bundled("calibration"), BUNDLED
    elif source.startswith(HUB_PREFIX):
        path, origin = _hub_file(source.removeprefix(HUB_PREFIX), offline)
        documents = _file_documents(path, tokenizer)
    else:
        path = named_path(source)
        documents, origin = _file_documents(path, tokenizer), f"file {path.name}"
    return TokenSet(_sequences(tokenizer, documents, samples, seq_len, origin), origin)


def evaluation_tokens(tokenizer: Tokenizer, *, samples: int, seq_len: int) -> TokenSet:
    """Sequences of the bundled evaluation text, as `calibration_tokens`."""
    documents = _bundled("evaluation")
    return TokenSet(_sequences(tokenizer, documents, samples, seq_len, BUNDLED), BUNDLED)


def _bundled(name: str) -> Iterator[str]:
    text = (Path(__file__).parent / "text" / f"{name}.txt").read_text(encoding="utf-8")
    yield from text.split(DOCUMENT_SEPARATOR)


def _sequences(tokenizer: Tokenizer, documents: Iterator[str], samples: int, seq_len: int, origin: str) -> Tensor:
    """[samples, seq_len] ids, each sequence begun as the tokenizer begins a text (with BOS where it has one)."""
    start = tokenizer.encode("")
    length = seq_len - len(start)
    if length < LEAST_TOKENS:
        raise UsageError(
            f"sequences of {seq_len} tokens are too short", hint=f"give --seq-len {LEAST_TOKENS * 2} or more"
        )
    ids: list[int] = []
    for document in documents:
        ids += tokenizer.encode(document, special_tokens=False)
    available = len(ids) // length
    if available == 0:
        raise UsageError(
            f"calibration text `{origin}` has {len(ids)} tokens, less than one sequence of {seq_len}",
            hint=f"give more text, or --seq-len {len(ids) // 8}" if len(ids) >= 16 * LEAST_TOKENS else "give more text",
        )
    count = min(samples, available)
    chosen = [i * available // count for i in range(count)]
    return torch.tensor([[*start, *ids[i * length : (i + 1) * length]] for i in chosen])


def _file_documents(path: Path, tokenizer: Tokenizer) -> Iterator[str]:
    """The documents of a text file (one), or of a .jsonl file: a line each, with `text` or `messages`."""
    content = read_text(path, hint="--calib takes bundled, a .txt or .jsonl file, or hub:ORG/DATASET")
    if path.suffix != ".jsonl":
        yield from content.split(DOCUMENT_SEPARATOR)
        return
    for number, line in enumerate(content.splitlines(), 1):
        if line.strip():
            yield _document(line, f"{path.name}:{number}", tokenizer)


def _document(line: str, where: str, tokenizer: Tokenizer) -> str:
    try:
        record = json.loads(line)
    except ValueError:
        raise UsageError(f"`{where}` is not JSON", hint="a .jsonl file holds one JSON object a line") from None
    if isinstance(record, dict) and isinstance(record.get("text"), str):
        return record["text"]
    if isinstance(record, dict) and isinstance(record.get("messages"), list):
        if tokenizer.chat_template is None:
            raise UsageError(
                f"`{where}` holds messages, and the model has no chat template", hint="give `text` instead"
            )
        return tokenizer.render_chat(record["messages"], add_generation_prompt=False)
    raise UsageError(f"`{where}` has neither `text` nor `messages`", hint='for example {"text": "..."}')


def _hub_file(name: str, offline: bool | None) -> tuple[Path, str]:
    """A text file of a Hub dataset, in the Hub's cache, and what to call it with its revision."""
    from specq.hub_download import dataset_file, dataset_files

    parts = name.split("/", 2)
    if len(parts) < 2 or not all(parts):
        raise UsageError(
            f"`{HUB_PREFIX}{name}` names no dataset", hint="for example --calib hub:ORG/DATASET/file.jsonl"
        )
    repo, file = "/".join(parts[:2]), parts[2] if len(parts) == 3 else None
    if file is None:
        if is_offline(offline):
            raise OfflineError(
                f"the files of dataset `{repo}` cannot be listed offline", hint="name one: hub:ORG/DATASET/file.jsonl"
            )
        file = next((name for name in dataset_files(repo) if name.endswith(HUB_SUFFIXES)), None)
        if file is None:
            raise UsageError(
                f"dataset `{repo}` holds no .jsonl or .txt file", hint="convert it, and give the file with --calib"
            )
    path = dataset_file(repo, file, offline=is_offline(offline))
    revision = path.parts[path.parts.index("snapshots") + 1] if "snapshots" in path.parts else "?"
    return path, f"{HUB_PREFIX}{repo}/{file} at {revision}"
