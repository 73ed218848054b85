"""Each test of a pair, with a pair that passes it and one that does not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_tokenizers import CHATML, byte_level, save
from tokenizers import AddedToken

from specq.checkpoint import ModelSpec
from specq.errors import SpecqError, UnsupportedError
from specq.models.inventory import expected_tensors
from specq.recipe import build_recipe
from specq.spec.check import check_pair
from specq.spec.load import load_pipeline

WEIGHTS = "model.safetensors"

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 176,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "vocab_size": 320,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "eos_token_id": 2,
    "dtype": "bfloat16",
}
HEAD_CONFIG = {**CONFIG, "num_hidden_layers": 1, "bias": True}
HEAD_DTYPES = {"d2t": torch.int64, "t2d": torch.bool}
NAMED = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "chat_template": CHATML}


def model(folder: Path, backend: Any = None, *, names: dict[str, str] | None = None, **changes: Any) -> Path:
    """A model folder; its weights are zeros of the right names and shapes where the config is one specq runs."""
    config = {key: value for key, value in {**CONFIG, **changes}.items() if value is not None}
    save(backend or byte_level(), folder, files={"config.json": config}, **{**NAMED, **(names or {})})
    try:
        shapes = expected_tensors(ModelSpec.from_config(config))
    except SpecqError:
        return folder
    save_file({name: torch.zeros(shape, dtype=torch.bfloat16) for name, shape in shapes.items()}, folder / WEIGHTS)
    return folder


def head_shapes(hidden: int = 64) -> dict[str, tuple[int, ...]]:
    products = {"q": hidden, "k": hidden // 2, "v": hidden // 2, "o": hidden}
    return {
        "fc.weight": (hidden, 2 * hidden),
        "fc.bias": (hidden,),
        **{f"layers.0.self_attn.{name}_proj.weight": (rows, hidden) for name, rows in products.items()},
        **{f"layers.0.mlp.{name}_proj.weight": (176, hidden) for name in ("gate", "up")},
        "layers.0.mlp.down_proj.weight": (hidden, 176),
        "layers.0.post_attention_layernorm.weight": (hidden,),
    }


def head(folder: Path, shapes: dict[str, tuple[int, ...]], *, kind: str = "safetensors", **changes: Any) -> Path:
    folder.mkdir()
    tensors = {name: torch.zeros(shape, dtype=HEAD_DTYPES.get(name, torch.bfloat16)) for name, shape in shapes.items()}
    if kind == "safetensors":
        save_file(tensors, folder / WEIGHTS)
    else:
        torch.save(tensors, folder / "pytorch_model.bin")
    config = {key: value for key, value in {**HEAD_CONFIG, **changes}.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def outcome(target: Path, drafter: Path, name: str) -> tuple[str, str]:
    found = [result for result in check_pair(target, drafter) if result.name == name]
    assert len(found) == 1, name
    return found[0].status, found[0].detail


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return model(tmp_path / "target")


def test_smaller_model_with_the_same_tokenizer_passes_every_test(target: Path, tmp_path: Path) -> None:
    results = check_pair(target, model(tmp_path / "drafter", num_hidden_layers=1))
    assert {result.name: result.status for result in results} == dict.fromkeys(
        [
            "target",
            "target weights",
            "target tokenizer",
            "drafter",
            "drafter weights",
            "drafter tokenizer",
            "tokenizers",
            "special tokens",
            "end of an answer",
            "chat template",
            "vocabulary",
            "context",
            "rotary positions",
            "cost",
            "memory",
        ],
        "pass",
    )


def test_padded_vocabularies_of_one_tokenizer_fit(target: Path, tmp_path: Path) -> None:
    status, detail = outcome(target, model(tmp_path / "drafter", vocab_size=328), "vocabulary")
    assert (status, detail) == ("pass", "320 and 328 rows for the 320 ids of the tokenizer")


def test_ids_without_a_row_fail(target: Path, tmp_path: Path) -> None:
    status, detail = outcome(target, model(tmp_path / "drafter", vocab_size=312), "vocabulary")
    assert status == "fail"
    assert "the drafter cannot read ids from 312 on" in detail


def test_another_tokenizer_fails_with_the_first_id_that_differs(target: Path, tmp_path: Path) -> None:
    other = byte_level(special=("<|end|>", "<|im_end|>", "<|im_start|>"))
    status, detail = outcome(target, model(tmp_path / "drafter", other), "tokenizers")
    assert status == "fail"
    assert detail == "2 ids mean different tokens, the first is 1: `<|im_start|>` and `<|im_end|>`"


@pytest.mark.parametrize(("who", "words"), [("target", "never drafted"), ("drafter", "are masked")])
def test_ids_of_one_side_alone_are_a_warning(who: str, words: str, tmp_path: Path) -> None:
    more = byte_level()
    more.add_tokens([AddedToken("<more>", special=False)])
    backends = {"target": byte_level(), "drafter": byte_level(), who: more}
    folders = [model(tmp_path / name, backend, vocab_size=328) for name, backend in backends.items()]
    status, detail = outcome(*folders, "tokenizers")
    assert (status, words in detail) == ("warn", True)


def test_differences_that_only_the_target_decides_are_warnings(target: Path, tmp_path: Path) -> None:
    special = byte_level()
    special.add_special_tokens(["the"])
    names = {"eos_token": "<|end|>", "chat_template": "{{ messages }}"}
    drafter = model(tmp_path / "drafter", special, names=names, eos_token_id=0)
    assert outcome(target, drafter, "end of an answer") == (
        "warn",
        "the target stops at ids [2], the drafter at [0]; the target decides",
    )
    assert outcome(target, drafter, "chat template")[0] == "warn"
    status, detail = outcome(target, drafter, "special tokens")
    assert (status, "`the`" in detail) == ("warn", True)


def test_shorter_context_and_deeper_drafter_are_warnings(target: Path, tmp_path: Path) -> None:
    drafter = model(tmp_path / "drafter", max_position_embeddings=64, num_hidden_layers=3)
    assert outcome(target, drafter, "context")[0] == "warn"
    assert outcome(target, drafter, "cost")[0] == "warn"


def test_models_too_large_for_this_machine_are_a_warning(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("specq.models.loader.free_bytes", lambda device: 1000)
    status, detail = outcome(target, model(tmp_path / "drafter"), "memory")
    assert (status, "are needed" in detail) == ("warn", True)


@pytest.mark.parametrize(
    ("lost", "words"), [(None, "holds no weights"), ("model.norm.weight", "the weights lack `model.norm.weight`")]
)
def test_incomplete_weights_fail(lost: str | None, words: str, target: Path, tmp_path: Path) -> None:
    drafter = model(tmp_path / "drafter")
    if lost is None:
        (drafter / WEIGHTS).unlink()
    else:
        tensors = load_file(drafter / WEIGHTS)
        del tensors[lost]
        save_file(tensors, drafter / WEIGHTS)
    status, detail = outcome(target, drafter, "drafter weights")
    assert (status, words in detail) == ("fail", True)
    assert "memory" not in [result.name for result in check_pair(target, drafter)]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_type": "gemma2", "architectures": ["Gemma2ForCausalLM"]}, "gemma2"),
        ({"rope_scaling": {"rope_type": "longrope"}}, "longrope"),
        ({"hidden_size": None}, "hidden_size"),
    ],
)
def test_unsupported_side_is_named_and_the_other_tests_still_run(
    changes: dict[str, Any], words: str, target: Path, tmp_path: Path
) -> None:
    bad = model(tmp_path / "bad", **changes)
    for pair, name in (((target, bad), "drafter"), ((bad, target), "target")):
        status, detail = outcome(*pair, name)
        assert (status, words in detail) == ("fail", True)
        assert outcome(*pair, "tokenizers")[0] == "pass"


def test_missing_tokenizer_fails(target: Path, tmp_path: Path) -> None:
    drafter = model(tmp_path / "drafter")
    (drafter / "tokenizer.json").unlink()
    status, detail = outcome(target, drafter, "drafter tokenizer")
    assert (status, "has no tokenizer" in detail) == ("fail", True)


@pytest.mark.parametrize("kind", ["safetensors", "bin"])
def test_head_that_fits_passes_every_test(kind: str, target: Path, tmp_path: Path) -> None:
    results = check_pair(target, head(tmp_path / "head", head_shapes(), kind=kind))
    assert {result.status for result in results} == {"pass"}
    assert "an EAGLE-2 head with all its tensors" in [result.detail for result in results]
    assert {"fc bias", "hidden size", "vocabulary", "rotary positions"} <= {result.name for result in results}


def test_head_in_the_place_of_the_target_is_one_test_that_says_so(target: Path, tmp_path: Path) -> None:
    results = check_pair(head(tmp_path / "head", head_shapes()), target)
    assert [(result.name, result.status) for result in results] == [("target", "fail")]
    assert "the model comes first" in results[0].detail


@pytest.mark.parametrize(
    ("said", "is_there", "status"),
    [(True, True, "pass"), (None, True, "pass"), (None, False, "pass"), (False, True, "warn")],
)
def test_fc_bias_is_decided_by_the_file(
    said: bool | None, is_there: bool, status: str, target: Path, tmp_path: Path
) -> None:
    shapes = head_shapes()
    if not is_there:
        del shapes["fc.bias"]
    found, detail = outcome(target, head(tmp_path / "head", shapes, bias=said), "fc bias")
    assert found == status
    assert is_there == ("there is one" in detail)


def test_head_of_another_hidden_size_fails(target: Path, tmp_path: Path) -> None:
    status, detail = outcome(target, head(tmp_path / "head", head_shapes(32)), "hidden size")
    assert status == "fail"
    assert "fc is [32, 64] and the target's hidden size is 64" in detail


@pytest.mark.parametrize(
    ("changed", "name", "words"),
    [
        ({"layers.0.self_attn.q_proj.weight": None}, "drafter", "lacks `layers.0.self_attn.q_proj.weight`"),
        ({"norm.weight": (64,)}, "drafter", "holds `norm.weight`"),
        ({"fc.weight": (64,)}, "drafter", "`fc.weight` of the head is [64], not a matrix"),
        ({"fc.bias": None}, "drafter", "promises a bias of fc"),
        ({"layers.0.self_attn.k_proj.weight": (64, 64)}, "hidden size", "k_proj.weight` of the head is [64, 64]"),
        ({"fc.bias": (32,)}, "hidden size", "`fc.bias` of the head is [32]"),
        ({"embed_tokens.weight": (320, 32)}, "hidden size", "`embed_tokens.weight` of the head is [320, 32]"),
        ({"layers.0.self_attn.v_proj.bias": (32,)}, "drafter", "a bias on some of q, k and v only"),
        ({"embed_tokens.weight": (300, 64)}, "vocabulary", "the head's embedding has 300 rows"),
    ],
)
def test_head_with_other_tensors_fails(
    changed: dict[str, Any], name: str, words: str, target: Path, tmp_path: Path
) -> None:
    shapes = {key: shape for key, shape in {**head_shapes(), **changed}.items() if shape}
    status, detail = outcome(target, head(tmp_path / "head", shapes), name)
    assert status == "fail"
    assert words in detail


@pytest.mark.parametrize("key", ["num_attention_heads", "vocab_size"])
def test_head_config_without_its_numbers_fails(key: str, target: Path, tmp_path: Path) -> None:
    status, detail = outcome(target, head(tmp_path / "head", head_shapes(), **{key: None}), "drafter")
    assert (status, f"`{key}`" in detail) == ("fail", True)


def eagle3_shapes() -> dict[str, tuple[int, ...]]:
    shapes = {name.replace("layers.0.", "midlayer."): shape for name, shape in head_shapes().items()}
    del shapes["fc.bias"]
    for name, rows in (("q", 64), ("k", 32), ("v", 32)):
        shapes[f"midlayer.self_attn.{name}_proj.weight"] = (rows, 128)
    norms = ("midlayer.hidden_norm.weight", "midlayer.input_layernorm.weight", "norm.weight")
    return {
        **shapes,
        **dict.fromkeys(norms, (64,)),
        "fc.weight": (64, 192),
        "lm_head.weight": (100, 64),
        "d2t": (100,),
        "t2d": (320,),
    }


def test_eagle3_head_with_a_trimmed_vocabulary_fits(tmp_path: Path) -> None:
    results = check_pair(
        model(tmp_path / "target", num_hidden_layers=6), head(tmp_path / "head", eagle3_shapes(), bias=None)
    )
    assert {result.status for result in results} == {"pass"}
    assert "100 rows for the 320 ids of the tokenizer, named by `d2t`" in [result.detail for result in results]


def test_eagle3_head_that_reads_layers_the_target_lacks_fails(target: Path, tmp_path: Path) -> None:
    status, detail = outcome(target, head(tmp_path / "head", eagle3_shapes(), bias=None), "hidden size")
    assert (status, "reads layers [2, 1, -1] of a target with 2" in detail) == ("fail", True)


def test_narrow_head_without_its_own_output_fails(target: Path, tmp_path: Path) -> None:
    shapes = {key: tuple(32 if size == 64 else size for size in shape) for key, shape in eagle3_shapes().items()}
    shapes |= {"fc.weight": (32, 192), "embed_tokens.weight": (320, 32)}
    del shapes["lm_head.weight"]
    status, detail = outcome(target, head(tmp_path / "head", shapes, bias=None), "hidden size")
    assert (status, "hidden size 32, the target 64, and brings no output matrix" in detail) == ("fail", True)


@pytest.mark.parametrize(
    ("d2t", "name", "words"),
    [
        (None, "vocabulary", "knows 100 of 320 ids and has no `d2t`"),
        ((99,), "vocabulary", "`d2t` of the head has 99 entries for 100 rows"),
    ],
)
def test_trimmed_vocabulary_without_its_table_fails(
    d2t: tuple[int, ...] | None, name: str, words: str, target: Path, tmp_path: Path
) -> None:
    shapes = {key: shape for key, shape in {**eagle3_shapes(), "d2t": d2t}.items() if shape}
    status, detail = outcome(target, head(tmp_path / "head", shapes, bias=None), name)
    assert status == "fail"
    assert words in detail


def test_trimmed_vocabulary_that_names_an_unknown_id_fails(target: Path, tmp_path: Path) -> None:
    folder = head(tmp_path / "head", eagle3_shapes(), bias=None)
    tensors = load_file(folder / WEIGHTS)
    tensors["d2t"][99] = 221
    save_file(tensors, folder / WEIGHTS)
    status, detail = outcome(target, folder, "vocabulary")
    assert (status, "`d2t` of the head names id 320" in detail) == ("fail", True)


def test_head_without_a_rotary_base_is_a_warning(target: Path, tmp_path: Path) -> None:
    status, detail = outcome(target, head(tmp_path / "head", head_shapes(), rope_theta=None), "rotary positions")
    assert (status, "10000" in detail) == ("warn", True)


def test_head_that_would_run_code_is_refused(target: Path, tmp_path: Path) -> None:
    folder = head(tmp_path / "head", head_shapes(), kind="bin")
    torch.save({"fc.weight": torch.zeros(1), "call": Trap(tmp_path / "trapped")}, folder / "pytorch_model.bin")
    status, detail = outcome(target, folder, "drafter")
    assert status == "fail"
    assert "pytorch_model.bin" in detail
    assert not (tmp_path / "trapped").exists()


class Trap:
    """Unpickled by the plain pickle module, this creates a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


def test_head_in_the_place_of_an_intermediate_is_refused_before_weights_load(target: Path, tmp_path: Path) -> None:
    drafter = head(tmp_path / "head", head_shapes())
    assert all(result.status != "fail" for result in check_pair(target, drafter, role="target_head"))
    last = check_pair(target, drafter, role="intermediate")[-1]
    assert (last.name, last.status) == ("kind", "fail")
    with pytest.raises(UnsupportedError, match="is an EAGLE head and no whole model"):
        load_pipeline(build_recipe({"target": str(target), "intermediate": str(drafter)}), pipeline="sequence")
