"""The tensors a model needs, and whether a checkpoint holds them and nothing else."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from specq.checkpoint import ModelSpec
from specq.errors import UnsupportedError, UsageError
from specq.tensors import WeightSource

EMBEDDING, HEAD, NORM = "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"
CHECK_CONFIG = "check that config.json belongs to these weights"
NAMED = 3
"""How many tensors a message names before it counts the rest."""


def expected_tensors(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor the model needs, 4-bit matrices by their logical [out, in]."""
    q, kv = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    products = {
        "self_attn.q_proj": (q, spec.hidden, spec.qkv_bias),
        "self_attn.k_proj": (kv, spec.hidden, spec.qkv_bias),
        "self_attn.v_proj": (kv, spec.hidden, spec.qkv_bias),
        "self_attn.o_proj": (spec.hidden, q, spec.o_bias),
        "mlp.gate_proj": (spec.intermediate, spec.hidden, spec.mlp_bias),
        "mlp.up_proj": (spec.intermediate, spec.hidden, spec.mlp_bias),
        "mlp.down_proj": (spec.hidden, spec.intermediate, spec.mlp_bias),
    }
    norms = {"input_layernorm": spec.hidden, "post_attention_layernorm": spec.hidden}
    if spec.qk_norm:
        norms |= {"self_attn.q_norm": spec.head_dim, "self_attn.k_norm": spec.head_dim}
    shapes: dict[str, tuple[int, ...]] = {EMBEDDING: (spec.vocab, spec.hidden), NORM: (spec.hidden,)}
    if not spec.tie_embeddings:
        shapes[HEAD] = (spec.vocab, spec.hidden)
    for layer in range(spec.layers):
        prefix = f"model.layers.{layer}."
        shapes |= {f"{prefix}{name}.weight": (size,) for name, size in norms.items()}
        for name, (rows, columns, has_bias) in products.items():
            shapes[f"{prefix}{name}.weight"] = (rows, columns)
            if has_bias:
                shapes[f"{prefix}{name}.bias"] = (rows,)
    return shapes


def check_tensors(spec: ModelSpec, source: WeightSource, *, lent: Collection[str] = ()) -> None:
    """Raise unless the source holds the tensors of `expected_tensors` in their shapes, and no others of weight.

    Those that are `lent` by another model are not asked for, and refused like any other that should not be there.
    Frequencies saved with old checkpoints, a head beside a tied embedding and zero biases written by old
    quantizers are passed over: they do not change what the model computes.
    """
    expected = {name: shape for name, shape in expected_tensors(spec).items() if name not in lent}
    names = source.names()
    missing = [name for name in expected if name not in names]
    if missing:
        raise UsageError(
            f"the weights lack {_named(missing)}",
            hint="download the model again, or check that config.json belongs to these weights",
        )
    for name, shape in expected.items():
        if source.shape(name) != shape:
            raise UsageError(
                f"`{name}` is {list(source.shape(name))}, config.json says {list(shape)}",
                hint=CHECK_CONFIG,
            )
    extra = [name for name in sorted(names - expected.keys()) if not _is_harmless(name, spec, source)]
    if extra:
        raise UnsupportedError(
            f"the weights hold {_named(extra)}, which a `{spec.family}` model as config.json describes it has not",
            hint=CHECK_CONFIG,
        )


def _is_harmless(name: str, spec: ModelSpec, source: WeightSource) -> bool:
    if name.endswith("rotary_emb.inv_freq") or (name == HEAD and spec.tie_embeddings):
        return True
    is_zero_bias = name.endswith("_proj.bias") and spec.quantization is not None
    return is_zero_bias and not bool(source.tensor(name).any())


def _named(names: Sequence[str]) -> str:
    shown = ", ".join(f"`{name}`" for name in names[:NAMED])
    return shown if len(names) <= NAMED else f"{shown} and {len(names) - NAMED} more"
