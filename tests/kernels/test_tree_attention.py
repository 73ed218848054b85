"""Tree attention in the interpreter: against plain causal attention along every branch, odd shapes, windows, sums."""

from __future__ import annotations

import random

import pytest
import torch

from specq_kernels.group_sums import Sides, group_sums_ref
from specq_kernels.tree_attention import FOLD, LEAF, LEAVES, pack_mask, tree_attention, tree_attention_ref


def random_tree(nodes: int, seed: int, *, is_chain: bool = False) -> list[int]:
    """Parents; the first node hangs off the committed tokens."""
    draw = random.Random(seed)
    return [-1] + [i - 1 if is_chain else draw.randint(max(0, i - 6), i - 1) for i in range(1, nodes)]


def branch_of(parents: list[int], node: int) -> list[int]:
    path = []
    while node >= 0:
        path.append(node)
        node = parents[node]
    return path[::-1]


def tree_tensors(parents: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Mask words and depths."""
    ancestors = torch.zeros(len(parents), len(parents), dtype=torch.bool)
    for node in range(len(parents)):
        ancestors[node, branch_of(parents, node)] = True
    return pack_mask(ancestors), ancestors.sum(1, dtype=torch.int32) - 1


def random_case(nodes: int, heads: int, kv_heads: int, head_dim: int, length: int, dtype: torch.dtype) -> tuple:
    q = torch.randn(nodes, heads, head_dim, dtype=dtype)
    k, v = torch.randn(2, kv_heads, -(-(length + nodes) // 16) * 16, head_dim, dtype=dtype).unbind()
    return q, k, v, torch.tensor([length], dtype=torch.int32)


def exact_case(nodes: int, heads: int, kv_heads: int, head_dim: int, length: int) -> tuple:
    """A case in float32, which shows an order of addition that float16 rounds away.

    numpy's order within a product depends on its number of rows, so no product here rounds a sum: scores are sums of
    64ths, and of a tile's values a column has one that is not 0.
    """
    q, k, v, at = random_case(nodes, heads, kv_heads, head_dim, length, torch.float32)
    q, k = ((8 * x).round().clamp(-16, 16) / 8 for x in (q, k))
    return q, k, v * torch.eye(LEAF, head_dim).repeat(-(-v.shape[1] // LEAF), 1)[: v.shape[1]], at


def causal_last(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, slots: list[int], node: int, window: int | None
) -> torch.Tensor:
    """Plain attention of one query over the keys of its own branch, in order."""
    shared = q.shape[1] // k.shape[0]
    keys, values = (t[:, slots].double().repeat_interleave(shared, 0) for t in (k, v))
    if window is not None:
        keys, values = keys[:, -window:], values[:, -window:]
    scores = torch.einsum("hd,hkd->hk", q[node].double(), keys) / q.shape[2] ** 0.5
    return torch.einsum("hk,hkd->hd", scores.softmax(-1), values).flatten()


@pytest.mark.parametrize("window", [None, 5, 40])
def test_every_branch_equals_causal_attention_along_it(window: int | None) -> None:
    parents = random_tree(40, 1)
    mask, depths = tree_tensors(parents)
    q, k, v, length = random_case(40, 4, 2, 64, 90, torch.float32)
    out = tree_attention(q, k, v, mask, length, depths=depths, window=window)
    for node in range(40):
        slots = [*range(90), *(90 + i for i in branch_of(parents, node))]
        expected = causal_last(q, k, v, slots, node, window)
        # float32 against float64 over some 100 keys
        torch.testing.assert_close(out[node].double(), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("nodes", "heads", "kv_heads", "head_dim", "length"),
    [(1, 3, 1, 80, 0), (7, 7, 1, 96, 63), (33, 2, 2, 128, 64), (64, 2, 1, 64, 257), (5, 14, 2, 64, 600)],
)
def test_odd_shapes_equal_the_definition(nodes: int, heads: int, kv_heads: int, head_dim: int, length: int) -> None:
    mask, _ = tree_tensors(random_tree(nodes, nodes))
    q, k, v, at = random_case(nodes, heads, kv_heads, head_dim, length, torch.float16)
    out = tree_attention(q, k, v, mask, at)
    # weights are rounded to fp16 before they meet the values
    torch.testing.assert_close(out, tree_attention_ref(q, k, v, mask, at), rtol=5e-3, atol=2e-3)


@pytest.mark.parametrize("leaves", [6, LEAVES])  # with 6, leaves double at position 384, among the rows
def test_a_chain_row_does_not_depend_on_how_many_rows_run(leaves: int) -> None:
    mask, _ = tree_tensors(random_tree(14, 0, is_chain=True))
    q, k, v, length = exact_case(14, 2, 1, LEAF, 378)
    whole = tree_attention(q, k, v, mask, length, config={"leaves": leaves})
    # both add some 400 weights in float32, in different orders
    torch.testing.assert_close(whole, tree_attention_ref(q, k, v, mask, length), rtol=1e-4, atol=1e-6)
    for config in (
        {"folded": FOLD, "block_q": 128, "merged": 8},
        {"folded": FOLD, "block_q": 64, "batch": 2},
        {"folded": 1, "block_q": 16, "batch": 1},
    ):
        assert torch.equal(tree_attention(q, k, v, mask, length, config={"leaves": leaves, **config}), whole), config
    for first, last in ((0, 1), (0, 7), (5, 6), (5, 14), (13, 14)):
        part_mask, _ = tree_tensors(random_tree(last - first, 0, is_chain=True))
        at = torch.tensor([378 + first], dtype=torch.int32)
        part = tree_attention(q[first:last].contiguous(), k, v, part_mask, at, config={"leaves": leaves})
        assert torch.equal(part, whole[first:last])


def test_nodes_after_earlier_ones_give_the_rows_of_all() -> None:
    mask, _ = tree_tensors(random_tree(41, 4))
    q, k, v, length = exact_case(41, 2, 1, LEAF, 230)
    whole = tree_attention(q, k, v, mask, length)
    for first, last in ((0, 10), (10, 20), (33, 41)):
        rows = q[first:last].contiguous(), k, v, mask[first:last].contiguous(), length
        assert torch.equal(tree_attention(*rows, earlier=first), whole[first:last])
        reference = tree_attention_ref(*rows, earlier=first)
        torch.testing.assert_close(reference, whole[first:last], rtol=1e-4, atol=1e-6)  # float32, as above


@pytest.mark.parametrize(("heads", "head_dim", "group"), [(4, 64, 128), (4, 64, 32), (2, 128, 64), (2, 128, 128)])
def test_group_sums_of_the_output_are_emitted(heads: int, head_dim: int, group: int) -> None:
    mask, _ = tree_tensors(random_tree(6, 3))
    q, k, v, length = random_case(6, heads, 1, head_dim, 70, torch.float16)
    sides = Sides(torch.zeros(heads * head_dim // group, 16))
    out = tree_attention(q, k, v, mask, length, sides=sides)
    torch.testing.assert_close(sides.sums, group_sums_ref(out, group), rtol=1e-5, atol=1e-5)


def test_mask_words_hold_all_64_nodes() -> None:
    words = pack_mask(torch.ones(64, 64, dtype=torch.bool).tril())
    assert words[31].tolist() == [-1, 0]
    assert words[63].tolist() == [-1, -1]
    assert words[32].tolist() == [-1, 1]


@pytest.mark.parametrize("config", [{"folded": 2}, {"folded": FOLD, "leaves": 7}])
def test_pieces_that_would_change_the_order_of_addition_are_refused(config: dict[str, int]) -> None:
    q, k, v, length = random_case(1, 4, 2, 64, 10, torch.float16)
    with pytest.raises(ValueError, match="config: "):
        tree_attention(q, k, v, torch.ones(1, 2, dtype=torch.int32), length, config=config)


def test_errors_name_the_argument() -> None:
    q, k, v, length = random_case(4, 4, 2, 64, 10, torch.float16)
    mask, _ = tree_tensors(random_tree(4, 0))
    with pytest.raises(ValueError, match="depths: needed"):
        tree_attention(q, k, v, mask, length, window=8)
    with pytest.raises(ValueError, match="earlier: not with"):
        tree_attention(q, k, v, mask, length, depths=mask[:, 0].contiguous(), window=8, earlier=1)
    with pytest.raises(ValueError, match="mask: dtype"):
        tree_attention(q, k, v, mask.long(), length)
    with pytest.raises(ValueError, match="k: shape"):
        tree_attention(q, k[:, :, :32].contiguous(), v, mask, length)
