"""What 8-bit activations buy in a 4-bit product: `python -m specq_kernels.bench_w4a8 [8b] [70b]`.

Microseconds a call, median of 5 replays of a CUDA graph that rotates over at least 300 MB of weights. `w4a16` as it
is tuned, sides of x given; `w4a8` with the fastest tiles found in the run, its x as codes (`product`) or in 16 bits
(`whole`, rounded by a kernel of its own, as drafting runs it). r is w4a16 over w4a8: QSpec drafts g tokens with the
latter and verifies with the former, so that it gains only where r > g / (E - 1), E the tokens of a round.
"""

from __future__ import annotations

import argparse
import multiprocessing
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from itertools import cycle, product

import torch
import triton

from specq_kernels import configs
from specq_kernels.act_codes import Codes, round_codes
from specq_kernels.bench_w4a16 import product_us, rotated_weights
from specq_kernels.launch import device_name, row_bucket
from specq_kernels.peers import GROUP
from specq_kernels.timing import graph_us, require_cuda
from specq_kernels.tune import LAYERS, random_w4, rotated_inputs
from specq_kernels.w4_layout import W4Weight
from specq_kernels.w4a8 import product_of, w4a8

ROWS = (1, 4, 8, 16, 32, 64)
CHANCES = (0.9, 0.95, 0.97, 0.99)
DRAFTS = (1, 2, 3, 5)
SPLITS = (1, 2, 3, 4, 6, 8)
LANES = ((2, 1), (4, 1), (4, 2), (4, 4), (8, 4), (16, 4), (8, 8), (16, 8), (32, 8))
"""Of one row: groups of 128 a pass, warps."""

TILES = {  # by rows: columns, warps, stages
    16: ((64, 4, 3), (64, 4, 5), (128, 4, 3), (128, 4, 4), (128, 8, 3), (128, 8, 4), (256, 8, 3)),
    32: ((64, 4, 3), (64, 4, 4), (128, 4, 3), (128, 8, 3), (128, 8, 4), (256, 8, 3)),
    64: ((64, 4, 2), (64, 4, 3), (128, 4, 2), (128, 8, 2), (128, 8, 3), (256, 8, 2)),
}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m specq_kernels.bench_w4a8", description=__doc__)
    parser.add_argument("models", nargs="*", default=["8b", "70b"])
    parser.add_argument("--rows", type=int, nargs="+", default=list(ROWS))
    parser.add_argument("--jobs", type=int, default=8, help="processes that compile, default 8")
    options = parser.parse_args(arguments)
    require_cuda("the benchmark")
    compile_all(sorted({1 if rows == 1 else row_bucket(rows) for rows in options.rows}), options.jobs)
    print(f"{device_name(0)}, torch {torch.__version__}, triton {triton.__version__}, bf16, groups of {GROUP}, "
          f"symmetric, median of 5")  # fmt: skip
    print(f"{'shape':<26}{'rows':>5}{'w4a16':>9}{'w4a8':>9}{'r':>7}{'whole':>9}{'r whole':>9}  tiles")
    for model in options.models:
        bench_layer(model, options.rows)
    print("\nr that QSpec needs, verification as dear as a step; columns are tokens drafted")
    print(f"{'accepted':>9}" + "".join(f"{length:>8}" for length in DRAFTS))
    for chance in CHANCES:
        print(f"{chance:>9.2f}" + "".join(f"{break_even(chance, length):>8.3f}" for length in DRAFTS))


def break_even(chance: float, length: int) -> float:
    """The r from which drafting pays: length / (E - 1) with E = 1 + chance + ... + chance ** length."""
    return length / sum(chance**i for i in range(1, length + 1))


def bench_layer(model: str, rows: Sequence[int]) -> None:
    totals = {m: [0.0, 0.0, 0.0] for m in rows}
    for name, (n, k) in LAYERS[model].items():
        weights = rotated_weights(n, k)
        best: dict[int, configs.Config] = {}
        for m in rows:
            x = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
            bucket = 1 if m == 1 else row_bucket(m)
            if bucket not in best:
                best[bucket] = fastest(weights, x)
            out = x.new_empty(m, n)
            inputs = [pair[0] for pair in rotated_inputs(m, k, GROUP, torch.bfloat16)]
            codes = [round_codes(x, weights[0].padded[1], bits=8) for x in inputs]
            times = [product_us(weights, m)] + [
                graph_us(calls, repeats=5, target_us=800)
                for calls in (
                    [
                        partial(product_of, c, w, out, config=best[bucket])
                        for w, c in zip(weights, cycle(codes), strict=False)
                    ],
                    [partial(w4a8, x, w, config=best[bucket]) for w, x in zip(weights, cycle(inputs), strict=False)],
                )
            ]
            totals[m] = [a + b for a, b in zip(totals[m], times, strict=True)]
            print_line(f"{model} {name} ({k},{n})", m, times, best[bucket])
    for m, total in totals.items():
        print_line(f"{model} layer", m, total, {})


def fastest(weights: Sequence[W4Weight], x: torch.Tensor) -> configs.Config:
    """The tiles and split that this product of x's number of rows is fastest with."""
    out, codes = x.new_empty(x.shape[0], weights[0].shape[0]), round_codes(x, weights[0].padded[1], bits=8)
    found: list[tuple[float, configs.Config]] = []
    for config in candidates(x.shape[0], SPLITS):
        columns = config.get("block_n", 16)
        programs = weights[0].padded[0] // columns * config.get("split", 1)
        is_sensible = x.shape[0] == 1 or 60 < programs < 1200
        if is_sensible and weights[0].padded[0] % columns == 0 and fits(codes, weights[0], out, config):
            calls = [partial(product_of, codes, w, out, config=config) for w in weights]
            found.append((graph_us(calls, repeats=3, target_us=300), config))
    return min(found, key=lambda each: each[0])[1]


def candidates(rows: int, splits: Sequence[int]) -> list[configs.Config]:
    """What is tried for so many rows."""
    if rows == 1:
        return [{"groups": groups, "warps": warps} for groups, warps in LANES]
    return [
        {"split": split, "block_n": block_n, "warps": warps, "stages": stages}
        for (block_n, warps, stages), split in product(TILES[row_bucket(rows)], splits)
    ]


def fits(codes: Codes, weight: W4Weight, out: torch.Tensor, config: configs.Config) -> bool:
    """Whether the device has the shared memory for these tiles."""
    try:
        product_of(codes, weight, out, config=config)
    except triton.runtime.errors.OutOfResources:
        return False
    return True


def compile_all(rows: Sequence[int], jobs: int) -> None:
    """Fill Triton's cache from several processes, so that measuring waits for no compiler."""
    todo = [(m, config) for m in rows for config in candidates(m, (1, 4, 8))]
    with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        list(pool.map(_compile_one, todo))


def _compile_one(task: tuple[int, configs.Config]) -> None:
    rows, config = task
    weight = random_w4(256, 2048, GROUP)
    x = torch.randn(rows, 2048, device="cuda", dtype=torch.bfloat16)
    fits(round_codes(x, weight.padded[1], bits=8), weight, x.new_empty(rows, 256), config)


def print_line(name: str, rows: int, times: Sequence[float], config: configs.Config) -> None:
    full, codes, whole = times
    tiles = ", ".join(f"{key} {value}" for key, value in config.items())
    print(f"{name:<26}{rows:>5}{full:>9.1f}{codes:>9.1f}{full / codes:>7.2f}{whole:>9.1f}{full / whole:>9.2f}  {tiles}",
          flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
