"""EAGLE heads of random weights at a model's width, in the forms whose drafting is timed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from specq.models.causal_lm import CausalLM
from specq.models.eagle import EagleHead, HeadSpec
from specq.models.layers import DecoderLayer
from specq.models.random_weights import GROUP, random_packed
from specq.models.rope import RopeTable
from specq.quant.kernel_linear import (
    DenseKernelLinear,
    KernelByteLinear,
    KernelGateUp,
    KernelLinear,
    make_kernel_linear,
)
from specq.quant.packed import PackedWeight

TRIMMED = 32768
"""Ids of a trimmed vocabulary, as FR-Spec keeps them (arXiv 2502.14856)."""


@dataclass(frozen=True)
class HeadForm:
    """In how many bits a head's matrices are, and its output head; over how many ids it drafts (None: all)."""

    bits: int
    output_bits: int
    vocab: int | None = None

    def __str__(self) -> str:
        ids = "all ids" if self.vocab is None else f"{self.vocab} ids"
        return f"layer {self.bits} bits, output {self.output_bits} bits, {ids}"


FORMS = (
    HeadForm(16, 16),
    HeadForm(16, 4),
    HeadForm(16, 16, TRIMMED),
    HeadForm(4, 4),
    HeadForm(4, 16, TRIMMED),
    HeadForm(4, 4, TRIMMED),
)


def random_drafter(target: CausalLM, form: HeadForm) -> EagleHead:
    """An EAGLE-2 head of the target's sizes in this form; with 16 bits over all ids it uses the target's output."""
    spec = target.spec
    place: Any = {"device": target.device, "dtype": target.dtype}
    q, kv = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim

    def product(rows: int, columns: int, bits: int = form.bits, **options: Any) -> nn.Module:
        weight = random_matrix(rows, columns, bits=bits, device=target.device)
        return make_kernel_linear(weight, None, **place, **options)

    ids = None if form.vocab is None else torch.arange(form.vocab, device=target.device)
    needs_output = form.output_bits != 16 or form.vocab is not None
    rows = form.vocab or spec.vocab
    return EagleHead(
        HeadSpec(
            hidden=spec.hidden,
            heads=spec.heads,
            kv_heads=spec.kv_heads,
            head_dim=spec.head_dim,
            intermediate=spec.intermediate,
            norm_eps=spec.norm_eps,
            vocab=rows,
            feature_layers=None,
        ),
        target,
        fc=product(spec.hidden, 2 * spec.hidden),
        layer=DecoderLayer(
            spec,
            norms=(None, torch.ones(spec.hidden, **place)),
            head_norms=None,
            qkv=product(q + 2 * kv, spec.hidden),
            o=product(spec.hidden, q),
            gate_up=product(2 * spec.intermediate, spec.hidden, is_gate_up=True),
            down=product(spec.hidden, spec.intermediate),
        ),
        rope=RopeTable(spec.rope, spec.head_dim, **place),
        output=product(rows, spec.hidden, form.output_bits, out_dtype=torch.float32) if needs_output else None,
        target_ids=ids,
        head_bits=form.output_bits,
    )


def random_matrix(rows: int, columns: int, *, bits: int, device: torch.device) -> Tensor | PackedWeight:
    """A matrix of random numbers about columns ** -0.5 in size, dense for 16 bits, else in 4."""
    if bits == 16:
        return torch.randn(rows, columns, dtype=torch.float16, device=device) * columns**-0.5
    return random_packed(rows, columns, group=min(GROUP, columns), device=device)


def draft_bytes(head: EagleHead, depth: int) -> int:
    """Bytes of the matrices that drafting `depth` levels reads: layer and output head once a level."""
    output = head.target.head if head.output is None else head.output
    return depth * (module_bytes(head.fc) + module_bytes(head.layer) + module_bytes(output))


def module_bytes(module: nn.Module) -> int:
    """Bytes of the matrices one run of the module reads."""
    total = 0
    for part in module.modules():
        if isinstance(part, DenseKernelLinear):
            total += part.weight.nbytes
        elif isinstance(part, KernelLinear | KernelGateUp | KernelByteLinear):
            total += part.weight.num_bytes()
    return total
