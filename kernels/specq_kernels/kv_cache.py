"""Writes to the static cache: append of a forward's nodes with rotary embedding, and compaction of accepted nodes.

Lengths are read on the device, so that one CUDA graph serves every length; both launches change the cache only.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from specq_kernels.launch import MAX_ROWS, check_tensor, has_dependent_launch, interpreted, runs_kernel, wide
from specq_kernels.w4_device import sum_parts

HEADS_AT_ONCE = 8  # rotated by one program
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)  # the last for the definitions only


def append_rotary(
    qkv: Tensor,
    k: Tensor,
    v: Tensor,
    cos: Tensor,
    sin: Tensor,
    depths: Tensor,
    length: Tensor,
    *,
    heads: int | None = None,
    earlier: int = 0,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 1e-6,
) -> Tensor:
    """Rotated q [nodes, heads, head_dim]; writes rotated k, and v, of node i to slot length + earlier + i of one
    layer's cache.

    qkv [nodes, (heads + 2 * kv_heads) * head_dim], q first, then k, then v, or that product of so many `heads` as
    `w4a16_parts` leaves it, which is added here; k, v [kv_heads, max_len, head_dim]; cos, sin float32 [max_position,
    head_dim / 2], scaling included. Node i is at position length + depths[i]: depths int32 [nodes], length int32 [1],
    neither written by the kernel ahead. Halves rotate (x1, x2) -> (x1 cos - x2 sin, x2 cos + x1 sin). q_norm,
    k_norm [head_dim]: RMSNorm of each head before the rotation (Qwen3). The caller sees to it that the slots are in the
    cache. Raises ValueError naming the argument.
    """
    kv_heads, max_len, head_dim = k.shape
    check_tensor("k", k, shape=(None, None, None), dtype=FLOATS)
    check_tensor("v", v, shape=tuple(k.shape), dtype=k.dtype, device=k.device)
    in_parts = qkv.dim() == 3
    check_tensor("qkv", qkv, shape=(None,) * qkv.dim(), dtype=None if in_parts else k.dtype, device=k.device)
    nodes, columns = qkv.shape[-2:]
    heads = heads if in_parts and heads is not None else columns // head_dim - 2 * kv_heads
    used = (heads + 2 * kv_heads) * head_dim
    if heads < 1 or head_dim % 2 or columns < used or (columns > used and not in_parts):
        raise ValueError(f"qkv: {columns} columns do not hold q, k and v of {kv_heads} kv heads of {head_dim}")
    for name, table in (("cos", cos), ("sin", sin)):
        check_tensor(name, table, shape=(None, head_dim // 2), dtype=torch.float32, device=k.device)
    check_tensor("depths", depths, shape=(nodes,), dtype=torch.int32, device=k.device)
    check_tensor("length", length, shape=(1,), dtype=torch.int32, device=k.device)
    if (q_norm is None) != (k_norm is None):
        raise ValueError("q_norm: given without k_norm, or the reverse")
    norm_dtype = q_norm.dtype if q_norm is not None else None
    for name, weight in (("q_norm", q_norm), ("k_norm", k_norm)):
        if weight is not None:
            check_tensor(name, weight, shape=(head_dim,), dtype=norm_dtype, device=k.device)
    if not runs_kernel(qkv):
        return append_rotary_ref(
            qkv, k, v, cos, sin, depths, length, heads=heads, earlier=earlier, q_norm=q_norm, k_norm=k_norm, eps=eps
        )
    q = k.new_empty(nodes, heads, head_dim)
    early = has_dependent_launch(qkv)
    options = {} if interpreted() else {"num_warps": 4, "launch_pdl": early}
    _append_kernel[(nodes, triton.cdiv(heads + 2 * kv_heads, HEADS_AT_ONCE))](
        qkv, q, k, v, cos, sin, depths, length, q_norm if q_norm is not None else cos,
        k_norm if k_norm is not None else cos, columns, max_len, earlier, eps, HEADS=heads, KV_HEADS=kv_heads,
        HEAD_DIM=head_dim, BLOCK=triton.next_power_of_2(head_dim // 2), MANY=HEADS_AT_ONCE,
        PARTS=qkv.shape[0] if in_parts else 0, HAS_NORM=q_norm is not None, EARLY=early, **options,
    )  # fmt: skip
    return q


def append_rotary_ref(
    qkv: Tensor,
    k: Tensor,
    v: Tensor,
    cos: Tensor,
    sin: Tensor,
    depths: Tensor,
    length: Tensor,
    *,
    heads: int | None = None,
    earlier: int = 0,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 1e-6,
) -> Tensor:
    """The definition, in float32 (float64 for a float64 qkv)."""
    kv_heads, _, head_dim = k.shape
    if qkv.dim() == 3:
        used = None if heads is None else (heads + 2 * kv_heads) * head_dim
        qkv = sum(qkv.unbind(), torch.zeros_like(qkv[0]))[:, :used].to(k.dtype)
    x = qkv.unflatten(1, (-1, head_dim))
    heads = x.shape[1] - 2 * kv_heads
    turned = wide(x[:, : heads + kv_heads])
    if q_norm is not None and k_norm is not None:
        norms = wide(torch.cat([q_norm.expand(heads, -1), k_norm.expand(kv_heads, -1)]))
        turned = turned * torch.rsqrt(turned.square().mean(-1, keepdim=True) + eps) * norms
    a, b = turned.chunk(2, dim=-1)
    c, s = (table[(length + depths).long()][:, None] for table in (cos, sin))
    turned = torch.cat([a * c - b * s, b * c + a * s], -1).to(qkv.dtype)
    first = int(length) + earlier
    slots = slice(first, first + qkv.shape[0])
    k[:, slots] = turned[:, heads:].transpose(0, 1)
    v[:, slots] = x[:, heads + kv_heads :].transpose(0, 1)
    return turned[:, :heads].contiguous()


def compact(k: Tensor, v: Tensor, path: Tensor, count: Tensor, length: Tensor) -> None:
    """Move slot length + path[i] to slot length + i for i < count, in every layer, in one launch.

    k, v [layers, kv_heads, max_len, head_dim], changed in place; path int32 [n <= 64], ascending nodes (entries from
    `count` on are not read); count, length int32 [1]. Raises ValueError naming the argument.
    """
    check_tensor("k", k, shape=(None, None, None, None), dtype=FLOATS)
    check_tensor("v", v, shape=tuple(k.shape), dtype=k.dtype, device=k.device)
    check_tensor("path", path, shape=(None,), dtype=torch.int32, device=k.device)
    for name, scalar in (("count", count), ("length", length)):
        check_tensor(name, scalar, shape=(1,), dtype=torch.int32, device=k.device)
    if not 1 <= path.shape[0] <= MAX_ROWS:
        raise ValueError(f"path: {path.shape[0]} entries, the kernel takes 1 to {MAX_ROWS}")
    if not runs_kernel(k):
        compact_ref(k, v, path, count, length)
        return
    layers, kv_heads, max_len, head_dim = k.shape
    early = has_dependent_launch(k)
    options = {} if interpreted() else {"num_warps": 4, "launch_pdl": early}
    _compact_kernel[(layers * kv_heads, 2)](
        k, v, path, count, length, max_len, HEAD_DIM=head_dim, BLOCK_D=triton.next_power_of_2(head_dim),
        BLOCK_P=triton.next_power_of_2(path.shape[0]), EARLY=early, **options,
    )  # fmt: skip


def compact_ref(k: Tensor, v: Tensor, path: Tensor, count: Tensor, length: Tensor) -> None:
    """The definition."""
    start, n = int(length), int(count)
    for cache in (k, v):
        cache[:, :, start : start + n] = cache[:, :, start + path[:n].long()]


def compact_rows(x: Tensor, path: Tensor, count: Tensor, length: Tensor) -> None:
    """Move row length + path[i] of x [max_len, columns] to row length + i for i < count; as `compact`."""
    check_tensor("x", x, shape=(None, None), dtype=FLOATS)
    check_tensor("path", path, shape=(None,), dtype=torch.int32, device=x.device)
    for name, scalar in (("count", count), ("length", length)):
        check_tensor(name, scalar, shape=(1,), dtype=torch.int32, device=x.device)
    if not 1 <= path.shape[0] <= MAX_ROWS:
        raise ValueError(f"path: {path.shape[0]} entries, the kernel takes 1 to {MAX_ROWS}")
    if not runs_kernel(x):
        compact_rows_ref(x, path, count, length)
        return
    early = has_dependent_launch(x)
    options = {} if interpreted() else {"num_warps": 4, "launch_pdl": early}
    _compact_rows_kernel[(triton.cdiv(x.shape[1], 128),)](
        x, path, count, length, x.shape[1], BLOCK_P=triton.next_power_of_2(path.shape[0]), EARLY=early, **options
    )


def compact_rows_ref(x: Tensor, path: Tensor, count: Tensor, length: Tensor) -> None:
    """The definition."""
    start, n = int(length), int(count)
    x[start : start + n] = x[start + path[:n].long()]


@triton.jit(do_not_specialize=["earlier"])
def _append_kernel(
    qkv_ptr, q_ptr, k_ptr, v_ptr, cos_ptr, sin_ptr, depth_ptr, length_ptr, q_norm_ptr, k_norm_ptr,
    columns, max_len, earlier, eps,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK: tl.constexpr, MANY: tl.constexpr,
    PARTS: tl.constexpr, HAS_NORM: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """MANY heads of one node a program: queries, keys or values by their numbers."""
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    node = tl.program_id(0)
    head = tl.program_id(1) * MANY + tl.arange(0, MANY)
    HALF: tl.constexpr = HEAD_DIM // 2
    offs = tl.arange(0, BLOCK)
    is_half = offs < HALF
    # none of these is the kernel ahead's
    length = tl.load(length_ptr, cache_modifier=".cg")
    at = (length + tl.load(depth_ptr + node, cache_modifier=".cg")) * HALF + offs
    slot = length + earlier + node
    cos = tl.load(cos_ptr + at, mask=is_half, other=0.0)[None, :]
    sin = tl.load(sin_ptr + at, mask=is_half, other=0.0)[None, :]
    if EARLY:
        tl.extra.cuda.gdc_wait()
    mask = (head < HEADS + 2 * KV_HEADS)[:, None] & is_half[None, :]
    kind: tl.constexpr = q_ptr.dtype.element_ty
    source = node * columns + head[:, None] * HEAD_DIM + offs[None, :]
    if PARTS > 0:
        stride = tl.num_programs(0) * columns
        a = sum_parts(qkv_ptr, source, mask, stride, PARTS).to(kind)
        b = sum_parts(qkv_ptr, source + HALF, mask, stride, PARTS).to(kind)
    else:
        a = tl.load(qkv_ptr + source, mask=mask, other=0.0)
        b = tl.load(qkv_ptr + source + HALF, mask=mask, other=0.0)
    x, y = a.to(tl.float32), b.to(tl.float32)
    is_query = (head < HEADS)[:, None]
    if HAS_NORM:
        scale = 1.0 / tl.sqrt(tl.sum(tl.fma(x, x, y * y), 1) / HEAD_DIM + eps)
        x *= scale[:, None] * _norm_of(is_query, q_norm_ptr + offs, k_norm_ptr + offs, is_half)
        y *= scale[:, None] * _norm_of(is_query, q_norm_ptr + HALF + offs, k_norm_ptr + HALF + offs, is_half)
    first = tl.fma(x, cos, -(y * sin)).to(kind)
    second = tl.fma(y, cos, x * sin).to(kind)
    to_q = q_ptr + (node * HEADS + head)[:, None] * HEAD_DIM + offs[None, :]
    tl.store(to_q, first, mask=mask & is_query)
    tl.store(to_q + HALF, second, mask=mask & is_query)
    to_k = k_ptr + ((head - HEADS).to(tl.int64) * max_len + slot)[:, None] * HEAD_DIM + offs[None, :]
    is_key = mask & ((head >= HEADS) & (head < HEADS + KV_HEADS))[:, None]
    tl.store(to_k, first, mask=is_key)
    tl.store(to_k + HALF, second, mask=is_key)
    to_v = v_ptr + ((head - HEADS - KV_HEADS).to(tl.int64) * max_len + slot)[:, None] * HEAD_DIM + offs[None, :]
    is_value = mask & (head >= HEADS + KV_HEADS)[:, None]
    tl.store(to_v, a, mask=is_value)
    tl.store(to_v + HALF, b, mask=is_value)


@triton.jit
def _norm_of(is_query, q_norm_ptrs, k_norm_ptrs, mask):
    """fp32 [heads, half]: the weights of a query's or a key's norm."""
    q_norm = tl.load(q_norm_ptrs, mask=mask, other=0.0).to(tl.float32)
    k_norm = tl.load(k_norm_ptrs, mask=mask, other=0.0).to(tl.float32)
    return tl.where(is_query, q_norm[None, :], k_norm[None, :])


@triton.jit
def _compact_kernel(
    k_ptr, v_ptr, path_ptr, count_ptr, length_ptr, max_len,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_P: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """All moved rows of one layer and head a program: every row is read before any is written."""
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    length = tl.load(length_ptr)
    offs_p = tl.arange(0, BLOCK_P)
    offs_d = tl.arange(0, BLOCK_D)
    is_kept = offs_p < tl.load(count_ptr)
    node = tl.load(path_ptr + offs_p, mask=is_kept, other=0)
    is_moved = tl.sum(tl.where(is_kept & (node != offs_p), 1, 0), 0) > 0
    mask = is_kept[:, None] & (offs_d < HEAD_DIM)[None, :] & is_moved
    base = tl.program_id(0).to(tl.int64) * max_len + length
    source = (base + node)[:, None] * HEAD_DIM + offs_d[None, :]
    target = (base + offs_p)[:, None] * HEAD_DIM + offs_d[None, :]
    if tl.program_id(1) == 0:
        rows = tl.load(k_ptr + source, mask=mask, other=0.0)
        tl.debug_barrier()
        tl.store(k_ptr + target, rows, mask=mask)
    else:
        rows = tl.load(v_ptr + source, mask=mask, other=0.0)
        tl.debug_barrier()
        tl.store(v_ptr + target, rows, mask=mask)


@triton.jit
def _compact_rows_kernel(x_ptr, path_ptr, count_ptr, length_ptr, columns, BLOCK_P: tl.constexpr, EARLY: tl.constexpr):
    """128 columns of all moved rows a program: every row is read before any is written."""
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    length = tl.load(length_ptr)
    offs_p = tl.arange(0, BLOCK_P)
    offs = tl.program_id(0) * 128 + tl.arange(0, 128)
    is_kept = offs_p < tl.load(count_ptr)
    node = tl.load(path_ptr + offs_p, mask=is_kept, other=0)
    is_moved = tl.sum(tl.where(is_kept & (node != offs_p), 1, 0), 0) > 0
    mask = is_kept[:, None] & (offs < columns)[None, :] & is_moved
    source = (length + node).to(tl.int64)[:, None] * columns + offs[None, :]
    rows = tl.load(x_ptr + source, mask=mask, other=0.0)
    tl.debug_barrier()
    target = (length + offs_p).to(tl.int64)[:, None] * columns + offs[None, :]
    tl.store(x_ptr + target, rows, mask=mask)
