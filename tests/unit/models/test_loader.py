"""From files to a model: the same logits whatever the files look like, and every mismatch named before loading."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from factories import WeightsInMemory, random_weights, tiny_config, tiny_model, write_model
from packed_weights import random_packed
from tiny_models import make_head
from torch import Tensor

from specq.checkpoint import ModelSpec
from specq.errors import NotEnoughMemoryError, UnsupportedError, UsageError
from specq.models import loader
from specq.models.causal_lm import CausalLM
from specq.models.inventory import expected_tensors
from specq.models.layers import SideBySide
from specq.models.loader import build_model, check_memory, load_model, model_spec
from specq.models.memory import (
    GPU_SCRATCH,
    HEAD_ROWS,
    MemoryEstimate,
    estimate_bytes,
    head_bytes_per_token,
    require_memory,
)
from specq.quant.formats import FORMATS
from specq.quant.linear import DenseLinear, Int4Linear, RescoredLinear
from specq.quant.packed import PackedWeight, pack_nibbles
from specq.spec.tree import chain

GROUPS = {"bits": 4, "group_size": 32}
CT_WEIGHTS = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32}
QUANTIZATIONS: dict[str, dict[str, Any]] = {
    "gptq": {"quant_method": "gptq", "sym": True, **GROUPS},
    "gptq_v2": {"quant_method": "gptq", "sym": True, "checkpoint_format": "gptq_v2", **GROUPS},
    "awq": {"quant_method": "awq", "zero_point": True, "version": "gemm", **GROUPS},
    "compressed-tensors": {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": CT_WEIGHTS}},
    },
}
TOKENS = [5, 300, 7, 7, 120, 44, 3, 260]


@torch.inference_mode()
def logits(model: CausalLM) -> Tensor:
    return model(chain(TOKENS), model.new_cache(len(TOKENS))).logits


class PartlyPacked(WeightsInMemory):
    """Weights of which the matrices a function takes are 4-bit, in groups it says."""

    def __init__(self, weights: dict[str, Tensor], group_of: Callable[[str], int | None]) -> None:
        packed = {name: group_of(name) for name in weights if "_proj.weight" in name}
        self.packed = {
            name.removesuffix(".weight"): pack(weights[name], group) for name, group in packed.items() if group
        }
        dense = {f"{prefix}.weight": weight.dequantize() for prefix, weight in self.packed.items()}
        super().__init__({**weights, **dense})

    def linear(self, prefix: str) -> Tensor | PackedWeight:  # type: ignore[override]
        return self.packed.get(prefix) or super().linear(prefix)

    def is_packed(self, prefix: str) -> bool:
        return prefix in self.packed

    def dense(self) -> WeightsInMemory:
        return WeightsInMemory({name: self.tensor(name) for name in self.names()})


def pack(weight: Tensor, group: int) -> PackedWeight:
    """The nearest 4-bit matrix with float minima."""
    rows, columns = weight.shape
    grouped = weight.view(rows, -1, group)
    minima = grouped.amin(-1).half()
    scales = ((grouped.amax(-1) - minima) / 15).half()
    codes = ((grouped - minima[..., None]) / scales[..., None]).round().clamp(0, 15)
    return PackedWeight(pack_nibbles(codes.view(rows, columns)), scales, minima=minima, group_size=group)


def symmetric(weight: Tensor, group: int = 32) -> PackedWeight:
    """The nearest 4-bit matrix around zero."""
    rows, columns = weight.shape
    grouped = weight.view(rows, -1, group)
    scales = (grouped.abs().amax(-1) / 7).half()
    codes = (grouped / scales[..., None]).round().clamp(-8, 7) + 8
    return PackedWeight(pack_nibbles(codes.view(rows, columns)), scales, group_size=group)


def config_for_groups(**changes: Any) -> dict[str, Any]:
    return tiny_config("qwen2", intermediate_size=128, quantization_config={"quant_method": "gguf"}, **changes)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shards", [1, 3])
def test_folder_gives_the_logits_of_its_weights(tmp_path: Path, dtype: torch.dtype, shards: int) -> None:
    config = tiny_config("qwen3", tie_word_embeddings=True)
    rounded = {name: weight.to(dtype) for name, weight in random_weights(config).items()}
    folder = write_model(tmp_path / "model", config, dtype=dtype, shards=shards)
    expected = logits(tiny_model(config, weights=rounded, dtype="float32"))
    assert torch.equal(logits(load_model(folder)), expected)


def test_embedding_of_an_untied_model_stays_in_16_bits(tmp_path: Path) -> None:
    model = load_model(write_model(tmp_path, dtype=torch.bfloat16))
    assert model.embedding.dtype == torch.bfloat16
    assert model.embed(torch.tensor([1])).dtype == torch.float32


@pytest.mark.parametrize("hidden", [0, 1024])
def test_a_head_of_eight_bits_gives_the_logits_of_its_values(
    tmp_path: Path, hidden: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exactly in fp32; beside int4 products as bf16, its best logits in fp32."""
    monkeypatch.setattr("specq.models.loader.INT4_HIDDEN", hidden)
    monkeypatch.setattr("specq.models.loader.has_fast_bfloat16", lambda: True)
    quantization = {**QUANTIZATIONS["gptq"], "lm_head": True, "dynamic": {"lm_head": {"bits": 8}}}
    config = tiny_config("qwen2", intermediate_size=128, quantization_config=quantization)
    weights = random_weights(config)
    tensors = {name: weight for name, weight in weights.items() if not name.endswith("_proj.weight")}
    head = random_packed(320, 64, 32, bits=8)
    for prefix in [name.removesuffix(".weight") for name in weights if name.endswith("_proj.weight")]:
        parts = FORMATS["gptq"].pack(symmetric(weights[f"{prefix}.weight"]))
        tensors |= {f"{prefix}.{suffix}": part for suffix, part in parts.items()}
    del tensors["lm_head.weight"]
    tensors |= {f"lm_head.{suffix}": part for suffix, part in FORMATS["gptq-8bit"].pack(head).items()}
    model = load_model(write_model(tmp_path, config, weights=tensors, dtype=None))
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(0))
    expected = x @ head.dequantize().T
    assert type(model.head) is (RescoredLinear if hidden == 0 else DenseLinear)
    error = (model.logits(x) - expected).abs().max() / expected.abs().max()
    assert error < (1e-2 if hidden == 0 else 1e-6)


def test_tied_model_holds_its_embedding_once() -> None:
    model = tiny_model(tiny_config(tie_word_embeddings=True), dtype="float32")
    assert model.head.weight.data_ptr() == model.embedding.data_ptr()


def test_tied_config_wins_over_a_head_in_the_file() -> None:
    config = tiny_config(tie_word_embeddings=True)
    weights = random_weights(config)
    with_head = {**weights, "lm_head.weight": torch.zeros(320, 64)}
    assert torch.equal(logits(tiny_model(config, weights=with_head)), logits(tiny_model(config, weights=weights)))


@pytest.mark.parametrize(
    ("group_of", "kind"),
    [
        (lambda name: 32, Int4Linear),
        (lambda name: 32 if "k_proj" not in name else 16, SideBySide),
        (lambda name: 32 if "v_proj" not in name else None, SideBySide),
    ],
    ids=["all", "groups that differ", "one dense"],
)
def test_4_bit_matrices_give_the_logits_of_their_values(
    group_of: Callable[[str], int | None], kind: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("specq.models.loader.INT4_HIDDEN", 0)
    config = config_for_groups()
    source = PartlyPacked(random_weights(config), group_of)
    spec = ModelSpec.from_config(config)
    expected = build_model(spec, source.dense(), dtype="float64")
    exact = build_model(spec, source, dtype="float64")
    torch.testing.assert_close(logits(exact), logits(expected), atol=1e-11, rtol=0)
    fast = build_model(spec, source)
    assert isinstance(fast.layers[0].qkv, kind)
    # bf16 activations and scales through two layers, on logits of unit size.
    assert (logits(fast) - logits(expected)).abs().mean() < 0.05 * logits(expected).std()


@pytest.mark.parametrize("stored", ["gptq", "gptq_v2", "awq", "compressed-tensors"])
def test_4_bit_folders_give_the_logits_of_their_values(tmp_path: Path, stored: str) -> None:
    config = tiny_config("qwen2", intermediate_size=128, tie_word_embeddings=True)
    weights = random_weights(config)
    matrices = {name: symmetric(weight) for name, weight in weights.items() if "_proj.weight" in name}
    files = {name: weight for name, weight in weights.items() if name not in matrices}
    for name, matrix in matrices.items():
        parts = FORMATS[stored].pack(matrix)
        files |= {f"{name.removesuffix('.weight')}.{suffix}": part for suffix, part in parts.items()}
    folder = write_model(tmp_path, config | {"quantization_config": QUANTIZATIONS[stored]}, weights=files, dtype=None)
    values = weights | {name: matrix.dequantize() for name, matrix in matrices.items()}
    expected = logits(tiny_model(config, weights=values))
    torch.testing.assert_close(logits(load_model(folder, dtype="float64")), expected, atol=1e-11, rtol=0)
    assert isinstance(load_model(folder, dtype="bfloat16").layers[0].gate_up, Int4Linear)
    assert torch.equal(logits(load_model(folder)), logits(load_model(folder, dtype="float32")))


def test_a_dtype_that_is_asked_for_is_exact() -> None:
    config = config_for_groups()
    source = PartlyPacked(random_weights(config), lambda name: 32)
    model = build_model(ModelSpec.from_config(config), source, dtype="float32")
    assert isinstance(model.layers[0].down, DenseLinear)


def changed(change: Callable[[dict[str, Tensor]], Any], **config: Any) -> tuple[ModelSpec, WeightsInMemory]:
    described = tiny_config(**config)
    weights = random_weights(described)
    change(weights)
    return ModelSpec.from_config(described), WeightsInMemory(weights)


def test_missing_tensors_are_named_and_counted() -> None:
    spec, source = changed(lambda weights: [weights.pop(name) for name in list(weights) if "layers.1" in name])
    with pytest.raises(UsageError) as caught:
        build_model(spec, source)
    assert "`model.layers.1.input_layernorm.weight`" in caught.value.message
    assert caught.value.message.endswith("and 6 more")


def test_missing_head_of_an_untied_model_is_an_error() -> None:
    spec, source = changed(lambda weights: weights.pop("lm_head.weight"))
    with pytest.raises(UsageError, match=r"lack `lm_head\.weight`"):
        build_model(spec, source)


def test_a_wrong_shape_is_named_with_both_shapes() -> None:
    spec, source = changed(lambda weights: weights.update({"model.embed_tokens.weight": torch.zeros(328, 64)}))
    with pytest.raises(UsageError, match=r"is \[328, 64\], config\.json says \[320, 64\]"):
        build_model(spec, source)


def test_unexpected_tensors_are_named() -> None:
    spec, source = changed(lambda weights: weights.update({"model.layers.0.self_attn.q_norm.weight": torch.ones(16)}))
    with pytest.raises(UnsupportedError, match=r"hold `model\.layers\.0\.self_attn\.q_norm\.weight`"):
        build_model(spec, source)


def test_a_bias_the_config_denies_is_not_dropped() -> None:
    bias = {"model.layers.0.self_attn.q_proj.bias": torch.zeros(64)}
    spec, source = changed(lambda weights: weights.update(bias))
    with pytest.raises(UnsupportedError, match="bias"):
        build_model(spec, source)


def test_old_frequencies_and_zero_biases_of_quantizers_are_passed_over() -> None:
    name = "model.layers.0.self_attn.q_proj.bias"
    extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8), name: torch.zeros(64)}
    quantized = {"quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 32}}
    spec, source = changed(lambda weights: weights.update(extra), **quantized)
    plain = tiny_model(tiny_config(), dtype="float32")
    assert torch.equal(logits(build_model(spec, source, dtype="float32")), logits(plain))
    spec, source = changed(lambda weights: weights.update({name: torch.ones(64)}), **quantized)
    with pytest.raises(UnsupportedError, match="bias"):
        build_model(spec, source)


def test_nothing_is_read_before_everything_was_checked() -> None:
    class Unreadable(WeightsInMemory):
        def tensor(self, name: str) -> Tensor:
            raise AssertionError(f"{name} was read")

        linear = tensor

    weights = random_weights(tiny_config())
    weights.pop("model.norm.weight")
    with pytest.raises(UsageError, match=r"model\.norm\.weight"):
        build_model(ModelSpec.from_config(tiny_config()), Unreadable(weights))


def test_unknown_dtype_is_refused_with_the_known_ones() -> None:
    with pytest.raises(UsageError, match="`int8` is unknown") as caught:
        tiny_model(dtype="int8")
    assert "bfloat16" in str(caught.value.hint)


def test_a_folder_of_several_gguf_files_asks_which(tmp_path: Path) -> None:
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).touch()
    with pytest.raises(UsageError, match="holds 2 GGUF files"):
        model_spec(tmp_path)


@pytest.mark.parametrize("is_tied", [False, True])
def test_estimated_weights_are_those_loaded(is_tied: bool) -> None:
    config = tiny_config("qwen2", tie_word_embeddings=is_tied)
    estimate = estimate_bytes(ModelSpec.from_config(config), dtype=torch.float32, context=100)
    model = tiny_model(config, dtype="float32")
    sizes = {parameter.data_ptr(): parameter.nbytes for parameter in model.parameters()}
    assert estimate.weights == sum(sizes.values())
    cache = model.new_cache(100)
    assert estimate.kv == cache.k.nbytes + cache.v.nbytes
    assert estimate.total == estimate.weights + estimate.kv + estimate.activations


@pytest.mark.parametrize(("heads", "kv_heads"), [(8, 8), (16, 8), (32, 8), (64, 8), (28, 4), (32, 1)])
def test_on_a_gpu_the_sums_of_attention_are_counted_for_any_number_of_nodes(heads: int, kv_heads: int) -> None:
    attention = pytest.importorskip("specq_kernels.tree_attention")
    config = tiny_config("qwen2", num_attention_heads=heads, num_key_value_heads=kv_heads, head_dim=16)
    spec = ModelSpec.from_config(config)
    here, there = (
        estimate_bytes(spec, dtype=torch.bfloat16, context=1, device=name).activations for name in ("cpu", "cuda:0")
    )
    shared, taken = heads // kv_heads, []
    for nodes in range(1, HEAD_ROWS + 1):
        sizes = attention.attention_config(nodes * shared, nodes * heads)
        taken.append(sizes["leaves"] // sizes["folded"] * nodes * heads * spec.head_dim * 4)
    assert 0.98 * (there - here - GPU_SCRATCH) <= max(taken) <= there - here - GPU_SCRATCH


@pytest.mark.parametrize("is_eagle3", [False, True])
def test_what_a_head_keeps_of_a_token_is_counted(is_eagle3: bool) -> None:
    target = tiny_model(tiny_config("qwen2"), dtype="float32")
    head = make_head(target, eagle3=is_eagle3)
    kept, own = target.new_cache(10, features=head.spec.features), head.new_cache(10)
    assert kept.features is not None
    said = 10 * head_bytes_per_token(head.spec, torch.float32)
    assert said == kept.features.nbytes + own.k.nbytes + own.v.nbytes


def test_4_bit_matrices_are_counted_in_4_bits() -> None:
    config = config_for_groups()
    spec = ModelSpec.from_config(config)
    packed = [name for name in expected_tensors(spec) if name.endswith("_proj.weight") and "layers" in name]
    dense = estimate_bytes(spec, dtype=torch.float32, context=1)
    kept = estimate_bytes(spec, dtype=torch.float32, context=1, packed=packed)
    # 4 bits and a 32nd of 32 bits, twice, instead of 32 bits.
    matrices = sum(4 * random_weights(config)[name].numel() for name in packed)
    assert dense.weights - kept.weights == matrices * (1 - 2 * 5 / 32)
    # A GPU has one form of a matrix, for prompts and for decoding.
    on_gpu = estimate_bytes(spec, dtype=torch.float32, context=1, device="cuda:0", packed=packed)
    assert dense.weights - on_gpu.weights == matrices * (1 - 5 / 32)


def test_a_packed_head_is_counted_with_the_runs_of_its_product() -> None:
    spec = ModelSpec.from_config({**tiny_config("llama"), "tie_word_embeddings": False})
    said = {
        (device, packed): estimate_bytes(
            spec, dtype=torch.bfloat16, context=1, device=device, packed=packed
        ).activations
        for device in ("cpu", "cuda:0")
        for packed in ((), ("lm_head.weight",))
    }
    assert said["cpu", ("lm_head.weight",)] == said["cpu", ()]
    assert said["cuda:0", ("lm_head.weight",)] - said["cuda:0", ()] == 4 * 64 * spec.vocab * 4


def test_too_little_memory_names_the_context_that_fits() -> None:
    estimate = MemoryEstimate(weights=6 * 2**30, kv=4 * 2**30, activations=0)
    require_memory([estimate], 8192, device="cpu", free=10 * 2**30)
    require_memory([estimate], 8192, device="cpu", free=None)
    with pytest.raises(NotEnoughMemoryError) as caught:
        require_memory([estimate], 8192, device="cpu", free=8 * 2**30)
    assert "10.00 GiB" in caught.value.message
    assert "8.00 GiB free" in caught.value.message
    assert "--context 4096" in str(caught.value.hint)
    assert caught.value.exit_code == 7
    with pytest.raises(NotEnoughMemoryError) as caught:
        require_memory([estimate], 8192, device="cpu", free=6 * 2**30)
    assert "no context fits" in str(caught.value.hint)


def test_memory_of_all_models_is_added(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_model(tmp_path)
    spec = model_spec(folder)
    one = estimate_bytes(spec, dtype=torch.float32, context=256).total
    monkeypatch.setattr(loader, "free_bytes", lambda device: one + one // 2)
    check_memory([(spec, folder, 256)], device="cpu", dtype="auto")
    with pytest.raises(NotEnoughMemoryError):
        check_memory([(spec, folder, 256), (spec, folder, 256)], device="cpu", dtype="auto")
