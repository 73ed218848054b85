"""Attention of 1 to 64 query nodes over a static cache: split over the keys, with an ancestor mask for the nodes.

A row's keys are cut into chunks whose size follows from the row's own position (128 keys, doubled where there would be
more than `chunks`), and a chunk's tiles are aligned to the cache; so chains give bitwise the same rows however many run
at once. The committed length is read on the device: one CUDA graph serves every length.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from specq_kernels.configs import Config
from specq_kernels.launch import MAX_ROWS, check_tensor, has_dependent_launch, interpreted, row_bucket, runs_kernel

TILE = 64  # keys a tile
LEAST_CHUNK = 128  # keys
CHUNKS = 24  # chunks of a row's keys at most
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
    sums: Tensor | None = None,
    config: Config | None = None,
) -> Tensor:
    """softmax(q k.T / sqrt(head_dim)) v, [nodes, heads * head_dim], over the keys each node sees.

    q [nodes, heads, head_dim]; k, v [kv_heads, max_len, head_dim], one layer's cache, in which node i's own key and
    value already lie at slot length + i; mask int32 [nodes, 2], bit j % 32 of word j // 32 says whether node j is an
    ancestor (itself included); length int32 [1], committed tokens. With a sliding `window`, a node at position p sees
    positions p - window + 1 to p and `depths` int32 [nodes] is needed. With `earlier` nodes that ran before (no
    window), node i's key lies at slot length + earlier + i and its bit is earlier + i. `sums`, if given, receives
    `group_sums(out, heads * head_dim // sums.shape[0])`. `config` overrides `attention_config`, for tuning. Raises
    ValueError naming the argument.
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
    group = sums_group(sums, nodes, heads * head_dim, head_dim)
    if not runs_kernel(q):
        out = tree_attention_ref(q, k, v, mask, length, depths=depths, window=window, earlier=earlier)
        if sums is not None:
            sums[:, :nodes] = out.float().unflatten(1, (-1, group)).sum(-1).T
        return out
    rows = nodes * (heads // kv_heads)
    config = {**attention_config(head_dim, group), **(config or {})}
    most = config["chunks"]
    chunks = min(most, triton.cdiv(max_len, LEAST_CHUNK))
    partial = q.new_empty(chunks, kv_heads, rows, head_dim, dtype=torch.float32)
    top_total = q.new_empty(2, chunks, kv_heads, rows, dtype=torch.float32)
    out = q.new_empty(nodes, heads * head_dim)
    block_q, block_h, block_d = config["block_q"], config["combine_heads"], triton.next_power_of_2(head_dim)
    early = has_dependent_launch(q)
    options = {} if interpreted() else {"num_warps": block_q // 16, "launch_pdl": early}
    _attention_chunk_kernel[(kv_heads, triton.cdiv(rows, block_q), chunks)](
        q, k, v, mask, depths if depths is not None else mask, length, partial, top_total, top_total[1],
        nodes, earlier + nodes, max_len, LOG2E / math.sqrt(head_dim), window or 0, most,
        KV_HEADS=kv_heads, SHARED=heads // kv_heads, HEAD_DIM=head_dim, BLOCK_D=block_d, BLOCK_Q=block_q,
        TILE=TILE, LEAST=LEAST_CHUNK, WINDOWED=window is not None, STAGES=config["stages"], EARLY=early,
        **options,
    )  # fmt: skip
    options = {} if interpreted() else {"num_warps": 4, "launch_pdl": early}
    _attention_combine_kernel[(nodes, heads // block_h)](
        partial, top_total, top_total[1], length, out, sums if sums is not None else out, nodes, earlier + nodes, most,
        HEADS=heads, SHARED=heads // kv_heads, HEAD_DIM=head_dim, BLOCK_D=block_d, BLOCK_H=block_h,
        LEAST=LEAST_CHUNK, BLOCK_C=min(16, triton.next_power_of_2(most)),
        GROUP=group if sums is not None else 0, STRIDE=row_bucket(nodes), EARLY=early, **options,
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


def attention_config(head_dim: int, group: int) -> Config:
    """Tile sizes. Only `block_q` and `stages` may follow the number of rows: the rest enters a row's bits."""
    return {
        "chunks": CHUNKS,
        "block_q": 64,
        "stages": 3,
        "combine_heads": max(1, group // head_dim),
    }


def sums_group(sums: Tensor | None, rows: int, columns: int, head_dim: int) -> int:
    """The group `sums` is for; head_dim without one. Raises ValueError where this kernel cannot emit it."""
    if sums is None:
        return head_dim
    group = columns // sums.shape[0]
    if sums.shape != (columns // group, row_bucket(rows)) or columns % 256 or group not in (32, 64, 128):
        raise ValueError(f"sums: shape {tuple(sums.shape)} does not fit {columns} columns of {rows} rows")
    if head_dim not in (32, 64, 128):
        raise ValueError(f"sums: not emitted for a head_dim of {head_dim}")
    return group


@triton.jit
def _chunk_size(position, most, LEAST: tl.constexpr):
    """Keys a chunk for a row at this position: LEAST, doubled until `most` chunks hold all up to the position."""
    doublings = 0
    for i in tl.static_range(16):
        doublings += (position >= ((most * LEAST) << i)).to(tl.int32)
    return LEAST << doublings


@triton.jit(do_not_specialize=["nodes", "written", "window", "most"])
def _attention_chunk_kernel(
    q_ptr, k_ptr, v_ptr, mask_ptr, depth_ptr, length_ptr, partial_ptr, top_ptr, total_ptr,
    nodes, written, max_len, scale, window, most,
    KV_HEADS: tl.constexpr, SHARED: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_Q: tl.constexpr, TILE: tl.constexpr, LEAST: tl.constexpr, WINDOWED: tl.constexpr,
    STAGES: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Unnormalised attention of BLOCK_Q rows (node, head of the kv head's group) over one chunk of keys.

    `written` slots behind the length hold nodes, the last `nodes` of them this call's. partial [chunks, kv_heads, rows,
    HEAD_DIM]; top (running maximum, log2) and total [chunks, kv_heads, rows]. Where the rows' positions lie on both
    sides of one at which the size of a chunk doubles, a second phase serves the rows behind it.
    """
    kv_head = tl.program_id(0)
    base = kv_head.to(tl.int64) * max_len * HEAD_DIM
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    length = tl.load(length_ptr)
    first = length + written - nodes  # slot of the first row's node
    size = _chunk_size(first, most, LEAST)
    rows = nodes * SHARED
    row = tl.program_id(1) * BLOCK_Q + tl.arange(0, BLOCK_Q)
    node = row // SHARED
    head = kv_head * SHARED + row % SHARED
    offs_d = tl.arange(0, BLOCK_D)
    is_d = offs_d < HEAD_DIM
    q = tl.load(
        q_ptr + (node * (KV_HEADS * SHARED) + head)[:, None] * HEAD_DIM + offs_d[None, :],
        mask=(row < rows)[:, None] & is_d[None, :], other=0.0,
    )  # fmt: skip
    low = tl.load(mask_ptr + node * 2, mask=row < rows, other=0)
    high = tl.load(mask_ptr + node * 2 + 1, mask=row < rows, other=0)
    depth = tl.zeros((BLOCK_Q,), tl.int32)
    if WINDOWED:
        depth = tl.load(depth_ptr + node, mask=row < rows, other=0)
    phases = tl.where(length + written > most * size, 2, 1)
    for phase in tl.range(0, phases, num_stages=1):
        is_row = (row < rows) & ((first + node >= most * size) == (phase == 1))
        begin = tl.program_id(2) * (size << phase)
        end = tl.minimum(length + written, begin + (size << phase))
        if begin < end:
            top = tl.full((BLOCK_Q,), -float("inf"), tl.float32)
            total = tl.zeros((BLOCK_Q,), tl.float32)
            acc = tl.zeros((BLOCK_Q, BLOCK_D), tl.float32)
            # tiles wholly inside the committed prefix need no mask, those before every row's window are skipped
            plain_end = tl.minimum(length // TILE * TILE, end)
            start_at = begin
            if WINDOWED:
                start_at = tl.maximum(begin, (length - window + 1) // TILE * TILE)
                plain_end = start_at
            for start in tl.range(start_at, plain_end, TILE, num_stages=STAGES):
                offs = base + (start + tl.arange(0, TILE))[:, None] * HEAD_DIM + offs_d[None, :]
                if HEAD_DIM == BLOCK_D:
                    keys = tl.load(k_ptr + offs)
                    values = tl.load(v_ptr + offs)
                else:
                    keys = tl.load(k_ptr + offs, mask=is_d[None, :], other=0.0)
                    values = tl.load(v_ptr + offs, mask=is_d[None, :], other=0.0)
                scores = tl.dot(q, keys.T, input_precision="ieee")
                acc, top, total = _add_tile(acc, top, total, scores, scale, values)
            for start in tl.range(tl.maximum(start_at, plain_end), end, TILE, num_stages=1):
                slot = start + tl.arange(0, TILE)
                is_key = slot < end
                offs = base + slot[:, None] * HEAD_DIM + offs_d[None, :]
                keys = tl.load(k_ptr + offs, mask=is_key[:, None] & is_d[None, :], other=0.0)
                values = tl.load(v_ptr + offs, mask=is_key[:, None] & is_d[None, :], other=0.0)
                scores = tl.dot(q, keys.T, input_precision="ieee")
                other = slot - length  # the node in this slot
                shift = (tl.maximum(other, 0) & 31)[None, :]
                bit = tl.where((other < 32)[None, :], low[:, None] >> shift, high[:, None] >> shift) & 1
                visible = ((other < 0)[None, :] | (bit != 0)) & is_key[None, :]
                if WINDOWED:
                    ancestor = tl.load(depth_ptr + tl.maximum(other, 0), mask=(other >= 0) & is_key, other=0)
                    position = tl.where(other < 0, slot, length + ancestor)
                    visible = visible & ((length + depth)[:, None] - position[None, :] < window)
                scores = tl.where(visible, scores, -float("inf"))
                acc, top, total = _add_tile(acc, top, total, scores, scale, values)
            at = (tl.program_id(2) * KV_HEADS + kv_head) * rows + row
            tl.store(
                partial_ptr + at[:, None].to(tl.int64) * HEAD_DIM + offs_d[None, :],
                acc,
                mask=is_row[:, None] & is_d[None, :],
            )
            tl.store(top_ptr + at, top, mask=is_row)
            tl.store(total_ptr + at, total, mask=is_row)


@triton.jit
def _add_tile(acc, top, total, scores, scale, values):
    """One step of the running softmax; rows that see nothing yet stay at weight 0.

    Fused multiply-adds are written out: a tile may be masked in one call and plain in another, to the same bits.
    """
    new_top = tl.maximum(top, tl.max(scores, 1) * scale)
    safe = tl.where(new_top == -float("inf"), 0.0, new_top)
    weights = tl.exp2(tl.fma(scores, scale, -safe[:, None]))
    decay = tl.exp2(top - safe)
    total = tl.fma(total, decay, tl.sum(weights, 1))
    acc = tl.dot(weights.to(values.dtype), values, acc * decay[:, None], input_precision="ieee")
    return acc, new_top, total


@triton.jit(do_not_specialize=["nodes", "written", "most"])
def _attention_combine_kernel(
    partial_ptr, top_ptr, total_ptr, length_ptr, out_ptr, sums_ptr, nodes, written, most,
    HEADS: tl.constexpr, SHARED: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_H: tl.constexpr, LEAST: tl.constexpr, BLOCK_C: tl.constexpr, GROUP: tl.constexpr,
    STRIDE: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Chunks merged in fixed blocks of BLOCK_C, for one node and BLOCK_H heads; chunks a row does not see weigh 0."""
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    node = tl.program_id(0)
    head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    offs_d = tl.arange(0, BLOCK_D)
    rows = nodes * SHARED
    stride = (HEADS // SHARED) * rows  # entries a chunk
    row = (head // SHARED) * rows + node * SHARED + head % SHARED  # [BLOCK_H]
    slot = tl.load(length_ptr) + written - nodes + node  # a node sees no later ones
    chunks = slot // _chunk_size(slot, most, LEAST) + 1
    top = tl.full((BLOCK_H,), -float("inf"), tl.float32)
    total = tl.zeros((BLOCK_H,), tl.float32)
    acc = tl.zeros((BLOCK_H, BLOCK_D), tl.float32)
    for first in tl.range(0, chunks, BLOCK_C):
        chunk = first + tl.arange(0, BLOCK_C)
        is_chunk = chunk < chunks
        at = chunk[:, None] * stride + row[None, :]  # [BLOCK_C, BLOCK_H]
        tops = tl.load(top_ptr + at, mask=is_chunk[:, None], other=-float("inf"))
        totals = tl.load(total_ptr + at, mask=is_chunk[:, None], other=0.0)
        new_top = tl.maximum(top, tl.max(tops, 0))
        safe = tl.where(new_top == -float("inf"), 0.0, new_top)
        weights = tl.exp2(tops - safe[None, :])
        decay = tl.exp2(top - safe)
        part = tl.load(
            partial_ptr + at[:, :, None].to(tl.int64) * HEAD_DIM + offs_d[None, None, :],
            mask=is_chunk[:, None, None] & (offs_d < HEAD_DIM)[None, None, :], other=0.0,
        )  # fmt: skip
        acc = acc * decay[:, None] + tl.sum(part * weights[:, :, None], 0)
        total = total * decay + tl.sum(totals * weights, 0)
        top = new_top
    y = (acc / total[:, None]).to(out_ptr.dtype.element_ty)
    columns = (head * HEAD_DIM)[:, None] + offs_d[None, :]
    tl.store(out_ptr + node * (HEADS * HEAD_DIM) + columns, y, mask=(offs_d < HEAD_DIM)[None, :])
    if GROUP > 0:
        groups: tl.constexpr = BLOCK_H * BLOCK_D // GROUP
        sums = tl.sum(tl.reshape(y.to(tl.float32), (groups, GROUP)), 1)
        tl.store(sums_ptr + (tl.program_id(1) * groups + tl.arange(0, groups)) * STRIDE + node, sums)
