"""`specq quantize --share-embeddings TARGET`: an intermediate in 4 bits that leaves its embedding to its target."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from factories import random_weights, tiny_config, write_model
from safetensors.torch import load_file

from specq.compress import calibration
from specq.models.inventory import EMBEDDING, HEAD

CONFIG = tiny_config(intermediate_size=192)
ANSWER = ("--max-new-tokens", "12", "--temperature", "0", "--dtype", "float32", "--json")


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("models") / "target", CONFIG)


@pytest.fixture
def short(tmp_path: Path) -> tuple[str, ...]:
    """Flags for little calibration."""
    text = Path(calibration.__file__).parent / "text" / "calibration.txt"
    (tmp_path / "calib.txt").write_text(text.read_text(encoding="utf-8")[:4000], encoding="utf-8")
    return "--calib", str(tmp_path / "calib.txt"), "--samples", "4", "--seq-len", "32", "--device", "cpu"


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """A complete model of one layer with the target's embedding and head."""
    config = {**CONFIG, "num_hidden_layers": 1}
    lent = {name: weight for name, weight in random_weights(CONFIG).items() if name in (EMBEDDING, HEAD)}
    return write_model(tmp_path / "small", config, weights=random_weights(config, seed=5) | lent)


def test_a_complete_folder_becomes_one_that_shares_and_its_numbers_are_the_same(
    call, target, small, short, tmp_path
) -> None:
    shared, whole = tmp_path / "shared", tmp_path / "whole"
    done = call("quantize", small, "-o", shared, "--share-embeddings", target, *short, "--json")
    assert done.code == 0, done.err
    assert call("quantize", small, "-o", whole, *short).code == 0
    weights, complete = load_file(shared / "model.safetensors"), load_file(whole / "model.safetensors")
    assert complete.keys() - weights.keys() == {EMBEDDING, HEAD}
    assert all(weights[name].equal(complete[name]) for name in weights)
    assert json.loads(done.out)["evaluation"]["quantized"]["kl"] > 0
    assert sorted(file.name for file in shared.iterdir()) == [
        "README.md",
        "config.json",
        "model.safetensors",
        "quantize_config.json",
        "specq_intermediate.json",
    ]
    card = (shared / "README.md").read_text()
    assert "Embedding, output head and tokenizer are those of `target`" in card
    assert "specq quantize small -o DIR --share-embeddings target --calib calib.txt" in card
    answer = call("run", target, "hello", "--pipeline", "sequence", "--intermediate", shared, *ANSWER)
    plain = call("run", target, "hello", "--pipeline", "plain", *ANSWER)
    assert json.loads(answer.out)["token_ids"] == json.loads(plain.out)["token_ids"]


def test_a_folder_that_shares_already_is_quantized_with_its_lender_only(call, target, small, tmp_path) -> None:
    options = ("--method", "rtn", "--device", "cpu")
    assert call("quantize", small, "-o", tmp_path / "once", "--share-embeddings", target, *options).code == 0
    manifest = json.loads((tmp_path / "once" / "specq_intermediate.json").read_text())
    weights = load_file(small / "model.safetensors")
    for name in (EMBEDDING, HEAD):
        del weights[name]
    bare = write_model(tmp_path / "bare", {**CONFIG, "num_hidden_layers": 1}, weights=weights)
    (bare / "specq_intermediate.json").write_text(json.dumps(manifest | {"layers": [0]}))
    alone = call("quantize", bare, "-o", tmp_path / "out", *options)
    assert alone.code == 2
    assert "`bare` was saved without embedding and output head, which calibration needs" in alone.err
    assert "--share-embeddings target" in alone.err
    assert call("quantize", bare, "-o", tmp_path / "out", "--share-embeddings", target, *options).code == 0
    written = json.loads((tmp_path / "out" / "specq_intermediate.json").read_text())
    assert written == manifest | {"layers": [0]}
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == (
        tmp_path / "once" / "model.safetensors"
    ).read_bytes()


def test_another_target_and_bits_for_the_shared_head_are_refused(call, target, small, short, tmp_path) -> None:
    other = write_model(tmp_path / "other", CONFIG, seed=9)
    done = call("quantize", small, "-o", tmp_path / "out", "--share-embeddings", other, *short)
    assert done.code == 6
    assert "`model.embed_tokens.weight` of `small` is another" in done.err
    done = call("quantize", small, "-o", tmp_path / "out", "--share-embeddings", target, "--head-bits", "8", *short)
    assert done.code == 2
    assert "the output head is shared" in done.err
    assert not (tmp_path / "out").exists()


def test_a_folder_in_4_bits_only_loses_its_embedding(call, target, small, short, tmp_path) -> None:
    whole, left, bare = tmp_path / "whole", tmp_path / "left", tmp_path / "bare"
    assert call("quantize", small, "-o", whole, *short).code == 0
    done = call("quantize", whole, "-o", left, "--share-embeddings", target)
    assert done.code == 0, done.err
    assert "the 4 bits as they were" in done.out
    ignored = call("quantize", whole, "-o", tmp_path / "out", "--share-embeddings", target, "--group-size", "32")
    assert (ignored.code, (tmp_path / "out").exists()) == (2, False)
    assert "--group-size changes nothing: the model is in 4 bits already" in ignored.err
    replaced = call("quantize", whole, "-o", whole, "--share-embeddings", target, "--overwrite")
    assert (replaced.code, (whole / "model.safetensors").is_file()) == (2, True)
    complete, weights = load_file(whole / "model.safetensors"), load_file(left / "model.safetensors")
    assert complete.keys() - weights.keys() == {EMBEDDING, HEAD}
    assert all(weights[name].equal(complete[name]) for name in weights)
    assert (left / "config.json").read_bytes() == (whole / "config.json").read_bytes()
    assert not (left / "tokenizer.json").exists()
    answer = call("run", target, "hello", "--pipeline", "sequence", "--intermediate", left, *ANSWER)
    assert answer.code == 0, answer.err
    # the same where somebody took the embedding out before
    shutil.copytree(left, bare)
    (bare / "specq_intermediate.json").unlink()
    done = call("quantize", bare, "-o", tmp_path / "again", "--share-embeddings", target, "--json")
    assert json.loads(done.out)["shared"]["tensors"].keys() == {EMBEDDING, HEAD}
    assert (tmp_path / "again" / "specq_intermediate.json").read_bytes() == (
        left / "specq_intermediate.json"
    ).read_bytes()
    other = write_model(tmp_path / "other", CONFIG, seed=9)
    done = call("quantize", whole, "-o", tmp_path / "out", "--share-embeddings", other)
    assert done.code == 6
    assert not (tmp_path / "out").exists()
