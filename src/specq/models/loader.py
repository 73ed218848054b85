"""From a folder or a GGUF file to a CausalLM: everything is checked first, then tensors move one by one."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from specq.checkpoint import ModelSpec, read_config
from specq.errors import UsageError
from specq.models.causal_lm import CausalLM
from specq.models.inventory import EMBEDDING, HEAD, NORM, check_tensors, expected_tensors
from specq.models.layers import DecoderLayer, SideBySide
from specq.models.memory import MemoryEstimate, estimate_bytes, free_bytes, require_memory
from specq.models.shared import (
    LENDABLE,
    Lender,
    LentWeights,
    SharedEmbeddings,
    describe_lender,
    lent_names,
    read_shared,
    require_lender,
    require_same_rows,
    without_lender,
)
from specq.quant.kernel_choice import VARIABLE, asks_for_kernels, why_no_kernels
from specq.quant.linear import RescoredLinear, has_fast_bfloat16, int4_group, make_linear
from specq.quant.packed import PackedWeight, concat_rows
from specq.tensors import WeightSource, gguf_config, open_weights

log = logging.getLogger("specq")

INT4_HIDDEN = 1024
"""Hidden size from which a 4-bit model keeps its matrices packed on a CPU by default."""

DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}


@dataclass(frozen=True)
class Engine:
    """What may run a model where it can: our kernels (what is trained cannot), and steps as CUDA graphs."""

    use_kernels: bool = True
    use_graphs: bool = True


def load_model(
    path: Path,
    *,
    device: str = "cpu",
    dtype: str = "auto",
    lender: CausalLM | None = None,
    engine: Engine | None = None,
) -> CausalLM:
    """The model in a local folder or .gguf file, on `device`.

    `dtype` is that of activations, K and V; "auto" is float32 on a CPU and the checkpoint's 16-bit type on a GPU.
    An intermediate saved without embedding and output head takes those of `lender`, and its dtype (shared.py).
    Raises UnsupportedError or UsageError before any weight is read when the model is not one specq runs, its
    tensors are not those its config promises, or it has no lender.
    """
    spec, shared = model_spec(path), read_shared(path)
    if shared is None:
        return build_model(spec, open_weights(path, spec), device=device, dtype=dtype, engine=engine)
    if lender is None:
        raise without_lender(path.name, shared)
    return build_model(spec, open_weights(path, spec), device=device, dtype=dtype, lender=lender, engine=engine)


def model_spec(path: Path) -> ModelSpec:
    """What the model in a local folder or .gguf file is, without reading weights."""
    return ModelSpec.from_config(model_config(path))


def model_config(path: Path) -> dict[str, Any]:
    """The config.json of a local folder, or what a .gguf file says in its place."""
    if path.suffix == ".gguf":
        return gguf_config(path)
    if not (path / "config.json").is_file() and (files := sorted(path.glob("*.gguf"))):
        if len(files) > 1:
            raise UsageError(f"`{path}` holds {len(files)} GGUF files", hint=f"name one of them, such as {files[0]}")
        return gguf_config(files[0])
    return read_config(path)


def open_sharing(path: Path, spec: ModelSpec, lender: Lender) -> tuple[WeightSource, SharedEmbeddings]:
    """(the weights in `path` with what the lender lends, what that is).

    A folder that does not say what it shares is taken for one that lacks it: what it holds of that must be the
    lender's. Raises UnsupportedError when it is not.
    """
    lender_spec = model_spec(lender.path)
    own, theirs, shared = open_weights(path, spec), open_weights(lender.path, lender_spec), read_shared(path)
    if shared is None:
        shared = describe_lender(lender.name, lender_spec, theirs, is_tied=spec.tie_embeddings)
        require_lender(shared.among(own.names()), own, name=path.name)
    else:
        require_lender(shared, theirs, name=lender.name)
    return LentWeights(own, theirs, frozenset(shared.tensors)), shared


def build_model(
    spec: ModelSpec,
    source: WeightSource,
    *,
    device: str = "cpu",
    dtype: str = "auto",
    lender: CausalLM | None = None,
    engine: Engine | None = None,
) -> CausalLM:
    """The model of these weights, without embedding and head when there is a `lender`; see `load_model`."""
    lent = frozenset[str]()
    if lender is not None:
        require_same_rows(spec, lender.spec)
        lent = LENDABLE
    check_tensors(spec, source, lent=lent)
    engine = engine or Engine()
    builder = _Builder(spec, source, device, dtype, lender, use_kernels=engine.use_kernels)
    model = builder.model()
    if builder.use_kernels:
        from specq.models.device_step import attach_device_step

        attach_device_step(model, use_graphs=engine.use_graphs)
    return model


def check_memory(
    models: Sequence[tuple[ModelSpec, Path, int]],
    *,
    device: str,
    dtype: str,
    head_bytes: int = 0,
    head_kv: int = 0,
    use_kernels: bool = True,
) -> None:
    """Raise NotEnoughMemoryError when these models (spec, path, context) do not fit the device together.

    `head_bytes` is what the files of their EAGLE heads take, `head_kv` what these keep of the context; `use_kernels` as
    in Engine.
    """
    estimates = [estimate_memory(*model, device=device, dtype=dtype, use_kernels=use_kernels) for model in models]
    estimates.append(MemoryEstimate(weights=head_bytes, kv=head_kv, activations=0))
    context = max((context for *_, context in models), default=0)
    require_memory(estimates, context, device=device, free=free_bytes(device))


def estimate_memory(
    spec: ModelSpec, path: Path, context: int, *, device: str, dtype: str, use_kernels: bool = True
) -> MemoryEstimate:
    """What the model of these weights takes on the device with a cache of `context` tokens; see `check_memory`."""
    packed, lent = frozenset[str](), lent_names(path)
    on_kernels = use_kernels and runs_kernels(choose_dtype(dtype, spec, device), device)
    if keeps_4_bits(spec, dtype=dtype, device=device) or on_kernels:
        source = open_weights(path, spec)
        packed = frozenset(
            name
            for name, shape in expected_tensors(spec).items()
            if len(shape) == 2 and name != EMBEDDING and source.is_packed(name.removesuffix(".weight"))
        )
    kind = choose_dtype(dtype, spec, device)
    return estimate_bytes(spec, dtype=kind, context=context, device=device, packed=packed, lent=lent)


def keeps_4_bits(spec: ModelSpec, *, dtype: str, device: str) -> bool:
    """Whether a 4-bit model's matrices stay packed on this device; they are dequantised once where they do not.

    On a CPU they do in wide models and wherever bfloat16 is asked for. A narrow model, whose fp32 weights are small,
    is exact by default: the bf16 x of torch's int4 product moves the logits of SmolLM2-135M by 1.5 % and with them one
    greedy token in 30.
    """
    if device != "cpu" or spec.quantization is None or spec.quantization.bits != 4:
        return False
    return dtype == "bfloat16" or (dtype == "auto" and spec.hidden >= INT4_HIDDEN)


def runs_kernels(dtype: torch.dtype, device: str) -> bool:
    """Whether a model runs on our Triton kernels, which keep packed matrices packed."""
    if not asks_for_kernels(device):
        return False
    reason = why_no_kernels(dtype, device)
    if reason is not None:
        say = log.warning if os.environ.get(VARIABLE) else log.info  # who asked for them is told
        say(f"products run in torch, not on our kernels: {reason}")
    return reason is None


def choose_dtype(name: str, spec: ModelSpec, device: str) -> torch.dtype:
    """The dtype of activations. Raises UsageError for an unknown name."""
    if name == "auto":
        if not device.startswith("cuda"):
            return torch.float32
        return torch.float16 if spec.dtype == "float16" else torch.bfloat16
    if name not in DTYPES:
        raise UsageError(f"dtype `{name}` is unknown", hint=f"give auto, {', '.join(DTYPES)}")
    return DTYPES[name]


class _Builder:
    """Moves the source's tensors into modules, layer by layer."""

    def __init__(
        self,
        spec: ModelSpec,
        source: WeightSource,
        device: str,
        dtype: str,
        lender: CausalLM | None,
        *,
        use_kernels: bool,
    ) -> None:
        self.spec, self.source, self.device, self.lender = spec, source, torch.device(device), lender
        self.dtype = choose_dtype(dtype, spec, device) if lender is None else lender.dtype
        self.use_kernels = use_kernels and runs_kernels(self.dtype, device)
        self.use_int4 = not self.use_kernels and keeps_4_bits(spec, dtype=dtype, device=device)
        # Beside int4 products, whose x is bf16, an fp32 head would be the slowest part.
        self.use_rescored_head = self.use_int4 and has_fast_bfloat16()

    def model(self) -> CausalLM:
        if self.lender is not None:
            embedding, head = self.lender.embedding.data, self.lender.head
        elif self.spec.tie_embeddings:
            kind = torch.bfloat16 if self.use_rescored_head else self.dtype
            embedding = self.source.tensor(EMBEDDING).to(self.device, kind)
            head = self._head(embedding)
        else:
            # Only rows are read from it, so a 16-bit file's type serves fp32 too: exact, and half the memory.
            embedding = self.source.tensor(EMBEDDING)
            if embedding.dtype.itemsize > self.dtype.itemsize:
                embedding = embedding.to(self.dtype)
            embedding = embedding.to(self.device)
            head = self._head(self.source.linear(HEAD.removesuffix(".weight")))
        layers = [self._layer(f"model.layers.{layer}.") for layer in range(self.spec.layers)]
        return CausalLM(self.spec, embedding=embedding, layers=layers, norm=self._vector(NORM), head=head)

    def _head(self, weight: Tensor | PackedWeight) -> nn.Module:
        if self.use_rescored_head and isinstance(weight, PackedWeight) and weight.bits == 8:
            weight = weight.dequantize(torch.bfloat16)
        if self.use_rescored_head and isinstance(weight, Tensor):
            return RescoredLinear(weight.to(torch.bfloat16))
        return self._linear(weight, None, out_dtype=torch.float32)

    def _layer(self, prefix: str) -> DecoderLayer:
        spec, attention = self.spec, f"{prefix}self_attn."
        head_norms = None
        if spec.qk_norm:
            head_norms = self._vector(f"{attention}q_norm.weight"), self._vector(f"{attention}k_norm.weight")
        return DecoderLayer(
            spec,
            norms=(
                self._vector(f"{prefix}input_layernorm.weight"),
                self._vector(f"{prefix}post_attention_layernorm.weight"),
            ),
            head_norms=head_norms,
            qkv=self._product([f"{attention}{name}_proj" for name in "qkv"], has_bias=spec.qkv_bias),
            o=self._product([f"{attention}o_proj"], has_bias=spec.o_bias),
            gate_up=self._product(
                [f"{prefix}mlp.gate_proj", f"{prefix}mlp.up_proj"], has_bias=spec.mlp_bias, is_gate_up=True
            ),
            down=self._product([f"{prefix}mlp.down_proj"], has_bias=spec.mlp_bias),
        )

    def _product(self, prefixes: Sequence[str], *, has_bias: bool, is_gate_up: bool = False) -> nn.Module:
        """One product over the rows of all these matrices, or several side by side where they do not fuse."""
        weights = [self.source.linear(prefix) for prefix in prefixes]
        biases = [self.source.tensor(f"{prefix}.bias") for prefix in prefixes] if has_bias else []
        fused = fuse_rows(weights)
        if fused is not None:
            return self._linear(fused, torch.cat(biases) if biases else None, is_gate_up=is_gate_up)
        return SideBySide([self._linear(weight, biases[i] if biases else None) for i, weight in enumerate(weights)])

    def _linear(
        self,
        weight: Tensor | PackedWeight,
        bias: Tensor | None,
        *,
        is_gate_up: bool = False,
        out_dtype: torch.dtype | None = None,
    ) -> nn.Module:
        """One product; our kernels can fuse SiLU into gate and up, and give a head's logits without rounding."""
        if self.use_kernels:
            from specq.quant.kernel_linear import make_kernel_linear

            place: dict[str, Any] = {"device": self.device, "dtype": self.dtype}
            return make_kernel_linear(weight, bias, is_gate_up=is_gate_up, out_dtype=out_dtype, **place)
        product = None
        if self.use_int4 and isinstance(weight, PackedWeight) and int4_group(weight) is not None:
            product = "int4"
        return make_linear(weight, bias, device=self.device, dtype=self.dtype, product=product)

    def _vector(self, name: str) -> Tensor:
        return self.source.tensor(name).to(self.device, self.dtype)


def fuse_rows(weights: Sequence[Tensor | PackedWeight]) -> Tensor | PackedWeight | None:
    """One matrix with the rows of all, None when they are stored in ways that do not go together."""
    if len(weights) == 1:
        return weights[0]
    dense = [weight for weight in weights if isinstance(weight, Tensor)]
    packed = [weight for weight in weights if isinstance(weight, PackedWeight)]
    if dense and packed:
        return None
    return torch.cat(dense) if dense else concat_rows(packed)
