"""Weights of model folders: read lazily and right, and nothing followed, executed or believed unchecked."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from factories import random_weights, tiny_config, write_model
from packed_weights import random_packed, same
from safetensors.torch import save_file

from specq.checkpoint import ModelSpec
from specq.errors import SpecqError, UnsupportedError, UsageError
from specq.quant.formats import FORMATS, PackedWeight
from specq.tensors import WeightSource, open_weights

Q_PROJ = "model.layers.0.self_attn.q_proj"
QUANTIZATION: dict[str, dict[str, Any]] = {
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": False, "desc_act": True},
    "gptq_v2": {"quant_method": "gptq", "bits": 4, "group_size": 32, "checkpoint_format": "gptq_v2"},
    "awq": {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"},
    "compressed-tensors": {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {
            "group_0": {"weights": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}}
        },
    },
}


def _open(folder: Path, config: dict[str, Any] | None = None) -> WeightSource:
    return open_weights(folder, ModelSpec.from_config(config or tiny_config()))


def _packed_matrices(name: str) -> dict[str, PackedWeight]:
    """A random matrix for every product of the tiny model, by prefix."""
    is_permuted = name in ("gptq", "gptq_v2")
    shapes = {key: tuple(value.shape) for key, value in random_weights(tiny_config()).items() if "_proj" in key}
    return {
        key.removesuffix(".weight"): random_packed(*shape, 32, kind="zeros", is_permuted=is_permuted, seed=seed)
        for seed, (key, shape) in enumerate(shapes.items())
    }


def _packed_tensors(name: str, matrices: dict[str, PackedWeight]) -> dict[str, torch.Tensor]:
    tensors = {key: value for key, value in random_weights(tiny_config()).items() if "_proj" not in key}
    for prefix, matrix in matrices.items():
        tensors |= {f"{prefix}.{suffix}": part for suffix, part in FORMATS[name].pack(matrix).items()}
    return tensors


def _packed_config(name: str) -> dict[str, Any]:
    return tiny_config(quantization_config=QUANTIZATION[name])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shards", [1, 3])
def test_dense_tensors_come_as_they_were_stored(tmp_path: Path, shards: int, dtype: torch.dtype) -> None:
    weights = random_weights(tiny_config())
    source = _open(write_model(tmp_path, weights=weights, dtype=dtype, shards=shards))
    assert source.names() == weights.keys()
    for name, weight in weights.items():
        assert source.shape(name) == weight.shape
        assert same(source.tensor(name), weight.to(dtype))
    assert torch.equal(source.linear(Q_PROJ), weights[f"{Q_PROJ}.weight"].to(dtype))
    assert not source.is_packed(Q_PROJ)
    assert source.bytes() == sum(path.stat().st_size for path in tmp_path.glob("*.safetensors"))


def test_a_bin_file_is_read_without_executing_anything(tmp_path: Path) -> None:
    weights = random_weights(tiny_config())
    torch.save(weights, tmp_path / "pytorch_model.bin")
    source = _open(tmp_path)
    assert source.names() == weights.keys()
    assert all(torch.equal(source.tensor(name), weight) for name, weight in weights.items())


class _Payload:
    """Pickled into a file, it makes the folder named when it is loaded carelessly."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.folder),)


def test_a_bin_file_with_code_is_refused_and_the_code_does_not_run(tmp_path: Path) -> None:
    planted = tmp_path / "planted"
    torch.save({"model.norm.weight": _Payload(planted)}, tmp_path / "pytorch_model.bin")
    with pytest.raises(UsageError, match="is not read"):
        _open(tmp_path)
    assert not planted.exists()
    torch.load(tmp_path / "pytorch_model.bin", weights_only=False)  # the control: careless loading does run it
    assert planted.exists()


@pytest.mark.parametrize("name", QUANTIZATION)
def test_packed_matrices_keep_their_four_bits(tmp_path: Path, name: str) -> None:
    matrices = _packed_matrices(name)
    save_file(_packed_tensors(name, matrices), tmp_path / "model.safetensors")
    source = _open(tmp_path, _packed_config(name))
    assert source.names() == random_weights(tiny_config()).keys()
    for prefix, matrix in matrices.items():
        assert source.is_packed(prefix)
        assert source.shape(f"{prefix}.weight") == matrix.shape
        assert same(source.linear(prefix), matrix)
        assert torch.equal(source.tensor(f"{prefix}.weight"), matrix.dequantize())


HEADS: dict[str, dict[str, Any]] = {
    "gptq": {**QUANTIZATION["gptq"], "lm_head": True, "dynamic": {"lm_head": {"bits": 8, "group_size": -1}}},
    "compressed-tensors": {
        **QUANTIZATION["compressed-tensors"],
        "config_groups": {
            **QUANTIZATION["compressed-tensors"]["config_groups"],
            "head": {"targets": ["lm_head"], "weights": {"num_bits": 8, "type": "int", "strategy": "channel"}},
        },
    },
}


@pytest.mark.parametrize("name", HEADS)
def test_a_head_of_other_bits_is_read_beside_four_bits(tmp_path: Path, name: str) -> None:
    matrices, head = _packed_matrices(name), random_packed(320, 64, 64, kind="zeros", bits=8)
    tensors = _packed_tensors(name, matrices)
    del tensors["lm_head.weight"]
    tensors |= {f"lm_head.{suffix}": part for suffix, part in FORMATS[f"{name}-8bit"].pack(head).items()}
    save_file(tensors, tmp_path / "model.safetensors")
    source = _open(tmp_path, tiny_config(quantization_config=HEADS[name]))
    assert same(source.linear("lm_head"), head)
    assert not source.is_packed("lm_head")  # dequantised once: no product keeps 8 bits
    assert source.is_packed(Q_PROJ)
    assert same(source.linear(Q_PROJ), matrices[Q_PROJ])
    with pytest.raises(UsageError, match="`lm_head` is not a 4-bit"):
        _open(tmp_path, _packed_config(name))


def test_a_checkpoint_of_eight_bits_is_read(tmp_path: Path) -> None:
    packed = random_packed(64, 64, 32, bits=8)
    tensors = random_weights(tiny_config())
    del tensors[f"{Q_PROJ}.weight"]
    tensors |= {f"{Q_PROJ}.{suffix}": part for suffix, part in FORMATS["gptq-8bit"].pack(packed).items()}
    save_file(tensors, tmp_path / "model.safetensors")
    quantization = {"quant_method": "gptq", "bits": 8, "group_size": 32}
    assert same(_open(tmp_path, tiny_config(quantization_config=quantization)).linear(Q_PROJ), packed)


def test_a_matrix_left_in_16_bits_beside_packed_ones_is_dense(tmp_path: Path) -> None:
    matrices = _packed_matrices("gptq")
    del matrices[Q_PROJ]
    dense = random_weights(tiny_config())[f"{Q_PROJ}.weight"].half()
    tensors = _packed_tensors("gptq", matrices) | {f"{Q_PROJ}.weight": dense}
    save_file(tensors, tmp_path / "model.safetensors")
    source = _open(tmp_path, _packed_config("gptq"))
    assert not source.is_packed(Q_PROJ)
    assert torch.equal(source.linear(Q_PROJ), dense)


def test_a_stored_zero_of_15_is_named_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tensors = _packed_tensors("gptq", _packed_matrices("gptq"))
    for name in tensors:
        if name.endswith(".qzeros"):
            tensors[name] = torch.full_like(tensors[name], -1)
    save_file(tensors, tmp_path / "model.safetensors")
    source = _open(tmp_path, _packed_config("gptq"))
    with caplog.at_level(logging.WARNING, "specq"):
        weights = [source.linear(f"model.layers.{layer}.self_attn.q_proj") for layer in range(2)]
    assert all(weight.zeros.eq(16).all() for weight in weights)
    assert [record.getMessage().split("`")[1] for record in caplog.records] == [Q_PROJ]


@pytest.mark.parametrize(
    ("name", "suffix", "change", "message"),
    [
        ("gptq", "scales", lambda part: part[:1], "groups of 32"),
        ("gptq", "qzeros", lambda part: None, "comes without"),
        ("gptq", "g_idx", lambda part: part[:8], "g_idx"),
        ("awq", "qweight", lambda part: part.long(), "type"),
        ("compressed-tensors", "weight_scale", lambda part: part.double(), "float64"),
    ],
)
def test_packed_parts_that_do_not_fit_are_refused_on_opening(
    tmp_path: Path, name: str, suffix: str, change: Any, message: str
) -> None:
    tensors = _packed_tensors(name, _packed_matrices(name))
    part = change(tensors.pop(f"{Q_PROJ}.{suffix}"))
    if part is not None:
        tensors[f"{Q_PROJ}.{suffix}"] = part.contiguous()
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(UsageError, match=message) as refused:
        _open(tmp_path, _packed_config(name))
    assert Q_PROJ in refused.value.message


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_scales_that_are_no_numbers_are_refused_when_read(tmp_path: Path, value: float) -> None:
    tensors = _packed_tensors("gptq", _packed_matrices("gptq"))
    tensors[f"{Q_PROJ}.scales"][1, 3] = value
    save_file(tensors, tmp_path / "model.safetensors")
    source = _open(tmp_path, _packed_config("gptq"))
    with pytest.raises(UsageError, match=f"`{Q_PROJ}` has scales that are not finite"):
        source.linear(Q_PROJ)


def test_a_shape_that_contradicts_its_words_is_refused_when_read(tmp_path: Path) -> None:
    tensors = _packed_tensors("compressed-tensors", _packed_matrices("compressed-tensors"))
    tensors[f"{Q_PROJ}.weight_shape"] = torch.tensor([64, 60])
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(UsageError, match="weight_shape says"):
        _open(tmp_path, _packed_config("compressed-tensors")).linear(Q_PROJ)


@pytest.mark.parametrize(
    ("tensors", "quantization", "message"),
    [
        ({"model.layers.0.mlp.experts.0.up_proj.weight": torch.ones(2, 2)}, None, "mixture of experts"),
        ({f"{Q_PROJ}.qweight": torch.ones(8, 64, dtype=torch.int32)}, None, "is quantized"),
        ({f"{Q_PROJ}.weight": torch.ones(64, 64)}, QUANTIZATION["gptq"], "the files hold none"),
    ],
)
def test_layouts_without_a_reader_are_refused_on_opening(
    tmp_path: Path, tensors: dict[str, torch.Tensor], quantization: dict[str, Any] | None, message: str
) -> None:
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(UnsupportedError, match=message) as refused:
        _open(tmp_path, tiny_config(quantization_config=quantization))
    assert "GPTQ" in str(refused.value.hint)


def test_a_tensor_of_eight_bit_floats_is_refused_by_its_header(tmp_path: Path) -> None:
    save_file({"model.norm.weight": torch.ones(4).to(torch.float8_e4m3fn)}, tmp_path / "model.safetensors")
    with pytest.raises(UnsupportedError, match="float8_e4m3fn"):
        _open(tmp_path).shape("model.norm.weight")


@pytest.mark.parametrize(
    "file", ["../outside.safetensors", "/outside.safetensors", "sub/outside.safetensors", "..\\outside.safetensors", ""]
)
def test_an_index_may_only_name_files_of_its_folder(tmp_path: Path, file: str) -> None:
    folder = tmp_path / "model"
    (folder / "sub").mkdir(parents=True)
    for place in (tmp_path, folder / "sub"):
        save_file({"model.norm.weight": torch.ones(4)}, place / "outside.safetensors")
    file = str(tmp_path / "outside.safetensors") if file.startswith("/") else file
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"model.norm.weight": file}}))
    with pytest.raises(UsageError, match=r"not a bare file name|not a \.safetensors file"):
        _open(folder)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("not json", "not an index"),
        ("[]", "not an index"),
        ('{"weight_map": []}', "not an index"),
        ('{"weight_map": {"model.norm.weight": "model.bin"}}', "not a .safetensors file"),
        ('{"weight_map": {"model.norm.weight": "gone.safetensors"}}', "is missing"),
        ('{"weight_map": {"other": "part.safetensors"}}', "does not hold `other`"),
    ],
)
def test_a_broken_index_is_named(tmp_path: Path, content: str, message: str) -> None:
    save_file({"model.norm.weight": torch.ones(4)}, tmp_path / "part.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(content)
    with pytest.raises(UsageError, match=message):
        _open(tmp_path)


def test_a_link_out_of_the_folder_is_refused_and_one_within_is_followed(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    save_file({"model.norm.weight": torch.ones(4)}, tmp_path / "outside.safetensors")
    link = folder / "model.safetensors"
    link.symlink_to(tmp_path / "outside.safetensors")
    with pytest.raises(UsageError, match="is a link out of the model's folder"):
        _open(folder)
    link.unlink()
    save_file({"model.norm.weight": torch.ones(4)}, folder / "weights")
    link.symlink_to("weights")
    assert torch.equal(_open(folder).tensor("model.norm.weight"), torch.ones(4))


def test_links_of_a_hub_snapshot_lead_to_its_own_blobs_only(tmp_path: Path) -> None:
    repository = tmp_path / "models--org--name"
    snapshot = repository / "snapshots" / "0123abcd"
    snapshot.mkdir(parents=True)
    (repository / "blobs").mkdir()
    save_file({"model.norm.weight": torch.ones(4)}, repository / "blobs" / "aa")
    save_file({"model.norm.weight": torch.zeros(4)}, tmp_path / "bb")
    link = snapshot / "model.safetensors"
    link.symlink_to("../../blobs/aa")
    assert torch.equal(_open(snapshot).tensor("model.norm.weight"), torch.ones(4))
    link.unlink()
    link.symlink_to("../../../bb")
    with pytest.raises(UsageError, match="link out"):
        _open(snapshot)


@pytest.mark.parametrize("size", [0, 4, 40, -8])
def test_a_file_cut_short_is_refused_on_opening(tmp_path: Path, size: int) -> None:
    folder = write_model(tmp_path)
    content = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(content[:size])
    with pytest.raises(UsageError, match="not a whole safetensors file"):
        _open(folder)


def test_the_choice_of_files_is_never_guessed(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="holds no weights"):
        _open(tmp_path)
    save_file({"model.norm.weight": torch.ones(4)}, tmp_path / "gptq_model-4bit-128g.safetensors")
    assert torch.equal(_open(tmp_path).tensor("model.norm.weight"), torch.ones(4))
    save_file({"model.norm.weight": torch.zeros(4)}, tmp_path / "other.safetensors")
    with pytest.raises(UsageError, match=r"holds 2 \.safetensors files"):
        _open(tmp_path)
    save_file({"model.norm.weight": torch.zeros(4)}, tmp_path / "model.safetensors")
    assert torch.equal(_open(tmp_path).tensor("model.norm.weight"), torch.zeros(4))


def test_an_adapter_is_not_a_model(tmp_path: Path) -> None:
    save_file({"model.norm.weight": torch.ones(4)}, tmp_path / "adapter_model.safetensors")
    with pytest.raises(UnsupportedError, match="an adapter, not a model"):
        _open(tmp_path)


def test_a_missing_path_and_a_missing_tensor_are_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="neither a folder nor a file"):
        _open(tmp_path / "gone")
    source = _open(write_model(tmp_path))
    for read in (source.tensor, source.shape, source.linear):
        with pytest.raises(SpecqError, match="hold no `gone"):
            read("gone")
