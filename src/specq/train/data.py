"""What a drafter is trained on: prompts, the target's answers to them (kept on disk as they come), and batches."""

from __future__ import annotations

import gzip
import hashlib
import json
import lzma
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from specq.errors import UsageError
from specq.files import named_path, write_atomically
from specq.recipe import DistillSection
from specq.tokenizer import Tokenizer
from specq.train.batch import pad

BUNDLED = "bundled"
OPENERS: dict[str, Callable[..., Any]] = {".xz": lzma.open, ".gz": gzip.open}
LENGTH_MULTIPLE = 64
SORTED_BATCHES = 32
"""Batches cut from one sorted stretch: sequences of like length go together, order stays random beyond it."""


@dataclass(frozen=True)
class Sequences:
    """Prompts with their answers as one run of ids each; `starts[i]` is where the answer of `ids[i]` begins."""

    ids: list[list[int]]
    starts: list[int]

    @property
    def answer_tokens(self) -> int:
        return sum(len(ids) - start for ids, start in zip(self.ids, self.starts, strict=True))


@dataclass(frozen=True)
class Batch:
    """int64 `tokens` [batch, length], padded at the end, and the flat indices of positions whose next id is to be
    learnt: `positions` int64 [rows], those of the ids before each answer id. `texts` are the sequences' numbers."""

    tokens: Tensor
    positions: Tensor
    texts: tuple[int, ...] = ()


def read_prompts(source: str) -> list[str]:
    """The prompts of a file: one a line, or .jsonl with `prompt`, or the first of `turns` (also .xz and .gz).

    "bundled" are specq's own. Raises UsageError naming the line that is of no such form.
    """
    path = Path(__file__).parent / "text" / "prompts.txt" if source == BUNDLED else named_path(source)
    if not path.is_file():
        raise UsageError(f"there is no file of prompts `{source}`", hint="give --prompts FILE, or leave it out")
    name = path.name.removesuffix(path.suffix) if path.suffix in OPENERS else path.name
    try:
        with OPENERS.get(path.suffix, open)(path, "rt", encoding="utf-8") as file:
            lines = [line.strip() for line in file]
    except UnicodeDecodeError:
        raise UsageError(
            f"`{path}` is no text in UTF-8", hint="give prompts one a line, or .jsonl, also as .xz or .gz"
        ) from None
    except (OSError, EOFError, lzma.LZMAError) as error:
        raise UsageError(f"`{path}` cannot be read: {error}", hint="give another file with --prompts") from error
    numbered = [(number, line) for number, line in enumerate(lines, 1) if line]
    prompts = [_prompt_of(path, number, line) for number, line in numbered] if name.endswith(".jsonl") else None
    found = [line for _, line in numbered] if prompts is None else prompts
    if not found:
        raise UsageError(f"`{path}` holds no prompts", hint="one a line, or .jsonl with `prompt` or `turns`")
    return list(dict.fromkeys(found))


def _prompt_of(path: Path, number: int, line: str) -> str:
    try:
        record = json.loads(line)
    except ValueError:
        record = None
    turns = record.get("turns") if isinstance(record, dict) else None
    text = turns[0] if isinstance(turns, list) and turns else record.get("prompt") if isinstance(record, dict) else None
    if not isinstance(text, str) or not text.strip():
        raise UsageError(
            f"line {number} of `{path}` has neither a text `prompt` nor `turns`",
            hint='a line looks like {"prompt": "Name three rivers"}',
        )
    return text.strip()


def choose_prompts(settings: DistillSection) -> tuple[list[str], list[str]]:
    """(prompts to train on, prompts to evaluate on), chosen by the seed; none is both.

    Raises UsageError when none is left to train on.
    """
    found = _shuffled(read_prompts(settings.prompts), settings.seed)
    judging = found if settings.eval_prompts is None else _shuffled(read_prompts(settings.eval_prompts), settings.seed)
    held_out = judging[: settings.held_out]
    training = [text for text in found if text not in set(held_out)][: settings.max_prompts]
    if not training:
        raise UsageError(
            f"{len(found)} prompts leave none to train on beside {settings.held_out} held out",
            hint="give more prompts, or --set distill.held_out=N",
        )
    return training, held_out


def _shuffled(prompts: Sequence[str], seed: int) -> list[str]:
    return sorted(prompts, key=lambda text: hashlib.sha256(f"{seed}:{text}".encode()).digest())


def encode_prompts(tokenizer: Tokenizer, prompts: Sequence[str], *, longest: int) -> list[list[int]]:
    """The ids of each prompt that is no longer, see `fitting_prompts`. Raises UsageError when none is left."""
    fitting = fitting_prompts(tokenizer, prompts, longest=longest)
    if not fitting:
        raise UsageError(f"no prompt has 1 to {longest} tokens", hint="--set distill.length=N allows longer ones")
    return fitting


def fitting_prompts(tokenizer: Tokenizer, prompts: Sequence[str], *, longest: int) -> list[list[int]]:
    """The ids of each prompt as a chat's first turn (as plain text for a base model); longer ones are left out."""
    has_template = tokenizer.chat_template is not None
    encoded = [
        tokenizer.encode_chat([{"role": "user", "content": text}]) if has_template else tokenizer.encode(text)
        for text in prompts
    ]
    return [ids for ids in encoded if 0 < len(ids) <= longest]


class AnswerStore:
    """Answers in a folder, a file a shard; a killed run is taken up after its last whole shard."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def collect(
        self,
        prompts: Sequence[list[int]],
        write: Callable[[Sequence[list[int]], float, int], list[list[int]]],
        *,
        temperatures: Sequence[float],
        shard: int,
        say: Callable[[str], None],
    ) -> Sequences:
        """Every prompt's answer at every temperature; `write(prompts, temperature, seed)` makes those of a shard."""
        self.folder.mkdir(parents=True, exist_ok=True)
        ordered = sorted(prompts, key=len)
        jobs = [
            (temperature, ordered[first : first + shard])
            for temperature in temperatures
            for first in range(0, len(ordered), shard)
        ]
        ids: list[list[int]] = []
        starts: list[int] = []
        for number, (temperature, part) in enumerate(jobs):
            file = self.folder / f"answers-{number:05}.safetensors"
            if not file.is_file():
                answers = write(part, temperature, number)
                _write_answers(file, [[*p, *a] for p, a in zip(part, answers, strict=True)], [len(p) for p in part])
            more_ids, more_starts = _read_answers(file)
            ids += more_ids
            starts += more_starts
            say(f"{len(ids)} of {len(prompts) * len(temperatures)}")
        return Sequences(ids, starts)


def _write_answers(file: Path, sequences: list[list[int]], starts: list[int]) -> None:
    flat = [token for ids in sequences for token in ids]
    parts = {"tokens": flat, "lengths": [len(ids) for ids in sequences], "starts": starts}
    with write_atomically(file) as path:
        save_file({name: torch.tensor(values, dtype=torch.int32) for name, values in parts.items()}, path)


def _read_answers(file: Path) -> tuple[list[list[int]], list[int]]:
    with safe_open(file, framework="pt") as shard:
        tokens, lengths = shard.get_tensor("tokens"), shard.get_tensor("lengths").tolist()
        return [part.tolist() for part in tokens.split(lengths)], shard.get_tensor("starts").tolist()


class BatchSource:
    """Endless batches of at most `batch_tokens` padded positions; the same seed gives the same batches."""

    def __init__(self, sequences: Sequences, *, length: int, batch_tokens: int, seed: int) -> None:
        """Sequences are cut at `length`; those whose answer then has no id left are dropped."""
        self._rows = [
            (ids[:length], start) for ids, start in zip(sequences.ids, sequences.starts, strict=True) if start < length
        ]
        self._batch_tokens, self._seed = batch_tokens, seed
        if not self._rows:
            raise UsageError(
                f"no answer begins before token {length}", hint="--set distill.length=N allows longer ones"
            )

    def batches(self, first: int) -> Iterator[Batch]:
        """The batches from number `first` on, epoch after epoch."""
        epoch = 0
        while True:
            chosen = self._epoch(epoch)
            for rows in chosen[first:]:
                yield self._batch(rows)
            first = max(0, first - len(chosen))
            epoch += 1

    @property
    def lengths(self) -> list[int]:
        """Ids of each sequence, by the number that batches give it."""
        return [len(ids) for ids, _ in self._rows]

    @property
    def per_epoch(self) -> int:
        """Batches in the first epoch; later ones differ by a few."""
        return len(self._epoch(0))

    def _epoch(self, epoch: int) -> list[list[int]]:
        """Row numbers of each batch."""
        draws = random.Random(f"{self._seed}:{epoch}")
        order = list(range(len(self._rows)))
        draws.shuffle(order)
        mean = sum(len(ids) for ids, _ in self._rows) / len(self._rows)
        stretch = max(1, int(self._batch_tokens / mean)) * SORTED_BATCHES
        cut: list[list[int]] = []
        for begin in range(0, len(order), stretch):
            part = sorted(order[begin : begin + stretch], key=lambda row: len(self._rows[row][0]))
            cut += self._cut(part)
        draws.shuffle(cut)
        return cut

    def _cut(self, rows: list[int]) -> list[list[int]]:
        batches: list[list[int]] = []
        for row in rows:
            padded = -(-len(self._rows[row][0]) // LENGTH_MULTIPLE) * LENGTH_MULTIPLE
            if batches and (len(batches[-1]) + 1) * padded <= self._batch_tokens:
                batches[-1].append(row)
            else:
                batches.append([row])
        return batches

    def _batch(self, rows: list[int]) -> Batch:
        chosen = [self._rows[row] for row in rows]
        tokens = pad([ids for ids, _ in chosen], multiple=LENGTH_MULTIPLE)
        width = tokens.shape[1]
        spans = [torch.arange(start - 1, len(ids) - 1) + row * width for row, (ids, start) in enumerate(chosen)]
        return Batch(tokens, torch.cat(spans), tuple(rows))


def frequent_ids(sequences: Sequences, count: int, *, vocab: int) -> Tensor:
    """The `count` ids that answers hold most often, ascending; ids that never occur fill up from the lowest."""
    counts = torch.zeros(vocab, dtype=torch.int64)
    for ids, start in zip(sequences.ids, sequences.starts, strict=True):
        counts += torch.bincount(torch.tensor(ids[start:], dtype=torch.int64), minlength=vocab)
    return counts.argsort(descending=True, stable=True)[:count].sort().values
