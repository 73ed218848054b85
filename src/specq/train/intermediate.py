"""A smaller model cut from the target: the layers that matter most, taught to write as the target does.

Embedding, output head and tokenizer stay the target's own, so that the two can share them in memory.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn

from specq.checkpoint import ModelSpec
from specq.companions import without_local_keys
from specq.models.causal_lm import CausalLM
from specq.models.inventory import EMBEDDING, HEAD, NORM
from specq.models.layers import DecoderLayer
from specq.quant.linear import DenseLinear
from specq.recipe import DistillSection
from specq.train.batch import BatchedForward, decoder_layers
from specq.train.data import Batch
from specq.train.eagle import output_matrix, stored
from specq.train.features import TargetStates
from specq.train.soft_loss import Teacher, soft_cross_entropy


@torch.no_grad()
def layer_importance(target: CausalLM, batches: Sequence[Batch]) -> list[float]:
    """For each layer, how far the target's next-token distribution moves without it: mean KL divergence in nats."""
    forward, output = BatchedForward(target), output_matrix(target)
    total = [0.0] * target.spec.layers
    for batch in batches:
        tokens, positions = batch.tokens.to(target.device), batch.positions.to(target.device)
        whole = forward.states(tokens).flatten(0, 1)[positions]
        teacher = Teacher.of(whole, output)
        entropy, _ = soft_cross_entropy(whole, output, teacher)
        for left_out in range(target.spec.layers):
            rest = [layer for layer in range(target.spec.layers) if layer != left_out]
            states = forward.states(tokens, layers=rest).flatten(0, 1)[positions]
            total[left_out] += float(soft_cross_entropy(states, output, teacher)[0] - entropy)
    return [each / len(batches) for each in total]


def choose_layers(importance: Sequence[float], count: int) -> list[int]:
    """The `count` most important layers (fewer than all) in their order; the first and the last are among them."""
    layers = len(importance)
    ends = [0, layers - 1][:count]
    inner = sorted(range(1, layers - 1), key=lambda layer: importance[layer], reverse=True)
    return sorted([*ends, *inner[: count - len(ends)]])


class IntermediateTask:
    """A student of some of the target's layers that learns the target's distributions on the target's text."""

    def __init__(
        self,
        target: CausalLM,
        settings: DistillSection,
        *,
        begin: Sequence[int] | CausalLM,
        lengths: Sequence[int] = (),
    ) -> None:
        """The student begins as a copy of these layers of the target, or of an earlier student.

        `lengths` are those of the texts it will learn from, by number.
        """
        self.target, self.settings, self.begin = target, settings, begin
        self._states = TargetStates(BatchedForward(target), lengths)
        self._output = output_matrix(target)
        self.student = continued(target, begin) if isinstance(begin, CausalLM) else cut_model(target, begin)
        self._forward = BatchedForward(self.student)
        # Embedding and output head are the target's own and stay as they are.
        self.parameters = {"norm": self.student.norm, **dict(self.student.layers.named_parameters("layers"))}
        for parameter in self.parameters.values():
            parameter.requires_grad_()

    def loss(self, batch: Batch, draws: torch.Generator, *, done: float) -> tuple[Tensor, list[Tensor]]:
        """See Task."""
        tokens, positions = batch.tokens.to(self.target.device), batch.positions.to(self.target.device)
        with torch.no_grad():
            wanted = self._states.of(batch, tokens).flatten(0, 1)[positions]
            teacher = Teacher.of(wanted, self._output)
        rows = self._forward.states(tokens).flatten(0, 1)[positions]
        entropy, agreed = soft_cross_entropy(rows, self._output, teacher)
        loss = self.settings.ce_weight * entropy
        if self.settings.feature_weight:
            loss = loss + self.settings.feature_weight * F.smooth_l1_loss(rows.float(), wanted.float())
        return loss, [agreed]

    def state(self) -> dict[str, Tensor]:
        """See Task: nothing but the parameters."""
        return {}

    def take_state(self, state: Mapping[str, Tensor]) -> None:
        """See Task."""

    def save_weights(self, folder: Path, *, without: Collection[str] = ()) -> None:
        """Write the student's weights as an ordinary Hugging Face model holds them, `without` these tensors."""
        tensors = {name: tensor for name, tensor in model_tensors(self.student).items() if name not in without}
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})

    def config(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """The student's config.json, from that of what it began as: the target, or an earlier student."""
        made = without_local_keys({key: value for key, value in config.items() if key != "quantization_config"})
        if not isinstance(self.begin, CausalLM):
            made["num_hidden_layers"] = len(self.begin)
            if isinstance(kinds := made.get("layer_types"), list):
                made["layer_types"] = [kinds[layer] for layer in self.begin]
            if made.get("max_window_layers") is not None:
                made["max_window_layers"] = sum(layer < made["max_window_layers"] for layer in self.begin)
        dtype = str(self.student.dtype).removeprefix("torch.")
        return made | {"torch_dtype" if "torch_dtype" in made else "dtype": dtype}


def cut_model(target: CausalLM, layers: Sequence[int]) -> CausalLM:
    """A model of copies of these layers, dense, over the target's own embedding and head."""
    windows = tuple(target.spec.sliding_windows[layer] for layer in layers)
    spec = replace(target.spec, layers=len(layers), sliding_windows=windows, quantization=None)
    copies = [_copy_layer(decoder_layers(target)[layer], target) for layer in layers]
    return CausalLM(
        spec, embedding=target.embedding.data, layers=copies, norm=target.norm.detach().clone(), head=target.head
    )


def continued(target: CausalLM, start: CausalLM) -> CausalLM:
    """The model of `start`'s layers, dense, over the target's embedding and head."""
    copy = cut_model(start, range(start.spec.layers))
    return CausalLM(
        copy.spec, embedding=target.embedding.data, layers=decoder_layers(copy), norm=copy.norm.data, head=target.head
    )


@torch.no_grad()
def _copy_layer(layer: DecoderLayer, target: CausalLM) -> DecoderLayer:
    spec = target.spec

    def dense(product: nn.Module, inputs: int) -> DenseLinear:
        """The product's matrix and bias, read off what it does to the unit vectors and to zero."""
        if isinstance(product, DenseLinear):
            return DenseLinear(product.weight.clone(), None if product.bias is None else product.bias.clone())
        unit = torch.eye(inputs, dtype=target.dtype, device=target.device)
        bias = product(torch.zeros_like(unit[:1]), "a16")[0]
        return DenseLinear((product(unit, "a16") - bias).T.contiguous(), bias if bool(bias.any()) else None)

    assert layer.attention_norm is not None
    return DecoderLayer(
        spec,
        norms=(layer.attention_norm.clone(), layer.mlp_norm.clone()),
        head_norms=(layer.q_norm.clone(), layer.k_norm.clone()) if layer.has_head_norms else None,
        qkv=dense(layer.qkv, spec.hidden),
        o=dense(layer.o, spec.heads * spec.head_dim),
        gate_up=dense(layer.gate_up, spec.hidden),
        down=dense(layer.down, spec.intermediate),
    )


def model_tensors(model: CausalLM) -> dict[str, Tensor]:
    """Every tensor of a dense model under its Hugging Face name, on the CPU."""
    spec = model.spec
    named: dict[str, Tensor] = {EMBEDDING: model.embedding, NORM: model.norm}
    if not spec.tie_embeddings:
        named[HEAD] = output_matrix(model)
    for number, layer in enumerate(decoder_layers(model)):
        prefix = f"model.layers.{number}."
        assert layer.attention_norm is not None
        named[f"{prefix}input_layernorm.weight"] = layer.attention_norm
        named[f"{prefix}post_attention_layernorm.weight"] = layer.mlp_norm
        if layer.has_head_norms:
            named |= {
                f"{prefix}self_attn.q_norm.weight": layer.q_norm,
                f"{prefix}self_attn.k_norm.weight": layer.k_norm,
            }
        named |= {f"{prefix}{name}": tensor for name, tensor in _products(layer, spec)}
    return {name: stored(tensor.to(model.dtype)) for name, tensor in named.items()}


def _products(layer: DecoderLayer, spec: ModelSpec) -> list[tuple[str, Tensor]]:
    """The layer's matrices and biases, fused ones taken apart."""
    q, kv = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    fused = (
        (layer.qkv, ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), (q, kv, kv)),
        (layer.o, ("self_attn.o_proj",), (spec.hidden,)),
        (layer.gate_up, ("mlp.gate_proj", "mlp.up_proj"), (spec.intermediate, spec.intermediate)),
        (layer.down, ("mlp.down_proj",), (spec.hidden,)),
    )
    found = []
    for product, names, rows in fused:
        for kind in ("weight", "bias"):
            if (tensor := getattr(product, kind)) is not None:
                found += [(f"{name}.{kind}", part) for name, part in zip(names, tensor.split(rows), strict=True)]
    return found
