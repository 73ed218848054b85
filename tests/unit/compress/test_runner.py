"""Whole runs on tiny models: what is written, resumed, refused and kept apart."""

from __future__ import annotations

import hashlib
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from factories import random_weights, tiny_config, write_model
from filelock import FileLock
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file

from specq.checkpoint import ModelSpec, read_config
from specq.compress.plan import Settings
from specq.compress.report import Provenance, Report
from specq.compress.runner import Calibration, quantize
from specq.errors import DiskFullError, NotEnoughMemoryError, SpecqError, UnsupportedError, UsageError
from specq.models.loader import load_model
from specq.spec.tree import chain
from specq.tensors import open_weights
from specq.tokenizer import Tokenizer

Run = Callable[..., Report]


def digest(folder: Path) -> dict[str, str]:
    files = sorted(path for path in folder.glob("*.safetensors"))
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def logits(folder: Path) -> torch.Tensor:
    model = load_model(folder, dtype="float64")
    return model.forward(chain(list(range(3, 40))), model.new_cache(40)).logits


def stored(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def test_a_folder_that_loads_like_any_other(run: Run, source: Path) -> None:
    report = run(source)
    names = {path.name for path in report.output.iterdir()}
    assert names >= {
        "config.json",
        "quantize_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
        "chat_template.jinja",
        "generation_config.json",
        "README.md",
    }
    difference = (logits(report.output) - logits(source)).abs().mean() / logits(source).abs().mean()
    assert 0 < difference < 0.5
    assert Tokenizer.load(report.output).chat_template == Tokenizer.load(source).chat_template


def test_no_matrix_stays_dense_and_every_one_is_reported(run: Run, source: Path) -> None:
    report = run(source)
    tensors = stored(report.output)
    assert len(report.matrices) == 14
    for matrix in report.matrices:
        assert f"{matrix.name}.weight" not in tensors
        parts = [tensors[f"{matrix.name}.{part}"] for part in ("qweight", "qzeros", "scales", "g_idx")]
        assert sum(part.nbytes for part in parts) == matrix.num_bytes
        assert parts[2].dtype == torch.float16
        assert parts[1].unique().tolist() == [0x77777777]  # zero 8, stored as 7
        assert torch.equal(parts[3], torch.arange(matrix.columns, dtype=torch.int32) // 64)
        assert matrix.error is not None
        assert 0 < matrix.error < 0.05


def test_the_config_says_what_readers_ask_for(run: Run, source: Path) -> None:
    config = json.loads((run(source).output / "config.json").read_text())
    quantization = config["quantization_config"]
    assert quantization == json.loads((source.parent / "out" / "quantize_config.json").read_text())
    assert {key: quantization[key] for key in ("bits", "group_size", "sym", "desc_act", "quant_method", "format")} == {
        "bits": 4,
        "group_size": 64,
        "sym": True,
        "desc_act": False,
        "quant_method": "gptq",
        "format": "gptq",
    }
    assert quantization["checkpoint_format"] == "gptq"
    assert quantization["lm_head"] is False
    assert config["torch_dtype"] == "bfloat16"


@pytest.mark.parametrize(
    "settings",
    [
        {"stored_order": True},
        {"symmetric": False},
        {"method": "rtn"},
        {"group_size": -1},
        {"group_size": 32, "symmetric": False, "stored_order": True},
        {"format": "compressed-tensors"},
        {"format": "compressed-tensors", "symmetric": False},
        {"format": "compressed-tensors", "group_size": -1},
    ],
    ids=str,
)
def test_every_kind_of_file_reads_back_as_it_was_solved(run: Run, source: Path, settings: dict) -> None:
    report = run(source, **settings)
    written = open_weights(report.output, ModelSpec.from_config(read_config(report.output)))
    original = open_weights(source, ModelSpec.from_config(read_config(source)))
    for matrix in report.matrices:
        name = f"{matrix.name}.weight"
        difference = (written.tensor(name) - original.tensor(name).float()).square().mean()
        assert difference < 0.1 * original.tensor(name).float().square().mean()
    assert (written.tensor("model.norm.weight") == original.tensor("model.norm.weight")).all()


def test_all_families_and_their_biases_survive(run: Run, tmp_path: Path) -> None:
    for family, changes in (("qwen2", {}), ("qwen3", {}), ("mistral", {}), ("llama", {"attention_bias": True})):
        config = tiny_config(family, intermediate_size=192, **changes)
        folder = write_model(tmp_path / family, config)
        report = run(folder, f"{family}-4bit")
        reference = logits(folder)
        assert (logits(report.output) - reference).abs().mean() < 0.5 * reference.abs().mean()


def test_tied_embeddings_are_stored_once(run: Run, tmp_path: Path) -> None:
    folder = write_model(tmp_path / "tied", tiny_config(tie_word_embeddings=True, intermediate_size=192))
    report = run(folder)
    assert "lm_head.weight" not in stored(report.output)
    assert json.loads((report.output / "config.json").read_text())["tie_word_embeddings"] is True
    assert logits(report.output).shape == logits(folder).shape


@pytest.mark.parametrize("is_tied", [False, True])
@pytest.mark.parametrize(
    "settings",
    [
        {"head_bits": 8},
        {"head_bits": 4},
        {"head_bits": 8, "method": "rtn"},
        {"head_bits": 8, "group_size": -1, "symmetric": False},
        {"head_bits": 8, "stored_order": True},
        {"head_bits": 8, "format": "compressed-tensors"},
        {"head_bits": 4, "format": "compressed-tensors"},
    ],
    ids=str,
)
def test_a_head_is_quantized_when_asked(run: Run, tmp_path: Path, settings: dict, is_tied: bool) -> None:
    config = tiny_config(intermediate_size=192, tie_word_embeddings=is_tied)
    folder = write_model(tmp_path / "model", config, dtype=torch.bfloat16)
    report = run(folder, **settings)
    matrix, bits = report.matrices[-1], settings["head_bits"]
    assert (matrix.name, matrix.bits, matrix.rows, matrix.columns) == ("lm_head", bits, 320, 64)
    tensors = stored(report.output)
    assert "lm_head.weight" not in tensors
    assert sum(part.nbytes for name, part in tensors.items() if name.startswith("lm_head")) == matrix.num_bytes
    original = load_file(folder / "model.safetensors")
    embedding = original["model.embed_tokens.weight"]
    assert torch.equal(tensors["model.embed_tokens.weight"], embedding)
    written = read_config(report.output)
    assert written["tie_word_embeddings"] is False
    head = (embedding if is_tied else original["lm_head.weight"]).float()
    found = open_weights(report.output, ModelSpec.from_config(written)).tensor("lm_head.weight")
    # GPTQ also moves the head towards what the layers before it lost.
    limit = 0.05 if bits == 4 else 1e-4 if settings.get("method") == "rtn" else 3e-3
    assert (found - head).square().mean() < limit * head.square().mean()
    reference = logits(folder)
    assert (logits(report.output) - reference).abs().mean() < 0.5 * reference.abs().mean()
    card = (report.output / "README.md").read_text()
    assert f"The head is in {bits} bits" in card
    assert ("loader leaves out" in card) == ("format" not in settings)


def test_the_config_names_the_heads_bits_as_readers_expect(run: Run, source: Path) -> None:
    eight = json.loads((run(source, "eight", head_bits=8).output / "config.json").read_text())["quantization_config"]
    assert eight["lm_head"] is True
    assert eight["bits"] == 4
    assert eight["dynamic"] == {"lm_head": {"bits": 8, "group_size": 64, "sym": True, "desc_act": False}}
    four = json.loads((run(source, "four", head_bits=4).output / "config.json").read_text())["quantization_config"]
    assert four["lm_head"] is True
    assert "dynamic" not in four
    form = {"format": "compressed-tensors"}
    config = json.loads((run(source, "ct", head_bits=8, **form).output / "config.json").read_text())
    groups = config["quantization_config"]["config_groups"]
    assert [groups[key]["weights"]["num_bits"] for key in groups] == [4, 8]
    assert groups["group_1"]["targets"] == ["re:.*lm_head$"]
    assert config["quantization_config"]["ignore"] == []


def test_a_head_that_cannot_be_packed_leaves_the_model_tied(run: Run, tmp_path: Path) -> None:
    config = tiny_config(intermediate_size=192, tie_word_embeddings=True, vocab_size=323)
    report = run(write_model(tmp_path / "odd", config), head_bits=4)
    assert not any(name.startswith("lm_head") for name in stored(report.output))
    assert read_config(report.output)["tie_word_embeddings"] is True
    head = report.matrices[-1]
    assert (head.name, head.bits, head.group_size, head.num_bytes) == ("lm_head", 16, None, 0)
    assert "323 outputs" in head.remark


def test_odd_shapes_are_written_and_read(run: Run, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for intermediate, kept in ((176, False), (100, True)):
        folder = write_model(tmp_path / f"odd{intermediate}", tiny_config(intermediate_size=intermediate))
        report = run(folder, f"out{intermediate}")
        down = next(matrix for matrix in report.matrices if matrix.name.endswith("down_proj"))
        assert (down.group_size is None) == kept
        assert down.remark
        reference = logits(folder)
        assert (logits(report.output) - reference).abs().mean() < 0.5 * reference.abs().mean()
        assert ("dynamic" in json.loads((report.output / "quantize_config.json").read_text())) == kept
    assert "vLLM" in caplog.text


def test_a_gptq_run_beats_rounding_on_the_text_it_saw(run: Run, source: Path, text: str) -> None:
    report = run(source, calibration=Calibration(text, samples=32, seq_len=64))
    assert report.scores["quantized"].kl < report.scores["rtn"].kl
    assert report.scores["source"].kl == 0
    assert report.scores["source"].top1 == 1


def test_wider_models_get_more_calibration(run: Run, source: Path) -> None:
    report = run(source, calibration=Calibration(seq_len=64))
    assert report.calibration is not None
    assert report.calibration["samples"] == 16 * 192 // 64


def test_the_same_run_writes_the_same_bits(run: Run, source: Path) -> None:
    assert digest(run(source, "a").output) == digest(run(source, "b").output)


class Stop(BaseException):
    """What ends a run in the middle, as Ctrl-C does."""


def stop_at(text: str) -> Callable[[str], None]:
    def hear(line: str) -> None:
        if line.startswith(text):
            raise Stop

    return hear


@pytest.mark.parametrize(
    ("where", "done"),
    [
        ("layer 2 of 2, o", 1),
        ("layer 2 of 2, down", 1),
        ("head, rows 0", 2),
        ("writing", 3),
        ("evaluating, layer 2", 3),
    ],
)
def test_a_stopped_run_resumes_to_the_same_bits(run: Run, source: Path, where: str, done: int) -> None:
    settings = {"head_bits": 8}
    whole = run(source, "whole", **settings)
    with pytest.raises(Stop):
        run(source, on_progress=stop_at(where), **settings)
    assert not (source.parent / "out").exists()
    said: list[str] = []
    resumed = run(source, on_progress=said.append, **settings)
    assert digest(resumed.output) == digest(whole.output)
    assert resumed.resumed_layers == done
    assert not any(line.startswith("layer 1 of 2,") for line in said)
    assert [matrix.error for matrix in resumed.matrices] == [matrix.error for matrix in whole.matrices]


def test_a_killed_process_resumes_to_the_same_bits(run: Run, source: Path, text: str, tmp_path: Path) -> None:
    whole = run(source, "whole")
    script = (
        "import os, signal, sys\n"
        "from pathlib import Path\n"
        "from specq.compress.runner import Calibration, quantize\n"
        "def hear(line):\n"
        "    if line.startswith('layer 2 of 2, gate_up'): os.kill(os.getpid(), signal.SIGKILL)\n"
        "calibration = Calibration(sys.argv[3], samples=16, seq_len=64)\n"
        "quantize(Path(sys.argv[1]), Path(sys.argv[2]), calibration=calibration, on_progress=hear)\n"
    )
    command = [sys.executable, "-c", script, str(source), str(tmp_path / "out"), text]
    done = subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": str(torch.get_num_threads())}, check=False)
    assert done.returncode == -signal.SIGKILL
    assert not (tmp_path / "out").exists()
    resumed = run(source)
    assert resumed.resumed_layers == 1
    assert digest(resumed.output) == digest(whole.output)


def test_other_options_text_or_weights_do_not_resume(run: Run, source: Path, text: str) -> None:
    with pytest.raises(Stop):
        run(source, on_progress=stop_at("layer 2"))
    with pytest.raises(UsageError, match="group_size was `64`, now `32`"):
        run(source, group_size=32)
    with pytest.raises(UsageError, match="asym was `False`, now `True`"):
        run(source, symmetric=False)
    with pytest.raises(UsageError, match="head_bits was `None`, now `8`"):
        run(source, head_bits=8)
    with pytest.raises(UsageError, match="calibration is another"):
        run(source, calibration=Calibration(text, samples=3, seq_len=64))
    other = write_model(source.parent / "other", tiny_config(intermediate_size=192), seed=5, dtype=torch.bfloat16)
    with pytest.raises(UsageError, match="source is another"):
        run(other)
    assert run(source, group_size=32, overwrite=True).resumed_layers == 0


def test_two_runs_on_one_folder_are_kept_apart(run: Run, source: Path) -> None:
    with FileLock(source.parent / ".out.specq.lock"), pytest.raises(UsageError, match="another specq quantize"):
        run(source)


def test_nothing_is_left_beside_a_finished_folder(run: Run, source: Path) -> None:
    run(source)
    assert sorted(path.name for path in source.parent.iterdir()) == ["out", "source"]


def test_a_folder_in_use_is_only_replaced_when_asked(run: Run, source: Path) -> None:
    (source.parent / "out").mkdir()
    (source.parent / "out" / "notes.txt").write_text("mine")
    with pytest.raises(UsageError, match="not empty"):
        run(source)
    with pytest.raises(UsageError, match="holds no model"):
        run(source, overwrite=True)
    (source.parent / "out" / "config.json").write_text("{}")
    with pytest.raises(Stop):
        run(source, overwrite=True, on_progress=stop_at("writing"))
    assert (source.parent / "out" / "notes.txt").read_text() == "mine"
    run(source, overwrite=True)
    assert not (source.parent / "out" / "notes.txt").exists()


def test_a_name_with_no_room_for_the_files_beside_it_is_refused_at_once(source: Path) -> None:
    for length in (300, 250):
        with pytest.raises(UsageError, match="cannot be opened: file name too long"):
            quantize(source, source.parent / ("a" * length))
    assert [path.name for path in source.parent.iterdir()] == ["source"]


@pytest.mark.parametrize("where", ["", "..", "../source", "inside", "inside/deeper"])
def test_the_source_is_never_the_output(source: Path, where: str) -> None:
    with pytest.raises(UsageError, match="source itself"):
        quantize(source, source / where, overwrite=True)


def test_nan_and_inf_are_named_before_work_starts(run: Run, tmp_path: Path) -> None:
    config = tiny_config(intermediate_size=192)
    weights = random_weights(config)
    weights["model.layers.1.mlp.up_proj.weight"][3, 4] = torch.nan
    weights["model.norm.weight"][0] = -torch.inf
    folder = write_model(tmp_path / "broken", config, weights=weights)
    said: list[str] = []
    with pytest.raises(UsageError, match=r"`model.layers.1.mlp.up_proj.weight`, `model.norm.weight`"):
        run(folder, on_progress=said.append)
    assert not any(line.startswith("layer") for line in said)


def test_missing_tensors_are_named(run: Run, tmp_path: Path) -> None:
    config = tiny_config(intermediate_size=192)
    weights = random_weights(config)
    del weights["model.layers.1.mlp.up_proj.weight"]
    with pytest.raises(UsageError, match=r"model.layers.1.mlp.up_proj.weight"):
        run(write_model(tmp_path / "broken", config, weights=weights))


def test_a_mixture_of_experts_is_refused_by_name(run: Run, source: Path) -> None:
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**config, "model_type": "mixtral"}))
    with pytest.raises(UnsupportedError, match="mixtral"):
        run(source)


def test_too_little_memory_is_said_before_work_starts(
    run: Run, source: Path, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr("specq.compress.job.free_bytes", lambda device: 700_000)
    with pytest.raises(NotEnoughMemoryError, match="GB on `cpu`") as caught:
        run(source, on_progress=said.append, calibration=Calibration(text, samples=64, seq_len=64))
    assert "--samples" in str(caught.value.hint)
    assert not said
    monkeypatch.setattr("specq.compress.job.free_bytes", lambda device: 10)
    with pytest.raises(NotEnoughMemoryError):
        run(source, method="rtn")


def test_shorter_and_fewer_sequences_than_asked_for_are_said(
    run: Run, source: Path, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO", "specq"):
        run(source, calibration=Calibration(text, samples=4, seq_len=64))
        assert "sequences" not in caplog.text
        report = run(source, "long", calibration=Calibration(text, samples=1000, seq_len=4000))
    assert "sequences of 512 tokens: the model sees no more" in caplog.text
    assert report.calibration is not None
    assert f"the text has {report.calibration['samples']} sequences of 512 tokens, not 1000" in caplog.text


def test_too_little_disk_is_said_before_work_starts(run: Run, source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specq.compress.runner.disk_bytes", lambda spec, plan: 1 << 60)
    with pytest.raises(DiskFullError, match="are needed"):
        run(source)
    assert not (source.parent / "out").exists()


@pytest.mark.parametrize("module", ["layer_files", "writer"])
def test_a_disk_that_fills_up_leaves_no_output_and_can_be_resumed(
    run: Run, source: Path, monkeypatch: pytest.MonkeyPatch, module: str
) -> None:
    def full(*arguments: object, **options: object) -> None:
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    with monkeypatch.context() as patch:
        patch.setattr(f"specq.compress.{module}.save_file", full)
        with pytest.raises(DiskFullError, match="no room left"):
            run(source)
    assert not (source.parent / "out").exists()
    assert run(source).resumed_layers == (2 if module == "writer" else 0)


def test_a_source_in_fp32_is_written_in_16_bits(run: Run, tmp_path: Path) -> None:
    folder = write_model(tmp_path / "fp32", tiny_config(intermediate_size=192))
    report = run(folder)
    assert stored(report.output)["model.embed_tokens.weight"].dtype == torch.bfloat16


def test_a_template_that_is_only_a_jinja_file_comes_along(run: Run, source: Path) -> None:
    settings = json.loads((source / "tokenizer_config.json").read_text())
    template = settings.pop("chat_template")
    (source / "tokenizer_config.json").write_text(json.dumps(settings))
    (source / "chat_template.jinja").write_text(template)
    report = run(source)
    assert Tokenizer.load(report.output).chat_template == template


def test_nothing_of_this_machine_and_no_code_is_written(run: Run, source: Path) -> None:
    (source / "modeling_evil.py").write_text("raise SystemExit")
    config = json.loads((source / "config.json").read_text())
    local = {"_name_or_path": str(source), "auto_map": {"AutoModel": "modeling_evil.Model"}}
    (source / "config.json").write_text(json.dumps({**config, **local}))
    settings = json.loads((source / "tokenizer_config.json").read_text())
    (source / "tokenizer_config.json").write_text(json.dumps({**settings, "name_or_path": str(source)}))
    report = run(source, provenance=Provenance("org/model", "abc123", "specq quantize org/model -o DIR"))
    host = os.uname().nodename
    for file in report.output.iterdir():
        assert file.suffix != ".py"
        content = file.read_bytes()
        assert str(source.parent).encode() not in content
        if file.suffix in (".json", ".md") and not file.name.startswith("tokenizer."):
            assert not {host, str(Path.home()), "auto_map"} & set(re.findall(r"[\w./~-]+", content.decode()))


def test_the_model_card_says_how_it_was_made(run: Run, source: Path) -> None:
    report = run(source, provenance=Provenance("org/model", "abc123", "specq quantize org/model -o DIR"))
    card = (report.output / "README.md").read_text()
    assert report.calibration is not None
    for fact in (
        "base_model: org/model",
        "abc123",
        "specq quantize org/model -o DIR",
        report.calibration["sha256"],
        f"{report.scores['quantized'].kl:.4f}",
        f"{report.matrices[0].error:.5f}",
        torch.__version__,
    ):
        assert fact in card


def test_links_out_of_the_source_are_not_followed(run: Run, source: Path, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("secret")
    (source / "LICENSE").symlink_to(secret)
    with pytest.raises(UsageError, match="link out of the model's folder"):
        run(source)
    assert not (source.parent / ".out.specq").exists()  # no layer was solved first


def test_shards_have_an_index_that_names_every_tensor(run: Run, source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    single = stored(run(source, "single").output)
    monkeypatch.setattr("specq.compress.writer.SHARD_BYTES", 30_000)
    folder = run(source, "sharded").output
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    files = sorted(path.name for path in folder.glob("*.safetensors"))
    assert files == [f"model-{i + 1:05}-of-{len(files):05}.safetensors" for i in range(len(files))]
    assert len(files) > 2
    found = {}
    for file in files:
        with safe_open(folder / file, framework="pt") as part:
            for name in part.keys():  # noqa: SIM118
                assert index["weight_map"][name] == file
                found[name] = part.get_tensor(name)
    assert found.keys() == single.keys()
    assert all(torch.equal(found[name], single[name]) for name in single)
    assert torch.equal(logits(folder), logits(source.parent / "single"))


def test_an_error_in_a_product_names_it(run: Run, source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specq.quant.gptq.LAST_DAMPING", 0.0)
    with pytest.raises(SpecqError, match=r"`model.layers.0.self_attn.q_proj`: the inputs of a product"):
        run(source)


def test_raised_damping_is_said_and_reported(
    run: Run, source: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail_once(matrix: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        lower, failed = factor(matrix)
        calls.append(len(matrix))
        return lower, torch.ones_like(failed) if calls == [64] else failed

    calls: list[int] = []
    factor = torch.linalg.cholesky_ex
    monkeypatch.setattr("torch.linalg.cholesky_ex", fail_once)
    report = run(source)
    damping = [matrix.damping for matrix in report.matrices]
    assert damping == pytest.approx([0.1] * 3 + [0.01] * 11)  # q, k and v are solved together
    assert caplog.text.count("damping raised to 0.1 for") == 3
    assert "| damping | 0.01, 0.1 |" in (report.output / "README.md").read_text()


def test_act_order_and_settings_reach_the_file(run: Run, source: Path) -> None:
    report = run(source, stored_order=True)
    g_idx = stored(report.output)["model.layers.0.mlp.down_proj.g_idx"]
    assert g_idx.bincount().tolist() == [64, 64, 64]
    assert not torch.equal(g_idx, g_idx.sort().values)
    assert json.loads((report.output / "config.json").read_text())["quantization_config"]["desc_act"] is True
    assert report.settings == Settings(stored_order=True)
