"""The two ends of a verification: laying out pending tokens and a draft as nodes, and following the samples down.

Both read their counts on the device, write to fixed buffers of 64 nodes and leave nothing for the host to decide, so
that a verification is one CUDA graph. A token of -1 is no token: nothing follows it, and nothing reaches it.
specq/spec/tree.py has the definitions on lists (`graft`, `walk`).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from specq_kernels.launch import MAX_ROWS, check_tensor, has_dependent_launch, interpreted, runs_kernel
from specq_kernels.tree_attention import pack_mask


def graft_nodes(
    counts: Tensor,
    pending: Tensor,
    draft: Tensor,
    *,
    tokens: Tensor,
    ids: Tensor,
    parents: Tensor,
    depths: Tensor,
    mask: Tensor,
    positions: Tensor,
    length: Tensor,
) -> None:
    """Fill the buffers with a trunk of pending tokens and the draft below it; what is left of 64 are roots of -1.

    counts int32 [3]: committed tokens, pending tokens, draft nodes; pending int32 [64]; draft int32 [2, 64], tokens
    and parents (-1: the trunk's end). Filled: tokens, and the ids to embed (0 for -1), int32 [64]; parents and depths
    int32 [64]; mask int32 [64, 2] as tree_attention reads it; positions int64 [64] of the token after each node;
    length int32 [1]. Raises ValueError naming the argument.
    """
    check_tensor("counts", counts, shape=(3,), dtype=torch.int32)
    device = counts.device
    for name, tensor, shape in (
        ("pending", pending, (MAX_ROWS,)),
        ("draft", draft, (2, MAX_ROWS)),
        ("tokens", tokens, (MAX_ROWS,)),
        ("ids", ids, (MAX_ROWS,)),
        ("parents", parents, (MAX_ROWS,)),
        ("depths", depths, (MAX_ROWS,)),
        ("mask", mask, (MAX_ROWS, 2)),
        ("length", length, (1,)),
    ):
        check_tensor(name, tensor, shape=shape, dtype=torch.int32, device=device)
    check_tensor("positions", positions, shape=(MAX_ROWS,), dtype=torch.int64, device=device)
    buffers = (tokens, ids, parents, depths, mask, positions, length)
    if not runs_kernel(counts):
        for buffer, value in zip(buffers, graft_nodes_ref(counts, pending, draft), strict=True):
            buffer.copy_(value)
        return
    early = has_dependent_launch(counts)
    options = {} if interpreted() else {"num_warps": 1, "launch_pdl": early}
    _graft_kernel[(1,)](counts, pending, draft, *buffers, NODES=MAX_ROWS, EARLY=early, **options)


def graft_nodes_ref(counts: Tensor, pending: Tensor, draft: Tensor) -> tuple[Tensor, ...]:
    """The definition: (tokens, ids, parents, depths, mask, positions, length)."""
    length, trunk, drafted = counts.unbind()
    at = torch.arange(MAX_ROWS, dtype=torch.int32, device=counts.device)
    below = (at - trunk).clamp(0, MAX_ROWS - 1).long()
    is_draft = (at >= trunk) & (at - trunk < drafted)
    tokens = torch.where(at < trunk, pending, torch.where(is_draft, draft[0, below], -1))
    parents = torch.where(at < trunk, at - 1, torch.where(is_draft, draft[1, below] + trunk, -1))
    ancestors = reachable(parents)
    depths = ancestors.sum(1, dtype=torch.int32) - 1
    positions = (depths + length + 1).long()
    return tokens, tokens.clamp(min=0), parents, depths, pack_mask(ancestors), positions, length[None]


def walk_nodes(
    counts: Tensor, tokens: Tensor, parents: Tensor, sampled: Tensor, *, path: Tensor, kept: Tensor, result: Tensor
) -> None:
    """Follow the samples from the trunk's end down, the first of equal siblings; where one is -1, stop before its node.

    counts, tokens and parents as in `graft_nodes`; sampled int64 [nodes], for the first nodes. Filled: path int32 [64],
    the nodes to keep (the trunk, then those followed; beyond them itself); kept int32 [1], how many; result int32 [65],
    how many tokens were decided, then those. Nothing is decided where the trunk's end has -1: then the path ends
    before it. Raises ValueError naming the argument.
    """
    check_tensor("counts", counts, shape=(3,), dtype=torch.int32)
    check_tensor("sampled", sampled, shape=(None,), dtype=torch.int64, device=counts.device)
    for name, tensor, size in (
        ("tokens", tokens, MAX_ROWS),
        ("parents", parents, MAX_ROWS),
        ("path", path, MAX_ROWS),
        ("kept", kept, 1),
        ("result", result, MAX_ROWS + 1),
    ):
        check_tensor(name, tensor, shape=(size,), dtype=torch.int32, device=counts.device)
    if not runs_kernel(counts):
        for buffer, value in zip((path, kept, result), walk_nodes_ref(counts, tokens, parents, sampled), strict=True):
            buffer.copy_(value)
        return
    early = has_dependent_launch(counts)
    options = {} if interpreted() else {"num_warps": 1, "launch_pdl": early}
    _walk_kernel[(1,)](counts, tokens, parents, sampled, path, kept, result, NODES=MAX_ROWS, EARLY=early, **options)


def walk_nodes_ref(counts: Tensor, tokens: Tensor, parents: Tensor, sampled: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The definition: (path, kept, result)."""
    start = counts[1] - 1
    at = torch.arange(MAX_ROWS, device=counts.device)
    chosen = torch.nn.functional.pad(sampled, (0, MAX_ROWS - sampled.shape[0]), value=-1)
    same = (parents[:, None] == parents) & (tokens[:, None] == tokens)
    is_first = ~(same & (at[:, None] > at)).any(1)
    follows = is_first & (tokens >= 0) & (parents >= 0) & (tokens == chosen[parents.clamp(min=0).long()])
    is_sound = (chosen >= 0) & (follows | (at <= start))
    ancestors = reachable(parents)
    is_below = ancestors[:, start.long().clamp(min=0)] & (at >= start)
    followed = is_below & ~(ancestors & ~is_sound & (at >= start)).any(1)
    order = followed.cumsum(0) - 1
    spill = MAX_ROWS  # one entry more, where what is not followed goes
    path = torch.arange(MAX_ROWS + 1, dtype=torch.int32, device=counts.device)
    path[torch.where(followed, start + order, spill)] = at.int()
    decided = torch.zeros(MAX_ROWS + 1, dtype=torch.int32, device=counts.device)
    decided[torch.where(followed, order, spill)] = chosen.int()
    count = followed.sum(dtype=torch.int32)[None]
    return path[:MAX_ROWS], start + count, torch.cat([count, decided[:MAX_ROWS]])


def reachable(parents: Tensor) -> Tensor:
    """bool [nodes, nodes]: row i is true at i and at every ancestor of i; parents int32 [nodes], -1 for a root."""
    nodes = parents.shape[0]
    at = torch.arange(nodes, device=parents.device)
    reach = ((parents[:, None] == at) | (at[:, None] == at)).float()
    for _ in range(max(nodes - 1, 1).bit_length()):
        reach = (reach @ reach).clamp(max=1)
    return reach.bool()


@triton.jit
def _graft_kernel(
    count_ptr, pending_ptr, draft_ptr, token_ptr, id_ptr, parent_ptr, depth_ptr, mask_ptr, position_ptr, length_ptr,
    NODES: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """All nodes in one program; each climbs to its root, by the parents just written."""
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    length = tl.load(count_ptr)
    trunk = tl.load(count_ptr + 1)
    drafted = tl.load(count_ptr + 2)
    at = tl.arange(0, NODES)
    is_trunk = at < trunk
    is_draft = (at >= trunk) & (at - trunk < drafted)
    pending = tl.load(pending_ptr + at, mask=is_trunk, other=-1)
    below = tl.load(draft_ptr + at - trunk, mask=is_draft, other=-1)
    token = tl.where(is_trunk, pending, below)
    under = tl.load(draft_ptr + NODES + at - trunk, mask=is_draft, other=0) + trunk
    parent = tl.where(is_trunk, at - 1, tl.where(is_draft, under, -1))
    tl.store(token_ptr + at, token)
    tl.store(id_ptr + at, tl.maximum(token, 0))
    tl.store(parent_ptr + at, parent)
    tl.store(length_ptr, length)
    tl.debug_barrier()
    node = at
    depth = tl.full((NODES,), -1, tl.int32)
    low = tl.zeros((NODES,), tl.int32)
    high = tl.zeros((NODES,), tl.int32)
    while tl.max(node, 0) >= 0:
        is_node = node >= 0
        bit = tl.where(is_node, 1, 0) << (node & 31)
        low = low | tl.where(node < 32, bit, 0)
        high = high | tl.where(node < 32, 0, bit)
        depth += is_node.to(tl.int32)
        node = tl.load(parent_ptr + node, mask=is_node, other=-1)
    tl.store(depth_ptr + at, depth)
    tl.store(mask_ptr + 2 * at, low)
    tl.store(mask_ptr + 2 * at + 1, high)
    tl.store(position_ptr + at, (length + depth + 1).to(tl.int64))


@triton.jit
def _walk_kernel(
    count_ptr, token_ptr, parent_ptr, sampled_ptr, path_ptr, kept_ptr, result_ptr,
    NODES: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """One program; a step down is one comparison of all nodes."""
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    start = tl.load(count_ptr + 1) - 1
    at = tl.arange(0, NODES)
    token = tl.load(token_ptr + at)
    parent = tl.load(parent_ptr + at)
    tl.store(path_ptr + at, at)
    tl.debug_barrier()
    node = start
    want = tl.load(sampled_ptr + node).to(tl.int32)
    count = start * 0
    while want >= 0:
        tl.store(path_ptr + start + count, node)
        tl.store(result_ptr + 1 + count, want)
        count += 1
        child = tl.min(tl.where((parent == node) & (token == want), at, NODES), 0)
        has_child = child < NODES
        node = tl.where(has_child, child, 0)
        want = tl.where(has_child, tl.load(sampled_ptr + node).to(tl.int32), -1)
    tl.store(kept_ptr, start + count)
    tl.store(result_ptr, count)
