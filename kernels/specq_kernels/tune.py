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
from collections.abc import Iterable, Sequence
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
SPLITS = (1, 2, 3, 4, 5, 6, 8)
TILES = {  # rows: (block_n, warps, stages, registers a thread or 0, weights straight to registers)
    16: (
        (64, 4, 2, 0, 1), (64, 4, 3, 0, 1), (64, 4, 4, 0, 1), (64, 4, 3, 80, 1), (64, 4, 3, 0, 0), (64, 4, 4, 0, 0),
        (128, 4, 2, 0, 1), (128, 4, 3, 0, 1), (128, 4, 3, 160, 1), (128, 4, 3, 128, 1), (128, 4, 4, 0, 1),
        (128, 8, 3, 0, 1), (128, 4, 3, 0, 0),
    ),
    32: (
        (64, 4, 2, 0, 1), (64, 4, 3, 0, 1), (64, 4, 3, 0, 0), (128, 4, 2, 0, 1), (128, 4, 3, 0, 1), (128, 4, 3, 0, 0),
        (128, 8, 2, 0, 1), (128, 8, 3, 0, 1),
    ),
    64: (
        (64, 4, 2, 0, 1), (64, 4, 3, 0, 1), (64, 4, 2, 0, 0), (128, 4, 2, 0, 0), (128, 4, 2, 0, 1), (128, 8, 2, 0, 1),
        (128, 8, 3, 0, 1), (256, 8, 3, 0, 0),
    ),
}  # fmt: skip
PREFETCH = (0, 8)
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
    compile_all(candidates(SPLITS), dtype, options.group, options.jobs)
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


def candidates(splits: Iterable[int]) -> list[configs.Config]:
    """Every configuration that is tried."""
    return [
        {
            "split": split,
            "block_m": rows,
            "block_n": n,
            "warps": warps,
            "stages": stages,
            "registers": regs, "direct": direct,
            "prefetch": prefetch,
        }
        for split in splits
        for rows, tiles in TILES.items()
        for (n, warps, stages, regs, direct), prefetch in itertools.product(tiles, PREFETCH)
    ]


def plausible_splits(n: int, k: int) -> list[int]:
    """Splits that leave each program at least two steps and the device at least one program a multiprocessor."""
    return [s for s in SPLITS if k // STEP >= 2 * s and n // 64 * s <= 16 * num_multiprocessors(0)]


def tune_w4a16(n: int, k: int, *, group: int, dtype: torch.dtype) -> dict[str, object]:
    """The table entry of one shape: split and, for each row count, the fastest tile with its microseconds."""
    first = random_weight(n, k, group)
    weights = [first, *(random_weight(n, k, group) for _ in range(copies_for(first.num_bytes()) - 1))]
    best: dict[int, dict[int, dict[str, float]]] = {}
    for rows in ROW_BUCKETS:
        x = torch.randn(rows, k, device="cuda", dtype=dtype)
        sums = group_sums(x, group)
        for config in candidates(plausible_splits(n, k)):
            if config["block_m"] != rows or weights[0].padded[0] % config["block_n"]:
                continue
            us = graph_us([lambda w=w, c=config, x=x, s=sums: w4a16(x, w, sums=s, config=c) for w in weights],
                          repeats=3, target_us=600)  # fmt: skip
            tile = {key: value for key, value in config.items() if key not in ("split", "block_m")}
            found = best.setdefault(config["split"], {}).setdefault(rows, {"us": float("inf")})
            if us < found["us"]:
                best[config["split"]][rows] = {**tile, "us": round(us, 2)}
    split = min(best, key=lambda s: sum(WEIGHT_OF_ROWS[r] * best[s][r]["us"] for r in ROW_BUCKETS))
    return {"split": split, "rows": {str(rows): best[split][rows] for rows in ROW_BUCKETS}}


def random_weight(n: int, k: int, group: int) -> W4Weight:
    """A symmetric weight with outputs of unit size."""
    codes = torch.randint(-(2**31), 2**31 - 1, (n, k // 8), dtype=torch.int32, device="cuda")
    scales = (torch.rand(n, -(-k // group), device="cuda") + 0.5).mul_(0.2 / k**0.5).half()
    return pack_w4(codes, scales, group_size=group)


def compile_all(todo: Sequence[configs.Config], dtype: torch.dtype, group: int, jobs: int) -> None:
    """Fill Triton's cache from several processes, so that measuring waits for no compiler."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, mp_context=context) as pool:
        list(pool.map(_compile_some, [todo[i::jobs] for i in range(jobs)], [dtype] * jobs, [group] * jobs))


def _compile_some(todo: Sequence[configs.Config], dtype: torch.dtype, group: int) -> None:
    weight = random_weight(256, STEP * max(SPLITS), group)
    for config in todo:
        w4a16(torch.randn(config["block_m"], weight.shape[1], device="cuda", dtype=dtype), weight, config=config)
    torch.cuda.synchronize()


if __name__ == "__main__":
    main()
