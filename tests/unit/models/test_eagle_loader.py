"""Heads load by what is in their files, fit is checked from headers, and nothing is made up in silence."""

from __future__ import annotations

import json
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from factories import tiny_config, tiny_model
from safetensors.torch import save_file
from tiny_heads import CONFIG, HEADS, HIDDEN, KV_HEADS, VOCAB, run, shapes, tiny_tensors
from torch import Tensor

from specq.checkpoint import ModelSpec
from specq.errors import SpecqError, UnsupportedError
from specq.models.causal_lm import CausalLM
from specq.models.eagle_files import HeadFiles
from specq.models.eagle_loader import load_head
from specq.spec.tree import chain


def write_head(folder: Path, tensors: Mapping[str, Tensor], *, as_bin: bool = False, **config: Any) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**CONFIG, **config}))
    if as_bin:
        torch.save(dict(tensors), folder / "pytorch_model.bin")
    else:
        save_file({name: t.contiguous() for name, t in tensors.items()}, folder / "model.safetensors")
    return folder


@pytest.fixture(scope="module")
def target() -> CausalLM:
    return tiny_model(tiny_config(num_hidden_layers=6))


def test_bin_and_safetensors_and_foreign_names_give_the_same_head(tmp_path: Path, target: CausalLM) -> None:
    tensors = tiny_tensors()
    plain = run(load_head(write_head(tmp_path / "a", tensors), target), target)
    as_bin = run(load_head(write_head(tmp_path / "b", tensors, as_bin=True), target), target)
    foreign = {name.replace("layers.0.", "transformer.").replace("fc.", "fusion_fc."): t for name, t in tensors.items()}
    renamed = run(load_head(write_head(tmp_path / "c", foreign), target), target)
    assert torch.equal(plain, as_bin)
    assert torch.equal(plain, renamed)


def test_the_head_computes_what_its_definition_says(tmp_path: Path, target: CausalLM) -> None:
    """One row, so attention is its own value: fc over (embedding, feature), no input norm, no final norm."""
    tensors = {name: t.double() for name, t in tiny_tensors().items()} | {"fc.bias": torch.linspace(-1, 1, HIDDEN)}
    head = load_head(write_head(tmp_path / "head", {n: t.float() for n, t in tensors.items()}), target)
    t = {name: value.float().double() for name, value in tensors.items()}
    feature = torch.randn(1, HIDDEN, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    x = torch.cat([target.embed(torch.tensor([5])), feature], -1) @ t["fc.weight"].T + t["fc.bias"]
    value = (x @ t["layers.0.self_attn.v_proj.weight"].T).view(1, KV_HEADS, 1, -1)
    value = value.expand(-1, -1, HEADS // KV_HEADS, -1).reshape(1, -1)
    x = x + value @ t["layers.0.self_attn.o_proj.weight"].T
    h = torch.nn.functional.rms_norm(x, (HIDDEN,), t["layers.0.post_attention_layernorm.weight"], 1e-5)
    gate = torch.nn.functional.silu(h @ t["layers.0.mlp.gate_proj.weight"].T)
    expected = x + (gate * (h @ t["layers.0.mlp.up_proj.weight"].T)) @ t["layers.0.mlp.down_proj.weight"].T
    with torch.inference_mode():
        out = head(chain([5]), feature, head.new_cache(4))
        torch.testing.assert_close(out, expected)
        torch.testing.assert_close(head.logits(out), target.logits(expected))


@pytest.mark.parametrize("name", ["fc.bias", "qkv"])
def test_biases_follow_the_tensors_and_not_the_config(tmp_path: Path, target: CausalLM, name: str) -> None:
    tensors = tiny_tensors()
    without = run(load_head(write_head(tmp_path / "without", tensors, bias=False), target), target)
    names = [name] if name == "fc.bias" else [f"layers.0.self_attn.{p}_proj.bias" for p in "qkv"]
    sizes = [HIDDEN] if name == "fc.bias" else [HIDDEN, HIDDEN // 2, HIDDEN // 2]
    biased = tensors | {n: torch.full((size,), 3.0) for n, size in zip(names, sizes, strict=True)}
    with_bias = run(load_head(write_head(tmp_path / "with", biased, bias=False), target), target)
    assert not torch.allclose(without, with_bias)


def test_a_promised_bias_that_is_not_there_is_an_error(tmp_path: Path, target: CausalLM) -> None:
    with pytest.raises(UnsupportedError, match="promises a bias"):
        load_head(write_head(tmp_path / "head", tiny_tensors(), bias=True), target)


def test_a_copied_embedding_is_shared_and_another_is_used(tmp_path: Path, target: CausalLM) -> None:
    tensors = tiny_tensors()
    without = load_head(write_head(tmp_path / "a", tensors), target)
    copy = load_head(write_head(tmp_path / "b", tensors | {"embed_tokens.weight": target.embedding.float()}), target)
    other = load_head(write_head(tmp_path / "c", tensors | {"embed_tokens.weight": torch.randn(VOCAB, HIDDEN)}), target)
    assert without.embedding is None
    assert copy.embedding is None
    assert not torch.allclose(run(without, target), run(other, target))


@pytest.mark.parametrize("change", ["missing", "extra"])
def test_missing_and_unknown_tensors_are_named(tmp_path: Path, target: CausalLM, change: str) -> None:
    tensors = tiny_tensors()
    if change == "missing":
        del tensors["layers.0.mlp.up_proj.weight"]
    else:
        tensors["layers.0.input_layernorm.weight"] = torch.ones(HIDDEN)
    with pytest.raises(UnsupportedError, match=r"up_proj" if change == "missing" else "input_layernorm"):
        load_head(write_head(tmp_path / "head", tensors), target)


def test_a_pickle_that_calls_something_is_refused(tmp_path: Path, target: CausalLM) -> None:
    class Planted:
        def __reduce__(self) -> tuple[Any, ...]:
            return (Path.touch, (tmp_path / "executed",))

    folder = write_head(tmp_path / "head", tiny_tensors(), as_bin=True)
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps({"fc.weight": Planted()}))
    with pytest.raises(SpecqError):
        load_head(folder, target)
    assert not (tmp_path / "executed").exists()


def test_eagle3_with_its_own_trimmed_head(tmp_path: Path, target: CausalLM) -> None:
    ids = torch.arange(0, VOCAB, 5)
    tensors = tiny_tensors(eagle3=True) | {
        "lm_head.weight": torch.randn(len(ids), HIDDEN),
        "d2t": ids - torch.arange(len(ids)),
        "t2d": torch.zeros(VOCAB, dtype=torch.bool).index_fill(0, ids, True),
    }
    head = load_head(write_head(tmp_path / "head", tensors), target)
    assert head.spec.feature_layers == (2, 3, 3)
    logits = run(head, target)
    assert logits.shape == (3, VOCAB)
    assert logits.isfinite().nonzero()[:, 1].unique().tolist() == ids.tolist()


def test_a_trimmed_head_without_its_map_is_refused(tmp_path: Path, target: CausalLM) -> None:
    tensors = tiny_tensors(eagle3=True) | {"lm_head.weight": torch.randn(64, HIDDEN)}
    with pytest.raises(UnsupportedError, match="d2t"):
        load_head(write_head(tmp_path / "head", tensors), target)


def test_a_trimmed_eagle2_head_takes_its_rows_from_the_target(tmp_path: Path, target: CausalLM) -> None:
    ids = torch.tensor([3, 9, 40, 100])
    tensors = tiny_tensors()
    whole = run(load_head(write_head(tmp_path / "a", tensors), target), target)
    trimmed = run(load_head(write_head(tmp_path / "b", tensors | {"d2t": ids - torch.arange(4)}), target), target)
    torch.testing.assert_close(trimmed[:, ids], whole[:, ids])
    assert int(trimmed.isfinite().sum()) == 12


def test_a_head_of_another_size_is_refused_with_both_sizes(tmp_path: Path) -> None:
    folder = write_head(tmp_path / "head", tiny_tensors())
    with pytest.raises(UnsupportedError, match=r"\[64, 128\] and the target's hidden size is 32"):
        load_head(folder, tiny_model(tiny_config(hidden_size=32)))


PUBLISHED = {
    "EAGLE-Vicuna-7B-v1.3": (4096, 11008, 32, 32, {"fc.bias"}),
    "EAGLE-Vicuna-13B-v1.3": (5120, 13824, 40, 40, {"fc.bias"}),
    "EAGLE-Vicuna-33B-v1.3": (6656, 17920, 52, 13, {"fc.bias"}),
    "EAGLE-llama2-chat-70B": (8192, 28672, 64, 8, {"fc.bias"}),
    "EAGLE-mixtral-instruct-8x7B": (4096, 14336, 32, 32, set()),
    "EAGLE-LLaMA3-Instruct-8B": (4096, 14336, 32, 8, set()),
    "EAGLE-LLaMA3-Instruct-70B": (8192, 28672, 64, 8, set()),
    "EAGLE-Qwen2-7B-Instruct": (3584, 18944, 28, 4, {"fc.bias", "qkv"}),
    "EAGLE-Qwen2-72B-Instruct": (8192, 29568, 64, 8, {"fc.bias", "qkv"}),
    "Eagle-Qwen2.5-14B-Instruct": (5120, 13824, 40, 8, {"fc.bias", "qkv"}),
}


def write_headers(path: Path, sizes: Mapping[str, tuple[int, ...]]) -> None:
    """A safetensors file of these shapes in fp16 whose data is a hole of zeros: exact headers, no bytes on the disk."""
    header, offset = {}, 0
    for name, shape in sizes.items():
        count = 2
        for size in shape:
            count *= size
        header[name] = {"dtype": "F16", "shape": list(shape), "data_offsets": [offset, offset + count]}
        offset += count
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + offset)


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_heads_fit_their_targets_and_no_other(tmp_path: Path, name: str) -> None:
    hidden, intermediate, heads, kv_heads, biases = PUBLISHED[name]
    sizes = shapes(hidden=hidden, intermediate=intermediate, heads=heads, kv_heads=kv_heads)
    if "fc.bias" in biases:
        sizes["fc.bias"] = (hidden,)
    if "qkv" in biases:
        kv = hidden // heads * kv_heads
        sizes |= {f"layers.0.self_attn.{p}_proj.bias": (size,) for p, size in zip("qkv", (hidden, kv, kv), strict=True)}
    sizes["embed_tokens.weight"] = (32000, hidden)
    write_headers(tmp_path / "model.safetensors", sizes)
    config = CONFIG | {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "vocab_size": 32000}
    (tmp_path / "config.json").write_text(json.dumps(config))
    files = HeadFiles(tmp_path)
    fitting = tiny_config(hidden_size=hidden, num_attention_heads=heads, num_key_value_heads=kv_heads, vocab_size=32000)
    files.check_fit(ModelSpec.from_config(fitting))
    with pytest.raises(UnsupportedError, match="hidden size"):
        files.check_fit(ModelSpec.from_config(fitting | {"hidden_size": hidden // 2}))
