"""Small real tokenizers for tests, saved as Hugging Face folders."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

TEXT = [
    "the cat sat on the mat while the other cats were sleeping in the kitchen",
    "hello world, hello there, how are you doing today, and where will you be tomorrow",
    "numbers 0 1 2 3 4 5 6 7 8 9 are written with digits, words are written with letters",
    "a small model drafts several tokens, the large model verifies them all at once",
    "caf\u00e9 \uc0bc\uacb9\uc0b4",
] * 3
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def byte_level(vocab: int = 320, special: tuple[str, ...] = ("<|end|>", "<|im_start|>", "<|im_end|>")) -> Tokenizer:
    """A byte-level BPE tokenizer; every byte is a token, the special tokens come first."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab, special_tokens=list(special), initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(TEXT, trainer)
    return backend


def with_bos(backend: Tokenizer, bos: str) -> Tokenizer:
    """The same tokenizer, putting BOS in front of every text."""
    bos_id = backend.token_to_id(bos)
    backend.post_processor = processors.TemplateProcessing(single=f"{bos} $A", special_tokens=[(bos, bos_id)])
    return backend


def sentencepiece_like() -> Tokenizer:
    """A Llama-2-style tokenizer: pieces that start with a bar, bytes for what is missing, BOS in front."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += [
        "\u2581",
        "t",
        "h",
        "e",
        "c",
        "a",
        "\u2581t",
        "\u2581th",
        "\u2581the",
        "\u2581c",
        "\u2581ca",
        "\u2581cat",
    ]
    merges = [
        ("\u2581", "t"),
        ("\u2581t", "h"),
        ("\u2581th", "e"),
        ("\u2581", "c"),
        ("\u2581c", "a"),
        ("\u2581ca", "t"),
    ]
    vocab = {piece: index for index, piece in enumerate(pieces)}
    backend = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(replacement="\u2581", prepend_scheme="first", split=False)
    backend.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in pieces[:3]])
    return with_bos(backend, "<s>")


def save(backend: Tokenizer, folder: Path, *, files: dict[str, Any] | None = None, **config: Any) -> Path:
    """Writes tokenizer.json, tokenizer_config.json from `config`, and `files` (text, or objects as JSON)."""
    folder.mkdir(parents=True, exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    config.setdefault("tokenizer_class", "PreTrainedTokenizerFast")
    for name, content in {"tokenizer_config.json": config, **(files or {})}.items():
        text = content if isinstance(content, str) else json.dumps(content)
        (folder / name).write_text(text, encoding="utf-8")
    return folder


def gguf_metadata(pre: str, **changes: Any) -> dict[str, Any]:
    """Metadata with a vocabulary in which digits and contractions do merge, where the cutting lets them."""
    backend = byte_level(400)
    tokens = [backend.id_to_token(index) for index in range(backend.get_vocab_size())]
    extra = [("2", "0"), ("20", "2"), ("202", "4"), ("1", "2"), ("12", "3"), ("'", "s")]
    merges = [*_merges(backend), *(" ".join(pair) for pair in extra)]
    tokens += [left + right for left, right in extra if left + right not in tokens]
    kinds = [3] * 3 + [1] * (len(tokens) - 3)
    tokens += ["<tool>", "[PAD1]", "[PAD2]"]
    kinds += [4, 5, 5]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.chat_template": CHATML,
        **changes,
    }


def _merges(backend: Any) -> list[str]:
    merges = json.loads(backend.to_str())["model"]["merges"]
    return [" ".join(pair) for pair in merges]


def write_gguf(folder: Path, content: dict[str, Any]) -> Path:
    """Writes model.gguf with these keys, and an embedding of width 64 as its only tensor."""
    writer = gguf.GGUFWriter(folder / "model.gguf", "llama")
    for key, value in content.items():
        add = {
            list: writer.add_array,
            str: writer.add_string,
            bool: writer.add_bool,
            int: writer.add_uint32,
            float: writer.add_float32,
        }
        add[type(value)](key, value)
    writer.add_tensor("token_embd.weight", np.zeros((len(content["tokenizer.ggml.tokens"]), 64), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return folder / "model.gguf"
