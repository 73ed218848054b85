"""`specq quantize` of an EAGLE head: 4 bits that the pipelines run, its card and manifest carried over."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from heads import write_head

from specq.models.eagle_files import HeadFiles

ANSWER = ("--max-new-tokens", "12", "--temperature", "0", "--dtype", "float32", "--json")


@pytest.fixture
def head(tmp_path: Path) -> Path:
    folder = write_head(tmp_path / "head")
    (folder / "README.md").write_text("# The card of the head\n")
    (folder / "specq_head.json").write_text(json.dumps({"kind": "eagle", "bits": 16, "training": {"steps": 7}}))
    return folder


def test_a_head_in_4_bits_drafts_and_keeps_what_was_said_of_it(call, model, head, tmp_path) -> None:
    done = call("quantize", head, "-o", tmp_path / "small", "--group-size", "32", "--head-bits", "8", "--json")
    assert done.code == 0, done.err
    report = json.loads(done.out)
    assert (report["group_size"], report["draft_head_bits"], len(report["matrices"])) == (32, 8, 8)
    assert report["method"] == "rtn"
    files = HeadFiles(tmp_path / "small")
    assert files.head_bits == 8
    assert files.config["quantization_config"]["bits"] == 4
    manifest = json.loads((tmp_path / "small" / "specq_head.json").read_text())
    assert manifest == {"kind": "eagle", "bits": 4, "training": {"steps": 7}, "draft_head_bits": 8}
    card = (tmp_path / "small" / "README.md").read_text()
    assert card.startswith("# The card of the head\n")
    assert "specq quantize head -o DIR --group-size 32 --head-bits 8" in card
    answer = call("run", model, "hello", "--pipeline", "eagle2", "--drafter", tmp_path / "small", *ANSWER)
    plain = call("run", model, "hello", "--pipeline", "plain", *ANSWER)
    assert json.loads(answer.out)["token_ids"] == json.loads(plain.out)["token_ids"]
    assert call("check", model, tmp_path / "small").code == 0


def test_the_table_names_every_matrix(call, head, tmp_path) -> None:
    done = call("quantize", head, "-o", tmp_path / "small", "--group-size", "32")
    assert done.out.count("_proj.weight") == 7
    assert "rounded to nearest; drafts with 16 bits" in done.out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--act-order",), "--act-order is for models"),
        (("--method", "gptq"), "`--method gptq` is for models: an EAGLE head is rounded to nearest"),
        (("--format", "compressed-tensors"), "--format is for models"),
        (("--asym",), "--asym is for models"),
        (("--strict-shapes",), "--strict-shapes is for models"),
        (("--max-kl", "0.1"), "--max-kl is for models"),
        (("--samples", "4"), "--samples is for models"),
    ],
)
def test_options_of_models_are_refused(call, head, tmp_path, options, message) -> None:
    done = call("quantize", head, "-o", tmp_path / "small", *options)
    assert done.code == 2
    assert message in done.err
    assert not (tmp_path / "small").exists()


def test_4_bits_are_not_quantized_again(call, head, tmp_path) -> None:
    assert call("quantize", head, "-o", tmp_path / "small").code == 0
    done = call("quantize", tmp_path / "small", "-o", tmp_path / "smaller")
    assert done.code == 2
    assert "`small` is already in 4 bits" in done.err
    assert "is not empty" in call("quantize", head, "-o", tmp_path / "small").err


@pytest.mark.parametrize("output", ["head", "."])
def test_a_head_is_not_replaced_by_what_is_made_of_it(call, head, tmp_path, output) -> None:
    done = call("quantize", head, "-o", tmp_path / output, "--overwrite")
    assert done.code == 2
    assert "is or holds `head`, which is read" in done.err
    assert (head / "model.safetensors").is_file()
