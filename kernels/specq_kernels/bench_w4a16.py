"""Times the 4-bit product beside its floor and its peers: `python -m specq_kernels.bench_w4a16 [8b] [70b]`.

Microseconds a call, median of 7 replays of a CUDA graph that rotates over at least 300 MB of weights. The floor is the
weight's bytes over the copy bandwidth measured first. "layer" is the sum of a layer's four products; "chain" runs the
four one after another, as decoding does. Group sums of x are given, as the kernel before emits them.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from functools import partial

import torch
import triton

from specq_kernels.group_sums import group_sums
from specq_kernels.launch import device_name
from specq_kernels.timing import copies_for, copy_bandwidth, graph_us, require_cuda
from specq_kernels.tune import LAYERS, random_w4
from specq_kernels.w4_layout import W4Weight
from specq_kernels.w4a16 import w4a16

ROWS = (1, 4, 8, 16, 32, 64)
GROUP = 128


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m specq_kernels.bench_w4a16", description=__doc__)
    parser.add_argument("models", nargs="*", default=["8b", "70b"])
    parser.add_argument("--rows", type=int, nargs="+", default=list(ROWS))
    options = parser.parse_args(arguments)
    require_cuda("the benchmark")
    bandwidth = copy_bandwidth()
    print(f"{device_name(0)}, torch {torch.__version__}, triton {triton.__version__}, "
          f"copy {bandwidth / 1e12:.2f} TB/s, bf16, groups of {GROUP}, symmetric, median of 7")  # fmt: skip
    print(f"{'shape':<26}{'rows':>5}{'ours':>8}{'floor':>8}{'share':>7}{'cuBLAS bf16':>13}{'torch int4':>12}")
    for model in options.models:
        bench_layer(model, options.rows, bandwidth)


def bench_layer(model: str, rows: Sequence[int], bandwidth: float) -> None:
    """One line a product and row count, then the layer's."""
    shapes = LAYERS[model]
    weights = {name: rotated_weights(*shape) for name, shape in shapes.items()}
    totals = {m: [0.0, 0.0, 0.0, 0.0] for m in rows}
    for name, (n, k) in shapes.items():
        floor = weights[name][0].num_bytes() / bandwidth * 1e6
        dense = [torch.randn(n, k, device="cuda", dtype=torch.bfloat16) for _ in range(copies_for(2 * n * k))]
        int4 = [torch_int4(n, k) for _ in range(copies_for(n * k // 2))]
        for m in rows:
            ours, cublas, peer = times_of(m, k, weights[name], dense, int4)
            print_line(f"{model} {name} ({k},{n})", m, ours, floor, cublas, peer)
            totals[m] = [a + b for a, b in zip(totals[m], (ours, floor, cublas, peer), strict=True)]
        del dense, int4
    for m, total in totals.items():
        print_line(f"{model} layer", m, *total)
    for m in rows:
        print_line(f"{model} chain", m, chain_us(weights, shapes, m), totals[m][1])


def times_of(
    rows: int,
    k: int,
    weights: Sequence[W4Weight],
    dense: Sequence[torch.Tensor],
    int4: Sequence[Callable[[torch.Tensor], torch.Tensor]],
) -> tuple[float, float, float]:
    """Microseconds of ours, cuBLAS and torch's int4 product."""
    x = torch.randn(rows, k, device="cuda", dtype=torch.bfloat16)
    sums = group_sums(x, GROUP)
    return (
        graph_us([partial(w4a16, x, w, sums=sums) for w in weights]),
        graph_us([partial(torch.nn.functional.linear, x, w) for w in dense]),
        graph_us([partial(call, x) for call in int4]),
    )


def chain_us(weights: dict[str, list[W4Weight]], shapes: dict[str, tuple[int, int]], rows: int) -> float:
    """Microseconds of a layer's four products run one after another, each asking for the next one's weight."""
    inputs = {name: torch.randn(rows, k, device="cuda", dtype=torch.bfloat16) for name, (_, k) in shapes.items()}
    sums = {name: group_sums(x, GROUP) for name, x in inputs.items()}

    def layer(i: int) -> None:
        queue = [(name, copies[i % len(copies)]) for name, copies in weights.items()]
        following = [*(weight for _, weight in queue[1:]), weights["qkv"][(i + 1) % len(weights["qkv"])]]
        for (name, weight), after in zip(queue, following, strict=True):
            w4a16(inputs[name], weight, sums=sums[name], following=after)

    return graph_us([partial(layer, i) for i in range(8)])


def rotated_weights(n: int, k: int) -> list[W4Weight]:
    first = random_w4(n, k, GROUP)
    return [first, *(random_w4(n, k, GROUP) for _ in range(copies_for(first.num_bytes()) - 1))]


def torch_int4(n: int, k: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """torch's own CUDA int4 product on random weights."""
    codes = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8, device="cuda")
    packed = torch.ops.aten._convert_weight_to_int4pack(codes, 8)
    scales = torch.randn(k // GROUP, n, 2, device="cuda", dtype=torch.bfloat16)
    return lambda x: torch.ops.aten._weight_int4pack_mm(x, packed, GROUP, scales)


def print_line(name: str, rows: int, ours: float, floor: float, *peers: float) -> None:
    columns = "".join(f"{us:>{width}.1f}" for us, width in zip(peers, (13, 12), strict=False))
    print(f"{name:<26}{rows:>5}{ours:>8.1f}{floor:>8.1f}{floor / ours:>7.0%}{columns}", flush=True)


if __name__ == "__main__":
    main()
