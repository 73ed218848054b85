"""`specq quantize` as a command: flags, recipes, streams and exit codes."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from factories import tiny_config, write_model

import specq.compress
from specq.cli.quantize_settings import command_line
from specq.recipe import QuantizeSection


@pytest.fixture(autouse=True)
def _quick(monkeypatch) -> None:
    monkeypatch.setattr("specq.compress.runner.EVALUATION_SAMPLES", 2)
    monkeypatch.setattr("specq.compress.runner.EVALUATION_LENGTH", 48)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_model(tmp_path / "source", tiny_config(intermediate_size=192))


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Flags for little calibration."""
    bundled = Path(specq.compress.__file__).parent / "text" / "calibration.txt"
    file = tmp_path_factory.mktemp("text") / "my text.txt"
    file.write_text(bundled.read_text("utf-8")[:20_000], "utf-8")
    return ["--calib", str(file), "--samples", "4", "--seq-len", "64", "--device", "cpu"]


def test_a_table_of_matrices_and_one_of_scores(call, source: Path, small: list[str], tmp_path: Path) -> None:
    done = call("quantize", source, "-o", tmp_path / "out", *small)
    assert done.code == 0
    assert "self_attn.q_proj  64x64" in done.out
    assert "rounding to nearest" in done.out
    assert "Embeddings, head, norms and biases are in 16 bits." in done.out
    assert re.search(r"\d seconds?, at most", done.out)
    assert str(tmp_path / "out") in done.out
    assert "groups of 64" in done.err


def test_a_head_and_what_stays_in_16_bits_are_in_the_table(call, small: list[str], tmp_path: Path) -> None:
    source = write_model(tmp_path / "odd", tiny_config(intermediate_size=100, tie_word_embeddings=True))
    done = call("quantize", source, "-o", tmp_path / "out", *small, "--head-bits", "8")
    assert done.code == 0
    rows = {line.split()[0]: line.split() for line in done.out.splitlines() if line.strip()}
    assert rows["lm_head"][1:4] == ["320x64", "8", "64"]
    assert rows["lm_head"][5] == "-"  # one matrix has no worst layer
    assert rows["mlp.down_proj"][2:6] == ["16", "-", "-", "-"]
    assert "64x100" in rows["mlp.down_proj"]
    assert "100 inputs, no multiple of 8: left in 16 bits" in done.out
    assert "the head gets a copy" in done.err
    assert call("quantize", source, "-o", tmp_path / "b", *small, "--head-bits", "5").code == 2


def test_json_is_one_document_with_every_matrix(call, source: Path, small: list[str], tmp_path: Path) -> None:
    done = call("quantize", source, "-o", tmp_path / "out", *small, "--json", "--asym", "--group-size", "32")
    record = json.loads(done.out)
    assert record["settings"]["group_size"] == 32
    assert record["settings"]["symmetric"] is False
    assert len(record["matrices"]) == 14
    assert record["evaluation"].keys() == {"source", "quantized", "rtn", "tokens"}
    assert record["calibration"]["samples"] == 4
    assert record["environment"]["torch"]


def test_the_output_runs(call, source: Path, small: list[str], tmp_path: Path) -> None:
    call("quantize", source, "-o", tmp_path / "out", *small)
    done = call("run", tmp_path / "out", "hello", "--pipeline", "plain", "--max-new-tokens", "4", "--json")
    assert done.code == 0
    assert json.loads(done.out)["tokens_out"] > 0


def test_a_kl_above_the_limit_is_exit_3_and_the_folder_is_there(
    call, source: Path, small: list[str], tmp_path: Path
) -> None:
    done = call("quantize", source, "-o", tmp_path / "out", *small, "--max-kl", "0.000001")
    assert done.code == 3
    assert "above `--max-kl 1e-06`" in done.err
    assert (tmp_path / "out" / "config.json").is_file()
    assert call("quantize", source, "-o", tmp_path / "out", *small, "--overwrite", "--max-kl", "100").code == 0


def test_a_recipes_section_is_used_and_flags_win(call, source: Path, small: list[str], tmp_path: Path) -> None:
    recipe = tmp_path / "mine.yaml"
    recipe.write_text(f"target: {source}\nquantize:\n  method: rtn\n  group_size: 32\n")
    done = call("quantize", recipe, "-o", tmp_path / "a", "--device", "cpu", "--json")
    assert json.loads(done.out)["settings"]["method"] == "rtn"
    done = call("quantize", recipe, "-o", tmp_path / "b", "--json", "--method", "gptq", *small)
    settings = json.loads(done.out)["settings"]
    assert (settings["method"], settings["group_size"]) == ("gptq", 32)


def test_a_recipe_is_never_quantized_silently(call, source: Path, small: list[str], tmp_path: Path) -> None:
    recipe = tmp_path / "mine.yaml"
    recipe.write_text(f"target: {source}\nquantize:\n  group_size: 32\n")
    words = ["--pipeline", "plain", "--max-new-tokens", "2"]
    done = call("run", recipe, "hello", *words)
    assert done.code == 2
    assert "specq quantize RECIPE" in done.err
    assert call("quantize", recipe, "-o", tmp_path / "out", *small).code == 0
    assert call("run", recipe, "hello", *words, "--set", f"target={tmp_path / 'out'}").code == 0


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--group-size", "100"], 2, "`--group-size` = `100`"),
        (["--method", "rtn", "--act-order"], 2, "--act-order"),
        (["--calib", "/nowhere/text.txt"], 2, "cannot be read: no such file"),
        (["--set", "quantize.sample=3"], 2, "unknown key `quantize.sample`"),
        (["--device", "tpu"], 2, "device `tpu` is unknown"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(
    call, source: Path, tmp_path: Path, arguments: list[str], code: int, message: str
) -> None:
    done = call("quantize", source, "-o", tmp_path / "out", *arguments)
    assert done.code == code
    assert message in done.err
    assert done.out == ""
    assert not (tmp_path / "out").exists()


def test_strict_shapes_is_exit_6(call, tmp_path: Path) -> None:
    source = write_model(tmp_path / "source", tiny_config(intermediate_size=176))
    done = call("quantize", source, "-o", tmp_path / "out", "--strict-shapes", "--device", "cpu")
    assert done.code == 6
    assert "mlp.down_proj" in done.err


def test_the_output_is_required(call, source: Path) -> None:
    done = call("quantize", source)
    assert done.code == 2
    assert "-o" in done.err


def test_an_interrupted_run_says_how_to_go_on(
    call, source: Path, small: list[str], tmp_path: Path, monkeypatch
) -> None:
    def interrupt(*arguments: object, **options: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("specq.compress.layers.solve", interrupt)
    done = call("quantize", source, "-o", tmp_path / "out", *small)
    assert done.code == 130
    assert "the same command goes on after the last finished layer" in done.err
    monkeypatch.undo()
    assert call("quantize", source, "-o", tmp_path / "out", *small).code == 0


def test_the_command_of_the_card_has_no_paths() -> None:
    section = QuantizeSection(calib="/home/me/secret/text.jsonl", group_size=32, asym=True)
    assert command_line("org/model", section) == (
        "specq quantize org/model -o DIR --group-size 32 --asym --calib text.jsonl"
    )
