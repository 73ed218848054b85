"""Chooses the tiles of 4-bit products where they run, in a step: `python -m specq.bench.step_tiles [8b] [70b]`.

`python -m specq_kernels.tune` times each product alone and chooses how K is summed; beside its neighbours in a step
another tile can be faster. Here every tile of the tuned law takes its place in a step of a few layers, one product and
one number of nodes after another, and stays where it is faster by more than timing wavers. Random weights, so timing
only. What is found goes where tune writes, into this user's table.
"""

from __future__ import annotations

import argparse
import copy
import json
import multiprocessing
import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specq.bench.step_times import TREES, StepBench
from specq.models.random_weights import GROUP, SHAPES, llama_config, random_model
from specq_kernels import configs, tune
from specq_kernels.launch import ROW_BUCKETS, device_name
from specq_kernels.timing import require_cuda

KERNEL = "w4a16"
NODES = (4, 8, 16, 30, 60)
LAYERS = 8
MARGIN = 0.004
"""Part of a step by which another tile has to be faster to be taken: what repeated steps differ by."""
AGAIN = 3
"""Turns in which the present tile and the best of the others are timed once more before it is taken."""

Entry = dict[str, Any]
Timer = Callable[[int], float]  # milliseconds of a step of so many nodes, under the table as it is


@dataclass(frozen=True)
class Trial:
    """A tile for one product's row of the table."""

    key: str
    rows: str
    nodes: int
    tile: configs.Config


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m specq.bench.step_tiles", description=__doc__)
    parser.add_argument("models", nargs="*", default=list(SHAPES), help=f"{', '.join(SHAPES)} (default: all)")
    parser.add_argument("--nodes", type=int, nargs="+", default=list(NODES), help="nodes of the steps")
    parser.add_argument("--context", type=int, default=1024, help="tokens before them")
    parser.add_argument("--layers", type=int, default=LAYERS, help="layers of the models")
    parser.add_argument("--output", type=Path, help="file to write (default: this user's cache)")
    parser.add_argument("--jobs", type=int, default=8, help="processes that compile")
    options = parser.parse_args(arguments)
    for name in options.models:
        if name not in SHAPES:
            parser.error(f"`{name}` is none of {', '.join(SHAPES)}")
    require_cuda("choosing tiles")
    device = device_name(0)
    path = options.output or configs.user_file(device)
    for name in options.models:
        entries = tuned_entries(device, name)
        with Trials(device, entries) as table:
            found = [trial for nodes in options.nodes for key in entries for trial in trials(key, entries[key], nodes)]
            compile_trials(name, found, options.context, device, entries, options.jobs)
            measure = step_timer(name, options.layers, options.context)
            for nodes in options.nodes:
                for line in choose(table, [trial for trial in found if trial.nodes == nodes], nodes, measure):
                    print(f"{name:<5}{line}", flush=True)
                tune.save(path, KERNEL, table.entries)
    print(f"wrote {path}", file=sys.stderr)


def tuned_entries(device: str, name: str) -> dict[str, Entry]:
    """The table's entries of a model's four products, by their keys; ends where one is missing."""
    found = {}
    for n, k in tune.LAYERS[name].values():
        key = configs.shape_key(*tune.padded_shape(n, k), GROUP)
        entry = configs.lookup(device, KERNEL, key)
        if entry is None:
            sys.exit(f"{key} is not tuned for {device}: run `python -m specq_kernels.tune {name}` first")
        found[key] = copy.deepcopy(entry)
    return found


def trials(key: str, entry: Entry, nodes: int) -> list[Trial]:
    """Every tile that the entry's law allows for steps of so many nodes, but the present one."""
    n = int(key.split("x")[0])
    rows = str(min(int(count) for count in entry["rows"] if int(count) >= nodes))
    tiles = []
    if int(rows) >= min(ROW_BUCKETS):
        wide = tune.tile_configs(KERNEL, int(rows), has_roles=tune.runs_roles(GROUP))
        tiles += [tile for tile in wide if not n % tile["block_n"] and not entry["tail_from"] % tile["block_n"]]
    parts = entry["parts"] if "parts" in entry else entry["split"]
    if int(rows) in tune.LANES_ROWS and entry["split"] in (1, entry["tail_split"]):
        tiles += tune.lanes_configs(int(rows), parts, n)
    named = [{name: value for name, value in tile.items() if name != "block_m"} for tile in tiles]
    present = {name: value for name, value in entry["rows"][rows].items() if name != "us"}
    return [Trial(key, rows, nodes, tile) for tile in named if tile != present]


class Trials:
    """A table that the kernels of this process follow instead of the user's, as long as it is entered."""

    def __init__(self, device: str, entries: dict[str, Entry]) -> None:
        self.entries, self._device = copy.deepcopy(entries), device

    def __enter__(self) -> Trials:
        self._folder = tempfile.TemporaryDirectory()
        self._cache = os.environ.get("SPECQ_CACHE")
        os.environ["SPECQ_CACHE"] = self._folder.name
        self._write()
        return self

    def __exit__(self, *_: object) -> None:
        os.environ.pop("SPECQ_CACHE")
        if self._cache is not None:
            os.environ["SPECQ_CACHE"] = self._cache
        self._folder.cleanup()
        _forget()

    @contextmanager
    def trying(self, trial: Trial) -> Iterator[None]:
        """The trial's tile in its place for a while."""
        present = self.entries[trial.key]["rows"][trial.rows]
        self.take(trial)
        try:
            yield
        finally:
            self.entries[trial.key]["rows"][trial.rows] = present
            self._write()

    def take(self, trial: Trial) -> None:
        """The trial's tile in its place from here on."""
        self.entries[trial.key]["rows"][trial.rows] = dict(trial.tile)
        self._write()

    def _write(self) -> None:
        path = configs.user_file(self._device)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({KERNEL: self.entries}))
        _forget()


def _forget() -> None:
    configs.lookup.cache_clear()
    configs.read.cache_clear()


def choose(table: Trials, found: Sequence[Trial], nodes: int, measure: Timer) -> Iterator[str]:
    """Leave the fastest tile of each product in the table; a line for each."""
    for key in table.entries:
        some = [trial for trial in found if trial.key == key]
        if not some:
            continue
        times = []
        for trial in some:
            with table.trying(trial):
                times.append(measure(nodes))
        best = some[times.index(min(times))]
        before, after = [], []
        for _ in range(AGAIN):  # in turns, so that a clock that drifts touches both
            before.append(measure(nodes))
            with table.trying(best):
                after.append(measure(nodes))
        old, new = statistics.median(before), statistics.median(after)
        taken = new < old * (1 - MARGIN)
        if taken:
            table.take(best)
        yield (f"{key:<18}{nodes:>3} nodes {old:>8.4f} ms {new:>8.4f} {'taken' if taken else 'not taken'}"
               f" {json.dumps(best.tile)}")  # fmt: skip


def step_timer(name: str, layers: int, context: int) -> Timer:
    """Milliseconds of a step of a random model of this shape with so many layers, captured anew at each call."""
    model = random_model(llama_config(**{**SHAPES[name], "num_hidden_layers": layers}), device="cuda", dtype="bfloat16")

    def measure(nodes: int) -> float:
        bench = StepBench(model, context)
        bench.load(nodes, "tree" if nodes in TREES else "chain")
        return bench.step_ms()

    return measure


def compile_trials(
    name: str, found: Sequence[Trial], context: int, device: str, entries: dict[str, Entry], jobs: int
) -> None:
    """Fill Triton's cache from several processes, so that measuring waits for no compiler."""
    shares = [found[i::jobs] for i in range(jobs)]
    with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        list(pool.map(_compile_some, [name] * jobs, shares, [context] * jobs, [device] * jobs, [entries] * jobs))


def _compile_some(name: str, found: Sequence[Trial], context: int, device: str, entries: dict[str, Entry]) -> None:
    with Trials(device, entries) as table:
        measure = step_timer(name, 1, context)
        for trial in found:
            with table.trying(trial):
                measure(trial.nodes)


if __name__ == "__main__":
    main()
