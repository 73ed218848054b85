"""An intermediate is some of the target's layers, made to write as the target does, in an ordinary folder."""

from __future__ import annotations

import json

import pytest
import torch
from factories import random_weights, tiny_config, tiny_model, write_tokenizer
from packed_weights import random_packed

from specq.models.causal_lm import CausalLM
from specq.models.loader import load_model
from specq.quant.linear import QuantLinear
from specq.recipe import DistillSection
from specq.spec.tree import chain
from specq.train.batch import BatchedForward, pad
from specq.train.data import Batch
from specq.train.intermediate import IntermediateTask, choose_layers, cut_model, layer_importance, model_tensors

CONFIGS = {
    "llama": {},
    "tied": {"tie_word_embeddings": True},
    "qwen2": {"family": "qwen2"},
    "qwen3": {"family": "qwen3"},
}
TOKENS = [[5, 9, 33, 7, 12, 80, 41, 3], [64, 3, 90, 14, 71, 6]]


def deep_model(layers: int = 4, **changes) -> CausalLM:
    return tiny_model(tiny_config(num_hidden_layers=layers, **changes), dtype="float32")


def batch() -> Batch:
    return Batch(pad(TOKENS), torch.tensor([3, 4, 5, 9, 10]))


def test_importance_is_highest_where_leaving_a_layer_out_changes_most() -> None:
    config = tiny_config(num_hidden_layers=4)
    weights = random_weights(config)
    for name in weights:
        if name.startswith("model.layers.2.") and name.endswith(("o_proj.weight", "down_proj.weight")):
            weights[name] = weights[name] * 1e-3  # a layer that hardly adds anything
    importance = layer_importance(tiny_model(config, weights=weights), [batch()])
    assert importance.index(min(importance)) == 2
    assert importance[2] < 1e-3 < min(importance[i] for i in (0, 1, 3))


def test_chosen_layers_are_the_ends_and_the_most_important() -> None:
    importance = [0.1, 5.0, 0.3, 4.0, 0.2, 0.1]
    assert choose_layers(importance, 4) == [0, 1, 3, 5]
    assert choose_layers(importance, 1) == [0]
    assert choose_layers(importance, 5) == [0, 1, 2, 3, 5]


@pytest.mark.parametrize("changes", CONFIGS.values(), ids=CONFIGS)
def test_written_folder_loads_to_the_student(tmp_path, changes) -> None:
    config = tiny_config(num_hidden_layers=4, **changes)
    target = tiny_model(config, dtype="float32")
    task = IntermediateTask(target, DistillSection(layers=2), begin=[0, 3])
    task.save_weights(tmp_path)
    write_tokenizer(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(task.config(config)))
    loaded = load_model(tmp_path, dtype="float32")
    assert loaded.spec.layers == 2
    with torch.inference_mode():
        logits = [m.forward(chain(TOKENS[0]), m.new_cache(64)).logits for m in (task.student, loaded)]
    torch.testing.assert_close(logits[0], logits[1], rtol=1e-5, atol=1e-5)


def test_student_of_all_layers_is_the_target() -> None:
    target = deep_model()
    student = cut_model(target, range(4))
    torch.testing.assert_close(BatchedForward(student).states(pad(TOKENS)), BatchedForward(target).states(pad(TOKENS)))


def test_layers_in_4_bits_are_copied_at_their_values() -> None:
    target = deep_model()
    packed = random_packed(64, 64, 32)
    target.layers[1].o = QuantLinear(packed, torch.full((64,), 0.25))
    copied = cut_model(target, [0, 1]).layers[1].o
    torch.testing.assert_close(copied.weight.data, packed.dequantize(torch.float32))
    assert torch.equal(copied.bias.data, torch.full((64,), 0.25))


def test_config_names_what_kind_each_kept_layer_is() -> None:
    target = deep_model()
    task = IntermediateTask(target, DistillSection(layers=2), begin=[1, 3])
    kinds = ["full_attention", "sliding_attention", "full_attention", "full_attention"]
    config = task.config({"layer_types": kinds, "max_window_layers": 2, "quantization_config": {}, "torch_dtype": "x"})
    assert config == {
        "layer_types": ["sliding_attention", "full_attention"],
        "max_window_layers": 1,
        "num_hidden_layers": 2,
        "torch_dtype": "float32",
    }


def test_student_learns_and_the_target_stays() -> None:
    target = deep_model()
    before = {name: tensor.clone() for name, tensor in model_tensors(target).items()}
    task = IntermediateTask(target, DistillSection(layers=2), begin=[0, 3])
    optimizer = torch.optim.Adam(task.parameters.values(), lr=3e-3)
    losses = []
    for _ in range(30):
        loss, _ = task.loss(batch(), torch.Generator(), done=0.0)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0] - 0.3
    assert all(torch.equal(before[name], tensor) for name, tensor in model_tensors(target).items())
    assert "norm" in task.parameters
    assert not any("embed" in name or "head" in name for name in task.parameters)
