"""A model in a GGUF file: its config and its weights under Hugging Face's names.

Q4_0, Q4_1 and Q4_K matrices stay in 4 bits; every other quantised type is dequantised to fp32.
"""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specq.checkpoint import ModelSpec
from specq.errors import UnsupportedError, UsageError
from specq.gguf_header import GgufArray, GgufHeader, GgufTensor, read_header
from specq.quant.formats import FORMATS, PackedWeight

ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
PACKED_TYPES = {"Q4_0": "gguf-q4_0", "Q4_1": "gguf-q4_1", "Q4_K": "gguf-q4_k"}
DENSE_TYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
TOP_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
ROPE_FACTORS = "rope_freqs.weight"
LLAMA3_FACTORS = (8.0, 32.0)
"""The factors of Llama 3.1 and 3.2, low_freq_factor 1, high_freq_factor 4, original context 8192."""


def gguf_config(path: Path) -> dict[str, Any]:
    """A config.json for the model in the file, as ModelSpec.from_config takes it.

    Raises UsageError for a broken file, UnsupportedError for an architecture or variant specq does not run.
    """
    header = read_header(path)
    arch = header.metadata.get("general.architecture")
    if arch not in ARCHITECTURES:
        raise UnsupportedError(
            f"GGUF architecture `{arch}` is not run", hint=f"the ones run are {', '.join(ARCHITECTURES)}"
        )
    keys = _Keys(path, header, arch)
    if keys.get("expert_count", 0):
        raise UnsupportedError(f"`{path.name}` is a mixture of experts, which specq does not run")
    heads = keys.count("attention.head_count")
    head_dim = keys.get("attention.key_length", keys.count("embedding_length") // heads)
    if keys.get("rope.dimension_count", head_dim) != head_dim:
        raise UnsupportedError(f"`{path.name}` rotates a part of each head, which specq does not run")
    theta = float(keys.get("rope.freq_base", 10000.0))
    config = {
        "architectures": [ARCHITECTURES[arch]],
        "model_type": arch,
        "hidden_size": keys.count("embedding_length"),
        "intermediate_size": keys.count("feed_forward_length"),
        "num_hidden_layers": keys.count("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": keys.get("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": keys.count("context_length"),
        "rms_norm_eps": round(float(keys.get("attention.layer_norm_rms_epsilon", 1e-6)), 12),
        "rope_theta": theta,
        "vocab_size": keys.tensor("token_embd.weight").shape[0],
        "tie_word_embeddings": "output.weight" not in header.tensors,
        "hidden_act": "silu",
        "attention_bias": "blk.0.attn_q.bias" in header.tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in header.tensors,
        "dtype": "bfloat16",
        "quantization_config": {"quant_method": "gguf", "bits": 4 if _has_packed_matrix(header) else 16},
    }
    scaling = _llama3_scaling(path, header, theta) or _scaling(keys)
    if scaling:
        config["rope_scaling"] = scaling
    window = keys.get("attention.sliding_window", 0)
    if window and arch != "llama":
        raise UnsupportedError(f"`{path.name}` has a sliding window, which GGUF `{arch}` models are not run with")
    if window:
        config |= {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": window}
    return config | _token_ids(header)


def _has_packed_matrix(header: GgufHeader) -> bool:
    """Whether a matrix that is multiplied keeps its four bits; an embedding alone does not count."""
    multiplied = (name for name in header.tensors if name.startswith("blk.") or name == "output.weight")
    return any(header.tensors[name].type in PACKED_TYPES for name in multiplied)


class _Keys:
    """The metadata of one architecture."""

    def __init__(self, path: Path, header: GgufHeader, arch: str) -> None:
        self._path, self._header, self._arch = path, header, arch

    def get(self, key: str, default: Any = None) -> Any:
        value = self._header.metadata.get(f"{self._arch}.{key}", default)
        if isinstance(value, GgufArray):
            raise UnsupportedError(f"`{self._arch}.{key}` differs by layer in `{self._path.name}`, which is not run")
        return value

    def count(self, key: str) -> int:
        value = self.get(key)
        if not isinstance(value, int) or value < 1:
            raise UsageError(f"`{self._arch}.{key}` in `{self._path}` is `{value}`", hint="download it again")
        return value

    def tensor(self, name: str) -> GgufTensor:
        if name not in self._header.tensors:
            raise UsageError(f"`{self._path}` holds no `{name}`", hint="download it again")
        return self._header.tensors[name]


def _token_ids(header: GgufHeader) -> dict[str, Any]:
    ids = {role: header.metadata.get(f"tokenizer.ggml.{role}_token_id") for role in ("bos", "eos", "eot")}
    ends = list(dict.fromkeys(ids[role] for role in ("eos", "eot") if ids[role] is not None))
    return {"bos_token_id": ids["bos"], "eos_token_id": ends or None}


def _scaling(keys: _Keys) -> dict[str, Any] | None:
    """`rope_scaling` of the metadata, None for plain positions."""
    kind = keys.get("rope.scaling.type", "none")
    if kind == "none":
        return None
    if kind not in ("linear", "yarn"):
        raise UnsupportedError(f"rotary positions of type `{kind}` are not run", hint="linear and yarn are")
    scaling = {"rope_type": kind, "factor": keys.get("rope.scaling.factor")}
    if kind == "yarn":
        scaling["original_max_position_embeddings"] = keys.count("rope.scaling.original_context_length")
    return scaling


def _llama3_scaling(path: Path, header: GgufHeader, theta: float) -> dict[str, Any] | None:
    """Llama 3's scaling, which GGUF keeps as one divisor a frequency instead of the numbers that made it."""
    if ROPE_FACTORS not in header.tensors:
        return None
    stored = _dense(_bytes(path, header.tensors[ROPE_FACTORS]), header.tensors[ROPE_FACTORS]).double()
    if torch.equal(stored, torch.ones_like(stored)):
        return None
    wavelength = 2 * math.pi * theta ** (torch.arange(len(stored)).double() / len(stored))
    smooth = ((8192 / wavelength - 1) / 3).clamp(0, 1)
    for factor in LLAMA3_FACTORS:
        divisors = 1 / ((1 - smooth) / factor + smooth)
        if torch.allclose(stored, divisors, rtol=1e-4):
            return {
                "rope_type": "llama3",
                "factor": factor,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
            }
    raise UnsupportedError(
        f"`{path.name}` scales its rotary positions in a way that is not run", hint="Llama 3.1's and 3.2's are"
    )


class GgufWeights:
    """The weights of one GGUF file, memory-mapped."""

    def __init__(self, path: Path, spec: ModelSpec) -> None:
        header = read_header(path)
        self._path, self._size = path, path.stat().st_size
        self._tensors = {_hf_name(name): tensor for name, tensor in header.tensors.items() if name != ROPE_FACTORS}
        self._heads: dict[str, int] = {}
        if header.metadata.get("general.architecture") == "llama":
            self._heads = {"q_proj": spec.heads, "k_proj": spec.kv_heads}
        for name, tensor in self._tensors.items():
            heads = self._rotary_heads(name)
            if heads is not None and tensor.shape[0] % (2 * heads):
                raise UsageError(f"`{name}` has {tensor.shape[0]} rows, which {heads} heads cannot share")

    def names(self) -> frozenset[str]:
        """Every tensor, by its Hugging Face name where it has one."""
        return frozenset(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape, [out, in] for a matrix."""
        return self._find(name).shape

    def tensor(self, name: str) -> Tensor:
        """The tensor in the file's type, fp32 when it is quantised."""
        tensor = self._find(name)
        if tensor.type in PACKED_TYPES and len(tensor.shape) == 2:
            return self._packed(name).dequantize()
        dense = _dense(_bytes(self._path, tensor), tensor)
        index = self._row_order(name)
        return dense if index is None else dense[index]

    def linear(self, prefix: str) -> Tensor | PackedWeight:
        """The matrix, packed when its type is Q4_0, Q4_1 or Q4_K. Raises UsageError for scales that are not finite."""
        name = f"{prefix}.weight"
        return self._packed(name) if self.is_packed(prefix) else self.tensor(name)

    def is_packed(self, prefix: str) -> bool:
        """Whether the matrix's type is one that stays in 4 bits."""
        tensor = self._find(f"{prefix}.weight")
        return tensor.type in PACKED_TYPES and len(tensor.shape) == 2

    def bytes(self) -> int:
        """Bytes of the file."""
        return self._size

    def _find(self, name: str) -> GgufTensor:
        if name not in self._tensors:
            raise UsageError(f"`{self._path}` holds no `{name}`")
        return self._tensors[name]

    def _packed(self, name: str) -> PackedWeight:
        tensor = self._tensors[name]
        blocks = _bytes(self._path, tensor).view(tensor.num_rows, tensor.row_bytes)
        weight = FORMATS[PACKED_TYPES[tensor.type]].unpack({"blocks": blocks}, -1)
        if not weight.is_finite():
            raise UsageError(f"`{name}` has scales that are not finite", hint="download the model again")
        index = self._row_order(name)
        return weight if index is None else weight.take_rows(index)

    def _rotary_heads(self, name: str) -> int | None:
        match = re.fullmatch(r"model\.layers\.\d+\.self_attn\.([qk]_proj)\.(weight|bias)", name)
        return self._heads.get(match[1]) if match else None

    def _row_order(self, name: str) -> Tensor | None:
        """File row of each row: llama models are stored with a head's two rotary halves interleaved."""
        heads = self._rotary_heads(name)
        if heads is None:
            return None
        rows = torch.arange(self._tensors[name].shape[0])
        return rows.view(heads, -1, 2).transpose(1, 2).reshape(-1)


def _hf_name(name: str) -> str:
    """Hugging Face's name of a GGUF tensor; one that has none keeps its own."""
    match = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias)", name)
    if match is None:
        return name
    layer, stem, kind = match.groups()
    known = TOP_NAMES if layer is None else LAYER_NAMES
    if stem not in known:
        return name
    return f"{known[stem]}.{kind}" if layer is None else f"model.layers.{layer}.{known[stem]}.{kind}"


def _bytes(path: Path, tensor: GgufTensor) -> Tensor:
    """uint8 [bytes] of the tensor, mapped from the file."""
    end = tensor.offset + tensor.num_rows * tensor.row_bytes
    return torch.from_file(str(path), shared=False, size=end, dtype=torch.uint8)[tensor.offset :]


def _dense(data: Tensor, tensor: GgufTensor) -> Tensor:
    """The numbers of a tensor's bytes."""
    if tensor.type in DENSE_TYPES:
        return data.view(DENSE_TYPES[tensor.type]).view(tensor.shape)
    if tensor.type == "Q8_0":
        blocks = data.view(-1, 34)  # fp16 scale, 32 signed bytes
        scales = blocks[:, :2].contiguous().view(torch.float16).float()
        return (blocks[:, 2:].view(torch.int8).float() * scales).view(tensor.shape)
    from gguf.constants import GGMLQuantizationType
    from gguf.quants import dequantize

    rows = data.view(tensor.num_rows, tensor.row_bytes).numpy()
    return torch.from_numpy(dequantize(rows, GGMLQuantizationType[tensor.type])).view(tensor.shape)
