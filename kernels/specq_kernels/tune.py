"""Measures tile sizes on this machine's GPU and writes them where `configs` looks: `python -m specq_kernels.tune`.

For each shape the split of K is chosen jointly over the row counts (a row's result must not depend on how many rows
there are); tile width, warps, stages and prefetch then follow for 16, 32 and 64 rows.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import torch

from specq_kernels import configs
from specq_kernels.group_sums import group_sums
from specq_kernels.launch import ROW_BUCKETS, device_name, num_multiprocessors
from specq_kernels.timing import copies_for, graph_us
from specq_kernels.w4_layout import STEP, W4Weight, pack_w4
from specq_kernels.w4a16 import w4a16

LAYERS = {  # [out, in] of a layer's four products
    "8b": {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336)},
    "70b": {"qkv": (10240, 8192), "o": (8192, 8192), "gate_up": (57344, 8192), "down": (8192, 28672)},
}
TILES = {  # rows: (block_n, warps, stages, registers a thread or 0 for the compiler's choice, to registers, k a pass)
    16: (
        (64, 4, 3, 96, 0, 256), (64, 4, 4, 0, 0, 256), (128, 4, 3, 168, 0, 256), (128, 8, 3, 112, 1, 256),
        (64, 4, 4, 96, 0, 128), (64, 4, 6, 96, 0, 128), (128, 4, 4, 168, 0, 128), (128, 4, 5, 168, 0, 128),
        (128, 4, 4, 128, 0, 128), (128, 4, 4, 128, 1, 128), (64, 4, 4, 80, 1, 128),
    ),
    32: (
        (64, 4, 3, 128, 0, 256), (128, 4, 3, 0, 0, 256), (128, 4, 4, 168, 0, 128), (128, 4, 5, 0, 0, 128),
        (128, 4, 4, 168, 1, 128), (64, 4, 5, 128, 0, 128),
    ),
    64: (
        (64, 4, 2, 168, 1, 256), (128, 4, 2, 0, 0, 256), (128, 4, 3, 0, 0, 128), (128, 4, 4, 0, 0, 128),
        (128, 4, 4, 0, 1, 128), (128, 8, 3, 128, 0, 128), (64, 4, 4, 168, 0, 128), (256, 8, 4, 0, 0, 128),
    ),
}  # fmt: skip
WEIGHT_OF_ROWS = {16: 4.0, 32: 1.0, 64: 1.0}  # decoding mostly verifies up to 16 rows


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m specq_kernels.tune", description=__doc__)
    parser.add_argument("shapes", nargs="*", default=["8b", "70b"], help="8b, 70b or OUTxIN (default: 8b 70b)")
    parser.add_argument("--group", type=int, default=128)
    parser.add_argument("--dtype", choices=("bfloat16", "float16"), default="bfloat16")
    parser.add_argument("--output", type=Path, help="file to write (default: this user's cache)")
    parser.add_argument("--jobs", type=int, default=8, help="processes that compile")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        sys.exit("tuning needs a CUDA device")
    dtype = getattr(torch, options.dtype)
    shapes = sorted({shape for name in options.shapes for shape in parse_shape(name)})
    compile_all(dtype, options.group, options.jobs)
    device = device_name(0)
    path = options.output or configs.user_file(device)
    table = dict(configs.read(path))
    for n, k in shapes:
        entry = tune_w4a16(n, k, group=options.group, dtype=dtype)
        table.setdefault("w4a16", {})[configs.shape_key(n, k, options.group)] = entry
        print(f"{n}x{k}", json.dumps(entry), flush=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(table, indent=1) + "\n")
    print(f"wrote {path}", file=sys.stderr)


def parse_shape(name: str) -> list[tuple[int, int]]:
    """Shapes of a named layer, or one `OUTxIN`."""
    if name in LAYERS:
        return list(LAYERS[name].values())
    n, k = name.split("x")
    return [(int(n), int(k))]


def tile_configs(rows: int) -> list[configs.Config]:
    """Every tile that is tried for a row count."""
    names = ("block_n", "warps", "stages", "registers", "direct", "step")
    return [{"block_m": rows, **dict(zip(names, tile, strict=True))} for tile in TILES[rows]]


def split_candidates(n: int, k: int, processors: int) -> list[configs.Config]:
    """Ways to split K: one number of parts, or full waves of programs in `split` parts and the rest in finer ones."""
    tiles, steps = n // 128, k // STEP
    found = {(parts, parts, n) for parts in (1, 2, 3, 4, 5, 6, 8) if steps >= 2 * parts}
    for slots, parts in itertools.product((2 * processors, 5 * processors // 2, 3 * processors), (1, 2, 3, 4, 6)):
        whole = tiles * parts // slots * slots // parts // 2 * 2  # tiles of 128 in full waves
        for finer in (2 * parts, 4 * parts):
            if 0 < whole < tiles and steps >= 2 * finer and finer <= 16:
                found.add((parts, finer, whole * 128))
    return [dict(zip(("split", "tail_split", "tail_from"), split, strict=True)) for split in sorted(found)]


def tune_w4a16(n: int, k: int, *, group: int, dtype: torch.dtype) -> dict[str, object]:
    """The table entry of one shape: how K is split and, for each row count, the fastest tile with its microseconds."""
    first = random_weight(n, k, group)
    weights = [first, *(random_weight(n, k, group) for _ in range(copies_for(first.num_bytes()) - 1))]
    inputs = {rows: torch.randn(rows, k, device="cuda", dtype=dtype) for rows in ROW_BUCKETS}
    sums = {rows: group_sums(x, group) for rows, x in inputs.items()}
    best: dict[str, object] = {}
    best_us = float("inf")
    for split in split_candidates(*first.padded, num_multiprocessors(0)):
        fastest = {}
        for rows in ROW_BUCKETS:
            tiles = [c for c in tile_configs(rows) if split["tail_from"] % c["block_n"] == 0 == n % c["block_n"]]
            timed = [(time_w4a16(weights, inputs[rows], sums[rows], {**split, **tile}), tile) for tile in tiles]
            us, tile = min(timed, key=lambda pair: pair[0])
            fastest[rows] = {**{key: v for key, v in tile.items() if key != "block_m"}, "us": round(us, 2)}
        total = sum(WEIGHT_OF_ROWS[rows] * fastest[rows]["us"] for rows in ROW_BUCKETS)
        if total < best_us:
            best_us, best = total, {**split, "rows": {str(rows): tile for rows, tile in fastest.items()}}
    return best


def time_w4a16(weights: Sequence[W4Weight], x: torch.Tensor, sums: torch.Tensor, config: configs.Config) -> float:
    calls = [lambda w=w: w4a16(x, w, sums=sums, config=config) for w in weights]
    return graph_us(calls, repeats=3, target_us=500)


def random_weight(n: int, k: int, group: int) -> W4Weight:
    """A symmetric weight with outputs of unit size."""
    codes = torch.randint(-(2**31), 2**31 - 1, (n, k // 8), dtype=torch.int32, device="cuda")
    scales = (torch.rand(n, -(-k // group), device="cuda") + 0.5).mul_(0.2 / k**0.5).half()
    return pack_w4(codes, scales, group_size=group)


def compile_all(dtype: torch.dtype, group: int, jobs: int) -> None:
    """Fill Triton's cache from several processes, so that measuring waits for no compiler."""
    todo = [{"split": split, **tile} for split in (1, 4, 8, 16) for rows in ROW_BUCKETS for tile in tile_configs(rows)]
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, mp_context=context) as pool:
        list(pool.map(_compile_some, [todo[i::jobs] for i in range(jobs)], [dtype] * jobs, [group] * jobs))


def _compile_some(todo: Sequence[configs.Config], dtype: torch.dtype, group: int) -> None:
    weight = random_weight(256, STEP * 16, group)
    for config in todo:
        w4a16(torch.randn(config["block_m"], weight.shape[1], device="cuda", dtype=dtype), weight, config=config)
    torch.cuda.synchronize()


if __name__ == "__main__":
    main()
