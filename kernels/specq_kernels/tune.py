"""Measures tile sizes on this machine's GPU and writes them where `configs` looks: `python -m specq_kernels.tune`.

For each shape the split of K is chosen jointly over the row counts (a row's result must not depend on how many rows
there are); tile width, warps, stages and the rest then follow for 16, 32 and 64 rows.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path

import torch

from specq_kernels import configs
from specq_kernels.group_sums import group_sums
from specq_kernels.launch import ROW_BUCKETS, device_capability, device_name, num_multiprocessors
from specq_kernels.timing import copies_for, graph_us, require_cuda
from specq_kernels.w4_layout import STEP, W4Weight, pack_w4
from specq_kernels.w4a16 import w4a16
from specq_kernels.w16a16 import W16Weight, w16a16

LAYERS = {  # [out, in] of a layer's four products
    "8b": {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336)},
    "70b": {"qkv": (10240, 8192), "o": (8192, 8192), "gate_up": (57344, 8192), "down": (8192, 28672)},
}
HEADS = {"8b": (128256, 4096), "70b": (128256, 8192)}
W4_NAMES = ("block_n", "warps", "stages", "registers", "direct", "step")
W4_TILES = {  # by rows, the first of each for every split; registers 0 is the compiler's choice, direct skips smem
    16: (
        (128, 4, 3, 168, 0, 256), (64, 4, 4, 0, 0, 256), (64, 4, 3, 96, 0, 256), (128, 8, 3, 0, 0, 256),
        (128, 8, 3, 112, 1, 256),
    ),
    32: (
        (128, 4, 3, 0, 0, 256), (64, 4, 3, 128, 0, 256), (128, 4, 4, 168, 0, 128), (64, 4, 5, 128, 0, 128),
    ),
    64: (
        (128, 4, 3, 0, 0, 128), (64, 4, 2, 168, 1, 256), (128, 4, 4, 0, 0, 128), (256, 16, 6, 0, 0, 128),
    ),
}  # fmt: skip
W4_ROLES = {16: ((256, 10), (128, 8)), 32: ((256, 8), (128, 6)), 64: ((256, 6), (128, 4))}  # block_n, stages: w4_hopper
FIRST_TILES = 4  # of each row count, to find the best splits; then every tile for these
BEST_SPLITS = 4
W16_NAMES = ("block_n", "warps", "stages")
W16_TILES = {
    16: ((64, 4, 4), (64, 4, 6), (64, 4, 8), (128, 4, 4), (128, 4, 6), (128, 8, 4)),
    32: ((64, 4, 4), (64, 4, 6), (128, 4, 4), (128, 4, 5), (128, 8, 4)),
    64: ((64, 4, 4), (64, 4, 5), (128, 4, 3), (128, 4, 4), (128, 8, 4), (256, 8, 3)),
}
WEIGHT_OF_ROWS = {16: 3.0, 32: 1.0, 64: 1.0}  # decoding mostly verifies up to 16 rows


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m specq_kernels.tune", description=__doc__)
    parser.add_argument("shapes", nargs="*", default=["8b", "70b"], help="8b, 70b or OUTxIN (default: 8b 70b)")
    parser.add_argument("--kernel", choices=("w4a16", "w16a16"), action="append", help="default: both")
    parser.add_argument("--group", type=int, default=128, help="group size of w4a16")
    parser.add_argument("--dtype", choices=("bfloat16", "float16"), default="bfloat16")
    parser.add_argument("--output", type=Path, help="file to write (default: this user's cache)")
    parser.add_argument("--jobs", type=int, default=8, help="processes that compile")
    options = parser.parse_args(arguments)
    require_cuda("tuning")
    dtype = getattr(torch, options.dtype)
    device = device_name(0)
    path = options.output or configs.user_file(device)
    table = dict(configs.read(path))
    for kernel in options.kernel or ("w4a16", "w16a16"):
        compile_all(kernel, dtype, options.group, options.jobs)
        for n, k in sorted({shape for name in options.shapes for shape in shapes_of(name, kernel)}):
            tune = tune_w4a16(n, k, options.group, dtype) if kernel == "w4a16" else tune_w16a16(n, k, dtype)
            key = configs.shape_key(n, k, options.group if kernel == "w4a16" else None)
            table.setdefault(kernel, {})[key] = tune
            print(kernel, key, json.dumps(tune), flush=True)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(table, indent=1) + "\n")  # after every shape: what is found outlives a break
    print(f"wrote {path}", file=sys.stderr)


def shapes_of(name: str, kernel: str) -> list[tuple[int, int]]:
    """Shapes of a named model (its layer's products and its head in 4 and 8 bits; or its head), or one `OUTxIN`."""
    if name in LAYERS:
        n, k = HEADS[name]
        return [*LAYERS[name].values(), (n, k), (n, 2 * k)] if kernel == "w4a16" else [(n, k)]
    rows, columns = name.split("x")
    return [(int(rows), int(columns))]


def tile_configs(kernel: str, rows: int, *, has_roles: bool = False) -> list[configs.Config]:
    """Every tile that is tried for a row count; `has_roles` with the ones of w4_hopper, after the first."""
    names, tiles = (W4_NAMES, W4_TILES) if kernel == "w4a16" else (W16_NAMES, W16_TILES)
    found: list[configs.Config] = [{"block_m": rows, **dict(zip(names, tile, strict=True))} for tile in tiles[rows]]
    if has_roles:
        found[1:1] = [
            {"block_m": rows, "block_n": block_n, "warps": 4, "stages": stages, "roles": 1}
            for block_n, stages in W4_ROLES[rows]
        ]
    return found


def runs_roles(group: int) -> bool:
    """Whether w4_hopper runs groups of this size on this device."""
    return group == 128 and device_capability(0)[0] == 9


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


def tune_w4a16(n: int, k: int, group: int, dtype: torch.dtype) -> dict[str, object]:
    """The table entry of one 4-bit shape."""
    first = random_w4(n, k, group)
    weights = [first, *(random_w4(n, k, group) for _ in range(copies_for(first.num_bytes()) - 1))]
    inputs = {rows: torch.randn(rows, k, device="cuda", dtype=dtype) for rows in ROW_BUCKETS}
    sums = {rows: group_sums(x, group) for rows, x in inputs.items()}

    def measure(config: configs.Config) -> float:
        x, s = inputs[config["block_m"]], sums[config["block_m"]]
        calls = [partial(w4a16, x, w, sums=s, config=config) for w in weights]
        return graph_us(calls, repeats=3, target_us=500)

    padded_n = first.padded[0]
    tiles = {
        rows: [c for c in tile_configs("w4a16", rows, has_roles=runs_roles(group)) if padded_n % c["block_n"] == 0]
        for rows in ROW_BUCKETS
    }
    splits = split_candidates(*first.padded, num_multiprocessors(0))
    return choose(splits, tiles, measure)


def tune_w16a16(n: int, k: int, dtype: torch.dtype) -> dict[str, object]:
    """The table entry of one 16-bit shape."""
    weights = [random_w16(n, k, dtype) for _ in range(copies_for(2 * n * k))]
    inputs = {rows: torch.randn(rows, k, device="cuda", dtype=dtype) for rows in ROW_BUCKETS}

    def measure(config: configs.Config) -> float:
        x = inputs[config["block_m"]]
        calls = [partial(w16a16, x, w, config=config) for w in weights]
        return graph_us(calls, repeats=3, target_us=500)

    most = 1 if n // 64 >= 4 * num_multiprocessors(0) else 8
    splits = [{"split": parts} for parts in (1, 2, 4, 8) if parts <= most and k // STEP >= 2 * parts]
    return choose(splits, {rows: tile_configs("w16a16", rows) for rows in ROW_BUCKETS}, measure)


def choose(
    splits: Sequence[configs.Config],
    tiles: dict[int, list[configs.Config]],
    measure: Callable[[configs.Config], float],
) -> dict[str, object]:
    """How K is split and, for each row count, the fastest tile with its microseconds.

    A few tiles choose the splits worth a closer look, in which every tile runs.
    """

    def fastest(split: configs.Config, count: int | None) -> dict[int, tuple[float, configs.Config]]:
        found = {}
        for rows in ROW_BUCKETS:
            fitting = [c for c in tiles[rows] if split.get("tail_from", 0) % c["block_n"] == 0]
            found[rows] = min(((measure({**split, **c}), c) for c in fitting[:count]), key=lambda pair: pair[0])
        return found

    def total(found: dict[int, tuple[float, configs.Config]]) -> float:
        return sum(WEIGHT_OF_ROWS[rows] * us for rows, (us, _) in found.items())

    promising = sorted(splits, key=lambda split: total(fastest(split, FIRST_TILES)))[:BEST_SPLITS]
    found, split = min(((fastest(split, None), split) for split in promising), key=lambda pair: total(pair[0]))
    rows_entry = {
        str(rows): {**{key: value for key, value in tile.items() if key != "block_m"}, "us": round(us, 2)}
        for rows, (us, tile) in found.items()
    }
    return {**split, "rows": rows_entry}


def random_w4(n: int, k: int, group: int, *, is_gate_up: bool = False) -> W4Weight:
    """A symmetric weight with outputs of about unit size."""
    codes = torch.randint(-(2**31), 2**31 - 1, (n, k // 8), dtype=torch.int32, device="cuda")
    scales = (torch.rand(n, -(-k // group), device="cuda") + 0.5).mul_(0.2 / k**0.5).half()
    return pack_w4(codes, scales, group_size=group, is_gate_up=is_gate_up)


def random_w16(n: int, k: int, dtype: torch.dtype) -> W16Weight:
    return W16Weight.of(torch.randn(n, k, device="cuda", dtype=dtype).mul_(k**-0.5))


def compile_all(kernel: str, dtype: torch.dtype, group: int, jobs: int) -> None:
    """Fill Triton's cache from several processes, so that measuring waits for no compiler."""
    splits = (1, 4, 8, 16) if kernel == "w4a16" else (1, 2, 4, 8)
    roles = kernel == "w4a16" and runs_roles(group)
    tiles = [tile for rows in ROW_BUCKETS for tile in tile_configs(kernel, rows, has_roles=roles)]
    todo = [{"split": split, **tile} for split in splits for tile in tiles]
    parts = [todo[i::jobs] for i in range(jobs)]
    with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        list(pool.map(_compile_some, [kernel] * jobs, parts, [dtype] * jobs, [group] * jobs))


def _compile_some(kernel: str, todo: Sequence[configs.Config], dtype: torch.dtype, group: int) -> None:
    k = STEP * 16
    w4, w16 = random_w4(256, k, group), random_w16(256, k, dtype)
    for config in todo:
        x = torch.randn(config["block_m"], k, device="cuda", dtype=dtype)
        if kernel == "w4a16":
            w4a16(x, w4, config=config)
        else:
            w16a16(x, w16, config=config)
    torch.cuda.synchronize()


if __name__ == "__main__":
    main()
