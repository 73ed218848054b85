"""GGUF's blocks against the package gguf, for every bit pattern a file may hold."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gguf.constants import GGMLQuantizationType
from gguf.quants import dequantize

from specq.quant.gguf_blocks import LAYOUTS

HALVES = {"q4_0": 1, "q4_1": 2, "q4_k": 2}  # fp16 numbers at the start of a block


def _random_rows(name: str) -> torch.Tensor:
    """uint8 [6, bytes of 512 columns]: any bytes, but scales that are numbers."""
    layout = LAYOUTS[name]
    generator = torch.Generator().manual_seed(1)
    blocks = torch.randint(0, 256, (6, 512 // layout.block_columns, layout.block_bytes), generator=generator)
    halves = torch.randn(*blocks.shape[:2], HALVES[name], generator=generator).half()
    rows = blocks.to(torch.uint8)
    rows[..., : 2 * HALVES[name]] = halves.view(torch.uint8)
    return rows.flatten(1)


@pytest.mark.parametrize("name", LAYOUTS)
def test_blocks_dequantise_as_in_package_gguf(name: str) -> None:
    rows = _random_rows(name)
    expected = torch.from_numpy(dequantize(rows.numpy(), GGMLQuantizationType[name.upper()]))
    assert torch.equal(LAYOUTS[name].unpack(rows).dequantize(), expected)


@pytest.mark.parametrize("name", LAYOUTS)
def test_blocks_survive_packing_bit_by_bit(name: str) -> None:
    rows = _random_rows(name)
    assert torch.equal(LAYOUTS[name].pack(LAYOUTS[name].unpack(rows)), rows)


@pytest.mark.parametrize("name", LAYOUTS)
def test_exchanged_nibbles_are_noticed(name: str) -> None:
    """The control: the comparison above sees the order within a byte."""
    rows = _random_rows(name)
    exchanged = rows.numpy().copy().reshape(-1, LAYOUTS[name].block_bytes)
    exchanged[:, -16:] = (exchanged[:, -16:] >> 4) | (exchanged[:, -16:] << 4)
    expected = dequantize(exchanged.reshape(rows.shape), GGMLQuantizationType[name.upper()])
    assert not np.array_equal(LAYOUTS[name].unpack(rows).dequantize().numpy(), expected)


def test_a_block_type_refuses_what_it_cannot_hold() -> None:
    symmetric = LAYOUTS["q4_0"].unpack(_random_rows("q4_0"))
    with pytest.raises(ValueError, match="cannot hold"):
        LAYOUTS["q4_1"].pack(symmetric)
