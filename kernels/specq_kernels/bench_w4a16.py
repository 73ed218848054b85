"""Times the 4-bit product beside its floor, targets and peers: `python -m specq_kernels.bench_w4a16 [8b] [70b]`.

Microseconds a call, median of 7 replays of a CUDA graph that rotates over at least 300 MB of weights and over five
inputs, so that none lies in a multiprocessor's L1 from the call before, as none does in decoding. The floor is the
weight's bytes over the copy bandwidth measured first. "layer" is the sum of a layer's four products; "chain" runs the
four one after another, as decoding does. Group sums of x and, where read, x in lane order are given, as the kernel
before emits them. The peers are cuBLAS on bf16 weights, torch's int4 product and humming-kernels, if installed.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Sequence
from functools import partial

import torch
import triton

from specq_kernels.launch import device_name
from specq_kernels.peers import GROUP, PEERS, has_humming
from specq_kernels.timing import copies_for, copy_bandwidth, graph_us, require_cuda
from specq_kernels.tune import LAYERS, random_w4, rotated_inputs
from specq_kernels.w4_layout import W4Weight
from specq_kernels.w4a16 import w4a16

ROWS = (1, 4, 8, 16, 32, 64)
TARGETS = {  # microseconds of a layer by rows: (must, aim)
    "70b": {1: (130, 115), 4: (130, 115), 8: (130, 115), 16: (138, 122), 32: (165, 148), 64: (250, 190)},
    "8b": {1: (45, 37), 4: (45, 37), 8: (45, 37), 32: (53, 45), 64: (85, 66)},
}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m specq_kernels.bench_w4a16", description=__doc__)
    parser.add_argument("models", nargs="*", default=["8b", "70b"])
    parser.add_argument("--rows", type=int, nargs="+", default=list(ROWS))
    parser.add_argument("--peers", nargs="*", choices=list(PEERS), default=list(PEERS), help="default: all")
    options = parser.parse_args(arguments)
    require_cuda("the benchmark")
    bandwidth = copy_bandwidth()
    print(f"{device_name(0)}, torch {torch.__version__}, triton {triton.__version__}, "
          f"copy {bandwidth / 1e12:.2f} TB/s, bf16, groups of {GROUP}, symmetric, median of 7")  # fmt: skip
    if "humming" in options.peers and not has_humming():
        print("humming: not installed (pip install humming-kernels)")
    names = "".join(f"{name:>13}" for name in options.peers)
    print(f"{'shape':<26}{'rows':>5}{'ours':>8}{'floor':>8}{'share':>7}{'must':>7}{'aim':>6}{names}")
    for model in options.models:
        bench_layer(model, options.rows, options.peers, bandwidth)


def bench_layer(model: str, rows: Sequence[int], peers: Sequence[str], bandwidth: float) -> None:
    """Print a line for each product and row count, then their sums and the chain."""
    shapes = LAYERS[model]
    weights = {name: rotated_weights(*shape) for name, shape in shapes.items()}
    totals = {m: [0.0] * (2 + len(peers)) for m in rows}
    for name, (n, k) in shapes.items():
        floor = weights[name][0].num_bytes() / bandwidth * 1e6
        times = {m: [product_us(weights[name], m), floor] for m in rows}
        for peer in peers:
            calls = PEERS[peer](n, k)
            for m in rows:
                inputs = itertools.cycle([x for x, _ in rotated_inputs(m, k, GROUP, torch.bfloat16)])
                used = [partial(call, x) for call, x in zip(calls or (), inputs, strict=False)]
                times[m].append(graph_us(used) if used else float("nan"))
            del calls
        for m in rows:
            print_line(f"{model} {name} ({k},{n})", m, times[m])
            totals[m] = [a + b for a, b in zip(totals[m], times[m], strict=True)]
    for m, total in totals.items():
        print_line(f"{model} layer", m, total, TARGETS[model].get(m))
    for m in rows:
        print_line(f"{model} chain", m, [chain_us(weights, shapes, m), totals[m][1]])


def product_us(weights: Sequence[W4Weight], rows: int) -> float:
    """Microseconds of our product."""
    inputs = itertools.cycle(rotated_inputs(rows, weights[0].shape[1], GROUP, torch.bfloat16))
    return graph_us([partial(w4a16, x, w, sides=s) for w, (x, s) in zip(weights, inputs, strict=False)])


def chain_us(weights: dict[str, list[W4Weight]], shapes: dict[str, tuple[int, int]], rows: int) -> float:
    """Microseconds of a layer's four products run one after another."""
    inputs = {name: rotated_inputs(rows, k, GROUP, torch.bfloat16) for name, (_, k) in shapes.items()}

    def layer(i: int) -> None:
        for name, copies in weights.items():
            x, beside = inputs[name][i % len(inputs[name])]
            w4a16(x, copies[i % len(copies)], sides=beside)

    return graph_us([partial(layer, i) for i in range(8)])


def rotated_weights(n: int, k: int) -> list[W4Weight]:
    """Random weights, enough copies to miss the L2."""
    first = random_w4(n, k, GROUP)
    return [first, *(random_w4(n, k, GROUP) for _ in range(copies_for(first.num_bytes()) - 1))]


def print_line(name: str, rows: int, times: Sequence[float], target: tuple[int, int] | None = None) -> None:
    """One row: ours, floor and peers in `times`."""
    ours, floor, *peers = times
    must, aim = target or ("", "")
    columns = "".join(f"{us:>13.1f}" if us == us else f"{'-':>13}" for us in peers)
    print(f"{name:<26}{rows:>5}{ours:>8.1f}{floor:>8.1f}{floor / ours:>7.0%}{must:>7}{aim:>6}{columns}", flush=True)


if __name__ == "__main__":
    main()
