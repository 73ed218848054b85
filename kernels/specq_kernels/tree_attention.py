"""Attention of 1 to 64 query nodes over a static cache: split over the keys, with an ancestor mask for the nodes.

A row's keys are cut into leaves at fixed slots, of a size that follows from the row's own position (64 keys, doubled
where there would be more than LEAVES); so chains give bitwise the same rows however many run at once. The committed
length is read on the device: one CUDA graph serves every length.
"""

from __future__ import annotations

import math

import torch
import triton
from torch import Tensor

from specq_kernels.attention_device import attention_kernel, attention_merge_kernel
from specq_kernels.configs import Config
from specq_kernels.group_sums import Sides, group_sums_ref, side_arguments
from specq_kernels.lane_order import lanes_ref, lanes_rows
from specq_kernels.launch import MAX_ROWS, check_tensor, has_dependent_launch, interpreted, row_bucket, runs_kernel

LEAF = 64  # keys
FOLD = 3  # leaves added up, in order, before their sums are
LEAVES = 16 * FOLD  # of a row at most
LOG2E = 1.4426950408889634
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)  # the last for the definition only


def tree_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor,
    length: Tensor,
    *,
    depths: Tensor | None = None,
    window: int | None = None,
    earlier: int = 0,
    sides: Sides | None = None,
    config: Config | None = None,
) -> Tensor:
    """softmax(q k.T / sqrt(head_dim)) v, [nodes, heads * head_dim], over the keys each node sees.

    q [nodes, heads, head_dim]; k, v [kv_heads, max_len, head_dim], one layer's cache, in which node i's own key and
    value already lie at slot length + i; mask int32 [nodes, 2], bit j % 32 of word j // 32 says whether node j is an
    ancestor (itself included); length int32 [1], committed tokens, not written by the kernel ahead. With a sliding
    `window`, a node at position p sees positions p - window + 1 to p and `depths` int32 [nodes] is needed. With
    `earlier` nodes that ran before (no window), node i's key lies at slot length + earlier + i and its bit is earlier +
    i. `sides`, room from `empty_sides`, receives those of the result. `config` overrides `attention_config`, for
    tuning. Raises ValueError naming the argument.
    """
    nodes, heads, head_dim = q.shape
    kv_heads, max_len = k.shape[0], k.shape[1]
    check_tensor("q", q, shape=(None, None, None), dtype=FLOATS)
    for name, tensor in (("k", k), ("v", v)):
        check_tensor(name, tensor, shape=(kv_heads, max_len, head_dim), dtype=q.dtype, device=q.device)
    check_tensor("mask", mask, shape=(nodes, 2), dtype=torch.int32, device=q.device)
    check_tensor("length", length, shape=(1,), dtype=torch.int32, device=q.device)
    if not 1 <= earlier + nodes <= MAX_ROWS:
        raise ValueError(f"q: {earlier + nodes} nodes, the kernel takes 1 to {MAX_ROWS}")
    if heads % kv_heads:
        raise ValueError(f"q: {heads} heads are not a multiple of {kv_heads} of k and v")
    if runs_kernel(q) and (head_dim > 128 or head_dim % 16):
        raise ValueError(f"q: head_dim is {head_dim}, the kernel takes multiples of 16 up to 128")
    if window is not None and depths is None:
        raise ValueError("depths: needed with a sliding window")
    if window is not None and earlier:
        raise ValueError("earlier: not with a sliding window")
    group = sides_group(sides, q)
    if not runs_kernel(q):
        out = tree_attention_ref(q, k, v, mask, length, depths=depths, window=window, earlier=earlier)
        if sides is not None and group is not None:
            sides.sums.copy_(group_sums_ref(out, group))
            if sides.lanes is not None:
                sides.lanes.copy_(lanes_ref(out))
        return out
    shared = heads // kv_heads
    rows = nodes * shared
    config = {**attention_config(rows, nodes * heads), **(config or {})}
    leaves, folded, block_q = (config[key] for key in ("leaves", "folded", "block_q"))
    if folded not in (1, FOLD) or leaves % folded:
        raise ValueError(f"config: {leaves} leaves in pieces of {folded}, the merge takes pieces of 1 or {FOLD}")
    merged = config.get("merged", max(1, (group or 0) // head_dim))  # rows a program of the merge: a group's
    pieces = min(leaves // folded, triton.cdiv(max_len, LEAF * folded))
    partial = q.new_empty(pieces, kv_heads, rows, head_dim, dtype=torch.float32)
    top_total = q.new_empty(2, pieces, kv_heads, rows, dtype=torch.float32)
    out = q.new_empty(nodes, heads * head_dim)
    to, constants = side_arguments(sides, out, group)
    early = has_dependent_launch(q)
    sizes = {"SHARED": shared, "HEAD_DIM": head_dim, "BLOCK_D": triton.next_power_of_2(head_dim), "LEAF": LEAF,
             "LEAVES": leaves, "FOLDED": folded, "EARLY": early}  # fmt: skip
    # rows on both sides of a position at which leaves double have pieces of their own
    twice = leaves // (2 * folded) + 1 if max_len > LEAF * leaves else 0
    options = {} if interpreted() else {"num_warps": max(4, block_q // 16), "launch_pdl": early}
    attention_kernel[(kv_heads, triton.cdiv(rows, block_q), pieces + twice)](
        q, k, v, mask, depths if depths is not None else mask, length, partial, top_total, top_total[1],
        nodes, earlier + nodes, max_len, LOG2E / math.sqrt(head_dim), window or 0,
        KV_HEADS=kv_heads, BLOCK_Q=block_q, WINDOWED=window is not None, STAGES=config["stages"],
        LATE=bool(config["late"]), **sizes, **options,
    )  # fmt: skip
    options = {} if interpreted() else {"num_warps": 1, "launch_pdl": early}
    attention_merge_kernel[(triton.cdiv(nodes * heads, merged),)](
        partial, top_total, top_total[1], length, out, *to[:2], nodes, earlier + nodes,
        HEADS=heads, BLOCK_R=merged, FOLD=FOLD, BLOCK_P=triton.next_power_of_2(leaves // folded),
        BATCH=config["batch"], LATE=bool(config["merge_late"]), **constants, **sizes, **options,
    )  # fmt: skip
    return out


def tree_attention_ref(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor,
    length: Tensor,
    *,
    depths: Tensor | None = None,
    window: int | None = None,
    earlier: int = 0,
) -> Tensor:
    """The definition, in float32 (float64 for a float64 q)."""
    nodes, heads, head_dim = q.shape
    start, wide = int(length), torch.float64 if q.dtype == torch.float64 else torch.float32
    bits = torch.arange(earlier + nodes, device=q.device)
    end = start + earlier + nodes
    visible = torch.ones(nodes, end, dtype=torch.bool, device=q.device)
    visible[:, start:] = (mask[:, bits // 32] >> (bits % 32) & 1).bool()
    if window is not None and depths is not None:
        at = torch.cat([torch.arange(start, device=q.device), start + depths])
        visible &= (start + depths)[:, None] - at < window
    keys, values = (
        t[:, :end].to(wide).repeat_interleave(heads // k.shape[0], 0) for t in (k, v)
    )  # [heads, keys, head_dim]
    scores = q.to(wide).transpose(0, 1) @ keys.transpose(1, 2) / math.sqrt(head_dim)
    weights = scores.masked_fill(~visible, -torch.inf).softmax(-1)
    return (weights @ values).transpose(0, 1).flatten(1).to(q.dtype)


def pack_mask(ancestors: Tensor) -> Tensor:
    """int32 [nodes, 2] words of a bool ancestor mask [nodes, nodes], node itself included."""
    nodes = ancestors.shape[0]
    if nodes > MAX_ROWS:
        raise ValueError(f"ancestors: {nodes} nodes, the mask holds {MAX_ROWS}")
    wide = torch.nn.functional.pad(ancestors, (0, MAX_ROWS - nodes)).unflatten(1, (2, 32)).to(torch.int64)
    words = (wide << torch.arange(32, device=ancestors.device)).sum(-1)
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)


def attention_config(rows: int, all_rows: int) -> Config:
    """Sizes for so many rows (node, head) a kv head and in all.

    `folded` leaves (1 or FOLD) are added up by one program; the merge loads `batch` sums of FOLD leaves at once.
    `late` and `merge_late`: the next kernel may begin when a program's sums are done, or the merge's when attention is,
    not at their start. None but `leaves` enters a row's bits. The rows of a merge's program (`merged`) follow from the
    group of the sums beside it unless a config holds them.
    """
    sizes = {"leaves": LEAVES, "folded": 1, "block_q": 64, "stages": 3, "late": 1, "batch": 6, "merge_late": 0}
    if rows <= 16:
        return {**sizes, "block_q": 16, "stages": 2, "late": 0}
    if rows <= 64:
        return {**sizes, "merge_late": int(all_rows >= 512)}
    return {**sizes, "folded": FOLD, "late": int(rows <= 128)}


def sides_group(sides: Sides | None, q: Tensor) -> int | None:
    """The group of the sums, None without. Raises ValueError where this kernel cannot emit these sides."""
    if sides is None:
        return None
    nodes, heads, head_dim = q.shape
    columns, sums, lanes = heads * head_dim, sides.sums, sides.lanes
    group = columns // sums.shape[0]
    if sums.shape != (columns // group, row_bucket(nodes)) or columns % 256 or group not in (32, 64, 128):
        raise ValueError(f"sides: sums of shape {tuple(sums.shape)} do not fit {columns} columns of {nodes} rows")
    if lanes is not None and (lanes.shape != (lanes_rows(nodes) * columns,) or lanes.dtype != q.dtype):
        raise ValueError(f"sides: lanes of shape {tuple(lanes.shape)} do not fit {columns} columns of {nodes} rows")
    if head_dim not in (32, 64, 128):
        raise ValueError(f"sides: not emitted for a head_dim of {head_dim}")
    return group
