"""What lies between two steps of a chain that a model drafts alone: the sampled token becomes the next step's one node.

It reads and writes the device only, so that a whole chain is one CUDA graph.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from specq_kernels.launch import MAX_ROWS, check_tensor, has_dependent_launch, interpreted, runs_kernel


def follow_sample(
    sampled: Tensor, chain: Tensor, at: int, *, ids: Tensor, length: Tensor, position: Tensor, nodes: int
) -> None:
    """Put the token sampled, int64 [1] (-1: none), at `at` of the chain, and first among `ids` to embed (0 for -1).

    chain and ids int32 [64]; length int32 [1] grows by the `nodes` that ran, position int64 [1] by one.
    Raises ValueError naming the argument.
    """
    check_tensor("sampled", sampled, shape=(1,), dtype=torch.int64)
    for name, tensor, size in (("chain", chain, MAX_ROWS), ("ids", ids, MAX_ROWS), ("length", length, 1)):
        check_tensor(name, tensor, shape=(size,), dtype=torch.int32, device=sampled.device)
    check_tensor("position", position, shape=(1,), dtype=torch.int64, device=sampled.device)
    if not 0 <= at < MAX_ROWS:
        raise ValueError(f"at: {at} is not within a chain of {MAX_ROWS}")
    if not runs_kernel(sampled):
        follow_sample_ref(sampled, chain, at, ids=ids, length=length, position=position, nodes=nodes)
        return
    early = has_dependent_launch(sampled)
    options = {} if interpreted() else {"num_warps": 1, "launch_pdl": early}
    _follow_kernel[(1,)](sampled, chain, ids, length, position, at, nodes, EARLY=early, **options)


def follow_sample_ref(
    sampled: Tensor, chain: Tensor, at: int, *, ids: Tensor, length: Tensor, position: Tensor, nodes: int
) -> None:
    """The definition."""
    chain[at : at + 1].copy_(sampled)
    ids[:1].copy_(sampled.clamp(min=0))
    length.add_(nodes)
    position.add_(1)


@triton.jit(do_not_specialize=["at", "nodes"])
def _follow_kernel(sampled_ptr, chain_ptr, id_ptr, length_ptr, position_ptr, at, nodes, EARLY: tl.constexpr):
    """One program, one thread's work."""
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    token = tl.load(sampled_ptr).to(tl.int32)
    tl.store(chain_ptr + at, token)
    tl.store(id_ptr, tl.maximum(token, 0))
    tl.store(length_ptr, tl.load(length_ptr) + nodes)
    tl.store(position_ptr, tl.load(position_ptr) + 1)
