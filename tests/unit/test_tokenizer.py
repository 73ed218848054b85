"""The tokenizer: ids as transformers gives them, chat turns, stop ids, and text in whole characters."""

from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_tokenizers import CHATML, byte_level, save, sentencepiece_like, with_bos
from tokenizers import AddedToken

from specq.errors import UsageError
from specq.tokenizer import TextStream, Tokenizer

FAMILY = "\U0001f469\u200d\U0001f469\u200d\U0001f467 \uc0bc\uacb9\uc0b4 \u010f\u00e1b"
TEXTS = [
    "",
    "the cat",
    " the  cat\n\n",
    "12345 6.7",
    "<|im_end|> in a text<|im_start|>",
    "</s> x <s>",
    FAMILY,
]
USER = {"role": "user", "content": "hi"}
SYSTEM = {"role": "system", "content": "be short"}
NAMED = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}
# Written like Gemma's and Mistral's: no system role, turns alternate.
STRICT = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system role') }}"
    "{% endif %}{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}[{{ message['role'] }}]{{ message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
)

BYTE_LEVEL = Tokenizer(byte_level(), named=NAMED)
PIECES = Tokenizer(sentencepiece_like(), named={"bos_token": "<s>", "eos_token": "</s>"})


def stream(tokenizer: Tokenizer, ids: list[int], *, skip_special: bool = True) -> list[str]:
    text = TextStream(tokenizer, skip_special=skip_special)
    return [*(text.push(index) for index in ids), text.flush()]


@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, PIECES], ids=["bytes", "pieces"])
def test_streamed_text_has_whole_characters_only(tokenizer: Tokenizer) -> None:
    ids = [index for char in FAMILY for index in tokenizer.encode(char, special_tokens=False)]
    pieces = stream(tokenizer, ids)
    assert "".join(pieces) == tokenizer.decode(ids)
    assert all("\ufffd" not in piece for piece in pieces)
    assert sum(1 for piece in pieces if piece) > 1


@pytest.mark.parametrize("skip_special", [True, False])
@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, PIECES], ids=["bytes", "pieces"])
@settings(max_examples=400, deadline=None)
@given(data=st.data())
def test_streamed_pieces_add_up_to_the_decoded_text(
    tokenizer: Tokenizer, skip_special: bool, data: st.DataObject
) -> None:
    ids = data.draw(st.lists(st.integers(0, tokenizer.size + 3), max_size=24))
    pieces = stream(tokenizer, ids, skip_special=skip_special)
    assert "".join(pieces) == tokenizer.decode(ids, skip_special=skip_special)


@settings(max_examples=200, deadline=None)
@given(text=st.text(max_size=20))
def test_valid_text_streams_without_replacement_characters(text: str) -> None:
    pieces = stream(BYTE_LEVEL, BYTE_LEVEL.encode(text, special_tokens=False), skip_special=False)
    assert "".join(pieces) == text
    assert "".join(pieces[:-1]).count("\ufffd") <= text.count("\ufffd")


def test_leading_space_of_a_sentencepiece_word_is_kept_across_blocks() -> None:
    ids = [PIECES.backend.token_to_id(token) for token in ("\u2581the", "\u2581cat")]
    assert stream(PIECES, ids) == ["the", " cat", ""]


def test_leading_space_survives_special_tokens_before_it() -> None:
    the, cat = (PIECES.backend.token_to_id(token) for token in ("\u2581the", "\u2581cat"))
    assert stream(PIECES, [1, the, 2, cat]) == ["", "the", "", " cat", ""]
    assert PIECES.decode([1, the, 2, cat]) == "the cat"


def test_incomplete_character_is_shown_only_at_the_end() -> None:
    ids = BYTE_LEVEL.encode("a\U0001f469", special_tokens=False)[:-1]
    pieces = stream(BYTE_LEVEL, ids)
    assert pieces[:-1] == ["a", *[""] * (len(ids) - 1)]
    assert pieces[-1] == "\ufffd"


@pytest.mark.parametrize("kind", ["bytes", "bytes-with-bos", "bytes-added", "pieces", "pieces-no-bos"])
def test_ids_and_text_equal_those_of_transformers(kind: str, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    added = {"400": {"content": "<extra>", "lstrip": False, "rstrip": True, "normalized": False, "special": False}}
    folder = {
        "bytes": lambda: save(byte_level(), tmp_path, **NAMED),
        "bytes-with-bos": lambda: save(with_bos(byte_level(), "<|im_start|>"), tmp_path, **NAMED),
        "bytes-added": lambda: save(
            byte_level(400),
            tmp_path,
            **NAMED,
            pad_token="<|pad|>",
            added_tokens_decoder=_at_end(added, byte_level(400)),
        ),
        "pieces": lambda: save(sentencepiece_like(), tmp_path, bos_token="<s>", eos_token="</s>"),
        "pieces-no-bos": lambda: save(
            sentencepiece_like(), tmp_path, bos_token="<s>", eos_token="</s>", add_bos_token=False
        ),
    }[kind]()
    ours, theirs = Tokenizer.load(folder), AutoTokenizer.from_pretrained(str(folder))
    for text in [*TEXTS, "an <extra>  token <|pad|>"]:
        for special in (True, False):
            ids = theirs(text, add_special_tokens=special)["input_ids"]
            assert ours.encode(text, special_tokens=special) == ids, text
            assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
            assert ours.decode(ids, skip_special=False) == theirs.decode(ids, skip_special_tokens=False)
    assert ours.size == len(theirs)
    assert ours.special_ids == set(theirs.all_special_ids) | {
        index for index, token in theirs.added_tokens_decoder.items() if token.special
    }


def _at_end(added: dict, backend) -> dict:
    size = backend.get_vocab_size()
    return {str(size + index): entry for index, entry in enumerate(added.values())}


@pytest.mark.parametrize("template", [CHATML, STRICT, "{% for m in messages %}{{ m | tojson }}{% endfor %}"])
@pytest.mark.parametrize("thinking", [None, True, False])
def test_rendered_chat_equals_that_of_transformers(template: str, thinking: bool | None, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    template += "{% if enable_thinking is defined %}{{ 'on' if enable_thinking else 'off' }}{% endif %}"
    folder = save(byte_level(), tmp_path, **NAMED, chat_template=template)
    ours, theirs = Tokenizer.load(folder), AutoTokenizer.from_pretrained(str(folder))
    turns = [USER, {"role": "assistant", "content": "<b>'yes'</b> \u00e9"}, USER]
    options = {} if thinking is None else {"enable_thinking": thinking}
    for prompt in (True, False):
        text = theirs.apply_chat_template(turns, tokenize=False, add_generation_prompt=prompt, **options)
        assert ours.render_chat(turns, add_generation_prompt=prompt, thinking=thinking) == text


def test_template_may_use_what_hugging_face_offers() -> None:
    template = (
        "{%- set ns = namespace(n=0) -%}{% for m in messages %}{% if loop.index > 2 %}{% break %}{% endif %}"
        "{% generation %}{{ m.content }}{% endgeneration %}{% set ns.n = ns.n + 1 %}{% endfor %}|{{ ns.n }}|"
        "{{ {'a': '<\u00e9>'} | tojson(indent=1) }}|{{ dict(x=1)['x'] }}|"
        "{{ strftime_now('%Y') | length }}|{{ tools }}"
    )
    tokenizer = Tokenizer(byte_level(), chat_template=template)
    assert tokenizer.render_chat([USER] * 3) == 'hihi|2|{\n "a": "<\u00e9>"\n}|1|4|None'


@pytest.mark.parametrize(
    "attack",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ (1).__class__.__base__.__subclasses__() }}",
        "{{ cycler.__init__.__globals__ }}",
        "{{ dict.__init__.__globals__['json'] }}",
    ],
)
def test_template_cannot_leave_the_sandbox(attack: str) -> None:
    with pytest.raises(UsageError, match="refuses these messages"):
        Tokenizer(byte_level(), chat_template=attack).render_chat([USER])


def test_system_text_is_folded_into_the_first_user_turn_and_said_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    tokenizer = Tokenizer(byte_level(), named=NAMED, chat_template=STRICT)
    with caplog.at_level(logging.WARNING, logger="specq"):
        texts = {tokenizer.render_chat([SYSTEM, USER]) for _ in range(3)}
    assert texts == {"<|im_start|>[user]be short\n\nhi"}
    assert len(caplog.records) == 1


def test_system_text_that_a_template_drops_is_folded_too() -> None:
    template = "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }};{% endif %}{% endfor %}"
    assert Tokenizer(byte_level(), chat_template=template).render_chat([SYSTEM, USER]) == "be short\n\nhi;"


def test_refusal_of_the_template_is_shown_in_its_own_words() -> None:
    with pytest.raises(UsageError, match="roles must alternate"):
        Tokenizer(byte_level(), named=NAMED, chat_template=STRICT).render_chat([USER, USER])


def test_base_model_has_no_template_and_says_what_to_do(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(save(byte_level(), tmp_path, **NAMED))
    assert tokenizer.chat_template is None
    with pytest.raises(UsageError, match="base model") as caught:
        tokenizer.encode_chat([USER])
    assert "--raw" in (caught.value.hint or "")


@pytest.mark.parametrize("bos_in_template", [True, False])
@pytest.mark.parametrize("add_bos", [True, False])
def test_chat_has_exactly_one_bos_where_one_is_asked_for(bos_in_template: bool, add_bos: bool) -> None:
    template = ("{{ bos_token }}" if bos_in_template else "") + "{% for m in messages %}{{ m.content }}{% endfor %}"
    backend = with_bos(byte_level(), "<|im_start|>") if add_bos else byte_level()
    tokenizer = Tokenizer(backend, named=NAMED, chat_template=template)
    ids = tokenizer.encode_chat([USER])
    assert ids.count(tokenizer.bos_id) == int(bos_in_template or add_bos)
    assert tokenizer.decode(ids) == "hi"


@pytest.mark.parametrize(
    ("files", "config", "expected"),
    [
        ({"chat_template.jinja": "new"}, {"chat_template": "old"}, "new"),
        ({"chat_template.json": {"chat_template": "json"}}, {}, "json"),
        (
            {},
            {"chat_template": [{"name": "tool", "template": "t"}, {"name": "default", "template": "d"}]},
            "d",
        ),
    ],
)
def test_template_is_found_where_models_keep_it(files: dict, config: dict, expected: str, tmp_path: Path) -> None:
    folder = save(byte_level(), tmp_path, files=files, **config)
    assert Tokenizer.load(folder).chat_template == expected


def test_stop_ids_are_the_union_of_all_four_places(tmp_path: Path) -> None:
    special = ("<|end|>", "<|im_start|>", "<|im_end|>", "<|eot|>", "<|stop|>")
    folder = save(
        byte_level(special=special),
        tmp_path,
        files={"config.json": {"eos_token_id": 0}, "generation_config.json": {"eos_token_id": [3, 0]}},
        bos_token="<|im_start|>",
        eos_token="<|stop|>",
        chat_template=CHATML,
    )
    tokenizer = Tokenizer.load(folder)
    assert tokenizer.eos_ids == {0, 2, 3, 4}
    assert (tokenizer.bos_id, tokenizer.size) == (1, 320)


def test_another_template_brings_its_own_turn_end() -> None:
    tokenizer = Tokenizer(byte_level(), eos_ids=[0], chat_template=CHATML)
    assert tokenizer.eos_ids == {0, 2}
    tokenizer.use_chat_template("{% for m in messages %}{{ m.content }}<|end|>{% endfor %}")
    assert tokenizer.eos_ids == {0}


def test_bare_tokenizer_json_takes_its_special_tokens_from_the_config(tmp_path: Path) -> None:
    folder = save(byte_level(), tmp_path, files={"config.json": {"bos_token_id": 1, "eos_token_id": [2, 0]}})
    (folder / "tokenizer_config.json").unlink()
    tokenizer = Tokenizer.load(folder)
    assert (tokenizer.bos_id, tokenizer.eos_ids) == (1, {0, 2})


def test_id_table_names_every_id() -> None:
    table = BYTE_LEVEL.id_table()
    assert sorted(table) == list(range(320))
    assert table[1] == "<|im_start|>"


def test_size_counts_ids_behind_a_hole() -> None:
    backend = byte_level()
    backend.add_tokens([AddedToken("<late>", special=False)])
    assert Tokenizer(backend).size == 321


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tokenizer.json", "{", "is not a tokenizer"),
        ("tokenizer_config.json", "[", "is not valid JSON"),
        ("chat_template.jinja", "{% if %}", "does not compile"),
    ],
)
def test_damaged_file_is_named(name: str, content: str, message: str, tmp_path: Path) -> None:
    folder = save(byte_level(), tmp_path)
    (folder / name).write_text(content)
    with pytest.raises(UsageError, match=message):
        Tokenizer.load(folder)


def test_folder_without_a_tokenizer_says_what_it_lacks(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"neither tokenizer\.json nor tokenizer\.model"):
        Tokenizer.load(tmp_path)


def test_older_vocabulary_files_are_converted_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECQ_CACHE", str(tmp_path / "cache"))
    folder = save(byte_level(special=("<|endoftext|>",)), tmp_path / "model", tokenizer_class="GPT2Tokenizer")
    reference = Tokenizer.load(folder)
    reference.backend.model.save(str(folder))
    (folder / "tokenizer.json").unlink()
    for _ in range(2):
        converted = Tokenizer.load(folder)
        assert converted.encode("the cat sat") == reference.encode("the cat sat")
    assert len(list((tmp_path / "cache" / "tokenizers").glob("[!.]*"))) == 1


def test_loading_imports_neither_torch_nor_transformers(tmp_path: Path) -> None:
    folder = save(byte_level(), tmp_path, chat_template=CHATML)
    code = (
        "import sys, pathlib; from specq.tokenizer import Tokenizer;"
        f"Tokenizer.load(pathlib.Path({str(folder)!r})).encode_chat([{USER!r}]);"
        "print(sorted({'torch', 'transformers'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
