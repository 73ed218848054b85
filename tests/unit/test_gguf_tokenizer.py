"""GGUF vocabularies become the tokenizer the model was trained with, whatever llama.cpp's names leave out."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import pytest
from tiny_tokenizers import CHATML, gguf_metadata, write_gguf

from specq import gguf_tokenizer
from specq.errors import UnsupportedError, UsageError
from specq.tokenizer import Tokenizer

TEXTS = [
    "hello 2024, the cat's 12345\n\n  x",
    "a<|im_end|>b",
    "caf\u00e9 cafe\u0301 \uc0bc\uacb9\uc0b4",
    "I'LL x_y  \t z!!\r\n",
]


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECQ_CACHE", str(tmp_path / "cache"))


def test_qwen_ids_equal_those_of_its_own_tokenizer_class() -> None:
    from transformers import Qwen2Tokenizer

    content = gguf_metadata("qwen2")
    tokens = content["tokenizer.ggml.tokens"][:-3]
    theirs = Qwen2Tokenizer(
        vocab={token: index for index, token in enumerate(tokens)},
        merges=[tuple(merge.split(" ")) for merge in content["tokenizer.ggml.merges"]],
        extra_special_tokens=tokens[:3],
    )
    ours = gguf_tokenizer.build_tokenizer(content)
    for text in TEXTS:
        assert ours.encode(text).ids == theirs(text)["input_ids"], text


def test_smollm_digits_stay_apart_though_a_merge_exists() -> None:
    digits = gguf_tokenizer.build_tokenizer(gguf_metadata("smollm")).encode("x 2024").tokens
    assert digits == ["x", "\u0120", "2", "0", "2", "4"]
    assert gguf_tokenizer.build_tokenizer(gguf_metadata("gpt-2")).encode("2024").tokens == ["2024"]


def test_llama3_groups_three_digits_and_starts_with_bos() -> None:
    backend = gguf_tokenizer.build_tokenizer(gguf_metadata("llama-bpe"))
    assert backend.encode("2024").tokens == ["<|im_start|>", "202", "4"]
    without = gguf_metadata("llama-bpe", **{"tokenizer.ggml.add_bos_token": False})
    assert gguf_tokenizer.build_tokenizer(without).encode("2024").tokens == ["202", "4"]


@pytest.mark.parametrize("pre", sorted(gguf_tokenizer.PRE_TOKENIZERS))
def test_loaded_gguf_keeps_control_tokens_single_and_text_whole(pre: str, tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(write_gguf(tmp_path, gguf_metadata(pre)))
    for text in TEXTS:
        back = tokenizer.decode(tokenizer.encode(text, special_tokens=False), skip_special=False)
        assert back == (tokenizer.backend.normalizer.normalize_str(text) if pre.endswith(("qwen", "qwen2")) else text)
    assert tokenizer.encode("<|im_start|><|im_end|><tool>", special_tokens=False)[:2] == [1, 2]
    assert len(tokenizer.encode("<tool>", special_tokens=False)) == 1
    assert tokenizer.decode(tokenizer.encode("<|im_end|><tool>", special_tokens=False)) == "<tool>"
    assert (tokenizer.bos_id, tokenizer.eos_ids, tokenizer.chat_template) == (1, {2}, CHATML)
    assert "[PAD1]" not in tokenizer.id_table().values()


PIECES = ["\u2581", "t", "h", "e", "c", "a", "\u2581t", "he", "\u2581the", "ca", "cat", "\u2581cat"]


def pieces_metadata(**changes: Any) -> dict[str, Any]:
    """A vocabulary as sentencepiece trains it: later pieces have lower scores."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *PIECES, "<tool>"]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [0.0] * 259 + [-float(rank) for rank in range(len(PIECES))] + [0.0],
        "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * len(PIECES) + [4],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        **changes,
    }


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("the cat", ["<s>", "\u2581the", "\u2581cat"]),
        ("  the", ["<s>", "\u2581", "\u2581", "\u2581the"]),
        ("at\u00e9", ["<s>", "\u2581", "a", "t", "<0xC3>", "<0xA9>"]),
        ("he</s><tool>", ["<s>", "\u2581", "he", "</s>", "<tool>"]),
        ("", ["<s>"]),
    ],
)
def test_sentencepiece_vocabulary_merges_by_score(text: str, pieces: list[str], tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(write_gguf(tmp_path, pieces_metadata()))
    ids = tokenizer.encode(text)
    assert [tokenizer.backend.id_to_token(index) for index in ids] == pieces
    assert tokenizer.decode(ids) == text.replace("</s>", "")
    assert tokenizer.special_ids == {0, 1, 2}


def test_sentencepiece_vocabulary_without_its_first_space() -> None:
    metadata = pieces_metadata(**{"tokenizer.ggml.add_space_prefix": False, "tokenizer.ggml.add_bos_token": False})
    backend = gguf_tokenizer.build_tokenizer(metadata)
    assert backend.encode("cat the").tokens == ["cat", "\u2581the"]
    assert backend.decode(backend.encode(" cat").ids) == " cat"


def test_gguf_tokenizer_is_converted_once(tmp_path: Path) -> None:
    file = write_gguf(tmp_path, gguf_metadata("smollm"))
    first = gguf_tokenizer.convert(file)
    written = (first / "tokenizer.json").stat().st_mtime_ns
    assert gguf_tokenizer.convert(tmp_path) == first
    assert (first / "tokenizer.json").stat().st_mtime_ns == written


@pytest.mark.parametrize("change", [{"tokenizer.ggml.model": "bert"}, {"tokenizer.ggml.pre": "chameleon"}])
def test_unknown_kind_is_refused_with_the_kinds_that_work(change: dict[str, str]) -> None:
    with pytest.raises(UnsupportedError, match="smollm") as caught:
        gguf_tokenizer.build_tokenizer(gguf_metadata("smollm", **change))
    assert next(iter(change.values())) in caught.value.message


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokenizer.ggml.merges": ["x nowhere"]}, "is damaged"),
        ({"tokenizer.ggml.token_type": [1]}, "is damaged"),
        ({"tokenizer.ggml.bos_token_id": 10**6, "tokenizer.ggml.add_bos_token": True}, "is damaged"),
        ({"tokenizer.ggml.tokens": None}, "holds no tokenizer"),
    ],
)
def test_damaged_vocabulary_is_one_message(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    metadata = {key: value for key, value in gguf_metadata("smollm", **changes).items() if value is not None}
    with pytest.raises(UsageError, match=message):
        gguf_tokenizer.write_tokenizer(metadata, tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "empty"),
        (b"PK\x03\x04" * 9, "does not start with"),
        (b"GGUF" + struct.pack("<I", 9) + bytes(16), "version 9"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", 1 << 60), "runs past the end"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q1sIIQ", 1, b"k", 9, 4, 1 << 60), "longer than"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q1sIIQ", 1, b"k", 9, 9, 1), "kind 9 is unknown"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1 << 40), "requires a buffer"),
    ],
)
def test_damaged_gguf_is_named(content: bytes, message: str, tmp_path: Path) -> None:
    file = tmp_path / "bad.gguf"
    file.write_bytes(content)
    with pytest.raises(UsageError, match=message) as caught:
        gguf_tokenizer.read_metadata(file)
    assert str(file) in caught.value.message


def test_folder_with_two_gguf_files_asks_for_one(tmp_path: Path) -> None:
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).touch()
    with pytest.raises(UsageError, match=r"2 GGUF files: a\.gguf, b\.gguf"):
        Tokenizer.load(tmp_path)
