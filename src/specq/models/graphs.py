"""Functions over fixed buffers that run as CUDA graphs, captured once each; elsewhere they run as they are."""

from __future__ import annotations

import gc
from collections.abc import Callable, Hashable
from typing import Any

import torch

MOST_GRAPHS = 256
"""Graphs kept at once; past it all are dropped and captured anew when they are asked for."""


class Graphs:
    """A function is known by its key: what runs under a key must be the same every time, values in buffers apart."""

    def __init__(self, pool: Any) -> None:
        """`pool` is what `graph_pool` gave; None runs everything eagerly."""
        self._pool = pool
        self._captured: dict[Hashable, torch.cuda.CUDAGraph] = {}

    def run(self, key: Hashable, function: Callable[[], None]) -> None:
        """Do what `function` does."""
        if self._pool is None:
            function()
            return
        graph = self._captured.get(key)
        if graph is None:
            if len(self._captured) >= MOST_GRAPHS:
                self._captured.clear()
            graph = self._captured[key] = self._capture(function)
        graph.replay()

    @property
    def keys(self) -> tuple[Hashable, ...]:
        """What has a graph, in the order of capture."""
        return tuple(self._captured)

    def _capture(self, function: Callable[[], None]) -> torch.cuda.CUDAGraph:
        """The graph of `function`, which runs once before: kernels compile and load outside of a capture."""
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        is_collecting = gc.isenabled()
        with torch.cuda.stream(stream):
            function()
            torch.cuda.synchronize()
            gc.disable()  # what a collection frees could call the driver in the middle of a capture
            try:
                graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
                try:
                    function()
                finally:
                    graph.capture_end()
            finally:
                if is_collecting:
                    gc.enable()
        torch.cuda.current_stream().wait_stream(stream)
        return graph


def graph_pool(device: torch.device, *, use_graphs: bool) -> Any:
    """The memory that graphs of a device share; None where none are captured."""
    return torch.cuda.graph_pool_handle() if use_graphs and device.type == "cuda" else None
