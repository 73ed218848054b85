"""What quantizing cost: perplexity, KL divergence and top-1 agreement on held-out text, layer by layer.

Source, result and a plain rounding to nearest run side by side, one decoder layer of each in memory at a time,
in fp32. The result is read from the files that were written.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from specq.checkpoint import ModelSpec
from specq.compress.head import head_weight, rounded_head
from specq.compress.plan import Plan
from specq.compress.stages import PRODUCTS, StagedLayer
from specq.models.inventory import EMBEDDING, HEAD, NORM
from specq.models.rope import RopeTable
from specq.quant.gptq import Grid, round_to_nearest
from specq.tensors import WeightSource

SOURCE, RESULT, ROUNDED = "source", "quantized", "rtn"
"""The three models compared."""

ROWS_AT_ONCE = 256
"""Tokens whose logits exist together."""


@dataclass(frozen=True)
class Score:
    """Perplexity of the text, mean KL divergence from the source in nats, share of tokens with the same top-1."""

    perplexity: float
    kl: float
    top1: float


@torch.inference_mode()
def evaluate(
    spec: ModelSpec,
    source: WeightSource,
    result: WeightSource,
    tokens: Tensor,
    *,
    plan: Plan,
    device: str,
    on_layer: Callable[[int], None] = lambda layer: None,
) -> Mapping[str, Score]:
    """Scores of source, result and rounding to nearest with the plan's groups, for tokens [samples, seq_len].

    `on_layer` hears of every layer before it runs.
    """
    rope = RopeTable(spec.rope, spec.head_dim, dtype=torch.float32, device=torch.device(device))
    rope.grow(tokens.shape[1])
    sources = {SOURCE: source, RESULT: result, ROUNDED: source}
    streams = {name: _embedded(weights, tokens) for name, weights in sources.items()}
    for index in range(spec.layers):
        on_layer(index)
        layer = _dense_layer(spec, index, source, rope)
        streams[SOURCE] = _behind(layer, streams[SOURCE], device)
        _round(layer, plan)
        streams[ROUNDED] = _behind(layer, streams[ROUNDED], device)
        streams[RESULT] = _behind(_dense_layer(spec, index, result, rope), streams[RESULT], device)
    return _scores(spec, plan, sources, streams, tokens, device)


def _dense_layer(spec: ModelSpec, index: int, weights: WeightSource, rope: RopeTable) -> StagedLayer:
    layer = StagedLayer(spec, index, weights, rope)
    device = str(rope.cos.device)
    layer.weights = {product: dense_product(weights, index, product, device=device) for product in PRODUCTS}
    return layer


def _behind(layer: StagedLayer, stream: list[Tensor], device: str) -> list[Tensor]:
    """The stream after the layer, kept on the host."""
    return [layer.run(x.to(device)).cpu() for x in stream]


def dense_product(weights: WeightSource, index: int, product: str, *, device: str) -> Tensor:
    """The product's matrices of a layer below each other, fp32 [out, in]."""
    parts = [weights.linear(f"model.layers.{index}.{name}").to(device) for name in PRODUCTS[product]]
    return torch.cat([part.float() if isinstance(part, Tensor) else part.dequantize() for part in parts])


def _embedded(weights: WeightSource, tokens: Tensor) -> list[Tensor]:
    """The residual stream before the first layer, a [1, seq_len, hidden] for each sequence."""
    table = weights.tensor(EMBEDDING)
    return [F.embedding(row[None], table).float() for row in tokens]


def _round(layer: StagedLayer, plan: Plan) -> None:
    """Replace the layer's matrices by their nearest codes, with symmetric groups of the plan's size."""
    for product, names in PRODUCTS.items():
        matrices = [plan.of(name) for name in names]
        parts = layer.weights[product].split([matrix.rows for matrix in matrices])
        rounded = [
            part if matrix.grid is None else round_to_nearest(part, Grid(matrix.grid.group_size)).dequantize()
            for part, matrix in zip(parts, matrices, strict=True)
        ]
        layer.weights[product] = torch.cat(rounded)


def _heads(
    spec: ModelSpec, plan: Plan, sources: Mapping[str, WeightSource], device: str
) -> dict[str, tuple[Tensor, Tensor]]:
    """The last norm and the head of each model, fp32 on the device; what nothing changed is there once."""
    source, result = sources[SOURCE], sources[RESULT]
    norm, own = source.tensor(NORM).to(device, torch.float32), head_weight(spec, source)
    head = own.to(device, torch.float32)
    heads = {SOURCE: (norm, head), ROUNDED: (norm, head)}
    written = result.tensor(HEAD) if plan.packs_head else head_weight(spec, result)
    table = head if torch.equal(written, own) else written.to(device, torch.float32)
    heads[RESULT] = result.tensor(NORM).to(device, torch.float32), table
    if plan.head is not None and plan.head.grid is not None:
        grid = Grid(plan.head.grid.group_size, bits=plan.head.grid.bits)
        heads[ROUNDED] = norm, rounded_head(own, grid, rows_at_once=plan.head_rows, device=device)
    return heads


def _scores(
    spec: ModelSpec,
    plan: Plan,
    sources: Mapping[str, WeightSource],
    streams: Mapping[str, list[Tensor]],
    tokens: Tensor,
    device: str,
) -> dict[str, Score]:
    heads = _heads(spec, plan, sources, device)
    sums = {name: torch.zeros(3, dtype=torch.float64) for name in sources}
    for i, row in enumerate(tokens):
        for start in range(0, len(row) - 1, ROWS_AT_ONCE):
            end = min(start + ROWS_AT_ONCE, len(row) - 1)
            following = row[start + 1 : end + 1].to(device)
            expected: Tensor | None = None
            for name, (norm, head) in heads.items():
                x = F.rms_norm(streams[name][i][0, start:end].to(device), norm.shape, norm, spec.norm_eps)
                found = F.linear(x, head).log_softmax(-1)
                expected = found if expected is None else expected
                sums[name] += _compared(expected, found, following)
    count = tokens.shape[0] * (tokens.shape[1] - 1)
    means = {name: (total / count).tolist() for name, total in sums.items()}
    return {name: Score(math.exp(loss), kl, top1) for name, (loss, kl, top1) in means.items()}


def _compared(expected: Tensor, found: Tensor, following: Tensor) -> Tensor:
    """Summed loss, KL divergence and top-1 agreement of log-probabilities [rows, vocab], fp64 [3] on the CPU."""
    loss = F.nll_loss(found, following, reduction="sum")
    kl = (expected.exp() * (expected - found)).sum()
    same = (expected.argmax(-1) == found.argmax(-1)).sum()
    return torch.stack((loss, kl, same.to(loss.dtype))).double().cpu()
