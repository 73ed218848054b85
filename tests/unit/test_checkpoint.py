"""What config.json says, in every spelling, and what is refused; writing files whole."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from factories import tiny_config

from specq.checkpoint import (
    ModelSpec,
    QuantSpec,
    RopeSpec,
    read_config,
    read_generation_config,
)
from specq.errors import UnsupportedError, UsageError

YARN = {"factor": 4.0, "original_max_position_embeddings": 128}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}


def spec_of(family: str = "llama", **changes: Any) -> ModelSpec:
    return ModelSpec.from_config(tiny_config(family, **changes))


@pytest.mark.parametrize("kind", ["yarn", "llama3", "linear"])
def test_old_and_new_spellings_of_rotary_positions_mean_the_same(kind: str) -> None:
    numbers = {"yarn": YARN, "llama3": LLAMA3, "linear": {"factor": 2.0}}[kind]
    spellings = [
        spec_of(rope_theta=5e5, rope_scaling={"type": kind, **numbers}),
        spec_of(rope_theta=5e5, rope_scaling={"rope_type": kind, **numbers}),
        spec_of(rope_theta=None, rope_parameters={"rope_type": kind, "rope_theta": 5e5, **numbers}),
        spec_of(rope_theta=None, rope_parameters={"full_attention": {"rope_type": kind, "rope_theta": 5e5, **numbers}}),
    ]
    assert spellings[0].rope.kind == kind
    assert spellings[0].rope.theta == 5e5
    assert all(spelling == spellings[0] for spelling in spellings)


def test_rotary_positions_default_to_plain_ones_of_base_10000() -> None:
    assert spec_of(rope_theta=None).rope == RopeSpec("default", 10000.0)
    assert spec_of(rope_scaling=None, rope_theta=1e6).rope == RopeSpec("default", 1e6)


def test_yarn_works_out_its_attention_factor_and_lengthens_the_context() -> None:
    spec = spec_of(rope_scaling={"rope_type": "yarn", **YARN}, max_position_embeddings=128)
    assert spec.rope["attention_factor"] == pytest.approx(1.1386294)  # 0.1 ln 4 + 1
    assert spec.max_context == 512


def test_head_dim_and_kv_heads_are_derived_or_taken() -> None:
    derived = spec_of(num_key_value_heads=None)
    assert (derived.head_dim, derived.kv_heads) == (16, 4)
    assert spec_of(head_dim=32).head_dim == 32
    assert spec_of("qwen3", head_dim=None).head_dim == 128
    assert spec_of("mistral", num_attention_heads=8, num_key_value_heads=None).kv_heads == 8


def test_biases_follow_the_family_and_its_keys() -> None:
    def biases(spec: ModelSpec) -> tuple[bool, bool, bool, bool]:
        return spec.qkv_bias, spec.o_bias, spec.mlp_bias, spec.qk_norm

    assert biases(spec_of("llama")) == (False, False, False, False)
    assert biases(spec_of("llama", attention_bias=True, mlp_bias=True)) == (True, True, True, False)
    assert biases(spec_of("mistral", attention_bias=True)) == (False, False, False, False)
    assert biases(spec_of("qwen2", attention_bias=False)) == (True, False, False, False)
    assert biases(spec_of("qwen3", attention_bias=True)) == (True, True, False, True)


def test_sliding_windows_are_told_layer_by_layer() -> None:
    assert spec_of("mistral", sliding_window=16).sliding_windows == (16, 16)
    assert spec_of("mistral", sliding_window=None).sliding_windows == (None, None)
    assert spec_of("llama", sliding_window=16).sliding_windows == (None, None)
    assert spec_of("qwen2", sliding_window=16, use_sliding_window=False).sliding_windows == (None, None)
    on = {"sliding_window": 16, "use_sliding_window": True}
    assert spec_of("qwen2", max_window_layers=1, **on).sliding_windows == (None, 16)
    listed = ["sliding_attention", "full_attention"]
    assert spec_of("qwen3", layer_types=listed, **on).sliding_windows == (16, None)


@pytest.mark.parametrize(("given", "ids"), [(5, (5,)), ([5, 7, 9], (5, 7, 9)), (None, (2,))])
def test_end_tokens_are_one_or_several(given: Any, ids: tuple[int, ...]) -> None:
    assert spec_of(eos_token_id=given).eos_ids == ids  # 2 is what Llama's config means without the key


def test_dtype_is_read_in_both_spellings() -> None:
    assert spec_of(torch_dtype="bfloat16").dtype == "bfloat16"
    assert spec_of(torch_dtype=None, dtype="float16").dtype == "float16"


def test_code_named_by_a_config_is_never_needed() -> None:
    assert spec_of(auto_map={"AutoModelForCausalLM": "modeling_evil.Evil"}) == spec_of()


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "family": ({"model_type": "gemma2", "architectures": ["Gemma2ForCausalLM"]}, "model_type `gemma2`"),
    "mixture of experts": ({"model_type": "mixtral", "architectures": ["MixtralForCausalLM"]}, "`mixtral`"),
    "architecture without a model_type": (
        {"model_type": None, "architectures": ["PhiForCausalLM"]},
        "`PhiForCausalLM`",
    ),
    "another task": ({"architectures": ["LlamaForSequenceClassification"]}, "`LlamaForSequenceClassification`"),
    "eagle head": ({"architectures": ["LlamaForCausalLMEagle3"]}, "`LlamaForCausalLMEagle3`"),
    "experts": ({"num_local_experts": 8}, "`num_local_experts` of 8"),
    "activation": ({"hidden_act": "gelu"}, "hidden_act `gelu`"),
    "soft cap": ({"final_logit_softcapping": 30.0}, "`final_logit_softcapping` of 30.0"),
    "partial rotary": ({"partial_rotary_factor": 0.5}, "partial_rotary_factor `0.5`"),
    "dynamic positions": ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "type `dynamic`"),
    "long positions": ({"rope_scaling": {"rope_type": "longrope"}}, "type `longrope`"),
    "positions by layer": (
        {"rope_parameters": {"full_attention": {"rope_theta": 1e6}, "sliding_attention": {"rope_theta": 1e4}}},
        "differ by layer",
    ),
    "uneven groups": ({"num_key_value_heads": 3}, "4 attention heads cannot share 3"),
    "odd head": ({"head_dim": 15}, "head_dim of 15"),
    "layer kinds": (
        {
            "model_type": "qwen2",
            "architectures": ["Qwen2ForCausalLM"],
            "use_sliding_window": True,
            "layer_types": ["linear_attention", "full_attention"],
        },
        "`linear_attention`",
    ),
    "dtype": ({"torch_dtype": "float8_e4m3fn"}, "`float8_e4m3fn`"),
    "quantizer": ({"quantization_config": {"quant_method": "bitsandbytes"}}, "`bitsandbytes`"),
    "width": ({"quantization_config": {"quant_method": "gptq", "bits": 3}}, "3-bit `gptq`"),
    "width of the head": (
        {"quantization_config": {"quant_method": "gptq", "dynamic": {"lm_head": {"bits": 2}}}},
        "2-bit `gptq`",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_run_is_refused_with_its_value_and_what_works(case: str) -> None:
    changes, text = REFUSED[case]
    with pytest.raises(UnsupportedError) as caught:
        ModelSpec.from_config(tiny_config(**{"family": "llama", **changes}))
    assert text in caught.value.message
    assert "\n" not in caught.value.message
    assert caught.value.hint


def test_the_refusal_of_a_family_lists_those_that_work() -> None:
    with pytest.raises(UnsupportedError) as caught:
        ModelSpec.from_config({"model_type": "gemma2"})
    assert all(name in str(caught.value.hint) for name in ("llama", "mistral", "qwen2", "qwen3", "SmolLM2"))


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"hidden_size": None}, "no `hidden_size`"),
        ({"num_hidden_layers": 0}, "`num_hidden_layers` in config.json is `0`"),
        ({"vocab_size": "many"}, "`vocab_size` in config.json is `many`"),
        ({"rope_scaling": {"type": "linear"}}, "`factor`"),
        ({"rope_scaling": {"type": "llama3", "factor": 8.0}}, "`low_freq_factor`"),
    ],
)
def test_a_config_that_lacks_a_number_names_it(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(UsageError) as caught:
        spec_of(**changes)
    assert text in caught.value.message


def test_contradicting_windows_are_an_error() -> None:
    with pytest.raises(UsageError, match="use_sliding_window"):
        spec_of("qwen2", sliding_window=16, layer_types=["sliding_attention"] * 2)


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 64, "sym": False, "desc_act": True}
COMPRESSED = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "ignore": ["lm_head"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "input_activations": None,
            "weights": {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32},
        }
    },
}


def compressed_groups(target: str) -> dict[str, Any]:
    """The usual group, and one of 8 bits and whole rows for `target`."""
    weights = {"num_bits": 8, "type": "int", "symmetric": False, "strategy": "channel", "group_size": None}
    return {**COMPRESSED["config_groups"], "head": {"targets": [target], "weights": weights}}


def test_quantization_is_read_from_every_writer() -> None:
    assert QuantSpec.from_config(GPTQ) == QuantSpec("gptq", 4, 64, False, True, "gptq")
    assert QuantSpec.from_config({**GPTQ, "checkpoint_format": "gptq_v2"}).checkpoint_format == "gptq_v2"
    assert QuantSpec.from_config({**GPTQ, "format": "gptq_v2"}).checkpoint_format == "gptq_v2"
    awq = {"quant_method": "awq", "w_bit": 4, "q_group_size": 128, "zero_point": True, "version": "GEMM"}
    assert QuantSpec.from_config(awq) == QuantSpec("awq", 4, 128, False, False, "gemm")
    assert QuantSpec.from_config(COMPRESSED) == QuantSpec(
        "compressed-tensors", 4, 32, True, False, "pack-quantized", ("lm_head",)
    )
    assert QuantSpec.from_config({"quant_method": "gguf"}).method == "gguf"


def test_one_scale_a_row_is_group_size_minus_one() -> None:
    weights = {**COMPRESSED["config_groups"]["group_0"]["weights"], "strategy": "channel", "group_size": None}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    assert QuantSpec.from_config({**COMPRESSED, "config_groups": groups}).group_size == -1


@pytest.mark.parametrize(
    "config",
    [
        {**GPTQ, "checkpoint_format": "marlin"},
        {**GPTQ, "dynamic": {r".*\.down_proj.*": {"bits": 8}}},
        {**GPTQ, "dynamic": {"lm_head|.*down_proj": {"bits": 8}}},
        {"quant_method": "awq", "bits": 4, "version": "gemv"},
        {**COMPRESSED, "format": "int-quantized"},
        {"quant_method": "awq", "bits": 8, "version": "gemm"},
        {**COMPRESSED, "config_groups": {"g": {"weights": {"num_bits": 8, "strategy": "tensor"}}}},
        {**COMPRESSED, "config_groups": compressed_groups("re:.*down_proj$")},
        {**COMPRESSED, "config_groups": compressed_groups("lm_head") | {"h": compressed_groups("lm_head")["head"]}},
        {**COMPRESSED, "config_groups": {"g": {"weights": {"num_bits": 4, "type": "float", "strategy": "group"}}}},
        {
            **COMPRESSED,
            "config_groups": {
                "g": {**COMPRESSED["config_groups"]["group_0"], "input_activations": {"num_bits": 8}},
            },
        },
    ],
)
def test_storage_without_a_reader_is_refused(config: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedError):
        QuantSpec.from_config(config)


@pytest.mark.parametrize("pattern", ["lm_head", "+:lm_head", "+:^lm_head$", ".*lm_head$"])
def test_a_gptq_head_may_have_settings_of_its_own(pattern: str) -> None:
    head = {"bits": 8, "group_size": 32, "sym": True, "desc_act": False}
    spec = QuantSpec.from_config({**GPTQ, "lm_head": True, "dynamic": {"-:.*o_proj": {}, pattern: head}})
    assert (spec.bits, spec.group_size) == (4, 64)
    assert spec.head == QuantSpec("gptq", 8, 32, True, False, "gptq")
    assert QuantSpec.from_config({**GPTQ, "dynamic": {pattern: {"bits": 8}}}).head == replace(
        QuantSpec.from_config(GPTQ), bits=8
    )


@pytest.mark.parametrize("target", ["lm_head", "re:.*lm_head$"])
def test_a_compressed_tensors_head_may_have_a_scheme_of_its_own(target: str) -> None:
    spec = QuantSpec.from_config({**COMPRESSED, "ignore": [], "config_groups": compressed_groups(target)})
    assert (spec.bits, spec.group_size) == (4, 32)
    assert spec.head == QuantSpec("compressed-tensors", 8, -1, False, False, "pack-quantized")


def test_skipped_modules_of_gptq_are_no_override() -> None:
    assert QuantSpec.from_config({**GPTQ, "dynamic": {"-:.*lm_head": {}}}).bits == 4


def test_old_quantizers_own_file_counts(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(tiny_config()))
    (tmp_path / "quantize_config.json").write_text(json.dumps({"bits": 4, "group_size": 128, "sym": True}))
    spec = ModelSpec.from_config(read_config(tmp_path))
    assert spec.quantization == QuantSpec("gptq", 4, 128, True, False, "gptq")


def test_a_folder_without_config_says_so(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"holds no config\.json"):
        read_config(tmp_path)
    assert read_generation_config(tmp_path) == {}


@pytest.mark.parametrize("text", ["{", "[1]", "\xff"])
def test_a_broken_config_is_one_message(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(UsageError, match=r"config\.json"):
        read_config(tmp_path)
