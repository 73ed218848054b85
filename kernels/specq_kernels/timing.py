"""How the benchmarks and the tuner measure: CUDA graphs of calls that rotate over enough weights to miss the L2."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Sequence

import torch

COLD_BYTES = 300e6  # an H200's L2 is 60 MB; rotating over this much leaves nothing of a weight's last use


def require_cuda(what: str) -> None:
    """Leave with one line where there is no CUDA device to measure."""
    if not torch.cuda.is_available():
        sys.exit(f"{what} needs a CUDA device")


def copies_for(num_bytes: int) -> int:
    """How many copies of a weight of `num_bytes` a measurement rotates over."""
    return max(2, min(64, -(-int(COLD_BYTES) // num_bytes)))


def copy_bandwidth() -> float:
    """Bytes a second that a kernel reads and writes on this device, of 1 GiB each, both counted.

    Negation, since a graph makes of `copy_` the driver's own copy and no kernel.
    """
    source = torch.empty(1 << 28, dtype=torch.int32, device="cuda").random_()
    target = torch.empty_like(source)
    return 2 * source.nbytes / (graph_us([lambda: torch.neg(source, out=target)], target_us=5000) * 1e-6)


def graph_us(calls: Sequence[Callable[[], object]], *, repeats: int = 7, target_us: float = 1500.0) -> float:
    """Median microseconds a call, of replays of one CUDA graph that runs `calls` in turn (several rounds if short)."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls:
            call()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for call in calls:
                call()
        graph.replay()
        rounds = max(1, int(target_us / _elapsed_us(graph, 1)))
        times = [_elapsed_us(graph, rounds) for _ in range(repeats)]
    torch.cuda.current_stream().wait_stream(stream)
    return statistics.median(times) / len(calls)


def _elapsed_us(graph: torch.cuda.CUDAGraph, rounds: int) -> float:
    """Microseconds a replay, of `rounds` in a row between two events."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(rounds):
        graph.replay()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1e3 / rounds
