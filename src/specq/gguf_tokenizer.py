"""The tokenizer inside a GGUF file as an ordinary tokenizer.json, built once into the cache.

GGUF keeps tokens and merges but only a name (`tokenizer.ggml.pre`) for how text is cut before merging; what
each name stands for is written here: the digits of SmolLM2 one by one, the NFC form of Qwen.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from specq.errors import SpecqError, UnsupportedError, UsageError
from specq.gguf_header import GgufArray, read_array, read_header

# Kinds of tokens, as the GGUF specification numbers them.
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED = 1, 2, 3, 4, 5
SPACE = "\u2581"
CONVERSION = 1  # one more whenever the same metadata becomes another tokenizer.json: older ones lie in caches

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_CUTS = {
    "qwen2": rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}|{_REST}",
    "llama3": rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}{{1,3}}|{_REST}",
}
# `tokenizer.ggml.pre` -> how the text is cut
PRE_TOKENIZERS = {
    "smollm": "digits",
    "qwen2": "qwen2",
    "deepseek-r1-qwen": "qwen2",
    "llama-bpe": "llama3",
    "llama3": "llama3",
    "llama-v3": "llama3",
    "gpt-2": "gpt2",
    "default": "gpt2",
}


def read_metadata(path: Path) -> dict[str, Any]:
    """What a GGUF file says of its tokenizer: the keys that start with `tokenizer.`, arrays as lists.

    Raises: UsageError for a file that is no GGUF, is cut short or damaged.
    """
    metadata = read_header(path).metadata
    return {
        key: read_array(path, value) if isinstance(value, GgufArray) else value
        for key, value in metadata.items()
        if key.startswith("tokenizer.")
    }


def gguf_file(path: Path) -> Path:
    """The one GGUF file of a folder, or the file itself.

    Raises: UsageError when a folder holds several.
    """
    if path.is_file():
        return path
    files = sorted(path.glob("*.gguf"))
    if len(files) != 1:
        raise UsageError(
            f"`{path}` holds {len(files)} GGUF files: {', '.join(file.name for file in files)}",
            hint=f"name one of them, such as {path / files[0].name}" if files else None,
        )
    return files[0]


def convert(path: Path) -> Path:
    """A cached folder with the tokenizer.json of a GGUF file; the first call writes it."""
    from specq import storage

    metadata = read_metadata(gguf_file(path))
    digest = hashlib.sha256(json.dumps([CONVERSION, metadata], sort_keys=True).encode()).hexdigest()
    target = storage.cache_dir() / "tokenizers" / f"gguf-{digest[:32]}"
    return storage.build_folder(target, lambda empty: write_tokenizer(metadata, empty))


def write_tokenizer(metadata: dict[str, Any], folder: Path) -> None:
    """Writes tokenizer.json and tokenizer_config.json (chat template inside) from GGUF metadata.

    Raises: UnsupportedError for a kind of tokenizer that specq cannot rebuild, UsageError for a damaged one.
    """
    try:
        backend = build_tokenizer(metadata)
    except SpecqError:
        raise
    except Exception as error:  # the Rust side raises Exception itself
        raise UsageError(f"the tokenizer of the GGUF file is damaged: {error}", hint="download it again") from error
    backend.save(str(folder / "tokenizer.json"))
    tokens = metadata["tokenizer.ggml.tokens"]
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast"}
    for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        index = metadata.get(f"tokenizer.ggml.{key}_token_id")
        if index is not None and index < len(tokens):
            config[f"{name}_token"] = tokens[index]
    config["clean_up_tokenization_spaces"] = False
    if "tokenizer.chat_template" in metadata:
        config["chat_template"] = metadata["tokenizer.chat_template"]
    text = json.dumps(config, indent=2, ensure_ascii=False)
    (folder / "tokenizer_config.json").write_text(text + "\n", encoding="utf-8")


def build_tokenizer(metadata: dict[str, Any]) -> tokenizers.Tokenizer:
    """The BPE tokenizer that GGUF metadata describes; every control token stays one id."""
    kind = metadata.get("tokenizer.ggml.model")
    pre = metadata.get("tokenizer.ggml.pre", "default")
    if "tokenizer.ggml.tokens" not in metadata:
        raise UsageError(
            "the GGUF file holds no tokenizer", hint="put the tokenizer.json of the original model beside it"
        )
    tokens, types = _used_tokens(metadata)
    if kind == "gpt2" and pre in PRE_TOKENIZERS:
        backend = _byte_level(PRE_TOKENIZERS[pre], tokens, metadata["tokenizer.ggml.merges"])
        adds_bos = PRE_TOKENIZERS[pre] == "llama3"
    elif kind == "llama" and "tokenizer.ggml.scores" in metadata:
        has_prefix = metadata.get("tokenizer.ggml.add_space_prefix", True)
        backend = _pieces(tokens, types, metadata["tokenizer.ggml.scores"], has_prefix=has_prefix)
        adds_bos = True
    else:
        raise UnsupportedError(
            f"the GGUF file has a tokenizer of the kind `{kind}`, `{pre}`: "
            f"specq rebuilds `llama`, and `gpt2` with {', '.join(sorted(PRE_TOKENIZERS))}",
            hint="put the tokenizer.json of the original model beside the GGUF file",
        )
    special = (CONTROL, UNKNOWN) if kind == "llama" else (CONTROL,)
    added = [(token, type_) for token, type_ in zip(tokens, types, strict=True) if type_ in (*special, USER_DEFINED)]
    backend.add_tokens([AddedToken(token, special=type_ in special, normalized=False) for token, type_ in added])
    bos = metadata.get("tokenizer.ggml.bos_token_id")
    # llama.cpp's default where the file does not say
    if bos is not None and metadata.get("tokenizer.ggml.add_bos_token", adds_bos):
        backend.post_processor = processors.TemplateProcessing(
            single=[tokens[bos], "$A"], special_tokens=[(tokens[bos], bos)]
        )
    return backend


def _byte_level(cut: str, tokens: list[str], merges: list[str]) -> tokenizers.Tokenizer:
    """GPT-2's kind: every byte has a token, merges are written down."""
    vocab = {token: index for index, token in enumerate(tokens)}
    pairs = [(left, right) for left, _, right in (merge.partition(" ") for merge in merges)]
    backend = tokenizers.Tokenizer(models.BPE(vocab, pairs, ignore_merges=cut == "llama3"))
    if cut == "qwen2":
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = _pre_tokenizer(cut)
    backend.decoder = decoders.ByteLevel()
    return backend


def _pieces(tokens: list[str], types: list[int], scores: list[float], *, has_prefix: bool) -> tokenizers.Tokenizer:
    """Sentencepiece's BPE: two neighbours merge when they make a piece, the piece of the best score first."""
    vocab = {token: index for index, token in enumerate(tokens)}
    made = [
        (-scores[vocab[piece]], vocab[piece[:cut]], vocab[piece[cut:]])
        for piece, type_ in zip(tokens, types, strict=True)
        if type_ == NORMAL
        for cut in range(1, len(piece))
        if piece[:cut] in vocab and piece[cut:] in vocab
    ]
    merges = [(tokens[left], tokens[right]) for _, left, right in sorted(made)]
    unknown = next((token for token, type_ in zip(tokens, types, strict=True) if type_ == UNKNOWN), None)
    backend = tokenizers.Tokenizer(models.BPE(vocab, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    spaces = normalizers.Replace(" ", SPACE)
    backend.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), spaces]) if has_prefix else spaces
    parts = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*parts, decoders.Strip(" ", 1, 0)] if has_prefix else parts)
    return backend


def _used_tokens(metadata: dict[str, Any]) -> tuple[list[str], list[int]]:
    """Tokens and their kinds without the rows that only pad the embedding at its end."""
    tokens = metadata["tokenizer.ggml.tokens"]
    types = metadata.get("tokenizer.ggml.token_type") or [1] * len(tokens)
    end = len(tokens)
    while end > 0 and types[end - 1] == UNUSED:
        end -= 1
    return tokens[:end], types[:end]


def _pre_tokenizer(cut: str) -> pre_tokenizers.PreTokenizer:
    if cut == "gpt2":
        return pre_tokenizers.ByteLevel(add_prefix_space=False)
    if cut == "digits":
        parts = [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    else:
        parts = [
            pre_tokenizers.Split(Regex(_CUTS[cut]), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    return pre_tokenizers.Sequence(parts)
