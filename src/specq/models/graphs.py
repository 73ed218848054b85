"""Functions over fixed buffers that run as CUDA graphs, captured once each; elsewhere they run as they are."""

from __future__ import annotations

import gc
from collections.abc import Callable, Hashable

import torch

MOST_GRAPHS = 256
"""Graphs kept at once; past it all are dropped and captured anew when they are asked for."""


class GraphPool:
    """The memory and the stream that graphs of a model are captured with."""

    def __init__(self, device: torch.device) -> None:
        self.handle = torch.cuda.graph_pool_handle()
        # One for all: every stream that multiplies gets a workspace of its own from cuBLAS.
        self.stream = torch.cuda.Stream(device)
        # Held for good, because no graph can be captured into a pool whose graphs are all gone.
        self._anchor = self.capture(lambda: torch.zeros(1, device=device))

    def capture(self, function: Callable[[], object]) -> torch.cuda.CUDAGraph:
        """The graph of `function`, which runs once before: kernels compile and load outside of a capture."""
        graph = torch.cuda.CUDAGraph()
        self.stream.wait_stream(torch.cuda.current_stream())
        is_collecting = gc.isenabled()
        with torch.cuda.stream(self.stream):
            function()
            torch.cuda.synchronize()
            gc.disable()  # what a collection frees could call the driver in the middle of a capture
            try:
                graph.capture_begin(pool=self.handle, capture_error_mode="thread_local")
                try:
                    function()
                finally:
                    graph.capture_end()
            finally:
                if is_collecting:
                    gc.enable()
        torch.cuda.current_stream().wait_stream(self.stream)
        return graph


class Graphs:
    """A function is known by its key: what runs under a key must be the same every time, values in buffers apart."""

    def __init__(self, pool: GraphPool | None) -> None:
        """Without a pool everything runs eagerly."""
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
            graph = self._captured[key] = self._pool.capture(function)
        graph.replay()

    @property
    def keys(self) -> tuple[Hashable, ...]:
        """What has a graph, in the order of capture."""
        return tuple(self._captured)
