"""An EAGLE-2 head in training: the target's features in, its next features and tokens out, unrolled over depth.

Source: arXiv 2401.15077 (the head, its two losses, noise on features); 2503.01840 (unrolling: at depth j the head reads
its own predictions of depth j - 1, as it will when drafting). Files: as SafeAILab/EAGLE publishes them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specq.checkpoint import ModelSpec, RopeSpec
from specq.errors import UnsupportedError
from specq.models.causal_lm import CausalLM
from specq.models.eagle import HeadSpec
from specq.models.eagle_files import HeadFiles
from specq.models.eagle_writer import fitting_group
from specq.models.layers import DecoderLayer
from specq.models.rope import RopeTable
from specq.quant.linear import DenseLinear
from specq.recipe import DistillSection
from specq.train.batch import BatchedForward, attend_batch, share_heads, table_rows
from specq.train.data import Batch
from specq.train.features import TargetStates
from specq.train.rounded_linear import RoundedLinear
from specq.train.soft_loss import Teacher, soft_cross_entropy

INIT_STD = 0.02
ROUNDED_PART = 0.35
"""The last part of training, in which a head that is stored in 4 bits learns on the numbers that these hold."""

SETTLE_EVERY = 16
"""Steps between two searches of scales, which take as long as a step."""

SETTLED = "settled"
"""Name in a head's state of the steps since scales were first searched; the other names are those of products."""

GATE, DOWN = "layers.0.mlp.gate_proj.weight", "layers.0.mlp.down_proj.weight"


def head_config(spec: ModelSpec, *, dtype: torch.dtype, width: int | None = None) -> dict[str, Any]:
    """The config.json of a head for this target; every number a reader must not guess is in it.

    `width` is that of its MLP, by default the target's.
    """
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": spec.hidden,
        "intermediate_size": width or spec.intermediate,
        "num_attention_heads": spec.heads,
        "num_key_value_heads": spec.kv_heads,
        "head_dim": spec.head_dim,
        "num_hidden_layers": 1,
        "hidden_act": "silu",
        "rms_norm_eps": spec.norm_eps,
        "rope_theta": spec.rope.theta,
        "max_position_embeddings": spec.max_context,
        "vocab_size": spec.vocab,
        "bias": False,
        "tie_word_embeddings": False,
        "torch_dtype": str(dtype).removeprefix("torch."),
    }


class HeadTask:
    """A head that learns from a target, which stays as it is."""

    def __init__(
        self,
        target: CausalLM,
        settings: DistillSection,
        *,
        kept_ids: Tensor | None = None,
        start: HeadFiles | None = None,
        lengths: Sequence[int] = (),
    ) -> None:
        """`kept_ids` are the ids a trimmed head knows, ascending; `start` is a head whose weights are the first ones.

        Raises UnsupportedError when that head is not of the shape that is trained here.
        """
        self.target, self.settings, self.kept_ids = target, settings, kept_ids
        self.config = head_config(target.spec, dtype=target.dtype, width=settings.width)
        self._states = TargetStates(BatchedForward(target), lengths)
        rope = RopeSpec.from_config(self.config, max_positions=target.spec.max_context)
        self._rope = RopeTable(rope, target.spec.head_dim, dtype=target.dtype, device=target.device)
        self._output = output_matrix(target) if kept_ids is None else output_matrix(target)[kept_ids.to(target.device)]
        self._modules = _new_head(target, width=self.config["intermediate_size"], seed=settings.seed)
        if start is not None:
            check_start(start, target.spec, width=settings.width)
            _take_over(self._modules, start, target.spec)
        self._modules.requires_grad_()
        self._settled = 0
        self.parameters = dict(self._modules.named_parameters())

    def loss(self, batch: Batch, draws: torch.Generator, *, done: float) -> tuple[Tensor, list[Tensor]]:
        """See Task. A batch position p is learnt by row p - 1, which pairs id p with the feature before it."""
        settings = self.settings
        if settings.bits == 4 and done >= 1 - ROUNDED_PART:
            self._settle()
        tokens = batch.tokens.to(self.target.device)
        # Chosen before they are on the device: how many are left is then no question to it.
        positions = batch.positions[batch.positions % tokens.shape[1] > 0].to(self.target.device)
        with torch.no_grad():
            features = self._states.of(batch, tokens)
            wanted = features.flatten(0, 1)[positions]  # [rows, hidden]
            teacher = Teacher.of(wanted, self._output)
        total = torch.zeros((), device=self.target.device)
        agreement, weights = [], 0.0
        for depth, states in enumerate(self._unroll(tokens, self._noisy(features, draws))):
            rows = states.flatten(0, 1)[positions - 1]
            entropy, agreed = soft_cross_entropy(rows, self._output, teacher)
            loss = settings.ce_weight * entropy
            if settings.feature_weight:
                loss = loss + settings.feature_weight * F.smooth_l1_loss(rows.float(), wanted.float())
            weight = settings.unroll_decay**depth
            total, weights = total + weight * loss, weights + weight
            agreement.append(agreed)
        return total / weights, agreement

    def _settle(self) -> None:
        """Move the matrices to their 4-bit numbers, every SETTLE_EVERY-th time."""
        if self._settled % SETTLE_EVERY == 0:
            products = self._products()
            size = fitting_group([product.weight.shape[1] for product in products.values()])
            for product in products.values():
                product.settle(size)
        self._settled += 1

    def _products(self) -> dict[str, RoundedLinear]:
        return {name: module for name, module in self._modules.named_modules() if isinstance(module, RoundedLinear)}

    def state(self) -> dict[str, Tensor]:
        """See Task: the moves of the matrices to their 4-bit numbers, and how many steps used any."""
        moves = {name: product.moves for name, product in self._products().items() if product.moves is not None}
        return {SETTLED: torch.tensor(self._settled), **moves}

    def take_state(self, state: Mapping[str, Tensor]) -> None:
        """See Task."""
        self._settled = int(state[SETTLED])
        for name, product in self._products().items():
            moves = state.get(name)
            product.moves = None if moves is None else moves.to(product.weight.device)

    def _unroll(self, tokens: Tensor, features: Tensor) -> list[Tensor]:
        """Predicted features [batch, length, hidden] of each depth; row i holds the one after id i + 1."""
        layer, (batch, length) = self._modules.layer, tokens.shape
        self._rope.grow(length)
        rope = table_rows(self._rope, torch.arange(length, device=tokens.device).repeat(batch))
        embedded = self.target.embed(tokens.roll(-1, 1).flatten())  # the last row means nothing
        attention = UnrolledAttention(length, tokens.device)
        predicted = [features]
        for _ in range(self.settings.unroll):
            # Deeper rows read the prediction that the row before them made one depth earlier.
            entering = features if len(predicted) == 1 else torch.cat((features[:, :1], predicted[-1][:, :-1]), 1)
            x = self._modules.fc(torch.cat((embedded, entering.flatten(0, 1)), -1))
            q, k, v = layer.project(x, rope, "a16")
            x = layer.finish(x, attend_batch(attention, q, k, v, batch=batch), "a16")
            predicted.append(x.view(batch, length, -1))
        return predicted[1:]

    def _noisy(self, features: Tensor, draws: torch.Generator) -> Tensor:
        """Features moved by uniform noise of at most `noise`, so that the head learns to live with its own errors."""
        if not self.settings.noise:
            return features
        moves = torch.rand(features.shape, generator=draws, dtype=features.dtype, device=features.device)
        return features + (moves - 0.5) * (2 * self.settings.noise)

    def tensors(self) -> dict[str, Tensor]:
        """The head's weights under their published names; a trimmed one's with its map of ids."""
        tensors = published_tensors(self._modules, self.target.spec)
        if self.kept_ids is not None:
            # d2t holds offsets: the target's id minus the head's own.
            tensors["d2t"] = self.kept_ids.cpu() - torch.arange(len(self.kept_ids))
        return tensors


class UnrolledAttention:
    """Attention of one depth after another: a row sees true rows up to its depth before it, then its own drafts.

    Row i at depth j attends to row k of depth 0 for k <= i - j, and to row i - j + m of each depth m from 1 to j.
    """

    def __init__(self, length: int, device: torch.device) -> None:
        steps = torch.arange(length, device=device)
        self._distance = steps[:, None] - steps  # row minus column
        self._k: list[Tensor] = []
        self._v: list[Tensor] = []

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, window: int | None) -> Tensor:
        self._k.append(share_heads(k, q.shape[1]))
        self._v.append(share_heads(v, q.shape[1]))
        depth = len(self._k) - 1
        if depth == 0:
            return F.scaled_dot_product_attention(q, self._k[0], self._v[0], is_causal=True)
        seen = [self._distance >= depth, *(self._distance == depth - m for m in range(1, depth + 1))]
        keys, values = torch.cat(self._k, 2), torch.cat(self._v, 2)
        return F.scaled_dot_product_attention(q, keys, values, attn_mask=torch.cat(seen, 1))


class _HeadModules(nn.Module):
    """The trained parts of a head."""

    def __init__(self, fc: DenseLinear, layer: DecoderLayer) -> None:
        super().__init__()
        self.fc, self.layer = fc, layer


def _new_head(target: CausalLM, *, width: int, seed: int) -> _HeadModules:
    """A head of random weights, its attention shaped as that of the target's own layers."""
    spec, draws = target.spec, torch.Generator().manual_seed(seed)

    def linear(rows: int, columns: int, std: float = INIT_STD) -> RoundedLinear:
        weight = torch.randn(rows, columns, generator=draws) * std
        return RoundedLinear(weight.to(target.device, target.dtype))

    head = HeadSpec(
        hidden=spec.hidden,
        heads=spec.heads,
        kv_heads=spec.kv_heads,
        head_dim=spec.head_dim,
        intermediate=width,
        norm_eps=spec.norm_eps,
        vocab=spec.vocab,
        feature_layers=None,
    )
    ones = torch.ones(spec.hidden, dtype=target.dtype, device=target.device)
    layer = DecoderLayer(
        head,
        norms=(None, ones),
        head_norms=None,
        qkv=linear((spec.heads + 2 * spec.kv_heads) * spec.head_dim, spec.hidden),
        o=linear(spec.hidden, spec.heads * spec.head_dim),
        gate_up=linear(2 * width, spec.hidden),
        down=linear(spec.hidden, width),
    )
    return _HeadModules(linear(spec.hidden, 2 * spec.hidden, (2 * spec.hidden) ** -0.5), layer)


def published_tensors(head: nn.Module, spec: ModelSpec) -> dict[str, Tensor]:
    """The head's tensors under their published names, on the CPU."""
    return {name: stored(tensor) for name, tensor in _by_published_name(head, spec).items()}


def check_start(files: HeadFiles, spec: ModelSpec, *, width: int | None) -> None:
    """Raise UnsupportedError unless training for a target of this spec can begin with the weights of these files.

    Their MLP may be narrower than `width`, by default the target's.
    """
    files.check_fit(spec)
    q, kv, hidden = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim, spec.hidden
    shapes = {
        "layers.0.self_attn.q_proj.weight": (q, hidden),
        "layers.0.self_attn.k_proj.weight": (kv, hidden),
        GATE: (width or spec.intermediate, hidden),
    }
    for name, wanted in shapes.items():
        shape = files.shape(name)
        grows = name == GATE and shape[0] < wanted[0]
        if files.is_eagle3 or files.has("fc.bias") or not (shape == wanted or grows):
            raise UnsupportedError(
                f"training cannot begin with this head: `{name}` is {list(shape)}, "
                f"what is trained has {list(wanted)} and no biases",
                hint="leave out --from",
            )


@torch.no_grad()
def _take_over(head: nn.Module, files: HeadFiles, spec: ModelSpec) -> None:
    """Give the head the weights of these files, which passed `check_start`.

    Where its MLP is wider, what it gained is silent at first: nothing it computes changes.
    """
    for name, tensor in _by_published_name(head, spec).items():
        stored = files.tensor(name)
        if name == DOWN:
            tensor.zero_()
        tensor[: stored.shape[0], ...].narrow(-1, 0, stored.shape[-1]).copy_(stored)


def _by_published_name(head: nn.Module, spec: ModelSpec) -> dict[str, Tensor]:
    """The head's parameters, fused ones as views of their parts, under their published names."""
    parameters: Mapping[str, Tensor] = dict(head.named_parameters())
    q, kv = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    queries, keys, values = parameters["layer.qkv.weight"].split((q, kv, kv))
    gate, up = parameters["layer.gate_up.weight"].chunk(2)
    return {
        "fc.weight": parameters["fc.weight"],
        "layers.0.self_attn.q_proj.weight": queries,
        "layers.0.self_attn.k_proj.weight": keys,
        "layers.0.self_attn.v_proj.weight": values,
        "layers.0.self_attn.o_proj.weight": parameters["layer.o.weight"],
        GATE: gate,
        "layers.0.mlp.up_proj.weight": up,
        DOWN: parameters["layer.down.weight"],
        "layers.0.post_attention_layernorm.weight": parameters["layer.mlp_norm"],
    }


def stored(tensor: Tensor) -> Tensor:
    """A copy on the CPU as files hold it: in its own 16 or 32 bits (float64 exists in tests only)."""
    dtype = torch.float32 if tensor.dtype == torch.float64 else tensor.dtype
    return tensor.detach().to("cpu", dtype, copy=True)


@torch.no_grad()
def output_matrix(model: CausalLM) -> Tensor:
    """The output head as one dense matrix [vocab, hidden] in the dtype of activations, however it is stored."""
    if isinstance(model.head, DenseLinear):
        return model.head.weight.detach().to(model.dtype)
    unit = torch.eye(model.spec.hidden, dtype=model.dtype, device=model.device)
    return model.head(unit, "a16").T.contiguous()
