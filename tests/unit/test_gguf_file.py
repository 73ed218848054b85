"""Models in GGUF files, written with package gguf: config, names, row order, four bits kept."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from factories import random_weights, tiny_config
from gguf.constants import GGMLQuantizationType as Type
from gguf.quants import dequantize, quantize
from packed_weights import same

from specq.checkpoint import ModelSpec
from specq.errors import UnsupportedError, UsageError
from specq.gguf_file import LAYER_NAMES, TOP_NAMES, GgufWeights, gguf_config
from specq.gguf_header import read_header
from specq.models.inventory import check_tensors
from specq.models.loader import load_model, model_spec
from specq.quant.packed import PackedWeight
from specq.spec.pipelines import four_bits
from specq.tensors import open_weights

HEADS, KV_HEADS, HIDDEN = 4, 2, 64


def _gguf_name(name: str) -> str:
    stem, kind = name.rsplit(".", 1)
    known = {value: key for key, value in {**TOP_NAMES, **LAYER_NAMES}.items()}
    if not stem.startswith("model.layers."):
        return f"{known[stem]}.{kind}"
    layer, rest = stem.removeprefix("model.layers.").split(".", 1)
    return f"blk.{layer}.{known[rest]}.{kind}"


def _interleaved(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows as llama.cpp stores those of q and k: the two rotary halves of a head alternate."""
    return weight.reshape(heads, 2, -1, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)


def _write(
    path: Path,
    config: dict[str, Any],
    *,
    arch: str | None = None,
    matrix_type: Type = Type.F32,
    metadata: dict[str, Any] | None = None,
    extra: dict[str, np.ndarray] | None = None,
) -> dict[str, torch.Tensor]:
    """Writes the tiny model; returns what a reader should give, by Hugging Face name."""
    arch = arch or config["model_type"]
    writer = gguf.GGUFWriter(path, arch)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(50000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_token_list([f"token {i}" for i in range(300)])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    for key, value in (metadata or {}).items():
        add = writer.add_string if isinstance(value, str) else writer.add_uint32
        (writer.add_float32 if isinstance(value, float) else add)(key, value)
    expected = {}
    for name, tensor in random_weights(config).items():
        kind = matrix_type if tensor.ndim == 2 and tensor.shape[1] % 32 == 0 else Type.F32
        stored = quantize(tensor.numpy(), kind)
        expected[name] = torch.from_numpy(dequantize(stored, kind).copy())
        for suffix, heads in (("q_proj", HEADS), ("k_proj", KV_HEADS)):
            if arch == "llama" and f"{suffix}." in name:
                stored = _interleaved(stored, heads)
        raw_dtype = None if kind in (Type.F32, Type.F16) else kind
        writer.add_tensor(_gguf_name(name), stored, raw_dtype=raw_dtype)
    for name, array in (extra or {}).items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return expected


@pytest.mark.parametrize(("kind", "bits"), [(Type.F32, 16), (Type.Q8_0, 16), (Type.Q4_0, 4)])
def test_the_header_says_whether_any_matrix_keeps_four_bits(tmp_path: Path, kind: Type, bits: int) -> None:
    _write(tmp_path / "model.gguf", _config(), matrix_type=kind)
    spec = model_spec(tmp_path)
    assert spec.quantization is not None
    assert spec.quantization.bits == bits
    model = load_model(tmp_path, device="cpu", dtype="float32")
    assert model.has_four_bit_products == bool(four_bits(spec)) == (bits == 4)


def _config(family: str = "llama", **changes: Any) -> dict[str, Any]:
    return tiny_config(family, intermediate_size=128, **changes)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("is_tied", [False, True])
def test_config_and_weights_make_the_model_that_was_written(tmp_path: Path, family: str, is_tied: bool) -> None:
    config = _config(family, tie_word_embeddings=is_tied)
    expected = _write(tmp_path / "model.gguf", config)
    spec = ModelSpec.from_config(gguf_config(tmp_path / "model.gguf"))
    source = open_weights(tmp_path, spec)
    check_tensors(spec, source)
    assert (spec.family, spec.tie_embeddings, spec.rope.theta) == (family, is_tied, 50000.0)
    assert (spec.hidden, spec.heads, spec.kv_heads, spec.head_dim) == (HIDDEN, HEADS, KV_HEADS, 16)
    assert (spec.vocab, spec.layers, spec.max_context) == (320, 2, 512)
    assert (spec.norm_eps, spec.bos_ids, spec.eos_ids) == (1e-5, (1,), (2,))
    assert source.names() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(source.tensor(name), tensor), name


@pytest.mark.parametrize("kind", [Type.Q4_0, Type.Q4_1])
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_four_bit_matrices_stay_packed_with_their_rows_in_order(tmp_path: Path, family: str, kind: Type) -> None:
    expected = _write(tmp_path / "model.gguf", _config(family), matrix_type=kind)
    source = open_weights(tmp_path / "model.gguf", ModelSpec.from_config(gguf_config(tmp_path / "model.gguf")))
    for name, tensor in expected.items():
        prefix = name.removesuffix(".weight")
        if tensor.ndim == 2:
            weight = source.linear(prefix)
            assert isinstance(weight, PackedWeight)
            assert source.is_packed(prefix)
            assert torch.equal(weight.dequantize(), tensor), name


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        (Type.F16, torch.float16),
        (Type.BF16, torch.bfloat16),
        (Type.Q8_0, torch.float32),
        (Type.Q5_1, torch.float32),
    ],
)
def test_other_types_come_dense(tmp_path: Path, kind: Type, dtype: torch.dtype) -> None:
    expected = _write(tmp_path / "model.gguf", _config(), matrix_type=kind)
    source = open_weights(tmp_path / "model.gguf", ModelSpec.from_config(gguf_config(tmp_path / "model.gguf")))
    for name, tensor in expected.items():
        if tensor.ndim == 2:
            assert not source.is_packed(name.removesuffix(".weight"))
            assert same(source.linear(name.removesuffix(".weight")), tensor.to(dtype)), name


def test_the_header_agrees_with_package_gguf(tmp_path: Path) -> None:
    _write(tmp_path / "model.gguf", _config(), matrix_type=Type.Q4_1)
    header, reader = read_header(tmp_path / "model.gguf"), gguf.GGUFReader(tmp_path / "model.gguf")
    assert header.metadata["tokenizer.ggml.tokens"].count == 300
    assert header.tensors.keys() == {tensor.name for tensor in reader.tensors}
    for tensor in reader.tensors:
        found = header.tensors[tensor.name]
        assert (found.type, found.offset) == (tensor.tensor_type.name, tensor.data_offset)
        assert found.shape == tuple(reversed(tensor.shape.tolist()))
        assert found.num_rows * found.row_bytes == tensor.n_bytes


def test_every_cut_of_the_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    _write(path, _config())
    content = path.read_bytes()
    for size in (0, 3, 8, 20, 100, 3000, 8000, len(content) - 1000):
        path.write_bytes(content[:size])
        with pytest.raises(UsageError, match="not a whole GGUF file"):
            read_header(path)


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"split.count": 2}, "one part of several"),
        ({"llama.expert_count": 8}, "mixture of experts"),
        ({"llama.rope.dimension_count": 8}, "a part of each head"),
        ({"llama.rope.scaling.type": "longrope"}, "`longrope`"),
    ],
)
def test_variants_that_are_not_run_are_refused(tmp_path: Path, metadata: dict[str, Any], message: str) -> None:
    _write(tmp_path / "model.gguf", _config(), metadata=metadata)
    with pytest.raises(UnsupportedError, match=message):
        gguf_config(tmp_path / "model.gguf")


def test_an_unknown_architecture_is_refused_with_those_that_are_run(tmp_path: Path) -> None:
    _write(tmp_path / "model.gguf", _config(), arch="gemma3")
    with pytest.raises(UnsupportedError, match="`gemma3`") as refused:
        gguf_config(tmp_path / "model.gguf")
    assert refused.value.hint == "the ones run are llama, qwen2, qwen3"


def test_a_sliding_window_makes_a_mistral(tmp_path: Path) -> None:
    _write(tmp_path / "model.gguf", _config(), metadata={"llama.attention.sliding_window": 128})
    spec = ModelSpec.from_config(gguf_config(tmp_path / "model.gguf"))
    assert (spec.family, spec.sliding_windows) == ("mistral", (128, 128))


def test_scaled_positions_are_read_from_metadata(tmp_path: Path) -> None:
    metadata = {
        "llama.rope.scaling.type": "yarn",
        "llama.rope.scaling.factor": 4.0,
        "llama.rope.scaling.original_context_length": 128,
    }
    _write(tmp_path / "model.gguf", _config(), metadata=metadata)
    rope = ModelSpec.from_config(gguf_config(tmp_path / "model.gguf")).rope
    assert (rope.kind, rope["factor"], rope["original_max_position_embeddings"]) == ("yarn", 4.0, 128.0)


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_llama3_positions_are_recognised_by_their_divisors(tmp_path: Path, factor: float) -> None:
    divisors = []
    for i in range(8):  # each frequency as transformers' llama3 rule scales it, written out
        wavelength = 2 * np.pi * 50000.0 ** (2 * i / 16)
        if wavelength < 8192 / 4:
            divisors.append(1.0)
        elif wavelength > 8192:
            divisors.append(factor)
        else:
            smooth = (8192 / wavelength - 1) / (4 - 1)
            divisors.append(1 / ((1 - smooth) / factor + smooth))
    assert len(set(divisors)) > 2
    _write(tmp_path / "model.gguf", _config(), extra={"rope_freqs.weight": np.array(divisors, np.float32)})
    spec = ModelSpec.from_config(gguf_config(tmp_path / "model.gguf"))
    assert (spec.rope.kind, spec.rope["factor"]) == ("llama3", factor)
    assert "rope_freqs.weight" not in open_weights(tmp_path, spec).names()


def test_unknown_divisors_of_positions_are_refused(tmp_path: Path) -> None:
    _write(tmp_path / "model.gguf", _config(), extra={"rope_freqs.weight": np.full(8, 1.5, np.float32)})
    with pytest.raises(UnsupportedError, match="scales its rotary positions"):
        gguf_config(tmp_path / "model.gguf")


def test_two_files_in_a_folder_are_not_guessed_between(tmp_path: Path) -> None:
    for name in ("a.gguf", "b.gguf"):
        _write(tmp_path / name, _config())
    spec = ModelSpec.from_config(gguf_config(tmp_path / "a.gguf"))
    with pytest.raises(UsageError, match=r"holds 2 \.gguf files") as refused:
        open_weights(tmp_path, spec)
    assert "a.gguf" in str(refused.value.hint)


def test_scales_that_are_no_numbers_are_refused_when_read(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    _write(path, _config(), matrix_type=Type.Q4_0)
    offset = read_header(path).tensors["blk.0.ffn_up.weight"].offset
    content = bytearray(path.read_bytes())
    content[offset : offset + 2] = b"\x00\x7c"  # fp16 infinity
    path.write_bytes(content)
    source = GgufWeights(path, ModelSpec.from_config(gguf_config(path)))
    with pytest.raises(UsageError, match=r"`model\.layers\.0\.mlp\.up_proj\.weight` has scales"):
        source.linear("model.layers.0.mlp.up_proj")


def test_bytes_and_missing_names(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    _write(path, _config())
    source = GgufWeights(path, ModelSpec.from_config(gguf_config(path)))
    assert source.bytes() == path.stat().st_size
    with pytest.raises(UsageError, match="holds no `gone"):
        source.shape("gone")
