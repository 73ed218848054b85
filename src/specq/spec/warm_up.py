"""What decoding on a GPU compiles and captures at its first use, done before an answer or a clock waits for it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import torch

from specq.spec.eagle_tree import EagleTree
from specq.spec.self_chain import SelfChain
from specq.spec.speculator import Speculator
from specq.spec.tree import MAX_NODES, chain

NODES = (1, 2, 4, 8, 10, 16, 32, 64)
NEW_ROWS = (1, 2, 4, 8, 16)
TRUNKS = (0, 1)
"""What a round's graphs differ by: nodes of a verification; a head's rows with new features, and tokens without."""

CHAINS = 8
"""Of the target's own drafts the longest and those up to here; others end an answer, and are captured when one does.
They follow one pending token, as all do but the first of a context that was continued."""

CONTEXT = 2 * NEW_ROWS[-1]


def warm_up(speculator: Speculator) -> None:
    """Run the sizes of verification and drafting that recur once, on every level; its caches are empty afterwards."""
    context = [0] * (CONTEXT + 1)
    with torch.inference_mode():
        for level in speculator.levels():
            level.rollback(0)
            if level.verifier.cache.max_len < CONTEXT + MAX_NODES:
                continue
            level.verifier.prefill(context[:-1])
            for nodes in NODES:
                level.verifier.rollback(CONTEXT)
                level.verifier.verify(context, chain([0] * (nodes - 1), device=level.verifier.model.device))
            level.verifier.rollback(CONTEXT)
            if isinstance(level.drafter, EagleTree):
                _warm_up_head(level.drafter, context)
            elif isinstance(level.drafter, SelfChain):
                longest = level.drafter.draft_length
                for length in sorted({longest, *range(1, min(longest, CHAINS) + 1)}):
                    level.drafter.propose(context, max_nodes=MAX_NODES - 1, max_depth=length)
            level.rollback(0)


def _warm_up_head(drafter: EagleTree, context: Sequence[int]) -> None:
    depths = range(1, drafter.shape.depth + 1)
    for rows, trunk, depth in product(NEW_ROWS, TRUNKS, depths):
        drafter.cache.truncate(0)
        drafter.cache.keep(range(CONTEXT - rows))
        drafter.propose([*context, *[0] * trunk], max_nodes=MAX_NODES - 1, max_depth=depth)
