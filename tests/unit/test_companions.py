"""What is copied beside a model's weights, and what is not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from factories import CHAT_TEMPLATE, write_tokenizer
from tiny_tokenizers import gguf_metadata, write_gguf

from specq.companions import companion_files, copy_companions
from specq.errors import UsageError
from specq.tokenizer import Tokenizer


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_tokenizer(tmp_path / "source")


def test_known_files_come_along_and_code_does_not(source: Path, tmp_path: Path) -> None:
    for name in ("LICENSE", "generation_config.json", "modeling_evil.py", "training_args.bin"):
        (source / name).write_text("{}")
    folder = copied(source, tmp_path)
    names = {path.name for path in folder.iterdir()}
    assert names >= {"tokenizer.json", "tokenizer_config.json", "LICENSE", "generation_config.json"}
    assert not names & {"modeling_evil.py", "training_args.bin"}


def test_paths_of_whoever_saved_it_stay_behind(source: Path, tmp_path: Path) -> None:
    settings = json.loads((source / "tokenizer_config.json").read_text())
    (source / "tokenizer_config.json").write_text(json.dumps({**settings, "name_or_path": "/home/me/model"}))
    written = json.loads((copied(source, tmp_path) / "tokenizer_config.json").read_text())
    assert written == settings


def test_the_template_gets_a_file_of_its_own(source: Path, tmp_path: Path) -> None:
    assert (copied(source, tmp_path) / "chat_template.jinja").read_text() == CHAT_TEMPLATE


def test_a_link_out_of_the_folder_is_refused_before_anything_is_copied(source: Path, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("secret")
    (source / "LICENSE").symlink_to(tmp_path / "secret")
    with pytest.raises(UsageError, match="link out of the model's folder"):
        companion_files(source)


def test_a_gguf_file_brings_its_own_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "gguf").mkdir()
    file = write_gguf(tmp_path / "gguf", gguf_metadata("smollm"))
    assert Tokenizer.load(copied(file, tmp_path)).encode("a cat") == Tokenizer.load(file).encode("a cat")


def test_a_tokenizer_beside_a_gguf_file_wins_over_the_one_in_it(source: Path, tmp_path: Path) -> None:
    write_gguf(source, gguf_metadata("smollm"))
    folder = copied(source, tmp_path)
    assert (folder / "tokenizer.json").read_bytes() == (source / "tokenizer.json").read_bytes()


def copied(source: Path, tmp_path: Path) -> Path:
    folder = tmp_path / "copy"
    folder.mkdir()
    copy_companions(companion_files(source), folder, chat_template=Tokenizer.load(source).chat_template)
    return folder
