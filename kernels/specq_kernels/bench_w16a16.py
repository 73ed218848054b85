"""Times the 16-bit product and its argmax beside cuBLAS: `python -m specq_kernels.bench_w16a16 [8b] [70b] [OUTxIN]`.

Microseconds a call as in bench_w4a16; the names are the models' heads. "argmax" for the peer is cuBLAS and torch's
argmax after it. "8 bits" and "4 bits" are our products of the same matrix quantised, as a draft head may be, with fp32
logits.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from functools import partial

import torch
import triton

from specq_kernels.launch import device_name
from specq_kernels.timing import copies_for, copy_bandwidth, graph_us, require_cuda
from specq_kernels.tune import random_w4, random_w16, shapes_of
from specq_kernels.w4_layout import W4Weight
from specq_kernels.w4a16 import w4a16
from specq_kernels.w8a16 import W8Weight, w8a16
from specq_kernels.w16a16 import W16Weight, w16a16, w16a16_argmax

ROWS = (1, 8, 16, 32, 64)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m specq_kernels.bench_w16a16", description=__doc__)
    parser.add_argument("shapes", nargs="*", default=["8b", "70b"])
    options = parser.parse_args(arguments)
    require_cuda("the benchmark")
    bandwidth = copy_bandwidth()
    print(f"{device_name(0)}, torch {torch.__version__}, triton {triton.__version__}, "
          f"copy {bandwidth / 1e12:.2f} TB/s, bf16, median of 7")  # fmt: skip
    columns = ("ours", "floor", "share", "cuBLAS", "argmax", "cuBLAS+argmax", "8 bits", "4 bits")
    print(f"{'shape':<18}{'rows':>5}" + "".join(f"{name:>{len(name) + 4}}" for name in columns))
    for name in options.shapes:
        for n, k in shapes_of(name, "w16a16"):
            weights = [random_w16(n, k, torch.bfloat16) for _ in range(copies_for(2 * n * k))]
            quantised = W8Weight(random_w4(n, 2 * k, 128)), random_w4(n, k, 128)
            floor = 2 * n * k / bandwidth * 1e6
            for rows in ROWS:
                ours, peer, best, peer_best, eight, four = times_of(weights, quantised, rows)
                print(f"{f'{name} ({k},{n})':<18}{rows:>5}{ours:>8.1f}{floor:>9.1f}{floor / ours:>9.0%}{peer:>10.1f}"
                      f"{best:>10.1f}{peer_best:>17.1f}{eight:>10.1f}{four:>10.1f}", flush=True)  # fmt: skip


def times_of(weights: Sequence[W16Weight], quantised: tuple[W8Weight, W4Weight], rows: int) -> list[float]:
    """Microseconds of the product, cuBLAS, the product's argmax, cuBLAS and argmax; then of 8 and of 4 bits."""
    x = torch.randn(rows, weights[0].matrix.shape[1], device="cuda", dtype=torch.bfloat16)
    ways: list[Callable[[W16Weight], object]] = [
        lambda w: w16a16(x, w),
        lambda w: x @ w.matrix.T,
        lambda w: w16a16_argmax(x, w),
        lambda w: (x @ w.matrix.T).argmax(-1),
    ]
    eight, four = quantised  # each far larger than the L2
    return [
        *(graph_us([partial(way, w) for w in weights]) for way in ways),
        graph_us([lambda: w8a16(x, eight, out_dtype=torch.float32)]),
        graph_us([lambda: w4a16(x, four, out_dtype=torch.float32)]),
    ]


if __name__ == "__main__":
    main()
