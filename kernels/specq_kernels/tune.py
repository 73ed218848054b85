"""Measures tile sizes on this machine's GPU and writes them where `configs` looks: `python -m specq_kernels.tune`.

For each shape the parts and the split of K are chosen jointly over the row counts (a row's result must not depend on
how many rows there are); tile width, warps, stages and the rest then follow for 4, 8, 16, 32 and 64 rows.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path

import torch

from specq_kernels import configs
from specq_kernels.group_sums import Sides, sides
from specq_kernels.lane_order import has_lanes, lanes_rows
from specq_kernels.launch import ROW_BUCKETS, device_capability, device_name, num_multiprocessors
from specq_kernels.timing import copies_for, graph_us, require_cuda
from specq_kernels.w4_layout import ROW_MULTIPLE, STEP, W4Weight, pack_w4
from specq_kernels.w4a16 import w4a16
from specq_kernels.w16a16 import W16Weight, w16a16

LAYERS = {  # [out, in] of a layer's four products
    "8b": {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336)},
    "70b": {"qkv": (10240, 8192), "o": (8192, 8192), "gate_up": (57344, 8192), "down": (8192, 28672)},
}
HEADS = {"8b": (128256, 4096), "70b": (128256, 8192)}
W4_NAMES = ("block_n", "warps", "stages", "registers", "direct", "step", "fma")
W4_TILES = {  # by rows, the first of each for every split; registers 0 is the compiler's choice, direct skips smem
    16: (
        (128, 4, 3, 168, 0, 256, 0), (64, 4, 3, 0, 0, 256, 1), (64, 4, 3, 96, 0, 256, 1), (128, 8, 3, 0, 0, 256, 1),
        (64, 4, 4, 96, 0, 128, 1), (64, 4, 4, 0, 0, 256, 0), (128, 8, 3, 112, 1, 256, 0),
    ),
    32: (
        (128, 4, 3, 0, 0, 256, 0), (64, 4, 3, 128, 0, 256, 0), (64, 4, 3, 128, 0, 256, 1), (64, 4, 4, 128, 0, 128, 1),
        (128, 4, 4, 168, 0, 128, 0),
    ),
    64: (
        (128, 4, 3, 0, 0, 128, 0), (64, 4, 2, 168, 1, 256, 0), (128, 4, 4, 0, 0, 128, 0), (256, 16, 6, 0, 0, 128, 0),
    ),
}  # fmt: skip
ROLES_NAMES = ("block_n", "groups", "stages", "together", "sync", "fma")  # of w4_hopper
W4_ROLES = {
    16: (
        (128, 1, 4, 1, 1, 1), (256, 2, 5, 1, 1, 1), (128, 2, 4, 0, 1, 1), (128, 1, 4, 0, 1, 1), (256, 2, 4, 0, 1, 1),
        (256, 2, 5, 0, 0, 1),
    ),
    32: (
        (256, 4, 4, 1, 0, 1), (128, 2, 3, 1, 0, 1), (128, 1, 3, 0, 0, 1), (256, 2, 4, 0, 0, 1), (128, 2, 3, 0, 0, 1),
        (256, 4, 4, 0, 0, 1),
    ),
    64: (
        (256, 2, 3, 1, 0, 1), (128, 1, 2, 1, 0, 0), (128, 1, 2, 0, 0, 0), (256, 2, 3, 0, 0, 1), (256, 2, 2, 0, 0, 1),
        (128, 2, 2, 1, 0, 1),
    ),
}  # fmt: skip
LANES_NAMES = ("blocks", "k_warps", "n_warps", "registers", "hold", "once", "fma")  # of w4_rows
LANES_TILES = {  # by the most rows
    8: tuple(
        (blocks, k_warps, n_warps, *rest)
        for blocks, k_warps, n_warps in (
            (1, 8, 1), (2, 8, 1), (1, 4, 1), (2, 4, 1), (1, 4, 2), (1, 2, 1), (2, 2, 1), (2, 2, 2), (2, 1, 2)
        )
        for rest in ((96 if blocks == 1 else 128, 0, 1, 1), (72 if blocks == 1 else 112, 0, 1, 1), (0, 1, 1, 0))
    ),
    16: tuple(
        (blocks, k_warps, n_warps, *rest)
        for blocks, k_warps, n_warps in ((1, 8, 1), (2, 8, 1), (1, 4, 1), (2, 4, 1), (1, 4, 2), (2, 2, 2), (2, 2, 1))
        for rest in ((128 if blocks == 1 else 168, 0, 1, 1), (112 if blocks == 1 else 128, 0, 1, 1), (0, 1, 1, 1))
    ),
    32: ((2, 8, 1, 0, 1, 1, 0), (2, 8, 1, 208, 0, 1, 0), (2, 4, 1, 208, 0, 1, 0)),
}  # fmt: skip
LANES_ROWS = (4, 8, 16, 32)  # row counts w4_rows is tried for
LANES_CAPABILITIES = (8, 9)  # where `mma.sync` is known to add as what the wide kernels multiply with
PARTS = (1, 2, 3, 4, 6, 8, 12, 16, 24)  # of K
PARTS_A_WARP = 4  # w4_rows keeps so many apart
INPUT_COPIES = 5
Timer = Callable[..., float]  # of a config, and of a number of rows if it is not the config's block_m
Found = dict[int, tuple[float, configs.Config]]  # by rows: microseconds and the tile
FIRST_TILES = 4  # of each row count, to find the best splits; then every tile for these
BEST_SPLITS = 4
BEST_PARTS = 3
W16_NAMES = ("block_n", "warps", "stages")
W16_TILES = {
    16: ((64, 4, 4), (64, 4, 6), (64, 4, 8), (128, 4, 4), (128, 4, 6), (128, 8, 4)),
    32: ((64, 4, 4), (64, 4, 6), (128, 4, 4), (128, 4, 5), (128, 8, 4)),
    64: ((64, 4, 4), (64, 4, 5), (128, 4, 3), (128, 4, 4), (128, 8, 4), (256, 8, 3)),
}
WEIGHT_OF_ROWS = {4: 3.0, 8: 1.0, 16: 1.0, 32: 1.0, 64: 1.0}  # decoding mostly verifies few rows


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
    for kernel in options.kernel or ("w4a16", "w16a16"):
        compile_all(kernel, dtype, options.group, options.jobs)
        for n, k in sorted({shape for name in options.shapes for shape in shapes_of(name, kernel)}):
            tune = tune_w4a16(n, k, options.group, dtype) if kernel == "w4a16" else tune_w16a16(n, k, dtype)
            key = configs.shape_key(n, k)
            if kernel == "w4a16":
                key = configs.shape_key(*padded_shape(n, k), options.group)
            print(kernel, key, json.dumps(tune), flush=True)
            save(path, kernel, {key: tune})  # after every shape: what is found outlives a break
    print(f"wrote {path}", file=sys.stderr)


def save(path: Path, kernel: str, entries: Mapping[str, object]) -> None:
    """Put a kernel's entries into the table at `path`, beside what else it holds."""
    table = json.loads(path.read_text()) if path.is_file() else {}
    table.setdefault(kernel, {}).update(entries)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.{os.getpid()}")
    temporary.write_text(json.dumps(table, indent=1) + "\n")
    temporary.replace(path)


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
            {"block_m": rows, "roles": 1, **dict(zip(ROLES_NAMES, tile, strict=True))} for tile in W4_ROLES[rows]
        ]
    return found


def lanes_configs(rows: int, parts: int, padded_n: int) -> list[configs.Config]:
    """Every tile of w4_rows that is tried for up to 32 rows and K in so many parts."""
    block_m = lanes_rows(rows)
    named = (dict(zip(LANES_NAMES, tile, strict=True)) for tile in LANES_TILES[block_m])
    return [
        {"block_m": block_m, "lanes": 1, **tile}
        for tile in named
        if parts % tile["k_warps"] == 0
        and parts // tile["k_warps"] <= PARTS_A_WARP
        and padded_n % (16 * tile["blocks"] * tile["n_warps"]) == 0
    ]


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
    measure = w4a16_timer(n, k, group, dtype)
    padded_n, padded_k = padded_shape(n, k)
    tiles = {
        rows: [c for c in tile_configs("w4a16", rows, has_roles=runs_roles(group)) if padded_n % c["block_n"] == 0]
        for rows in ROW_BUCKETS
    }
    splits = split_candidates(padded_n, padded_k, num_multiprocessors(0))
    promising = most_promising(splits, tiles, measure)
    few = {}
    if group == 128 and has_lanes(k) and device_capability(0)[0] in LANES_CAPABILITIES:
        few = few_rows(padded_n, padded_k, {parts for split, _ in promising for parts in parts_for(split)}, measure)
    return best_entry(promising, few, tiles, measure)


def padded_shape(n: int, k: int) -> tuple[int, int]:
    """[n, k] as a 4-bit weight is packed, by which its entry is found."""
    return -(-n // ROW_MULTIPLE) * ROW_MULTIPLE, -(-k // STEP) * STEP


def w4a16_timer(n: int, k: int, group: int, dtype: torch.dtype) -> Timer:
    """Microseconds of a random weight's product by config, with as many rows as it is for or a number of their own.

    The input changes from call to call, as in decoding: none of it lies in a multiprocessor's L1 beforehand.
    """
    first = random_w4(n, k, group)
    weights = [first, *(random_w4(n, k, group) for _ in range(copies_for(first.num_bytes()) - 1))]
    inputs = {rows: rotated_inputs(rows, k, group, dtype) for rows in sorted({*LANES_ROWS, *ROW_BUCKETS})}

    def measure(config: configs.Config, rows: int | None = None) -> float:
        pairs = itertools.cycle(inputs[rows or config["block_m"]])
        calls = [partial(w4a16, x, w, sides=s, config=config) for w, (x, s) in zip(weights, pairs, strict=False)]
        return graph_us(calls, repeats=3, target_us=500)

    return measure


def rotated_inputs(rows: int, k: int, group: int, dtype: torch.dtype) -> list[tuple[torch.Tensor, Sides]]:
    """Inputs of a product, more than an L1 holds, with what lies beside each."""
    inputs = [torch.randn(rows, k, device="cuda", dtype=dtype) for _ in range(INPUT_COPIES)]
    return [(x, sides(x, group, lanes=has_lanes(k))) for x in inputs]


def few_rows(padded_n: int, padded_k: int, parts: set[int], measure: Timer) -> dict[int, Found]:
    """The fastest tiles of w4_rows for each of LANES_ROWS by the number of parts of K; none where K has fewer steps."""
    return {
        count: {
            rows: fastest(tiles, {"split": count, "tail_split": count, "tail_from": padded_n}, measure, rows)
            for rows in LANES_ROWS
            if (tiles := lanes_configs(rows, count, padded_n))
        }
        for count in sorted(parts)
        if count <= padded_k // STEP and lanes_configs(min(LANES_TILES), count, padded_n)
    }


def parts_for(split: configs.Config) -> list[int]:
    """In how many parts K may be cut for a split: each run has equally many.

    One run of all parts adds them as single parts are added: a tail of those may stand beside it, beside no other.
    """
    run, tail = split["split"], split["tail_split"]
    if tail != run:
        return [tail] if run == 1 else []
    return [parts for parts in PARTS if parts % run == 0]


def best_entry(
    wide: Sequence[tuple[configs.Config, Found]],
    few: dict[int, Found],
    tiles: dict[int, list[configs.Config]],
    measure: Timer,
) -> dict[str, object]:
    """The entry of the split, and of the parts for it, with which all row counts together take least.

    Where a run has several parts, the wide kernels fold them as they sum: their tiles are measured so once more.
    """
    choices = []
    for split, whole in wide:
        for parts in sorted(set(parts_for(split)) & set(few), key=lambda count: few[count][LANES_ROWS[0]][0])[
            :BEST_PARTS
        ]:
            law = {"parts": parts, **split}
            found = dict(whole if parts == split["split"] else wide_tiles(law, tiles, measure))
            for rows, pair in few[parts].items():
                if pair[0] < found[min(have for have in found if have >= rows)][0]:  # tiles for more rows take fewer
                    found[rows] = pair
            choices.append((total_us(found), law, found))
        choices.append((total_us(whole), split, whole))
    _, split, found = min(choices, key=lambda choice: choice[0])
    return entry_of(split, found)


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
    measure: Timer,
) -> dict[str, object]:
    """How K is split and, for each row count, the fastest tile with its microseconds."""
    split, found = min(most_promising(splits, tiles, measure), key=lambda pair: total_us(pair[1]))
    return entry_of(split, found)


def most_promising(
    splits: Sequence[configs.Config],
    tiles: dict[int, list[configs.Config]],
    measure: Timer,
) -> list[tuple[configs.Config, Found]]:
    """The best splits of K and, for each row count, their fastest tile.

    A few tiles choose the splits worth a closer look, in which every tile runs.
    """

    promising = sorted(splits, key=lambda split: total_us(wide_tiles(split, tiles, measure, FIRST_TILES)))[:BEST_SPLITS]
    return [(split, wide_tiles(split, tiles, measure)) for split in promising]


def wide_tiles(
    split: configs.Config, tiles: dict[int, list[configs.Config]], measure: Timer, count: int | None = None
) -> Found:
    """The fastest tile under a split for each row count, of the first `count` that fit."""
    return {
        rows: fastest([c for c in some if split.get("tail_from", 0) % c["block_n"] == 0][:count], split, measure)
        for rows, some in tiles.items()
    }


def fastest(
    tiles: Sequence[configs.Config], split: configs.Config, measure: Timer, *rows: int
) -> tuple[float, configs.Config]:
    """The tile that takes least under a split, with as many rows as it is for or the number given."""
    return min(((measure({**split, **tile}, *rows), tile) for tile in tiles), key=lambda pair: pair[0])


def total_us(found: Found) -> float:
    """Microseconds of all row counts, by how often decoding has them; counts without a tile take the next one's."""
    larger = {rows: min(have for have in found if have >= rows) for rows in WEIGHT_OF_ROWS}
    return sum(weight * found[larger[rows]][0] for rows, weight in WEIGHT_OF_ROWS.items())


def entry_of(split: configs.Config, found: Found) -> dict[str, object]:
    """An entry of the table."""
    rows_entry = {
        str(rows): {**{key: value for key, value in tile.items() if key != "block_m"}, "us": round(us, 2)}
        for rows, (us, tile) in sorted(found.items())
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
    laws = [{"split": split} for split in splits]
    if kernel == "w4a16" and group == 128:
        laws += [{"split": 1, "parts": 2}, {"split": 4, "parts": 8}]
    todo = [{**law, **tile} for law in laws for tile in tiles]
    if kernel == "w4a16" and group == 128:
        todo += [
            {"split": parts, **tile}
            for parts in PARTS
            for rows in LANES_TILES
            for tile in lanes_configs(rows, parts, 256)
        ]
    shares = [todo[i::jobs] for i in range(jobs)]
    with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        list(pool.map(_compile_some, [kernel] * jobs, shares, [dtype] * jobs, [group] * jobs))


def _compile_some(kernel: str, todo: Sequence[configs.Config], dtype: torch.dtype, group: int) -> None:
    k = STEP * PARTS[-1]
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
