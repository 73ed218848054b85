"""A head in 4 bits is read like any other, and the output head it drafts with is the one that was asked for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from factories import tiny_config, tiny_model
from tiny_heads import CONFIG, run, tiny_tensors

from specq.errors import UnsupportedError, UsageError
from specq.models.causal_lm import CausalLM
from specq.models.eagle_files import HeadFiles
from specq.models.eagle_loader import load_head
from specq.models.eagle_writer import HEAD_MANIFEST, pack_head, write_head
from specq.quant.draft_head import Int8Linear
from specq.quant.linear import DenseLinear, Int4Linear, QuantLinear


@pytest.fixture(scope="module")
def target() -> CausalLM:
    return tiny_model(tiny_config(num_hidden_layers=6))


def written(folder: Path, *, bits: int = 16, manifest: dict[str, object] | None = None, **extra: torch.Tensor) -> Path:
    folder.mkdir()
    write_head(folder, tiny_tensors() | extra, CONFIG, bits=bits, group_size=32)
    if manifest is not None:
        (folder / HEAD_MANIFEST).write_text(json.dumps(manifest))
    return folder


def test_4_bit_matrices_are_read_packed_and_predict_nearly_the_same(tmp_path, target) -> None:
    dense, packed = written(tmp_path / "dense"), written(tmp_path / "packed", bits=4)
    assert (packed / "model.safetensors").stat().st_size < 0.25 * (dense / "model.safetensors").stat().st_size
    files = HeadFiles(packed)
    files.check_fit(target.spec)
    assert files.shape("fc.weight") == (64, 128)
    logits = [run(load_head(folder, target), target) for folder in (dense, packed)]
    similarity = torch.cosine_similarity(logits[0], logits[1])
    assert 0.97 < similarity.min() < 0.99999  # rounded, not lost


def test_embedding_and_vocabulary_map_stay_as_they_are(tmp_path, target) -> None:
    extra = {"embed_tokens.weight": torch.randn(320, 64), "d2t": torch.arange(4) * 3}
    folder = written(tmp_path / "head", bits=4, **extra)
    files = HeadFiles(folder)
    assert torch.equal(files.tensor("embed_tokens.weight"), extra["embed_tokens.weight"])
    assert torch.equal(files.integers("d2t"), extra["d2t"])


def test_the_group_divides_every_matrix_and_odd_sizes_are_refused() -> None:
    tensors = {"fc.weight": torch.randn(64, 128), "layers.0.mlp.down_proj.weight": torch.randn(64, 176)}
    assert pack_head(tensors)[1]["group_size"] == 32  # 176 takes none: its last group is short
    assert pack_head({"fc.weight": torch.randn(64, 192)})[1]["group_size"] == 64
    with pytest.raises(UnsupportedError, match=r"`fc.weight` of the head is \[60, 128\]"):
        pack_head({"fc.weight": torch.randn(60, 128)})


@pytest.mark.parametrize(("bits", "kind"), [(8, Int8Linear), (4, DenseLinear)])
def test_the_draft_head_is_a_copy_and_the_target_keeps_its_own(tmp_path, target, bits, kind) -> None:
    folder = written(tmp_path / "head", manifest={"draft_head_bits": bits})
    head = load_head(folder, target)
    assert isinstance(head.output, kind)  # a float64 target has no 4-bit product: dequantised
    exact, rounded = run(load_head(folder, target, head_bits=16), target), run(head, target)
    assert load_head(folder, target, head_bits=16).output is None
    assert not torch.equal(exact, rounded)
    assert torch.cosine_similarity(exact, rounded.double()).min() > 0.98
    states = torch.randn(2, 64, dtype=torch.float64)
    assert torch.equal(target.logits(states), states @ target.head.weight.T)


def test_4_bits_stay_packed_for_a_fp32_target_and_a_trimmed_vocabulary(tmp_path) -> None:
    target = tiny_model(dtype="float32")
    ids = torch.tensor([3, 40, 41, 100, 7, 8, 9, 10])
    head = load_head(written(tmp_path / "head", d2t=ids - torch.arange(8)), target, head_bits=4)
    assert isinstance(head.output, Int4Linear)
    with torch.inference_mode():
        logits = head.logits(torch.randn(2, 64))
    assert (logits > -torch.inf).nonzero()[:, 1].tolist() == sorted(ids.tolist()) * 2


def test_rows_for_a_copy_come_from_a_packed_head_too(target) -> None:
    from specq.quant.draft_head import pack_ranges

    packed = tiny_model()
    exact = pack_ranges(packed.head.weight.float())
    packed.head = QuantLinear(exact)
    torch.testing.assert_close(packed.head_rows(None), exact.dequantize(torch.float64))
    torch.testing.assert_close(packed.head_rows(torch.tensor([7, 2])), exact.dequantize(torch.float64)[[7, 2]])


@pytest.mark.parametrize("text", ['{"draft_head_bits": 5}', "{", "[]"])
def test_a_manifest_that_asks_for_nothing_known_is_refused(tmp_path, text) -> None:
    folder = written(tmp_path / "head")
    (folder / HEAD_MANIFEST).write_text(text)
    with pytest.raises(UsageError, match=HEAD_MANIFEST):
        HeadFiles(folder)
