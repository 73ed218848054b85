"""An intermediate without embedding and head runs on the target's, is known by digests, and is no model alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from factories import random_weights, tiny_config, write_model
from safetensors.torch import load_file, save_file

from specq.errors import SpecqError, UnsupportedError, UsageError
from specq.models.causal_lm import CausalLM
from specq.models.inventory import EMBEDDING, HEAD, NORM
from specq.models.loader import estimate_memory, load_model, model_spec, open_sharing
from specq.models.shared import KEY, MANIFEST, Lender, describe_lender, read_shared, require_lender
from specq.spec.check import check_pair
from specq.spec.tree import chain
from specq.tensors import open_weights

CONFIGS = {"untied": tiny_config(), "tied": tiny_config(tie_word_embeddings=True)}
LENT = {"untied": {EMBEDDING, HEAD}, "tied": {EMBEDDING}}


@pytest.fixture(params=CONFIGS)
def kind(request) -> str:
    return str(request.param)


def share(folder: Path, target: Path, *, name: str = "the-target") -> Path:
    """The folder of a complete model with the target's embedding, made one that borrows it."""
    spec, theirs = model_spec(folder), model_spec(target)
    shared = describe_lender(name, theirs, open_weights(target, theirs), is_tied=spec.tie_embeddings)
    weights = load_file(folder / "model.safetensors")
    save_file({n: t for n, t in weights.items() if n not in shared.tensors}, folder / "model.safetensors")
    (folder / MANIFEST).write_text(json.dumps({KEY: shared.record()}))
    return folder


def small_model(folder: Path, kind: str) -> Path:
    """A complete one-layer model with the embedding and head of `target_of(kind)`."""
    config = {**CONFIGS[kind], "num_hidden_layers": 1}
    return write_model(folder, config, weights=random_weights(config, seed=3) | lent_weights(kind))


def lent_weights(kind: str) -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in random_weights(CONFIGS[kind]).items() if name in LENT[kind]}


def logits(model: CausalLM) -> torch.Tensor:
    with torch.inference_mode():
        return model.forward(chain([5, 9, 33]), model.new_cache(16)).logits


def test_it_computes_what_the_complete_folder_computes_and_holds_nothing_twice(tmp_path, kind) -> None:
    target = load_model(write_model(tmp_path / "target", CONFIGS[kind]), dtype="float32")
    complete = load_model(small_model(tmp_path / "complete", kind), dtype="float32")
    shared = share(small_model(tmp_path / "shared", kind), tmp_path / "target")
    assert set(load_file(shared / "model.safetensors")) & {EMBEDDING, HEAD} == set()
    loaded = load_model(shared, dtype="float32", lender=target)
    assert torch.equal(logits(loaded), logits(complete))
    assert loaded.embedding.data_ptr() == target.embedding.data_ptr()
    assert loaded.head is target.head


def test_memory_counts_what_is_lent_with_the_target_only(tmp_path, kind) -> None:
    write_model(tmp_path / "target", CONFIGS[kind])
    complete = small_model(tmp_path / "complete", kind)
    shared = share(small_model(tmp_path / "shared", kind), tmp_path / "target")
    spec = model_spec(shared)
    sizes = [estimate_memory(spec, path, 64, device="cpu", dtype="float32").weights for path in (complete, shared)]
    assert sizes[0] - sizes[1] == sum(4 * tensor.numel() for tensor in lent_weights(kind).values())


def test_alone_it_is_one_error_that_says_what_to_do(tmp_path, kind) -> None:
    write_model(tmp_path / "target", CONFIGS[kind])
    shared = share(small_model(tmp_path / "shared", kind), tmp_path / "target", name="org/target")
    with pytest.raises(
        UsageError, match=r"`shared` is no model of its own: .* which are those of `org/target`"
    ) as caught:
        load_model(shared)
    assert caught.value.hint is not None
    assert "specq chat org/target --pipeline sequence --intermediate shared" in caught.value.hint


def test_another_model_of_the_same_shape_does_not_lend(tmp_path, kind) -> None:
    write_model(tmp_path / "target", CONFIGS[kind])
    shared = read_shared(share(small_model(tmp_path / "shared", kind), tmp_path / "target"))
    assert shared is not None
    weights = random_weights(CONFIGS[kind])
    weights[EMBEDDING] = weights[EMBEDDING].roll(1, 0)
    other = write_model(tmp_path / "other", CONFIGS[kind], weights=weights)
    results = check_pair(other, tmp_path / "shared", role="intermediate")
    failed = [(result.name, result.detail) for result in results if result.status == "fail"]
    assert [name for name, _ in failed] == ["drafter embeddings"]
    assert "those of `the-target`" in failed[0][1]
    with pytest.raises(UnsupportedError, match="`other` is another"):
        open_sharing(tmp_path / "shared", model_spec(tmp_path / "shared"), Lender(other, "other"))
    assert all(result.status != "fail" for result in check_pair(tmp_path / "target", tmp_path / "shared"))


def test_copies_in_other_number_formats_lend(tmp_path) -> None:
    shared = read_shared(
        share(small_model(tmp_path / "shared", "untied"), write_model(tmp_path / "t", CONFIGS["untied"]))
    )
    assert shared is not None
    copy = write_model(tmp_path / "copy", CONFIGS["untied"], dtype=torch.bfloat16)
    require_lender(shared, open_weights(copy, model_spec(copy)), name="copy")


def test_a_head_beside_the_embedding_must_be_on_both_sides(tmp_path) -> None:
    folder = write_model(tmp_path / "target", CONFIGS["untied"])
    spec = model_spec(folder)
    with pytest.raises(
        UnsupportedError, match=r"`target` has an output head beside its embedding, the intermediate has not"
    ):
        describe_lender("target", spec, open_weights(folder, spec), is_tied=True)


def test_a_missing_or_surplus_tensor_is_still_noticed(tmp_path, kind) -> None:
    write_model(tmp_path / "target", CONFIGS[kind])
    target = load_model(tmp_path / "target", dtype="float32")
    shared = share(small_model(tmp_path / "shared", kind), tmp_path / "target")
    weights = load_file(shared / "model.safetensors")
    save_file({name: tensor for name, tensor in weights.items() if name != NORM}, shared / "model.safetensors")
    with pytest.raises(UsageError, match=r"lack `model\.norm\.weight`"):
        load_model(shared, dtype="float32", lender=target)
    save_file(weights | {EMBEDDING: torch.zeros(4, 64)}, shared / "model.safetensors")
    with pytest.raises(UnsupportedError, match=r"hold `model\.embed_tokens\.weight`"):
        load_model(shared, dtype="float32", lender=target)


def test_a_lender_of_another_width_is_refused(tmp_path) -> None:
    write_model(tmp_path / "target", CONFIGS["tied"])
    shared = share(small_model(tmp_path / "shared", "tied"), tmp_path / "target")
    wide = load_model(write_model(tmp_path / "wide", {**CONFIGS["tied"], "hidden_size": 128}), dtype="float32")
    with pytest.raises(UnsupportedError, match="cannot use an embedding of 320 and 128"):
        load_model(shared, lender=wide)


@pytest.mark.parametrize("text", ["[1]", "{", '{"shared_embeddings": {"lender": "x"}}', '{"shared_embeddings": 3}'])
def test_a_broken_manifest_is_a_usage_error(tmp_path, text) -> None:
    (tmp_path / MANIFEST).write_text(text)
    with pytest.raises(SpecqError, match="is not a manifest of specq"):
        read_shared(tmp_path)
    (tmp_path / MANIFEST).write_text('{"kind": "intermediate"}')
    assert read_shared(tmp_path) is None
