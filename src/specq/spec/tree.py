"""Draft trees and the pure functions on them; a chain is a tree, and no other file knows how one is laid out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

MAX_NODES = 64
"""Rows one verification runs at the most, pending tokens included (an ancestor mask is one 64-bit word)."""


@dataclass(frozen=True)
class DraftTree:
    """Nodes in an order in which parents precede children; parent -1 hangs off whatever the tree is grafted to.

    `tokens` and `parents` are int32 [nodes]. `is_chain` is known when a tree is made, so that no device is asked.
    """

    tokens: Tensor
    parents: Tensor
    is_chain: bool

    @classmethod
    def from_lists(
        cls, tokens: Sequence[int], parents: Sequence[int], *, device: torch.device | None = None
    ) -> DraftTree:
        """The tree of these nodes. Raises ValueError when a parent does not precede its child."""
        if len(tokens) != len(parents):
            raise ValueError(f"tokens and parents differ in length: {len(tokens)} and {len(parents)}")
        for node, parent in enumerate(parents):
            if not -1 <= parent < node:
                raise ValueError(f"parents: node {node} has parent {parent}, which does not precede it")
        is_chain = all(parent == node - 1 for node, parent in enumerate(parents))
        return cls(
            torch.tensor(list(tokens), dtype=torch.int32, device=device),
            torch.tensor(list(parents), dtype=torch.int32, device=device),
            is_chain,
        )

    def __len__(self) -> int:
        return self.tokens.shape[0]

    def depths(self) -> Tensor:
        """int32 [nodes]: edges between a node and its root (0 for a root)."""
        if self.is_chain:
            return torch.arange(len(self), dtype=torch.int32, device=self.tokens.device)
        return self.ancestor_mask().sum(1, dtype=torch.int32) - 1

    def ancestor_mask(self) -> Tensor:
        """bool [nodes, nodes]: row i is true at i and at every ancestor of i."""
        n, device = len(self), self.tokens.device
        if self.is_chain:
            return torch.ones(n, n, dtype=torch.bool, device=device).tril_()
        # Reachability by squaring: after k products paths of 2**k edges are in; no step depends on the data.
        reach = torch.eye(n + 1, dtype=torch.float32, device=device)
        reach[torch.arange(1, n + 1, device=device), self.parents.long() + 1] = 1.0
        for _ in range(max(n - 1, 1).bit_length()):
            reach = (reach @ reach).clamp_(max=1.0)
        return reach[1:, 1:] > 0


def chain(tokens: Sequence[int], *, device: torch.device | None = None) -> DraftTree:
    """The tree in which every token follows the one before."""
    nodes = torch.tensor(list(tokens), dtype=torch.int32, device=device)
    return DraftTree(nodes, torch.arange(-1, len(tokens) - 1, dtype=torch.int32, device=device), True)


def graft(pending: Sequence[int], tree: DraftTree, *, device: torch.device | None = None) -> DraftTree:
    """The tree below a trunk of pending tokens: roots of `tree` become children of the last of them.

    It lies on `device`; drafters that draft on the CPU need not know the verifier's.
    """
    trunk = chain(pending, device=device)
    n = len(trunk)
    return DraftTree(
        torch.cat([trunk.tokens, tree.tokens.to(trunk.tokens.device)]),
        torch.cat([trunk.parents, tree.parents.to(trunk.parents.device) + n]),
        tree.is_chain,
    )


def walk(tree: DraftTree, sampled: Sequence[int], *, start: int) -> list[int]:
    """The nodes from `start` down that follow the sampled tokens: a child is taken while it is its parent's sample.

    `sampled[i]` belongs to node `start + i`. Of two equal siblings the first is taken.
    """
    children: dict[tuple[int, int], int] = {}
    for node, (parent, token) in enumerate(zip(tree.parents.tolist(), tree.tokens.tolist(), strict=True)):
        if node > start:
            children.setdefault((parent, token), node)
    path = [start]
    while (child := children.get((path[-1], sampled[path[-1] - start]))) is not None:
        path.append(child)
    return path
