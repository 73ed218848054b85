"""Tiny random models, as objects and as Hugging Face folders, for every test that needs one."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor

from specq.checkpoint import ModelSpec
from specq.models.causal_lm import CausalLM
from specq.models.inventory import expected_tensors
from specq.models.loader import build_model

VOCAB = 320
BOS, IM_START, IM_END, END_OF_TEXT = 288, 289, 290, 291
"""Ids of the special tokens: 256 bytes and 32 merges come first, ids from 292 on are padding of the embedding."""

MERGES = (
    "t h|h e|i n|Ġ t|Ġt he|a n|an d|Ġ and|e r|o u|o n|r e|Ġ a|Ġ w|Ġ s|h a|l l|i s|e n|Ġ h|o r|in g|e d|i t|Ġ b|Ġ o|"
    "Ġ f|Ġ i|e s|a t|Ġ c|Ġ m"
)

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

TINY: Mapping[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 176,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_act": "silu",
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "bos_token_id": BOS,
    "eos_token_id": IM_END,
    "torch_dtype": "float32",
}

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}


def tiny_config(family: str = "llama", **changes: Any) -> dict[str, Any]:
    """A config.json of the family with hidden size 64 and two layers, changed as asked; None removes a key."""
    config = {**TINY, "model_type": family, "architectures": [ARCHITECTURES[family]]}
    config |= {"mistral": {"sliding_window": None}, "qwen3": {"head_dim": 16}}.get(family, {})
    config |= changes
    return {key: value for key, value in config.items() if value is not None or key == "sliding_window"}


def random_weights(config: Mapping[str, Any], *, seed: int = 0) -> dict[str, Tensor]:
    """Weights in fp32, large enough that attention is peaked and a misplaced position shows in the logits."""
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, shape in expected_tensors(ModelSpec.from_config(config)).items():
        values = torch.randn(shape, generator=generator)
        if name.endswith("norm.weight"):
            values = 1 + 0.2 * values
        elif name.endswith(".bias"):
            values = 0.5 * values
        elif "embed_tokens" not in name:
            values = values * (2 if "q_proj" in name or "k_proj" in name else 1) / shape[1] ** 0.5
        weights[name] = values
    return weights


class WeightsInMemory:
    """A weight source over a dictionary of dense tensors."""

    def __init__(self, weights: Mapping[str, Tensor]) -> None:
        self._weights = weights

    def names(self) -> frozenset[str]:
        return frozenset(self._weights)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._weights[name].shape)

    def tensor(self, name: str) -> Tensor:
        return self._weights[name]

    def linear(self, prefix: str) -> Tensor:
        return self._weights[f"{prefix}.weight"]

    def is_packed(self, prefix: str) -> bool:
        return False

    def bytes(self) -> int:
        return sum(weight.nbytes for weight in self._weights.values())


def tiny_model(
    config: Mapping[str, Any] | None = None,
    *,
    seed: int = 0,
    dtype: str = "float64",
    weights: Mapping[str, Tensor] | None = None,
) -> CausalLM:
    """A model of random weights on the CPU, made without touching the disk."""
    config = tiny_config() if config is None else config
    weights = random_weights(config, seed=seed) if weights is None else weights
    return build_model(ModelSpec.from_config(config), WeightsInMemory(weights), dtype=dtype)


def write_model(
    folder: Path,
    config: Mapping[str, Any] | None = None,
    *,
    seed: int = 0,
    weights: Mapping[str, Tensor] | None = None,
    dtype: torch.dtype | None = torch.float32,
    shards: int = 1,
) -> Path:
    """A Hugging Face folder of a tiny model with its tokenizer; returns the folder. No dtype: weights as they are."""
    config = dict(tiny_config() if config is None else config)
    if dtype is not None:
        config["torch_dtype"] = str(dtype).removeprefix("torch.")
    weights = random_weights(config, seed=seed) if weights is None else weights
    stored = {name: weight.to(dtype or weight.dtype).contiguous() for name, weight in weights.items()}
    folder.mkdir(parents=True, exist_ok=True)
    _write_json(folder / "config.json", config)
    _write_json(folder / "generation_config.json", {key: config.get(key) for key in ("bos_token_id", "eos_token_id")})
    if shards == 1:
        save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    else:
        files = [f"model-{i + 1:05}-of-{shards:05}.safetensors" for i in range(shards)]
        weight_map = {name: files[i % shards] for i, name in enumerate(stored)}
        for file in files:
            part = {name: stored[name] for name in stored if weight_map[name] == file}
            save_file(part, folder / file, metadata={"format": "pt"})
        _write_json(folder / "model.safetensors.index.json", {"metadata": {}, "weight_map": weight_map})
    write_tokenizer(folder)
    return folder


def write_tokenizer(folder: Path, *, chat_template: str | None = CHAT_TEMPLATE) -> Path:
    """A byte-level BPE tokenizer of 292 tokens with ChatML turns; returns the folder."""
    merges = [tuple(merge.split(" ")) for merge in MERGES.split("|")]
    pieces = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *("".join(merge) for merge in merges)]
    tokenizer = Tokenizer(models.BPE({piece: i for i, piece in enumerate(pieces)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    specials = ["<|bos|>", "<|im_start|>", "<|im_end|>", "<|endoftext|>"]
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in specials])
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|bos|>",
        "eos_token": "<|im_end|>",
        "clean_up_tokenization_spaces": False,
    }
    if chat_template is not None:
        settings["chat_template"] = chat_template
    _write_json(folder / "tokenizer_config.json", settings)
    return folder


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
