"""The product for few rows, and parts of K folded inside a program: bits of the plain kernel, whatever the tile."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from specq_kernels.launch import row_bucket
from specq_kernels.tune import lanes_configs, runs_roles
from specq_kernels.w4a16 import sum_parts_ref, w4a16, w4a16_parts, w4a16_ref, w4a16_silu

from .test_kernels import TOLERANCE, error, random_weight, roles

pytestmark = pytest.mark.gpu

PLAIN = {"block_n": 64, "warps": 4, "stages": 2}
CASES = [  # n, k, form, dtype, parts, split, tail_split
    (512, 4096, "symmetric", torch.bfloat16, 8, 4, 4),
    (384, 4096, "zeros", torch.float16, 12, 3, 3),
    (256, 14336, "symmetric", torch.bfloat16, 24, 6, 6),
    (512, 2560, "minima", torch.bfloat16, 4, 1, 4),  # shares of K of different length
    (512, 8192, "symmetric", torch.float16, 2, 1, 2),
    (256, 1792, "symmetric", torch.bfloat16, 6, 2, 2),
    (1008, 2048, "zeros", torch.bfloat16, 8, 8, 8),  # padded columns
]


@pytest.mark.parametrize(("n", "k", "form", "dtype", "parts", "split", "tail_split"), CASES)
def test_few_rows_have_the_bits_of_the_plain_kernel(
    n: int, k: int, form: str, dtype: torch.dtype, parts: int, split: int, tail_split: int
) -> None:
    law = {"parts": parts, "split": split, "tail_split": tail_split, "tail_from": 128}
    weight, gate_up = (random_weight(n, k, 128, form, is_gate_up=is_gate_up) for is_gate_up in (False, True))
    x, residual = torch.randn(32, k, device="cuda", dtype=dtype), torch.randn(32, n, device="cuda", dtype=dtype)
    bias = residual[0]
    for rows in (1, 2, 5, 8, 9, 16, 17, 32):
        few = x[:rows].contiguous()
        calls = [
            partial(w4a16, few, weight, bias=bias, residual=residual[:rows].contiguous()),
            partial(w4a16, few, weight, out_dtype=torch.float32),
            partial(w4a16_silu, few, gate_up),
        ]
        tiles = lanes_configs(rows, parts, weight.padded[0])[::7]
        assert tiles or rows > 16
        for call in calls:
            expected = call(config={**law, **PLAIN, "block_m": row_bucket(rows)})
            for tile in tiles:
                assert torch.equal(call(config={**law, **tile}), expected), (rows, tile)
                if call is calls[1]:
                    assert error(call(config={**law, **tile}), w4a16_ref(few.double(), weight)) < TOLERANCE[dtype]
    assert not weight.counters.any()


@pytest.mark.parametrize(("n", "k", "form", "dtype", "parts", "split", "tail_split"), CASES)
def test_parts_folded_in_a_program_have_the_same_bits_in_every_kernel(
    n: int, k: int, form: str, dtype: torch.dtype, parts: int, split: int, tail_split: int
) -> None:
    if not runs_roles(128):
        pytest.skip("not a Hopper GPU")
    law = {"parts": parts, "split": split, "tail_split": tail_split, "tail_from": 256}
    weight = random_weight(n, k, 128, form)
    x = torch.randn(64, k, device="cuda", dtype=dtype)
    whole = w4a16(x, weight, config={**law, **PLAIN, "block_m": 64})
    for index, (rows, block_m) in enumerate(((3, 16), (16, 16), (30, 32), (60, 64))):
        few = x[:rows].contiguous()
        of_these = [tile for tile in roles(block_m) if weight.padded[0] % tile["block_n"] == 0]
        kinds = len(of_these) // 2  # each with and without `together` or, of 16 rows, `sync`
        for tile in (PLAIN, *of_these[(index + n // 128) % kinds :: kinds]):
            config = {**law, **tile, "block_m": block_m}
            assert torch.equal(w4a16(few, weight, config=config), whole[:rows]), (rows, tile)
            parts_of_k = w4a16_parts(few, weight, config=config)
            assert torch.equal(sum_parts_ref(parts_of_k, n, out_dtype=dtype), whole[:rows]), (rows, tile)
    assert not weight.counters.any()
    assert error(whole, w4a16_ref(x.double(), weight)) < TOLERANCE[dtype]


@pytest.mark.parametrize(
    ("rows", "block_n", "groups", "sync"), [(60, 128, 1, 0), (60, 128, 2, 0), (30, 128, 1, 0), (16, 128, 1, 1)]
)
def test_copies_do_not_overtake_the_reads_of_what_they_replace(rows: int, block_n: int, groups: int, sync: int) -> None:
    """Large, with many short units at the end: so a stage was given back while a warp's last reads were under way."""
    if not runs_roles(128):
        pytest.skip("not a Hopper GPU")
    n, k = 57344, 8192
    config = {"split": 1, "tail_split": 4, "tail_from": 33792, "block_m": row_bucket(rows)}
    tile = {"roles": 1, "block_n": block_n, "groups": groups, "stages": 4, "sync": sync, "fma": rows < 60}
    weight = random_weight(n, k, 128, "symmetric")
    inputs = torch.randn(3, rows, k, device="cuda", dtype=torch.bfloat16)
    expected = [w4a16(x, weight, config={**config, **PLAIN}) for x in inputs]
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(100):
        for x, y in zip(inputs, expected, strict=True):  # other inputs than before: nothing old passes for right
            wrong += (w4a16(x, weight, config={**config, **tile}) != y).any()
    assert wrong == 0
