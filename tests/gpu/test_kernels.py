"""Kernels on a GPU against float64: the PTX forms, bf16, row independence and determinism, which no CPU test sees."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from specq_kernels.group_sums import Sides, empty_sides, sides
from specq_kernels.kv_cache import append_rotary, append_rotary_ref, compact, compact_ref
from specq_kernels.lane_order import lanes_ref
from specq_kernels.launch import ROW_BUCKETS
from specq_kernels.norm_rope import rms_norm, rms_norm_parts, rms_norm_ref, silu_mul, silu_mul_ref
from specq_kernels.round_rows import round_rows
from specq_kernels.sampling import Draw, argmax, gumbel_argmax, gumbel_argmax_ref
from specq_kernels.tree_attention import FOLD, LEAF, LEAVES, pack_mask, tree_attention, tree_attention_ref
from specq_kernels.tune import runs_roles, tile_configs
from specq_kernels.w4_layout import W4Weight, pack_w4
from specq_kernels.w4_prefill import w4_prefill
from specq_kernels.w4a16 import w4a16, w4a16_parts, w4a16_ref, w4a16_silu
from specq_kernels.w8a16 import pack_w8, w8a16
from specq_kernels.w16a16 import W16Weight, w16a16, w16a16_argmax, w16a16_ref

pytestmark = pytest.mark.gpu

DTYPES = (torch.bfloat16, torch.float16)
ROLES = [  # of w4_hopper
    {"block_n": block_n, "groups": groups, "stages": 4, "roles": 1, "together": together, "fma": fma}
    for together, fma in ((0, 1), (1, 0))
    for block_n, groups in ((128, 1), (128, 2), (256, 2), (256, 4))
]
TOLERANCE = {torch.bfloat16: 4e-3, torch.float16: 1e-3}  # output rounding 2^-9 and 2^-12 of the value, and slack


def roles(block_m: int) -> list[dict[str, int]]:
    """Every kind of tile of w4_hopper for so many rows: `mma.sync` is for 16."""
    return ROLES + [{**tile, "sync": 1, "fma": tile["together"]} for tile in ROLES] * (block_m == 16)


def error(y: torch.Tensor, reference: torch.Tensor) -> float:
    return ((y.double() - reference).norm() / reference.norm()).item()


def random_weight(n: int, k: int, group: int, form: str, *, is_gate_up: bool = False) -> W4Weight:
    codes = torch.randint(-(2**31), 2**31 - 1, (n, k // 8), dtype=torch.int32, device="cuda")
    groups = 1 if group == -1 else -(-k // group)
    scales = (torch.rand(n, groups, device="cuda") * 0.02 + 0.01).half()
    if form == "zeros":
        zeros = torch.randint(0, 17, (n, groups), dtype=torch.uint8, device="cuda")
        return pack_w4(codes, scales, group_size=group, zeros=zeros, is_gate_up=is_gate_up)
    if form == "minima":
        minima = (-torch.rand(n, groups, device="cuda") * 0.1).half()
        return pack_w4(codes, scales, group_size=group, minima=minima, is_gate_up=is_gate_up)
    if form == "two-level":
        d, dmin = (torch.rand(2, n, k // 256, device="cuda") * 1e-3).half()
        subs = torch.randint(0, 64, (2, n, k // 32), dtype=torch.uint8, device="cuda")
        return pack_w4(codes, d, group_size=32, minima=dmin, sub_scales=subs[0], sub_minima=subs[1],
                       is_gate_up=is_gate_up)  # fmt: skip
    return pack_w4(codes, scales, group_size=group, is_gate_up=is_gate_up)


CASES = [
    (4096, 4096, 128, "symmetric"),  # in the H200's table, with tiles for few rows, as the next two
    (6144, 4096, 128, "zeros"),
    (28672, 4096, 128, "symmetric"),
    (1024, 2048, 128, "symmetric"),
    (1000, 2048, 128, "zeros"),
    (576, 1536, 64, "symmetric"),
    (1536, 576, 128, "symmetric"),
    (896, 4864, 128, "zeros"),
    (512, 2048, 32, "minima"),
    (512, 2048, 32, "two-level"),
    (512, 2048, 32, "symmetric"),
    (512, 1000, -1, "symmetric"),
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("n", "k", "group", "form"), CASES)
def test_w4a16_equals_the_float64_product_and_rows_do_not_depend_on_their_number(
    n: int, k: int, group: int, form: str, dtype: torch.dtype
) -> None:
    weight = random_weight(n, k, group, form)
    x = torch.randn(64, k, device="cuda", dtype=dtype)
    bias = torch.randn(n, device="cuda", dtype=dtype)
    residual = torch.randn(64, n, device="cuda", dtype=dtype)
    whole = w4a16(x, weight, bias=bias, residual=residual)
    reference = w4a16_ref(x.double(), weight, bias=bias.double(), residual=residual.double())
    assert error(whole, reference) < TOLERANCE[dtype]
    for rows in (1, 2, 4, 5, 7, 8, 9, 15, 16, 17, 31, 32, 33, 60, 63):
        part = w4a16(x[:rows].contiguous(), weight, bias=bias, residual=residual[:rows].contiguous())
        assert torch.equal(part, whole[:rows]), rows
    assert not weight.counters.any()


@pytest.mark.parametrize("dtype", DTYPES)
def test_silu_product_equals_the_float64_one(dtype: torch.dtype) -> None:
    for form, group in (("symmetric", 128), ("zeros", 64)):
        weight = random_weight(1536, 1024, group, form, is_gate_up=True)
        x = torch.randn(20, 1024, device="cuda", dtype=dtype)
        assert error(w4a16_silu(x, weight), w4a16_ref(x.double(), weight)) < TOLERANCE[dtype]


@pytest.mark.parametrize("rows", ROW_BUCKETS)
def test_rows_agree_bitwise_across_tile_sizes(rows: int) -> None:
    weight = random_weight(2048, 4096, 128, "symmetric")
    x = torch.randn(64, 4096, device="cuda", dtype=torch.bfloat16)
    split = {"split": 2, "tail_split": 8, "tail_from": 1280}
    whole = w4a16(x, weight, config={**split, "block_n": 64, "block_m": 64, "warps": 4, "stages": 2})
    reference = w4a16_ref(x.double(), weight)
    for tile in tile_configs("w4a16", rows, has_roles=runs_roles(128)):
        for count in (rows, rows // 2 + 1):
            part = w4a16(x[:count].contiguous(), weight, config={**split, **tile})
            assert error(part, reference[:count]) < TOLERANCE[torch.bfloat16], tile
            assert torch.equal(part, whole[:count]), tile


@pytest.mark.parametrize("block_m", ROW_BUCKETS)
@pytest.mark.parametrize(
    ("n", "k", "form", "dtype", "first"),  # of the tiles, of which every third is compiled
    [
        (1008, 1000, "symmetric", torch.bfloat16, 0),
        (768, 2048, "zeros", torch.float16, 1),
        (512, 4096, "minima", torch.bfloat16, 2),
        (40960, 512, "symmetric", torch.float16, 3),  # more units than run at once
    ],
)
def test_warps_of_separate_roles_give_the_same_bits(
    n: int, k: int, form: str, dtype: torch.dtype, first: int, block_m: int
) -> None:
    if not runs_roles(128):
        pytest.skip("not a Hopper GPU")
    split = {"split": 2, "tail_split": 4, "tail_from": 256}
    plain = {"block_n": 64, "warps": 4, "stages": 2}
    x, residual = torch.randn(60, k, device="cuda", dtype=dtype), torch.randn(60, n, device="cuda", dtype=dtype)
    weight, gate_up = (random_weight(n, k, 128, form, is_gate_up=is_gate_up) for is_gate_up in (False, True))
    for rows in {16: (1, 16), 32: (23,), 64: (60,)}[block_m]:
        calls = [
            partial(w4a16, x[:rows].contiguous(), weight, bias=residual[0], residual=residual[:rows].contiguous()),
            partial(w4a16_silu, x[:rows].contiguous(), gate_up),
        ]
        for index, call in enumerate(calls):
            expected = call(config={**split, **plain, "block_m": block_m})
            for tile in roles(block_m)[(first + index) % 3 :: 3] * 5:
                assert torch.equal(call(config={**split, **tile, "block_m": block_m}), expected), (rows, call, tile)
    assert not weight.counters.any()
    assert not gate_up.counters.any()


@pytest.mark.parametrize("tile", [tile for tile in ROLES if tile["together"]], ids=str)
def test_programs_that_add_together_repeat_bitwise_also_in_a_graph(tile: dict[str, int]) -> None:
    if not runs_roles(128):
        pytest.skip("not a Hopper GPU")
    n, k = 4096, 8192  # nearly as many units as run at once on 132 multiprocessors
    split = {"parts": 16, "split": 8, "tail_split": 8, "tail_from": n, "block_m": 64}
    weight = random_weight(n, k, 128, "symmetric")
    x, residual = torch.randn(2, 64, max(n, k), device="cuda", dtype=torch.bfloat16)
    x, residual = x[:, :k].contiguous(), residual[:, :n].contiguous()
    call = partial(w4a16, x, weight, residual=residual, sides=sides(x, 128))
    expected = call(config={**split, "block_n": 64, "warps": 4, "stages": 2})
    for _ in range(200):
        assert torch.equal(call(config={**split, **tile}), expected)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):  # the next product starts early, with the same counters
        results = [call(config={**split, **tile}) for _ in range(6)]
    for _ in range(50):
        for y in results:
            y.zero_()
        graph.replay()
        for y in results:
            assert torch.equal(y, expected)
    assert not weight.counters.any()


@pytest.mark.parametrize("dtype", DTYPES)
def test_8_bit_product_equals_the_float64_one_and_rows_do_not_depend_on_their_number(dtype: torch.dtype) -> None:
    n, k = 1024, 2048
    codes = torch.randint(-(2**31), 2**31 - 1, (n, k // 4), dtype=torch.int32, device="cuda")
    scales = (torch.rand(n, k // 128, device="cuda") * 0.01 + 0.005).half()
    weight = pack_w8(codes, scales, group_size=128)
    x = torch.randn(64, k, device="cuda", dtype=dtype)
    whole = w8a16(x, weight, out_dtype=torch.float32)
    reference = x.double() @ weight.dequantize(torch.float64).T
    assert error(whole, reference) < 1e-3  # the power of two that carries the codes cancels in float32
    for rows in (1, 16, 17, 33):
        assert torch.equal(w8a16(x[:rows].contiguous(), weight, out_dtype=torch.float32), whole[:rows])


def test_split_k_repeats_bitwise() -> None:
    weight = random_weight(512, 8192, 128, "symmetric")
    x = torch.randn(5, 8192, device="cuda", dtype=torch.bfloat16)
    config = {"split": 5, "tail_split": 16, "tail_from": 256, "block_n": 64, "block_m": 16, "warps": 4, "stages": 3}
    first = w4a16(x, weight, config=config)
    for _ in range(200):
        assert torch.equal(first, w4a16(x, weight, config=config))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_product_in_parts_is_added_by_what_follows_as_by_itself(dtype: torch.dtype) -> None:
    weight = random_weight(4096, 4096, 128, "symmetric")
    x, residual = torch.randn(2, 30, 4096, device="cuda", dtype=dtype).unbind()
    parts, norm = w4a16_parts(x, weight), torch.rand(4096, device="cuda", dtype=dtype)
    y, h, _ = rms_norm_parts(parts, residual, norm, eps=1e-5)
    assert torch.equal(h, w4a16(x, weight, residual=residual))
    assert torch.equal(y, rms_norm(h, norm, eps=1e-5)[0])
    caches = torch.randn(4, 8, 64, 128, device="cuda", dtype=dtype).unbind()
    angles, depths = torch.rand(64, 64, device="cuda"), torch.arange(30, dtype=torch.int32, device="cuda")
    tables = (angles.cos(), angles.sin(), depths, torch.zeros(1, dtype=torch.int32, device="cuda"))
    whole = append_rotary(w4a16(x, weight), caches[0], caches[1], *tables)
    assert torch.equal(append_rotary(parts, caches[2], caches[3], *tables, heads=16), whole)
    assert torch.equal(caches[0][:, :30], caches[2][:, :30])
    assert torch.equal(caches[1][:, :30], caches[3][:, :30])


def tree_case(
    nodes: int, heads: int, kv_heads: int, head_dim: int, length: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    q = torch.randn(nodes, heads, head_dim, device="cuda", dtype=dtype)
    k, v = torch.randn(2, kv_heads, 4096, head_dim, device="cuda", dtype=dtype).unbind()
    return q, k, v, torch.tensor([length], dtype=torch.int32, device="cuda")


def random_ancestors(nodes: int) -> torch.Tensor:
    ancestors = torch.eye(nodes, dtype=torch.bool)
    for node in range(1, nodes):
        ancestors[node] |= ancestors[int(torch.randint(max(0, node - 7), node, ()))]
    return ancestors.cuda()


SHAPES = [(32, 8, 128), (64, 8, 128), (9, 3, 64), (14, 2, 64), (8, 1, 96), (32, 32, 80)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), SHAPES)
def test_tree_attention_equals_the_float64_definition(
    heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype
) -> None:
    for nodes, length, window in ((1, 0, None), (60, 1000, None), (13, 2050, 300), (64, 700, 64)):
        q, k, v, at = tree_case(nodes, heads, kv_heads, head_dim, length, dtype)
        ancestors = random_ancestors(nodes)
        mask, depths = pack_mask(ancestors), ancestors.sum(1, dtype=torch.int32) - 1
        out = tree_attention(q, k, v, mask, at, depths=depths, window=window)
        wide = (t.double() for t in (q, k, v))
        reference = tree_attention_ref(*wide, mask, at, depths=depths, window=window)
        assert error(out, reference) < 2 * TOLERANCE[dtype]  # the weights are rounded to 16 bits too
        # 16 rows and 64 run two kinds of instruction
        for folded, block_q in ((1, 16), (1, 64), (FOLD, 16), (FOLD, 64), (FOLD, 128)):
            config = {"folded": folded, "block_q": block_q, "stages": 2}
            again = tree_attention(q, k, v, mask, at, depths=depths, window=window, config=config)
            assert torch.equal(again, out), config


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), SHAPES)
def test_a_chain_row_does_not_depend_on_how_many_rows_run(
    heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype
) -> None:
    chain = pack_mask(torch.ones(64, 64, dtype=torch.bool, device="cuda").tril())
    for length in (1000, LEAF * LEAVES - 30):  # behind the second, leaves double among the rows
        q, k, v, at = tree_case(64, heads, kv_heads, head_dim, length, dtype)
        whole = tree_attention(q, k, v, chain, at)
        for first, last in ((0, 1), (0, 8), (7, 8), (10, 27), (20, 60), (63, 64)):
            rows = slice(first, last)
            part = tree_attention(q[rows].contiguous(), k, v, chain[: last - first].contiguous(), at + first)
            assert torch.equal(part, whole[rows]), (length, first, last)


@pytest.mark.parametrize("form", ["symmetric", "zeros", "minima", "two-level"])
def test_prefill_equals_the_float64_product(form: str) -> None:
    for is_gate_up in (False, True):
        weight = random_weight(1024, 2048, 32, form, is_gate_up=is_gate_up)
        x = torch.randn(700, 2048, device="cuda", dtype=torch.bfloat16)
        # the weight is rounded to bf16 as well
        assert error(w4_prefill(x, weight), w4a16_ref(x.double(), weight)) < 2 * TOLERANCE[torch.bfloat16]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("n", "k"), [(1024, 4096), (1000, 576), (49152, 576), (515, 1544)])
def test_w16a16_equals_float64_and_rows_do_not_depend_on_their_number(n: int, k: int, dtype: torch.dtype) -> None:
    weight = W16Weight.of(torch.randn(n, k, device="cuda", dtype=dtype) / k**0.5)
    x = torch.randn(64, k, device="cuda", dtype=dtype)
    whole = w16a16(x, weight, out_dtype=torch.float32)
    # products are exact in float32, but Hopper's matrix unit cuts bits off the running sum
    assert error(whole, w16a16_ref(x.double(), weight)) < 1e-4
    for rows in (1, 2, 15, 16, 17, 32, 33, 63):
        part = x[:rows].contiguous()
        assert torch.equal(w16a16(part, weight, out_dtype=torch.float32), whole[:rows]), rows
        assert torch.equal(w16a16_argmax(part, weight, vocab=n - 3), whole[:rows, : n - 3].argmax(-1)), rows
    assert not weight.counters.any()


@pytest.mark.parametrize("dtype", DTYPES)
def test_vector_kernels_equal_their_definitions(dtype: torch.dtype) -> None:
    x, residual = torch.randn(2, 17, 8192, device="cuda", dtype=dtype).unbind()
    weight = torch.rand(8192, device="cuda", dtype=dtype)
    y, h, beside = rms_norm(x, weight, eps=1e-5, residual=residual, group=128)
    expected, expected_h, theirs_beside = rms_norm_ref(x, weight, eps=1e-5, residual=residual, group=128)
    assert beside is not None
    assert theirs_beside is not None
    for ours, theirs in ((y, expected), (h, expected_h), (beside.sums[:, :17], theirs_beside.sums[:, :17])):
        assert error(ours, theirs) < TOLERANCE[dtype]
    gate_up = torch.randn(5, 2 * 14336, device="cuda", dtype=dtype)
    y, beside = silu_mul(gate_up, group=128)
    expected, theirs_beside = silu_mul_ref(gate_up, group=128)
    assert beside is not None
    assert theirs_beside is not None
    assert error(y, expected) < TOLERANCE[dtype]
    # sums of rounded values that cancel
    assert error(beside.sums[:, :5], theirs_beside.sums[:, :5]) < 4 * TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 5, 8, 9, 16, 33, 64])
@pytest.mark.parametrize("k", [768, 4096, 8192])
def test_lane_order_is_bitwise_that_of_the_result_and_changes_nothing_else(
    k: int, rows: int, dtype: torch.dtype
) -> None:
    x, residual = torch.randn(2, rows, k, device="cuda", dtype=dtype).unbind()
    weight, gate_up = torch.rand(k, device="cuda", dtype=dtype), torch.cat([x, residual], 1)
    parts = torch.randn(4, rows, k, device="cuda")
    q, keys, values, at = tree_case(rows, k // 128, 1, 128, 300, dtype)
    chain = pack_mask(torch.ones(rows, rows, dtype=torch.bool, device="cuda").tril())

    def attend(lanes: bool, merged: int) -> tuple[torch.Tensor, Sides]:
        room = empty_sides(x, 128, lanes=lanes)
        return tree_attention(q, keys, values, chain, at, sides=room, config={"merged": merged}), room

    for make in (
        lambda lanes: (x, sides(x, 128, lanes=lanes)),
        lambda lanes: rms_norm(x, weight, eps=1e-5, residual=residual, group=128, lanes=lanes)[::2],
        lambda lanes: rms_norm_parts(parts, residual, weight, eps=1e-5, group=128, lanes=lanes)[::2],
        lambda lanes: silu_mul(gate_up, group=128, lanes=lanes),
        lambda lanes: round_rows(x, bits=8, group=128, lanes=lanes),
        partial(attend, merged=1),
        partial(attend, merged=4),
    ):
        (y, beside), (alone, without) = make(True), make(False)
        assert torch.equal(y, alone)
        assert torch.equal(beside.sums[:, :rows], without.sums[:, :rows])
        is_row = lanes_ref(torch.ones_like(y)).bool()  # beyond x's lies anything
        assert torch.equal(beside.lanes[is_row], lanes_ref(y)[is_row])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), SHAPES)
def test_cache_writes_equal_their_definitions(heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> None:
    qkv = torch.randn(60, (heads + 2 * kv_heads) * head_dim, device="cuda", dtype=dtype)
    k, v = torch.randn(2, 3, kv_heads, 256, head_dim, device="cuda", dtype=dtype).unbind()
    angles = torch.outer(torch.arange(300.0), 1e4 ** -torch.linspace(0, 1, head_dim // 2)).cuda()
    length = torch.tensor([100], dtype=torch.int32, device="cuda")
    depths = torch.arange(60, dtype=torch.int32, device="cuda")
    norms = {name: torch.rand(head_dim, device="cuda", dtype=dtype) for name in ("q_norm", "k_norm")}
    expected_k, expected_v = k.clone(), v.clone()
    tables = (angles.cos(), angles.sin(), depths, length)
    expected = append_rotary_ref(qkv, expected_k[1], expected_v[1], *tables, **norms)
    q = append_rotary(qkv, k[1], v[1], *tables, **norms)
    for ours, theirs in ((q, expected), (k, expected_k), (v, expected_v)):
        assert error(ours, theirs.double()) < TOLERANCE[dtype]
    path = torch.tensor([0, 1, 5, 9, 30, 59, 0, 0], dtype=torch.int32, device="cuda")
    count = torch.tensor([6], dtype=torch.int32, device="cuda")
    expected_k, expected_v = k.clone(), v.clone()
    compact(k, v, path, count, length)
    compact_ref(expected_k, expected_v, path, count, length)
    assert torch.equal(k, expected_k)
    assert torch.equal(v, expected_v)


def test_sampling_equals_its_definition_on_the_cpu() -> None:
    logits = torch.randn(16, 128256, device="cuda")
    positions = torch.arange(16, device="cuda") * 977
    assert torch.equal(argmax(logits, vocab=128000), logits[:, :128000].argmax(-1))
    for temperature, seed in ((0.7, 5), (1.0, 2**64 - 3)):
        chosen = gumbel_argmax(logits, positions, Draw.of(seed, temperature, "cuda"), vocab=128000)
        expected = gumbel_argmax_ref(logits.cpu(), positions.cpu(), Draw.of(seed, temperature), vocab=128000)
        assert torch.equal(chosen.cpu(), expected)
