"""Text to ids and back, and the chat turns of a model, on the `tokenizers` package alone.

transformers is not imported (two seconds at the start of a chat) but for folders that hold no tokenizer.json.
Templates are rendered by chat_template.py, GGUF vocabularies are read by gguf_tokenizer.py.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken

from specq.chat_template import ChatTemplate, Message, fold_system, read_chat_template
from specq.errors import SpecqError, UnsupportedError, UsageError
from specq.files import require_readable

logger = logging.getLogger("specq")

NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
# Vocabulary files that only transformers can turn into a tokenizer.json.
CONVERTIBLE = ("tokenizer.model", "vocab.json", "tekken.json", "vocab.txt", "spiece.model")
BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")
REPLACEMENT = "\ufffd"


class Tokenizer:
    """A model's tokenizer: `size` ids have a meaning, ids above are padding rows of the embedding."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        named: Mapping[str, str] | None = None,
        eos_ids: Sequence[int] = (),
        chat_template: str | None = None,
    ) -> None:
        self.backend = backend
        self.named = dict(named or {})
        added = backend.get_added_tokens_decoder()
        self.special_ids = frozenset(index for index, token in added.items() if token.special)
        self.size: int = max([backend.get_vocab_size(with_added_tokens=True), *(index + 1 for index in added)])
        self.bos_id: int | None = self._named_id("bos_token")
        self._declared_eos = frozenset(eos_ids) | {
            index for index in [self._named_id("eos_token")] if index is not None
        }
        self._said: set[str] = set()
        self.chat_template: str | None = None
        self._template: ChatTemplate | None = None
        self.use_chat_template(chat_template)

    @classmethod
    def load(cls, folder: Path) -> Tokenizer:
        """The tokenizer of a model folder or GGUF file.

        A folder without a tokenizer.json is converted once, into the cache.
        Raises: UsageError when there is none, UnsupportedError for a kind that cannot be converted.
        """
        model_folder, source = folder, folder
        if not (folder / "tokenizer.json").is_file():
            source = _converted(folder)
        config = _read_json(source / "tokenizer_config.json")
        backend = _read_backend(source / "tokenizer.json")
        named = _named_tokens(source, config, model_folder, backend)
        _complete(backend, config, named)
        return cls(
            backend,
            named=named,
            eos_ids=_config_ids(model_folder, "eos_token_id"),
            chat_template=read_chat_template(source, config),
        )

    def use_chat_template(self, source: str | None) -> None:
        """Replaces the chat template, and with it the ids that end a turn.

        Raises: UsageError when it does not compile.
        """
        self._template = None if source is None else ChatTemplate(source, self.named)
        self.chat_template = source
        self.eos_ids: frozenset[int] = self._declared_eos | self._turn_end_ids()

    def encode(self, text: str, *, special_tokens: bool = True) -> list[int]:
        """The ids of a text, with the tokens a prompt of this model starts with unless told otherwise."""
        return self.backend.encode(text, add_special_tokens=special_tokens).ids

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        """The text of ids; ids that mean nothing are left out."""
        return self.backend.decode(list(ids), skip_special_tokens=skip_special)

    def render_chat(
        self, messages: Sequence[Message], *, add_generation_prompt: bool = True, thinking: bool | None = None
    ) -> str:
        """The text the model reads for a chat; `thinking` is passed to templates that know enable_thinking.

        A system text the template refuses or leaves out goes before the first user turn; the log says so.
        Raises: UsageError without a chat template, or when it refuses the messages.
        """
        if self._template is None:
            raise UsageError(
                "the model has no chat template: it is a base model",
                hint="use --raw to continue a text, or --chat-template FILE",
            )
        variables = {} if thinking is None else {"enable_thinking": thinking}
        system = ""
        if messages and messages[0]["role"] == "system":
            system = str(messages[0]["content"]).strip()
        try:
            text = self._template.render(messages, add_generation_prompt=add_generation_prompt, **variables)
            if system in text:
                return text
        except UsageError:
            if not system:
                raise
        text = self._template.render(fold_system(messages), add_generation_prompt=add_generation_prompt, **variables)
        self._say_once("the chat template takes no system text: it is put before the first user turn")
        return text

    def encode_chat(
        self, messages: Sequence[Message], *, add_generation_prompt: bool = True, thinking: bool | None = None
    ) -> list[int]:
        """The ids of a chat, with exactly one BOS where the template or the tokenizer asks for one."""
        text = self.render_chat(messages, add_generation_prompt=add_generation_prompt, thinking=thinking)
        ids = self.encode(text, special_tokens=False)
        bos = self.bos_id
        if bos is None:
            return ids
        start = 0
        while start < len(ids) and ids[start] == bos:
            start += 1
        return [bos, *ids[start:]] if start > 0 or self._adds_bos else ids

    def id_table(self) -> dict[int, str]:
        """The token of every id, to compare two tokenizers id by id."""
        return {index: token for token, index in self.backend.get_vocab(with_added_tokens=True).items()}

    @cached_property
    def anchor(self) -> int | None:
        """An id whose text stands in front of others without changing them; None where no id is like that."""
        for index in range(self.size):
            token = self.backend.id_to_token(index)
            if token is None or index in self.special_ids or BYTE_TOKEN.fullmatch(token):
                continue
            text = self.decode([index])
            if text and text.isascii() and text.isprintable() and self.decode([index, index])[len(text) :].strip():
                return index
        return None

    @cached_property
    def _adds_bos(self) -> bool:
        return self.bos_id in self.encode("")

    def _named_id(self, name: str) -> int | None:
        token = self.named.get(name)
        return None if token is None else self.backend.token_to_id(token)

    def _say_once(self, message: str) -> None:
        if message not in self._said:
            self._said.add(message)
            logger.warning(message)

    def _turn_end_ids(self) -> frozenset[int]:
        """The added token that closes an assistant turn, as the template itself writes it."""
        if self._template is None:
            return frozenset()
        answer = "specq-answer"
        turns = [{"role": "user", "content": "specq-question"}, {"role": "assistant", "content": answer}]
        try:
            text = self._template.render(turns, add_generation_prompt=False)
        except UsageError:
            return frozenset()
        after = text.rpartition(answer)[2].lstrip() if answer in text else ""
        ids = self.encode(after, special_tokens=False)[:1]
        added = self.backend.get_added_tokens_decoder()
        return frozenset(index for index in ids if index in added and index != self.bos_id)


class TextStream:
    """The text of ids as they come, whole characters only; the pieces together are `tokenizer.decode(ids)`.

    A run of byte tokens is held until it ends: its bytes only become characters together.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._held: list[int] = []
        self._prefix: list[int] = []  # empty until text came out: some decoders strip the first space of a text
        self._prefix_length = 0

    def push(self, token_id: int) -> str:
        """The text that is certain now, often "" in the middle of a character."""
        tokenizer = self._tokenizer
        token = tokenizer.backend.id_to_token(token_id)
        if token is None or (self._skip_special and token_id in tokenizer.special_ids):
            return ""
        self._held.append(token_id)
        if BYTE_TOKEN.fullmatch(token):
            return ""
        text = self._text()
        return "" if text.endswith(REPLACEMENT) else self._release(text)

    def flush(self) -> str:
        """What was still held, at the end of a text; an incomplete character shows as U+FFFD."""
        return self._release(self._text())

    def _text(self) -> str:
        ids = self._prefix + self._held
        return self._tokenizer.decode(ids, skip_special=self._skip_special)[self._prefix_length :]

    def _release(self, text: str) -> str:
        if not text:  # nothing seen yet: what is held still decides whether a first space is stripped
            return ""
        self._held.clear()
        anchor = self._tokenizer.anchor
        if not self._prefix and anchor is not None:
            self._prefix = [anchor]
            self._prefix_length = len(self._tokenizer.decode([anchor]))
        return text


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UsageError(f"`{path}` is not valid JSON: {error}", hint="download it again") from error
    if not isinstance(content, dict):
        raise UsageError(f"`{path}` holds no JSON object", hint="download it again")
    return content


def _read_backend(path: Path) -> tokenizers.Tokenizer:
    require_readable(path)
    try:
        backend = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the Rust side raises Exception itself
        raise UsageError(f"`{path}` is not a tokenizer: {error}", hint="download it again") from error
    backend.no_padding()
    backend.no_truncation()
    return backend


def _text_of(token: object) -> str | None:
    content = token.get("content") if isinstance(token, Mapping) else token
    return content if isinstance(content, str) else None


def _config_ids(folder: Path, key: str) -> list[int]:
    """The ids that config.json and generation_config.json give under a key, either one or a list."""
    found: list[int] = []
    for name in ("config.json", "generation_config.json"):
        value = _read_json(folder / name).get(key)
        values = value if isinstance(value, list) else [value]
        found += [index for index in values if isinstance(index, int)]
    return found


def _named_tokens(
    source: Path, config: Mapping[str, Any], model_folder: Path, backend: tokenizers.Tokenizer
) -> dict[str, str]:
    """Which token is bos_token, eos_token and so on; beside a bare tokenizer.json config.json tells."""
    older = _read_json(source / "special_tokens_map.json")
    named: dict[str, str] = {}
    for name in NAMED_TOKENS:
        token = _text_of(config.get(name, older.get(name)))
        if token is None and name in ("bos_token", "eos_token") and name not in config and name not in older:
            ids = _config_ids(model_folder, f"{name}_id")
            token = backend.id_to_token(ids[0]) if ids else None
        if token is not None:
            named[name] = token
    return named


def _complete(backend: tokenizers.Tokenizer, config: Mapping[str, Any], named: Mapping[str, str]) -> None:
    """Adds the tokens that only tokenizer_config.json names, as transformers does on loading.

    Whether BOS is put in front, tokenizer.json alone decides: transformers ignores add_bos_token beside one.
    """
    for index, entry in sorted(config.get("added_tokens_decoder", {}).items(), key=lambda item: int(item[0])):
        if backend.token_to_id(entry["content"]) is None:
            backend.add_tokens([AddedToken(**entry)])
            if backend.token_to_id(entry["content"]) != int(index):
                raise UsageError(
                    f"tokenizer_config.json gives `{entry['content']}` the id {index}, "
                    f"tokenizer.json leaves it {backend.token_to_id(entry['content'])}",
                    hint="the two files are not of the same model: download both again",
                )
    known = {token.content for token in backend.get_added_tokens_decoder().values() if token.special}
    lacking = sorted(set(named.values()) - known)
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in lacking])


def _converted(folder: Path) -> Path:
    """A cached folder that holds a tokenizer.json made from what `folder` has instead."""
    from specq import gguf_tokenizer, storage

    if folder.suffix == ".gguf" or any(folder.glob("*.gguf")):
        return gguf_tokenizer.convert(folder)
    names = [name for name in CONVERTIBLE if (folder / name).is_file()]
    if not names:
        raise UsageError(
            f"`{folder}` has no tokenizer: neither tokenizer.json nor {', '.join(CONVERTIBLE)}",
            hint="download the tokenizer files beside the weights",
        )
    digest = hashlib.sha256()
    for file in sorted(folder.iterdir()):
        if file.name in (*CONVERTIBLE, "merges.txt", "added_tokens.json") or file.name.startswith("tokenizer"):
            digest.update(file.name.encode() + file.read_bytes())
    target = storage.cache_dir() / "tokenizers" / digest.hexdigest()[:32]
    return storage.build_folder(target, lambda empty: _convert_by_transformers(folder, empty, names[0]))


def _convert_by_transformers(folder: Path, empty: Path, name: str) -> None:
    from transformers import AutoTokenizer

    try:
        converted = AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, ImportError, KeyError) as error:
        raise UnsupportedError(
            f"`{folder / name}` could not be converted to a tokenizer.json: {error}",
            hint="pip install sentencepiece protobuf, or use a folder with a tokenizer.json",
        ) from error
    converted.save_pretrained(str(empty))
    if not (empty / "tokenizer.json").is_file():
        raise SpecqError(f"transformers wrote no tokenizer.json for `{folder}`")
