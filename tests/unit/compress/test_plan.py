"""Groups, odd shapes and sizes, from config.json alone."""

from __future__ import annotations

from typing import Any, Literal

import pytest
from factories import tiny_config

from specq.checkpoint import ModelSpec
from specq.compress.plan import Plan, Settings, activation_bytes, peak_bytes, plan_quantization
from specq.errors import UnsupportedError, UsageError
from specq.quant.gptq import Grid


def plan_of(settings: Settings | None = None, **changes: Any) -> Plan:
    return plan_quantization(ModelSpec.from_config(tiny_config(**changes)), settings or Settings())


@pytest.mark.parametrize(
    ("hidden", "intermediate", "group_size"),
    [(256, 512, 128), (576, 1536, 64), (896, 4864, 128), (64, 176, 64), (64, 96, 32), (128, 4304, 128)],
)
def test_the_group_is_the_largest_that_divides_what_32_divides(hidden: int, intermediate: int, group_size: int) -> None:
    plan = plan_of(hidden_size=hidden, intermediate_size=intermediate, head_dim=hidden // 4)
    assert plan.group_size == group_size


def test_a_size_that_32_does_not_divide_gets_a_shorter_last_group() -> None:
    plan = plan_of(intermediate_size=176)
    down = plan.of("mlp.down_proj")
    assert down.grid is not None
    assert down.grid.group_size == 64
    assert "last group of 48 columns" in down.remark
    assert any("mlp.down_proj" in text and "vLLM" in text for text in plan.warnings)
    assert plan.of("mlp.up_proj").remark == ""


def test_a_format_without_shorter_groups_leaves_an_uneven_size_in_16_bits() -> None:
    plan = plan_of(Settings(format="compressed-tensors"), intermediate_size=176)
    assert plan.of("mlp.down_proj").grid is None
    assert "176 inputs, no multiple of 64" in plan.of("mlp.down_proj").remark
    assert plan.of("mlp.up_proj").grid == Grid(64)
    assert any("not quantized" in text for text in plan.warnings)


def test_a_forced_group_is_kept_where_it_does_not_divide() -> None:
    plan = plan_of(Settings(group_size=128), hidden_size=576, head_dim=64, num_attention_heads=9, num_key_value_heads=3)
    assert plan.group_size == 128
    assert "last group of 64 columns" in plan.of("self_attn.q_proj").remark


def test_a_group_larger_than_a_matrix_is_the_whole_row() -> None:
    grid = plan_of(Settings(group_size=128), intermediate_size=192).of("self_attn.q_proj").grid
    assert grid is not None
    assert grid.group_size == 64


def test_sizes_that_cannot_be_packed_stay_in_16_bits_with_the_reason() -> None:
    plan = plan_of(intermediate_size=100)
    assert plan.of("mlp.gate_proj").grid is None
    assert "100 outputs" in plan.of("mlp.gate_proj").remark
    assert "100 inputs" in plan.of("mlp.down_proj").remark
    assert plan.of("self_attn.q_proj").grid is not None
    assert any("not quantized" in text and "mlp.down_proj" in text for text in plan.warnings)


@pytest.mark.parametrize("intermediate", [176, 100])
def test_strict_shapes_refuses_what_does_not_divide(intermediate: int) -> None:
    with pytest.raises(UnsupportedError, match="mlp"):
        plan_of(Settings(strict_shapes=True), intermediate_size=intermediate)


def test_even_shapes_say_nothing() -> None:
    plan = plan_of(Settings(strict_shapes=True), intermediate_size=192)
    assert plan.warnings == ()
    assert all(matrix.remark == "" for matrix in plan.matrices)


def test_settings_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(UsageError, match="rtn"):
        plan_of(Settings(method="rtn", stored_order=True))
    with pytest.raises(UsageError, match="compressed-tensors"):
        plan_of(Settings(format="compressed-tensors", stored_order=True))
    with pytest.raises(UsageError, match="one group a row"):
        plan_of(Settings(group_size=-1, stored_order=True))


@pytest.mark.parametrize("settings", [Settings(stored_order=True), Settings(symmetric=False)])
def test_engines_that_refuse_what_was_asked_for_are_named(settings: Settings) -> None:
    (warning,) = plan_of(settings, intermediate_size=192).warnings
    assert "vLLM" in warning


def test_zero_points_have_a_format_that_engines_take() -> None:
    assert not plan_of(Settings(symmetric=False, format="compressed-tensors"), intermediate_size=192).warnings


@pytest.mark.parametrize("bits", [4, 8])
def test_a_quantized_model_is_refused(bits: int) -> None:
    with pytest.raises(UsageError, match=f"already in {bits} bits"):
        plan_of(quantization_config={"quant_method": "gptq", "bits": bits, "group_size": 32})


def test_the_head_stays_as_it_is_unless_asked() -> None:
    plan = plan_of(intermediate_size=192)
    assert plan.head is None
    assert not plan.packs_head


@pytest.mark.parametrize("bits", [4, 8])
def test_a_head_has_the_models_groups_and_says_who_reads_it(bits: Literal[4, 8]) -> None:
    plan = plan_of(Settings(head_bits=bits), intermediate_size=192)
    assert plan.head is not None
    assert plan.head.grid == Grid(64, bits=bits)
    assert plan.packs_head
    (warning,) = plan.warnings
    assert "transformers" in warning
    assert not plan_of(Settings(head_bits=bits, format="compressed-tensors"), intermediate_size=192).warnings


def test_a_tied_head_is_said_to_be_copied() -> None:
    plan = plan_of(Settings(head_bits=8), intermediate_size=192, tie_word_embeddings=True)
    assert any("stays in 16 bits" in warning for warning in plan.warnings)


def test_a_head_that_cannot_be_packed_stays_in_16_bits_with_the_reason() -> None:
    plan = plan_of(Settings(head_bits=4), intermediate_size=192, vocab_size=323)
    assert plan.head is not None
    assert not plan.packs_head
    assert any("`lm_head` (323 outputs, no multiple of 8" in warning for warning in plan.warnings)
    assert plan_of(Settings(head_bits=8), intermediate_size=192, vocab_size=324).packs_head
    with pytest.raises(UnsupportedError, match="lm_head"):
        plan_of(Settings(head_bits=4, strict_shapes=True), intermediate_size=192, vocab_size=323)


def test_a_layer_of_a_70b_model_fits_a_24_gb_card() -> None:
    spec = ModelSpec.from_config(
        tiny_config(
            hidden_size=8192,
            intermediate_size=28672,
            num_attention_heads=64,
            num_key_value_heads=8,
            num_hidden_layers=80,
        )
    )
    assert peak_bytes(spec, itemsize=2) < 22e9
    # Two copies of the residual stream and of what o reads; beside 4 GiB of the output they fit 64 GB of RAM.
    assert activation_bytes(spec, 128 * 2048, itemsize=2) == 4 * 128 * 2048 * 8192 * 2 < 18e9
