"""Prompts from files, answers kept shard by shard, batches that depend on the seed only."""

from __future__ import annotations

import itertools
import json
import lzma

import pytest
import torch

from specq.errors import UsageError
from specq.recipe import DistillSection
from specq.train.data import AnswerStore, BatchSource, Sequences, choose_prompts, frequent_ids, read_prompts


def test_prompts_are_lines_or_json(tmp_path) -> None:
    text = tmp_path / "a.txt"
    text.write_text("one\n\n two \none\n")
    assert read_prompts(str(text)) == ["one", "two"]
    records = [{"prompt": "three"}, {"turns": ["four", "later"], "source": "x"}]
    packed = tmp_path / "b.jsonl.xz"
    with lzma.open(packed, "wt") as file:
        file.write("\n".join(map(json.dumps, records)))
    assert read_prompts(str(packed)) == ["three", "four"]


@pytest.mark.parametrize("line", ['{"question": "x"}', "plain text", '{"prompt": ""}', "[1]"])
def test_a_line_of_another_form_is_named(tmp_path, line) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text('{"prompt": "fine"}\n' + line + "\n")
    with pytest.raises(UsageError, match="line 2 of"):
        read_prompts(str(file))


@pytest.mark.parametrize("content", [b"", b"\n\n", b"\xff\xfe\x00"])
def test_files_without_prompts_are_usage_errors(tmp_path, content) -> None:
    file = tmp_path / "a.txt"
    file.write_bytes(content)
    with pytest.raises(UsageError):
        read_prompts(str(file))


def test_no_prompt_is_both_trained_and_evaluated_on(tmp_path) -> None:
    file = tmp_path / "a.txt"
    file.write_text("\n".join(f"prompt {i}" for i in range(40)))
    training, held_out = choose_prompts(DistillSection(prompts=str(file), held_out=5, max_prompts=20))
    assert (len(training), len(held_out)) == (20, 5)
    assert not set(training) & set(held_out)
    assert choose_prompts(DistillSection(prompts=str(file), held_out=5, seed=1))[1] != held_out
    training, held_out = choose_prompts(DistillSection(prompts=str(file), eval_prompts=str(file), held_out=5))
    assert not set(training) & set(held_out)
    with pytest.raises(UsageError, match="leave none to train on"):
        choose_prompts(DistillSection(prompts=str(file), held_out=40))


def test_bundled_prompts_are_many_and_none_twice() -> None:
    assert len(read_prompts("bundled")) > 100


class Writer:
    """Answers every prompt with its reversal, and counts."""

    def __init__(self, stop_after: int = 1000) -> None:
        self.calls: list[tuple[float, int]] = []
        self.stop_after = stop_after

    def __call__(self, prompts, temperature: float, number: int) -> list[list[int]]:
        if len(self.calls) == self.stop_after:
            raise KeyboardInterrupt
        self.calls.append((temperature, number))
        return [ids[::-1] for ids in prompts]


def test_answers_of_a_stopped_run_are_not_written_again(tmp_path) -> None:
    prompts = [[i + 1] * (i % 3 + 1) + [99] for i in range(10)]
    options = {"temperatures": (0.0, 1.0), "shard": 4, "say": lambda text: None}
    with pytest.raises(KeyboardInterrupt):
        AnswerStore(tmp_path).collect(prompts, Writer(stop_after=4), **options)
    later = Writer()
    sequences = AnswerStore(tmp_path).collect(prompts, later, **options)
    assert later.calls == [(1.0, 4), (1.0, 5)]
    assert sequences == AnswerStore(tmp_path / "new").collect(prompts, Writer(), **options)
    assert len(sequences.ids) == 20
    for ids, start in zip(sequences.ids, sequences.starts, strict=True):
        assert ids[start:] == ids[:start][::-1]
        assert ids[:start] in prompts


def some_sequences() -> Sequences:
    draws = torch.Generator().manual_seed(5)
    lengths = torch.randint(3, 90, (60,), generator=draws).tolist()
    return Sequences([[i + 1] * n for i, n in enumerate(lengths)], [n // 2 for n in lengths])


def test_batches_hold_every_sequence_once_an_epoch_within_their_size() -> None:
    source = BatchSource(some_sequences(), length=80, batch_tokens=512, seed=3)
    epoch = list(itertools.islice(source.batches(0), source.per_epoch))
    assert all(batch.tokens.numel() <= 512 and batch.tokens.shape[1] % 64 == 0 for batch in epoch)
    seen = sorted(int(row[0]) for batch in epoch for row in batch.tokens)
    assert seen == list(range(1, 61))


def test_positions_are_those_before_each_answer_id() -> None:
    sequences = some_sequences()
    learnt: dict[int, list[int]] = {}
    source = BatchSource(sequences, length=80, batch_tokens=512, seed=3)
    for batch in itertools.islice(source.batches(0), source.per_epoch):
        for flat in batch.positions.tolist():
            row, position = divmod(flat, batch.tokens.shape[1])
            learnt.setdefault(int(batch.tokens[row, 0]), []).append(position)
    for ids, start in zip(sequences.ids, sequences.starts, strict=True):
        assert learnt.get(ids[0], []) == list(range(start - 1, min(len(ids), 80) - 1))


def test_batches_go_on_where_a_stopped_run_ended() -> None:
    source = BatchSource(some_sequences(), length=80, batch_tokens=512, seed=3)
    count = 2 * source.per_epoch + 3
    whole = list(itertools.islice(source.batches(0), count))
    for first in (1, source.per_epoch, source.per_epoch + 2):
        rest = list(itertools.islice(source.batches(first), count - first))
        assert all(torch.equal(a.tokens, b.tokens) for a, b in zip(whole[first:], rest, strict=True))
    other = BatchSource(some_sequences(), length=80, batch_tokens=512, seed=4)
    assert not all(torch.equal(a.tokens, b.tokens) for a, b in zip(whole, other.batches(0), strict=False))


def test_answers_that_begin_too_late_are_an_error() -> None:
    with pytest.raises(UsageError, match="no answer begins before token 2"):
        BatchSource(Sequences([[1, 2, 3, 4]], [3]), length=2, batch_tokens=64, seed=0)


def test_frequent_ids_are_counted_in_answers_only() -> None:
    sequences = Sequences([[7, 7, 7, 5, 3, 5], [7, 2, 5]], [3, 1])
    assert frequent_ids(sequences, 1, vocab=9).tolist() == [5]
    assert frequent_ids(sequences, 4, vocab=9).tolist() == [0, 2, 3, 5]
