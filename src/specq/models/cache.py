"""The key-value cache of one sequence, with the features of every committed token beside it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch


class KVCache:
    """K and V `[layers, kv_heads, max_len, head_dim]` and, if asked for, features `[max_len, feature_dim]`.

    Slots below `length` are committed tokens, slot = position. A forward pass writes its nodes from `length` on
    and commits nothing; only `keep`, `commit` and `truncate` change `length`.
    """

    def __init__(
        self,
        shape: tuple[int, int, int, int],
        *,
        feature_layers: tuple[int, ...] | str | None,
        feature_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """An empty cache of `shape` (layers, kv_heads, max_len, head_dim)."""
        self.max_len = shape[2]
        self.length = 0
        # Zeros, not garbage: a NaN in a masked slot would still reach the softmax.
        self.k = torch.zeros(shape, dtype=dtype, device=device)
        self.v = torch.zeros(shape, dtype=dtype, device=device)
        self.feature_layers = feature_layers
        self.features = (
            torch.zeros(self.max_len, feature_dim, dtype=dtype, device=device) if feature_layers is not None else None
        )

    def keep(self, path: Sequence[int]) -> None:
        """Commit these nodes of the last forward, root first, moving them to the front of the uncommitted slots.

        Raises ValueError when the nodes are not in ascending order or lie outside the cache.
        """
        start, count = self.length, len(path)
        if any(later <= earlier for earlier, later in pairwise(path)):
            raise ValueError(f"path: nodes {list(path)} are not in ascending order")
        if count and (path[0] < 0 or start + path[-1] >= self.max_len):
            raise ValueError(f"path: nodes {list(path)} lie outside a cache of {self.max_len} slots")
        moved = next((i for i, node in enumerate(path) if node != i), count)
        if moved < count:
            source = torch.tensor(path[moved:], device=self.k.device) + start
            target = slice(start + moved, start + count)
            self.k[:, :, target] = self.k[:, :, source]
            self.v[:, :, target] = self.v[:, :, source]
            if self.features is not None:
                self.features[target] = self.features[source]
        self.length = start + count

    def commit(self, count: int) -> None:
        """Commit the first `count` slots behind the last token, where a round on the device has put its path.

        Raises ValueError when they lie outside the cache.
        """
        if not 0 <= count <= self.max_len - self.length:
            raise ValueError(f"count: {count} slots behind {self.length} lie outside a cache of {self.max_len}")
        self.length += count

    def truncate(self, n: int) -> None:
        """Forget everything after the first `n` tokens. Raises ValueError when there are fewer."""
        if not 0 <= n <= self.length:
            raise ValueError(f"n: cannot truncate a cache of {self.length} tokens to {n}")
        self.length = n
