"""Text to token sets: files, bundled text, and that the two bundled texts share nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import tokenizers
import torch
from factories import BOS, write_tokenizer
from stub_hub import COMMIT, StubHub, serve
from tokenizers.processors import TemplateProcessing

import specq.compress
from specq.compress.calibration import calibration_tokens, evaluation_tokens
from specq.errors import OfflineError, UsageError
from specq.tokenizer import Tokenizer

TEXT = Path(specq.compress.__file__).parent / "text"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.load(write_tokenizer(tmp_path_factory.mktemp("tokenizer")))


def runs_of_words(text: str, length: int = 13) -> set[tuple[str, ...]]:
    words = text.split()
    return {tuple(words[i : i + length]) for i in range(len(words) - length + 1)}


def test_calibration_and_evaluation_share_no_13_words() -> None:
    calibration, evaluation = ((TEXT / f"{name}.txt").read_text("utf-8") for name in ("calibration", "evaluation"))
    assert not runs_of_words(calibration) & runs_of_words(evaluation)


def test_bundled_text_gives_the_sequences_asked_for(tokenizer: Tokenizer) -> None:
    found = calibration_tokens(tokenizer, "bundled", samples=6, seq_len=40)
    assert found.tokens.shape == (6, 40)
    assert found.tokens.dtype == torch.int64
    assert found.origin == "bundled"
    assert not torch.equal(found.tokens, evaluation_tokens(tokenizer, samples=6, seq_len=40).tokens)


def test_sequences_are_spread_over_the_whole_text(tokenizer: Tokenizer, tmp_path: Path) -> None:
    file = tmp_path / "text.txt"
    file.write_text("a" * 400 + "b" * 400)
    found = calibration_tokens(tokenizer, str(file), samples=2, seq_len=100)
    assert [tokenizer.decode(row.tolist())[0] for row in found.tokens] == ["a", "b"]


def test_short_text_gives_fewer_sequences(tokenizer: Tokenizer, tmp_path: Path) -> None:
    file = tmp_path / "text.txt"
    file.write_text("0123456789" * 10)
    assert calibration_tokens(tokenizer, str(file), samples=128, seq_len=32).tokens.shape == (3, 32)


def test_text_shorter_than_one_sequence_is_an_error(tokenizer: Tokenizer, tmp_path: Path) -> None:
    file = tmp_path / "text.txt"
    file.write_text("0123456789")
    with pytest.raises(UsageError, match="10 tokens, less than one sequence of 32"):
        calibration_tokens(tokenizer, str(file), samples=1, seq_len=32)


def test_jsonl_holds_text_or_messages(tokenizer: Tokenizer, tmp_path: Path) -> None:
    file = tmp_path / "text.jsonl"
    messages = [{"role": "user", "content": "0123456789"}]
    file.write_text(json.dumps({"text": "x" * 40}) + "\n\n" + json.dumps({"messages": messages}) + "\n")
    found = calibration_tokens(tokenizer, str(file), samples=1, seq_len=52)
    text = tokenizer.decode(found.tokens[0].tolist(), skip_special=False)
    assert text.startswith("x" * 40 + "<|im_start|>user")


@pytest.mark.parametrize(
    ("content", "message"),
    [("{", "text.jsonl:1` is not JSON"), ('{"prompt": "x"}', "neither `text` nor `messages`")],
)
def test_a_broken_line_is_named(tokenizer: Tokenizer, tmp_path: Path, content: str, message: str) -> None:
    file = tmp_path / "text.jsonl"
    file.write_text(content)
    with pytest.raises(UsageError, match=message):
        calibration_tokens(tokenizer, str(file), samples=1, seq_len=32)


def test_missing_and_binary_files_are_named(tokenizer: Tokenizer, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be read: no such file"):
        calibration_tokens(tokenizer, str(tmp_path / "none.txt"), samples=1, seq_len=32)
    (tmp_path / "binary.txt").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UsageError, match="is not UTF-8 text"):
        calibration_tokens(tokenizer, str(tmp_path / "binary.txt"), samples=1, seq_len=32)


def test_a_hub_dataset_offline_is_an_error_of_its_kind(tokenizer: Tokenizer, tmp_path: Path) -> None:
    with pytest.raises(OfflineError, match="org/data"):
        calibration_tokens(tokenizer, "hub:org/data/train.jsonl", samples=1, seq_len=32, offline=True)
    with pytest.raises(OfflineError, match="listed offline"):
        calibration_tokens(tokenizer, "hub:org/data", samples=1, seq_len=32, offline=True)


HUB_SCRIPT = """
import sys
from pathlib import Path
from specq.compress.calibration import calibration_tokens
from specq.errors import SpecqError
from specq.tokenizer import Tokenizer
for name in sys.argv[2:]:
    try:
        found = calibration_tokens(Tokenizer.load(Path(sys.argv[1])), name, samples=4, seq_len=32)
        print(found.origin, tuple(found.tokens.shape))
    except SpecqError as error:
        print(error.exit_code, error.message)
"""


def test_a_text_file_of_a_hub_dataset_is_fetched_at_its_revision(tmp_path: Path) -> None:
    folder = write_tokenizer(tmp_path / "tokenizer")
    lines = "".join(json.dumps({"text": "0123456789" * 8}) + "\n" for _ in range(4)).encode()
    repos = {"org/data": {"README.md": b"hi", "data/train.jsonl": lines}, "org/images": {"a.png": b"png"}}

    def ask(stub: StubHub, *names: str) -> list[str]:
        clean = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
        settings = {"HF_ENDPOINT": stub.url, "HF_HOME": str(tmp_path / "home"), "HF_HUB_DISABLE_XET": "1"}
        command = [sys.executable, "-c", HUB_SCRIPT, str(folder), *names]
        done = subprocess.run(command, env={**clean, **settings}, capture_output=True, text=True, check=True)
        assert "Retrying" not in done.stderr
        return done.stdout.splitlines()

    with serve(StubHub(repos)) as stub:
        listed, named, none, missing, nameless = ask(
            stub,
            *("hub:org/data", "hub:org/data/data/train.jsonl", "hub:org/images", "hub:org/none"),
            "hub:org/data/none.txt",
        )
        assert listed == named == f"hub:org/data/data/train.jsonl at {COMMIT} (4, 32)"
        assert none == "2 dataset `org/images` holds no .jsonl or .txt file"
        assert missing.startswith("4 dataset `org/none` does not exist")
        assert nameless == "2 dataset `org/data` has no file `none.txt`"
    for said in ask(stub, "hub:org/more", "hub:org/more/file.txt"):  # nobody listens there any more
        assert said.startswith(f"5 dataset `org/more` could not be fetched from {stub.url}: ")


def test_what_is_no_dataset_is_said_so(tokenizer: Tokenizer) -> None:
    for name in ("hub:data", "hub:/data"):
        with pytest.raises(UsageError, match="names no dataset"):
            calibration_tokens(tokenizer, name, samples=1, seq_len=32)
    with pytest.raises(UsageError, match="not a Hub id"):
        calibration_tokens(tokenizer, "hub:org/-data-/x.txt", samples=1, seq_len=32)


def test_a_tokenizer_with_bos_begins_every_sequence_with_it(tmp_path: Path) -> None:
    file = write_tokenizer(tmp_path) / "tokenizer.json"
    backend = tokenizers.Tokenizer.from_file(str(file))
    backend.post_processor = TemplateProcessing(single="<|bos|> $A", special_tokens=[("<|bos|>", BOS)])
    backend.save(str(file))
    with_bos = Tokenizer.load(tmp_path)
    found = calibration_tokens(with_bos, "bundled", samples=3, seq_len=40)
    assert found.tokens.shape == (3, 40)
    assert found.tokens[:, 0].tolist() == [BOS] * 3


def test_the_digest_tells_token_sets_apart(tokenizer: Tokenizer) -> None:
    first = calibration_tokens(tokenizer, "bundled", samples=4, seq_len=40)
    assert first.digest == calibration_tokens(tokenizer, "bundled", samples=4, seq_len=40).digest
    assert first.digest != calibration_tokens(tokenizer, "bundled", samples=5, seq_len=40).digest
    assert first.digest != calibration_tokens(tokenizer, "bundled", samples=4, seq_len=41).digest
