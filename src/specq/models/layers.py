"""One decoder layer, and attention over a cache for the nodes of a chain or a tree."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from specq.models.rope import rotate

FOLDED_NODES = 64
"""Up to here the queries that share a key head become rows of one product, which reads K and V once."""

GPU_ATTENTION = (SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH)
"""Not cuDNN's, which takes some 70 ms to plan for every new number of rows (H200, torch 2.11)."""


@dataclass(frozen=True)
class AttentionView:
    """What the nodes of one forward see in layers of one window: slots from `start` on, under `mask`.

    `mask` is additive, [rows, slots]; with no mask the nodes see every slot, or the causal part when `is_causal`.
    With `is_folded` its rows are those of all queries that share a key head, node by node.
    """

    start: int
    mask: Tensor | None
    is_causal: bool
    is_folded: bool


class LayerShape(Protocol):
    """What a layer must know besides its weights; ModelSpec and HeadSpec say it."""

    @property
    def heads(self) -> int: ...

    @property
    def kv_heads(self) -> int: ...

    @property
    def head_dim(self) -> int: ...

    @property
    def norm_eps(self) -> float: ...


class DecoderLayer(nn.Module):
    """Attention and MLP, each behind an RMSNorm and added to the residual stream.

    `qkv` and `gate_up` are single products over concatenated rows. A layer whose attention input is made outside
    (EAGLE heads) has no first norm.
    """

    def __init__(
        self,
        spec: LayerShape,
        *,
        norms: tuple[Tensor | None, Tensor],
        head_norms: tuple[Tensor, Tensor] | None,
        qkv: nn.Module,
        o: nn.Module,
        gate_up: nn.Module,
        down: nn.Module,
    ) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = spec.heads, spec.kv_heads, spec.head_dim
        self.eps = spec.norm_eps
        self.attention_norm = None if norms[0] is None else frozen(norms[0])
        self.mlp_norm = frozen(norms[1])
        self.has_head_norms = head_norms is not None
        if head_norms is not None:
            self.q_norm, self.k_norm = map(frozen, head_norms)
        self.qkv, self.o, self.gate_up, self.down = qkv, o, gate_up, down
        self.has_fused_silu = bool(getattr(gate_up, "has_fused_silu", False))

    def forward(
        self,
        x: Tensor,
        rope: tuple[Tensor, Tensor],
        slots: tuple[Tensor, Tensor],
        seen: tuple[Tensor, Tensor],
        view: AttentionView,
        act: str,
        *,
        attention_input: Tensor | None = None,
    ) -> Tensor:
        """The residual stream [nodes, hidden] after this layer.

        Attention reads `x` behind its norm, or `attention_input` as it is (EAGLE heads). Writes K and V of the nodes
        to `slots` ([kv_heads, nodes, head_dim] each), then attends to `seen` ([1, kv_heads, slots, head_dim] each),
        of which `slots` are the end.
        """
        h = self.normed(x) if attention_input is None else attention_input
        q, k, v = self.project(h, rope, act)
        slots[0].copy_(k.transpose(0, 1))
        slots[1].copy_(v.transpose(0, 1))
        return self.finish(x, attend(q, *seen, view), act)

    def project(self, h: Tensor, rope: tuple[Tensor, Tensor], act: str) -> tuple[Tensor, Tensor, Tensor]:
        """Turned queries [rows, heads, head_dim], turned keys and values [rows, kv_heads, head_dim] of `h`."""
        qkv = self.qkv(h, act).view(h.shape[0], -1, self.head_dim)  # [rows, heads + 2 kv_heads, head_dim]
        turning, v = qkv[:, : -self.kv_heads], qkv[:, -self.kv_heads :]
        if self.has_head_norms:
            turning = self._normalised(turning)
        turned = rotate(turning, *rope)
        return turned[:, : self.heads], turned[:, self.heads :], v

    def finish(self, x: Tensor, attended: Tensor, act: str) -> Tensor:
        """The residual stream [rows, hidden] after attention's output [rows, heads * head_dim] and the MLP."""
        x = x + self.o(attended, act)
        h = F.rms_norm(x, x.shape[-1:], self.mlp_norm, self.eps)
        h = self.gate_up(h, act)
        if not self.has_fused_silu:
            gate, up = h.chunk(2, -1)
            h = F.silu(gate) * up
        return x + self.down(h, act)

    def normed(self, x: Tensor) -> Tensor:
        """What attention reads of the residual stream: `x` behind the first norm."""
        return F.rms_norm(x, x.shape[-1:], self.attention_norm, self.eps)

    def _normalised(self, qk: Tensor) -> Tensor:
        """Every query and key head scaled to unit size, then by the weights of its kind (Qwen3)."""
        shape = qk.shape[-1:]
        q = F.rms_norm(qk[:, : self.heads], shape, self.q_norm, self.eps)
        k = F.rms_norm(qk[:, self.heads :], shape, self.k_norm, self.eps)
        return torch.cat((q, k), 1)


class SideBySide(nn.Module):
    """Products that cannot be one (4-bit groupings or orders that differ), their outputs concatenated."""

    def __init__(self, parts: Sequence[nn.Module]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)

    def forward(self, x: Tensor, act: str = "a16") -> Tensor:
        return torch.cat([part(x, act) for part in self.parts], -1)


def attend(q: Tensor, k: Tensor, v: Tensor, view: AttentionView) -> Tensor:
    """[nodes, heads * head_dim]: queries [nodes, heads, head_dim] over k and v [1, kv_heads, slots, head_dim]."""
    nodes, heads, head_dim = q.shape
    kv_heads = k.shape[1]
    with sdpa_kernel(list(GPU_ATTENTION)) if q.is_cuda else nullcontext():
        if not view.is_folded:
            out = F.scaled_dot_product_attention(
                q.transpose(0, 1).unsqueeze(0),
                k,
                v,
                attn_mask=view.mask,
                is_causal=view.is_causal,
                enable_gqa=heads != kv_heads,
            )
            return out[0].transpose(0, 1).reshape(nodes, heads * head_dim)
        rows = q.reshape(nodes, kv_heads, -1, head_dim).transpose(0, 1).reshape(1, kv_heads, -1, head_dim)
        out = F.scaled_dot_product_attention(rows, k, v, attn_mask=view.mask)  # [1, kv_heads, nodes * group, head_dim]
    # The kernels of a GPU lay their output out in other orders, so this may copy.
    return out.reshape(kv_heads, nodes, -1).transpose(0, 1).reshape(nodes, heads * head_dim)


def attention_view(
    ancestors: Tensor | None,
    positions: Tensor,
    *,
    base: int,
    window: int | None,
    group: int,
    dtype: torch.dtype,
    first: int = 0,
) -> AttentionView:
    """What the nodes from `first` on see: the `base` committed slots, then nodes by `ancestors`, all in the window.

    `ancestors` is bool [nodes, nodes], None for a chain; `positions` are those of all nodes. Slots before the window
    of the first node are cut off.
    """
    end = base + positions.shape[0]
    asking = positions[first:]
    nodes = asking.shape[0]
    start = 0 if window is None else max(0, base + 1 - window)
    if nodes == 1 and (ancestors is None or end == base + 1):
        return AttentionView(start, None, False, True)
    within_window = window is None or end <= window
    if ancestors is None and base == first == 0 and within_window and nodes > FOLDED_NODES:
        return AttentionView(start, None, True, False)
    slots = torch.arange(start, end, device=positions.device)
    if ancestors is None:
        allowed = slots <= asking[:, None]
    else:
        # A node's slot says nothing about its position: siblings share one.
        slots = torch.cat((slots[: base - start], positions))
        allowed = torch.cat((ancestors.new_ones(nodes, base - start), ancestors[first:]), 1)
    if window is not None and not within_window:
        allowed = allowed & (asking[:, None] - slots < window)
    mask = torch.zeros(allowed.shape, dtype=dtype, device=positions.device).masked_fill_(~allowed, -torch.inf)
    # On a GPU always: there is no fused attention there with a mask and fewer key heads than query heads.
    is_folded = nodes <= FOLDED_NODES or positions.is_cuda
    return AttentionView(start, mask.repeat_interleave(group, 0) if is_folded else mask, False, is_folded)


def frozen(tensor: Tensor) -> nn.Parameter:
    """The tensor as a parameter of a module that is not trained."""
    return nn.Parameter(tensor, requires_grad=False)
