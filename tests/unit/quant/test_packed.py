"""The packed matrix in memory: its law, its checks, and rows put together."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from packed_weights import random_packed, same

from specq.quant.packed import PackedWeight, concat_rows, pack_codes, pack_nibbles, unpack_codes, unpack_nibbles

KINDS = ("symmetric", "zeros", "minima", "two-level")


def test_nibbles_lie_lowest_first() -> None:
    words = torch.tensor([[0x76543210, -0x01234568]], dtype=torch.int32)  # 0x76543210, 0xFEDCBA98
    values = unpack_nibbles(words)
    assert values.tolist() == [list(range(16))]
    assert torch.equal(pack_nibbles(values), words)


def test_octets_lie_lowest_first() -> None:
    words = torch.tensor([[0x03020100, -0x01020304]], dtype=torch.int32)  # 0x03020100, 0xFEFDFCFC
    values = unpack_codes(words, 8)
    assert values.tolist() == [[0, 1, 2, 3, 0xFC, 0xFC, 0xFD, 0xFE]]
    assert torch.equal(pack_codes(values, 8), words)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("is_permuted", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_dequantised_numbers_follow_the_law(kind: str, is_permuted: bool, bits: int) -> None:
    weight = random_packed(6, 512, 32, kind=kind, is_permuted=is_permuted, bits=bits)
    scale, offset = weight.scale_offset()
    dense, codes, groups = weight.dequantize(), weight.unpacked(), weight.group_of().tolist()
    for row in range(6):
        for column in range(0, 512, 7):
            group = groups[column]
            assert dense[row, column] == scale[row, group] * codes[row, column] + offset[row, group]


def test_offsets_are_minus_zero_times_scale() -> None:
    symmetric, asymmetric = random_packed(8, 64, 32), random_packed(8, 64, 32, kind="zeros")
    scale, offset = symmetric.scale_offset()
    assert torch.equal(offset, -8 * symmetric.scales.float())
    scale, offset = asymmetric.scale_offset()
    assert torch.equal(offset, -asymmetric.zeros.float() * scale)
    scale, offset = random_packed(8, 64, 32, bits=8).scale_offset()
    assert torch.equal(offset, -128 * scale)


def test_a_shorter_last_group_has_its_own_scale() -> None:
    weight = random_packed(2, 80, 32)
    assert weight.num_groups == 3
    changed = replace(weight, scales=torch.cat([weight.scales[:, :2], 2 * weight.scales[:, 2:]], 1))
    ratio = changed.dequantize() / weight.dequantize()
    assert ratio[:, :64].nan_to_num(1).eq(1).all()
    assert ratio[:, 64:].nan_to_num(2).eq(2).all()


@pytest.mark.parametrize("kind", KINDS)
def test_taking_rows_takes_rows_of_the_numbers(kind: str) -> None:
    weight = random_packed(6, 512, 32, kind=kind, is_permuted=True)
    index = torch.tensor([4, 0, 4])
    assert torch.equal(weight.take_rows(index).dequantize(), weight.dequantize()[index])


@pytest.mark.parametrize("kind", KINDS)
def test_joined_rows_are_the_rows_of_all_parts(kind: str) -> None:
    parts = [random_packed(rows, 512, 32, kind=kind, seed=rows) for rows in (4, 2)]
    joined = concat_rows(parts)
    assert joined is not None
    assert torch.equal(joined.dequantize(), torch.cat([part.dequantize() for part in parts]))


def test_symmetric_and_asymmetric_rows_join() -> None:
    parts = [random_packed(4, 64, 32), random_packed(2, 64, 32, kind="zeros")]
    joined = concat_rows(parts)
    assert joined is not None
    assert torch.equal(joined.dequantize(), torch.cat([part.dequantize() for part in parts]))


def test_rows_that_cannot_share_a_product_do_not_join() -> None:
    first = random_packed(4, 64, 32)
    others = (
        random_packed(4, 64, 64),
        random_packed(4, 64, 32, bits=8),
        random_packed(4, 128, 32),
        random_packed(4, 64, 32, kind="minima"),
        random_packed(4, 64, 32, is_permuted=True),
        replace(first, scales=first.scales.bfloat16()),
    )
    assert all(concat_rows([first, other]) is None for other in others)
    permuted = random_packed(4, 64, 32, is_permuted=True)
    assert concat_rows([permuted, random_packed(4, 64, 32, is_permuted=True, seed=1)]) is None
    assert concat_rows([permuted, permuted]) is not None


def test_a_scale_or_minimum_that_is_no_number_is_seen() -> None:
    for kind in KINDS:
        weight = random_packed(4, 256, 32, kind=kind)
        assert weight.is_finite()
        assert not replace(weight, scales=weight.scales / 0).is_finite()
    weight = random_packed(4, 256, 32, kind="minima")
    assert not replace(weight, minima=weight.minima * float("nan")).is_finite()
    weight = random_packed(4, 256, 32, kind="two-level")
    level = replace(weight.two_level, minima=weight.two_level.minima / 0)
    assert not replace(weight, two_level=level).is_finite()


@pytest.mark.parametrize(
    "change",
    [
        {"codes": torch.zeros(4, 8)},
        {"scales": torch.ones(4, 3).half()},
        {"scales": torch.ones(4, 2).double()},
        {"zeros": torch.ones(3, 2, dtype=torch.uint8)},
        {"group_size": 0},
        {"bits": 5},
        {"bits": 8},
        {"group_size": 65},
        {"g_idx": torch.zeros(63, dtype=torch.int32)},
        {"zeros": torch.ones(4, 2, dtype=torch.uint8), "minima": torch.ones(4, 2).half()},
    ],
)
def test_parts_that_do_not_fit_together_are_refused(change: dict[str, object]) -> None:
    weight = random_packed(4, 64, 32)
    with pytest.raises(ValueError):
        replace(weight, **change)


def test_bytes_count_every_part() -> None:
    weight = random_packed(4, 256, 32, kind="two-level")
    assert weight.num_bytes == 4 * 128 + 4 * 2 + 4 * 2 + 2 * 4 * 8
    assert same(weight.to("cpu"), weight)
    assert isinstance(weight, PackedWeight)
