"""The 4-bit product in the interpreter: every form of the law, odd sizes, tails, splits, and row independence."""

from __future__ import annotations

import re
from itertools import pairwise

import pytest
import torch

from specq_kernels import configs
from specq_kernels.group_sums import group_sums_ref, sides
from specq_kernels.w4_device import UNPACK_BF16_FMA
from specq_kernels.w4_layout import W4Weight, pack_codes, pack_w4, unpack_codes
from specq_kernels.w4a16 import sum_parts_ref, w4a16, w4a16_parts, w4a16_ref, w4a16_silu
from specq_kernels.w8a16 import pack_w8, w8a16

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # rows beyond x in `sums` hold nothing


def spread(values: torch.Tensor, group: int, k: int) -> torch.Tensor:
    return values.float().repeat_interleave(group, 1)[:, :k]


def random_case(n: int, k: int, group: int, form: str, *, is_gate_up: bool = False) -> tuple[W4Weight, torch.Tensor]:
    """A packed weight and the matrix by the law, computed from the codes alone."""
    codes = torch.randint(-(2**31), 2**31 - 1, (n, k // 8), dtype=torch.int32)
    q = torch.stack([codes >> (4 * i) & 15 for i in range(8)], -1).flatten(1).float()
    width = k if group == -1 else group
    scales = (torch.rand(n, -(-k // width)) * 0.02 + 0.01).half()
    if form == "two-level":
        d, dmin = (torch.rand(2, n, k // 256) * 1e-3).half()
        subs = torch.randint(0, 64, (2, n, k // 32), dtype=torch.uint8)
        weight = pack_w4(codes, d, group_size=32, minima=dmin, sub_scales=subs[0], sub_minima=subs[1],
                         is_gate_up=is_gate_up)  # fmt: skip
        scale = spread(d, 256, k) * spread(subs[0], 32, k)
        return weight, scale * q - spread(dmin, 256, k) * spread(subs[1], 32, k)
    scale = spread(scales, width, k)
    if form == "zeros":
        zeros = torch.randint(0, 17, scales.shape, dtype=torch.uint8)
        weight = pack_w4(codes, scales, group_size=group, zeros=zeros, is_gate_up=is_gate_up)
        return weight, scale * q - spread(zeros, width, k) * scale
    if form == "minima":
        minima = (-torch.rand(scales.shape) * 0.1).half()
        weight = pack_w4(codes, scales, group_size=group, minima=minima, is_gate_up=is_gate_up)
        return weight, scale * q + spread(minima, width, k)
    return pack_w4(codes, scales, group_size=group, is_gate_up=is_gate_up), scale * q - 8 * scale


CASES = [
    (128, 256, 128, "symmetric", 3),
    (80, 576, 128, "zeros", 17),
    (96, 320, 32, "minima", 33),
    (64, 512, 64, "zeros", 1),
    (32, 512, 32, "two-level", 5),
    (48, 264, -1, "symmetric", 2),
    (64, 512, 64, "symmetric", 64),
    (16, 512, 256, "minima", 4),
]


@pytest.mark.parametrize(("n", "k", "group", "form", "rows"), CASES)
def test_product_equals_the_law(n: int, k: int, group: int, form: str, rows: int) -> None:
    weight, matrix = random_case(n, k, group, form)
    assert torch.equal(weight.dequantize(), matrix)
    x = torch.randn(rows, k).half()
    y = w4a16(x, weight)
    reference = x.double() @ matrix.double().T
    # half a unit of fp16's last place, 2^-12, on average less
    assert (y.double() - reference).norm() / reference.norm() < 4e-4


@pytest.mark.parametrize(("form", "group"), [("symmetric", 128), ("zeros", 64), ("two-level", 32)])
def test_gate_and_up_meet_in_one_product(form: str, group: int) -> None:
    weight, matrix = random_case(80, 256, group, form, is_gate_up=True)
    assert torch.equal(weight.dequantize(), matrix)
    x = torch.randn(5, 256).half()
    gate, up = (x.double() @ matrix.double().T).chunk(2, dim=-1)
    expected = torch.nn.functional.silu(gate) * up
    assert (w4a16_silu(x, weight).double() - expected).norm() / expected.norm() < 4e-4


def test_bias_and_residual_are_added_before_the_rounding() -> None:
    weight, _ = random_case(48, 256, 128, "symmetric")
    x, bias, residual = torch.randn(3, 256).half(), torch.randn(48).half(), torch.randn(3, 48).half()
    y = w4a16(x, weight, bias=bias, residual=residual)
    torch.testing.assert_close(y, w4a16_ref(x, weight, bias=bias, residual=residual), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("direct", [0, 1])
@pytest.mark.parametrize("step", [128, 256])
def test_rows_do_not_depend_on_their_number_nor_on_the_tile(step: int, direct: int) -> None:
    weight, _ = random_case(256, 1280, 64, "zeros")
    x = torch.randn(33, 1280).half()
    split = {"split": 2, "tail_split": 4, "tail_from": 128, "stages": 1, "step": step, "direct": direct}
    whole = w4a16(x, weight, config={**split, "block_n": 64, "block_m": 64})
    for rows, block_n in ((1, 64), (16, 128), (20, 64)):
        config = {**split, "block_n": block_n, "block_m": 16 if rows <= 16 else 32}
        assert torch.equal(w4a16(x[:rows].contiguous(), weight, config=config), whole[:rows])
    assert not weight.counters.any()


@pytest.mark.parametrize(("k", "group", "has_zeros"), [(512, 128, True), (576, -1, False), (256, 64, True)])
def test_8_bits_are_two_planes_of_4(k: int, group: int, has_zeros: bool) -> None:
    n, groups = 40, 1 if group == -1 else k // group
    q = torch.randint(0, 256, (n, k), dtype=torch.uint8)
    scales = (torch.rand(n, groups) * 0.01 + 0.005).half()
    zeros = torch.randint(0, 256, (n, groups), dtype=torch.uint8) if has_zeros else None
    weight = pack_w8(q.view(torch.int32), scales, group_size=group, zeros=zeros)
    offset = 128.0 if zeros is None else spread(zeros, k // groups, k)
    matrix = (q - offset) * spread(scales, k // groups, k)
    torch.testing.assert_close(weight.dequantize(torch.float64), matrix.double(), rtol=1e-6, atol=1e-6)
    assert weight.shape == (n, k)
    x = torch.randn(5, k).half()
    y = w8a16(x, weight, out_dtype=torch.float32)
    # only sums in fp32 differ
    torch.testing.assert_close(y.double(), x.double() @ matrix.double().T, rtol=1e-4, atol=2e-3)
    assert torch.equal(w8a16(x, weight), y.half())


def test_8_bit_groups_that_no_kernel_runs_are_refused() -> None:
    codes, scales = torch.zeros(16, 75, dtype=torch.int32), torch.ones(16, 3).half()
    with pytest.raises(ValueError, match="does not divide"):
        pack_w8(codes, scales, group_size=128)
    with pytest.raises(ValueError, match="group_size: 100"):
        pack_w8(codes, scales, group_size=100)
    with pytest.raises(ValueError, match="too large"):
        pack_w8(codes[:, :64], scales * 5000, group_size=128)


def test_codes_come_back_from_the_packed_layout() -> None:
    codes = torch.randint(-(2**31), 2**31 - 1, (32, 48), dtype=torch.int32)
    q = torch.stack([codes >> (4 * i) & 15 for i in range(8)], -1).flatten(1).to(torch.uint8)
    unpacked = unpack_codes(pack_codes(codes, 512), 512)
    assert torch.equal(unpacked[:, :384], q)
    assert not unpacked[:, 384:].any()


@pytest.mark.parametrize(("rows", "k", "group"), [(1, 576, 128), (17, 1280, 32), (64, 100, 64)])
def test_group_sums_equal_the_definition(rows: int, k: int, group: int) -> None:
    x = torch.randn(rows, k)
    sums = sides(x, group).sums[:, :rows]
    torch.testing.assert_close(sums, group_sums_ref(x, group)[:, :rows], rtol=1e-5, atol=1e-5)


def test_every_split_covers_k_once() -> None:
    for n, k in ((128, 256), (8192, 28672), (1536, 768)):
        for config in ({"split": 8}, {"split": 3, "tail_split": 16, "tail_from": 128}):
            split, tail_split, tail_from = configs.split_of(config, n=n, k=k)
            for parts in (split, tail_split):
                steps = k // 256
                edges = [part * steps // parts for part in range(parts + 1)]
                assert edges[0] == 0
                assert edges[-1] == steps
                assert all(a < b for a, b in pairwise(edges))
            assert tail_from <= n


def test_errors_name_the_argument() -> None:
    weight, _ = random_case(32, 256, 128, "symmetric")
    x = torch.randn(2, 256).half()
    with pytest.raises(ValueError, match="x: shape"):
        w4a16(x[:, :128].contiguous(), weight)
    with pytest.raises(ValueError, match="bias: dtype"):
        w4a16(x, weight, bias=torch.zeros(32))
    with pytest.raises(ValueError, match="x: 65 rows"):
        w4a16(torch.zeros(65, 256).half(), weight)
    with pytest.raises(ValueError, match="weight: not packed"):
        w4a16_silu(x, weight)
    with pytest.raises(ValueError, match="group_size: 48"):
        pack_w4(torch.zeros(16, 32, dtype=torch.int32), torch.ones(16, 6).half(), group_size=48)


@pytest.mark.parametrize("tail_split", [2, 4])
def test_parts_added_in_order_are_the_product(tail_split: int) -> None:
    weight, _ = random_case(240, 1280, 64, "zeros")
    x, bias, residual = torch.randn(5, 1280).half(), torch.randn(240).half(), torch.randn(5, 240).half()
    config = {"split": 2, "tail_split": tail_split, "tail_from": 128, "block_n": 64, "block_m": 16, "stages": 1}
    parts = w4a16_parts(x, weight, config=config)
    assert parts.shape == (tail_split, 5, 256)
    added = sum_parts_ref(parts, 240, bias=bias, residual=residual, out_dtype=torch.float16)
    assert torch.equal(added, w4a16(x, weight, bias=bias, residual=residual, config=config))
    assert torch.equal(w4a16_parts(x[:2].contiguous(), weight, config=config), parts[:, :2])


def test_parts_of_a_run_are_added_before_the_runs_are() -> None:
    weight, _ = random_case(240, 2048, 64, "zeros")
    x = torch.randn(5, 2048).half()
    tile = {"tail_from": 128, "block_n": 64, "block_m": 16, "stages": 1}
    single = w4a16_parts(x, weight, config={"split": 8, **tile})
    for split, tail_split in ((2, 2), (4, 4), (1, 8)):
        runs = single.unflatten(0, (split, -1))
        expected = sum_parts_ref(torch.stack([sum_parts_ref(run, 240) for run in runs]), 240, out_dtype=torch.float16)
        config = {"parts": 8, "split": split, "tail_split": tail_split, **tile}
        assert torch.equal(w4a16(x, weight, config=config), expected)
        assert torch.equal(w4a16(x[:2].contiguous(), weight, config=config), expected[:2])


def test_upper_codes_fall_out_of_a_rounded_multiply_add() -> None:
    """The arithmetic of UNPACK_BF16_FMA, with its constants, for every byte of two codes; fp32 holds it unrounded."""
    scale, base = (
        int(re.search(rf"mov.b32 {name}, 0x(\w{{4}})\1;", UNPACK_BF16_FMA.value).group(1), 16)
        for name in ("scale", "base")
    )
    byte = torch.arange(256, dtype=torch.int16)
    scale, base, x = (
        torch.as_tensor(bits).to(torch.int16).view(torch.float16) for bits in (scale, base, byte | 0x6700)
    )
    rounded = (x.float() * scale.float() + base.float()).half()
    assert torch.equal(rounded.view(torch.int16).view(torch.bfloat16).float(), 128.0 + (byte >> 4))
