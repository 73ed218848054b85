"""What belongs beside a model's weights: tokenizer, chat template, generation settings, licence.

Only known files are copied, none through a link out of the source, and nothing that is code.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from specq.chat_template import TEMPLATE_FILE
from specq.checkpoint import write_json
from specq.tensor_files import safe_path

TOKENIZER_CONFIG = "tokenizer_config.json"
COPIED = (
    "tokenizer.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
    "added_tokens.json",
    "special_tokens_map.json",
    TEMPLATE_FILE,
    "generation_config.json",
    "LICENSE",
    "LICENSE.txt",
    "NOTICE",
)
LOCAL_KEYS = ("_name_or_path", "name_or_path", "tokenizer_file", "special_tokens_map_file", "auto_map")


def companion_files(source: Path) -> dict[str, Path]:
    """Where the companions of the model `source` (a folder or .gguf file) lie, by name.

    The tokenizer is the one that `Tokenizer.load` reads: a GGUF file's own where there is no tokenizer.json.
    Raises UsageError for a link out of the model's folder.
    """
    origins = [source] if source.is_dir() else []
    if not (source / "tokenizer.json").is_file() and (source.is_file() or any(source.glob("*.gguf"))):
        from specq import gguf_tokenizer

        origins.insert(0, gguf_tokenizer.convert(source))
    found: dict[str, Path] = {}
    for origin in origins:
        for name in (*COPIED, TOKENIZER_CONFIG):
            if (origin / name).is_file():
                found.setdefault(name, safe_path(origin, name))
    return found


def copy_companions(files: Mapping[str, Path], folder: Path, *, chat_template: str | None) -> None:
    """Copies the files of `companion_files`, without what is of their machine only.

    The template of the model's chats, `chat_template`, becomes a file of its own, as some programs read no other.
    """
    for name, path in files.items():
        if name == TOKENIZER_CONFIG:
            write_json(folder / name, without_local_keys(json.loads(path.read_text(encoding="utf-8"))))
        else:
            (folder / name).write_bytes(path.read_bytes())
    if chat_template is not None and TEMPLATE_FILE not in files:
        (folder / TEMPLATE_FILE).write_text(chat_template, encoding="utf-8")


def without_local_keys(config: Mapping[str, Any]) -> dict[str, Any]:
    """A config without paths of whoever saved it, and without names of code that is not copied."""
    return {key: value for key, value in config.items() if key not in LOCAL_KEYS}
