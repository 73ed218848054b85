"""Times tree attention beside its floor and torch's own: `python -m specq_kernels.bench_attention [8b] [70b]`.

Microseconds a layer, merge included, median of 7 replays of a CUDA graph over at least 300 MB of cache. The
floor is the keys' and values' bytes over the copy bandwidth measured first. The peer is scaled_dot_product_attention
on the filled part of the cache, with the ancestor mask as a bias.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from functools import partial

import torch
import triton

from specq_kernels.launch import device_name
from specq_kernels.timing import COLD_BYTES, copy_bandwidth, graph_us, require_cuda
from specq_kernels.tree_attention import pack_mask, tree_attention

HEADS = {"8b": (32, 8, 128), "70b": (64, 8, 128)}
ROWS = (1, 8, 16, 32, 60)
LENGTHS = (1024, 8192)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m specq_kernels.bench_attention", description=__doc__)
    parser.add_argument("models", nargs="*", default=["8b", "70b"])
    options = parser.parse_args(arguments)
    require_cuda("the benchmark")
    bandwidth = copy_bandwidth()
    print(f"{device_name(0)}, torch {torch.__version__}, triton {triton.__version__}, "
          f"copy {bandwidth / 1e12:.2f} TB/s, bf16, median of 7")  # fmt: skip
    print(f"{'shape':<22}{'rows':>5}{'ours':>8}{'floor':>8}{'share':>7}{'torch sdpa':>12}")
    for model in options.models:
        for length in LENGTHS:
            for rows in ROWS:
                bench_shape(model, length, rows, bandwidth)


def bench_shape(model: str, length: int, rows: int, bandwidth: float) -> None:
    heads, kv_heads, head_dim = HEADS[model]
    used = 2 * kv_heads * (length + rows) * head_dim * 2
    layers = max(4, -(-int(COLD_BYTES) // used))
    k, v = torch.randn(2, layers, kv_heads, 2 * length, head_dim, device="cuda", dtype=torch.bfloat16).unbind()
    q = torch.randn(rows, heads, head_dim, device="cuda", dtype=torch.bfloat16)
    ancestors = random_ancestors(rows)
    mask, at = pack_mask(ancestors), torch.tensor([length], dtype=torch.int32, device="cuda")
    ours = graph_us([partial(tree_attention, q, k[i], v[i], mask, at) for i in range(layers)])
    bias = torch.zeros(rows, length + rows, device="cuda", dtype=torch.bfloat16)
    bias[:, length:].masked_fill_(~ancestors, -torch.inf)
    queries = q.transpose(0, 1)[None]

    def peer(i: int) -> None:
        keys, values = (t[i, None, :, : length + rows] for t in (k, v))
        torch.nn.functional.scaled_dot_product_attention(queries, keys, values, attn_mask=bias, enable_gqa=True)

    theirs = graph_us([partial(peer, i) for i in range(layers)])
    floor = used / bandwidth * 1e6
    print(f"{model + f' prefix {length}':<22}{rows:>5}{ours:>8.1f}{floor:>8.1f}{floor / ours:>7.0%}{theirs:>12.1f}",
          flush=True)  # fmt: skip


def random_ancestors(nodes: int) -> torch.Tensor:
    """A tree in which each node hangs off one of the seven before it."""
    ancestors = torch.eye(nodes, dtype=torch.bool)
    for node in range(1, nodes):
        ancestors[node] |= ancestors[int(torch.randint(max(0, node - 7), node, ()))]
    return ancestors.cuda()


if __name__ == "__main__":
    main()
