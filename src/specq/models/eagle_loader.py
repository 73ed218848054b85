"""From a head's folder to an EagleHead, built from the tensors there are; eagle_files.py says what they must be."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from specq.models.causal_lm import CausalLM
from specq.models.eagle import EagleHead
from specq.models.eagle_files import ATTENTION, EAGLE3_NORMS, EMBEDDING, MLP, MLP_NORM, OUTPUT, HeadFiles
from specq.models.layers import DecoderLayer, SideBySide
from specq.models.loader import INT4_HIDDEN, fuse_rows, runs_kernels
from specq.models.rope import RopeTable
from specq.quant.draft_head import draft_head_bits, make_draft_head
from specq.quant.linear import int4_group, make_linear
from specq.quant.packed import PackedWeight

log = logging.getLogger("specq")


def load_head(folder: Path, target: CausalLM, *, head_bits: int | None = None) -> EagleHead:
    """The head in a local folder, for this target, in the target's dtype and on its device.

    `head_bits` are those of the output head it drafts with, by default what the folder's manifest says, else 16.
    Raises UnsupportedError, before weights are loaded, when it does not fit the target or is not of a known form.
    """
    files = HeadFiles(folder)
    files.check_fit(target.spec)
    return build_head(files, target, head_bits=head_bits)


def build_head(files: HeadFiles, target: CausalLM, *, head_bits: int | None = None) -> EagleHead:
    """The head of these files, which were found to fit the target; `head_bits` as in `load_head`."""
    spec = files.spec(target.spec.layers)
    bits = usable_bits(files.head_bits if head_bits is None else head_bits, target)

    def vector(name: str) -> Tensor:
        return files.tensor(name).to(target.device, target.dtype)

    def bias_of(prefixes: Sequence[str]) -> Tensor | None:
        if not files.has(f"{prefixes[0]}.bias"):
            return None
        return torch.cat([files.tensor(f"{prefix}.bias") for prefix in prefixes])

    def product(*prefixes: str, is_gate_up: bool = False) -> nn.Module:
        weights, bias = [files.linear(prefix) for prefix in prefixes], bias_of(prefixes)
        fused = fuse_rows(weights)
        if fused is not None:
            return head_linear(fused, bias, target, is_gate_up=is_gate_up)
        biases = bias.split([w.shape[0] for w in weights]) if bias is not None else [None] * len(weights)
        return SideBySide([head_linear(w, b, target) for w, b in zip(weights, biases, strict=True)])

    target_ids = None
    if files.has("d2t"):
        offsets = files.integers("d2t").long()
        target_ids = (torch.arange(len(offsets)) + offsets).to(target.device)
    return EagleHead(
        spec,
        target,
        fc=product("fc"),
        layer=DecoderLayer(
            spec,
            norms=(None, vector(MLP_NORM)),
            head_norms=None,
            qkv=product(*(f"{ATTENTION}{name}_proj" for name in "qkv")),
            o=product(f"{ATTENTION}o_proj"),
            gate_up=product(f"{MLP}gate_proj", f"{MLP}up_proj", is_gate_up=True),
            down=product(f"{MLP}down_proj"),
        ),
        rope=RopeTable(files.rope, spec.head_dim, dtype=target.dtype, device=target.device),
        embedding=_own_embedding(files, target),
        norms={key: vector(name) for key, name in EAGLE3_NORMS.items()} if files.is_eagle3 else None,
        output=_output(files, target, target_ids, bits),
        target_ids=target_ids,
        head_bits=bits,
    )


def redraft(head: EagleHead, files: HeadFiles, *, head_bits: int) -> EagleHead:
    """The head of these files drafting with an output head of other bits; all else is shared with `head`."""
    bits = usable_bits(head_bits, head.target)
    return head.with_output(_output(files, head.target, head.target_ids, bits), head_bits=bits)


def usable_bits(bits: int, target: CausalLM) -> int:
    """The bits a draft head of this target can have: 16, said in one line, where no product takes fewer."""
    if bits in draft_head_bits(target.device, target.dtype):
        return bits
    log.warning(f"a draft head of {bits} bits has no product on `{target.device.type}` yet: it stays in 16")
    return 16


def _own_embedding(files: HeadFiles, target: CausalLM) -> Tensor | None:
    """The head's embedding where it is not the target's (heads often ship a copy)."""
    if not files.has(EMBEDDING):
        return None
    own = files.tensor(EMBEDDING)
    theirs = target.embedding
    if own.shape == theirs.shape and torch.equal(own.to(theirs.device, theirs.dtype), theirs.data):
        return None
    return own.to(target.device, target.dtype)


def head_linear(
    weight: Tensor | PackedWeight, bias: Tensor | None, target: CausalLM, *, is_gate_up: bool = False
) -> nn.Module:
    """The product of one of a head's matrices, packed ones as the target's would be on its device.

    What `is_gate_up` may be multiplied with its SiLU, which `has_fused_silu` says.
    """
    place: dict[str, Any] = {"device": target.device, "dtype": target.dtype}
    if isinstance(weight, Tensor):
        return make_linear(weight, bias, **place)
    if runs_kernels(target.dtype, str(target.device)):
        from specq.quant.kernel_linear import make_kernel_linear

        return make_kernel_linear(weight, bias, is_gate_up=is_gate_up, **place)
    is_narrow = target.spec.hidden < INT4_HIDDEN or target.dtype == torch.float64
    stays_packed = target.device.type == "cpu" and not is_narrow and int4_group(weight) is not None
    return make_linear(weight, bias, product="int4" if stays_packed else None, **place)


def _output(files: HeadFiles, target: CausalLM, target_ids: Tensor | None, bits: int) -> nn.Module | None:
    """The output product that drafts, in 4 or 8 `bits` a copy of its own; None where the target's serves."""
    own = files.linear("lm_head") if files.has(OUTPUT) else None
    if bits == 16 and own is not None:
        return head_linear(own, None, target)
    if bits == 16 and target_ids is None:
        return None
    if own is None:
        weight = target.head_rows(target_ids)
    else:
        weight = own if isinstance(own, Tensor) else own.dequantize()
    if bits == 16:
        return head_linear(weight, None, target)
    return make_draft_head(weight.to(target.device), bits=bits, device=target.device, dtype=target.dtype)
