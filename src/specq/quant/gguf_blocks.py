"""GGUF's 4-bit blocks to and from `PackedWeight`, codes and scales moved as they are.

Source: the block layouts of the GGUF format (package gguf, `gguf.quants`), held to it by tests.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from specq.quant.packed import PackedWeight, TwoLevel, pack_nibbles


@dataclass(frozen=True)
class BlockLayout:
    """One block type: `block_bytes` bytes hold `block_columns` columns in groups of `group_size`."""

    block_columns: int
    block_bytes: int
    group_size: int
    unpack: Callable[[Tensor], PackedWeight]  # uint8 [N, bytes a row] -> matrix
    pack: Callable[[PackedWeight], Tensor]


def _blocks(data: Tensor, block_bytes: int) -> Tensor:
    return data.view(data.shape[0], -1, block_bytes)  # [N, blocks, bytes]


def _halves(octets: Tensor) -> Tensor:
    """fp16 [N, blocks] of the two bytes [N, blocks, 2]."""
    return octets.contiguous().view(torch.float16).squeeze(-1)


def _split_nibbles(octets: Tensor) -> Tensor:
    """uint8 [..., 2 n] of n bytes: all low nibbles, then all high ones."""
    return torch.cat((octets & 15, octets >> 4), dim=-1)


def _join_nibbles(values: Tensor) -> Tensor:
    low, high = values.chunk(2, dim=-1)
    return low | (high << 4)


def _q4_0_unpack(data: Tensor) -> PackedWeight:
    """18 bytes: fp16 scale, 16 bytes of codes; w = scale * (q - 8)."""
    blocks = _blocks(data, 18)
    codes = pack_nibbles(_split_nibbles(blocks[..., 2:]).flatten(1))
    return PackedWeight(codes=codes, scales=_halves(blocks[..., :2]), group_size=32)


def _q4_0_pack(weight: PackedWeight) -> Tensor:
    _require(weight, 32, weight.zeros is None and weight.minima is None and weight.two_level is None)
    return torch.cat((_bytes_of(weight.scales), _codes_of(weight)), dim=-1).flatten(1)


def _q4_1_unpack(data: Tensor) -> PackedWeight:
    """20 bytes: fp16 scale, fp16 minimum, 16 bytes of codes; w = scale * q + minimum."""
    blocks = _blocks(data, 20)
    codes = pack_nibbles(_split_nibbles(blocks[..., 4:]).flatten(1))
    scales, minima = _halves(blocks[..., :2]), _halves(blocks[..., 2:4])
    return PackedWeight(codes=codes, scales=scales, minima=minima, group_size=32)


def _q4_1_pack(weight: PackedWeight) -> Tensor:
    _require(weight, 32, weight.minima is not None)
    assert weight.minima is not None
    parts = (_bytes_of(weight.scales), _bytes_of(weight.minima), _codes_of(weight))
    return torch.cat(parts, dim=-1).flatten(1)


def _q4_k_unpack(data: Tensor) -> PackedWeight:
    """144 bytes: fp16 scale and minimum, 12 bytes of 6-bit codes for 8 groups of 32, 128 bytes of codes.

    In the 12 bytes, groups 0..3 have their scale in the low 6 bits of bytes 0..3 and their minimum in those
    of bytes 4..7; groups 4..7 have the low 4 bits in bytes 8..11 (scale low, minimum high nibble) and the
    high 2 bits on top of bytes 0..3 and 4..7.
    """
    blocks = _blocks(data, 144)
    low, middle, high = blocks[..., 4:8], blocks[..., 8:12], blocks[..., 12:16]
    scale_codes = torch.cat((low & 63, (high & 15) | ((low >> 6) << 4)), dim=-1).flatten(1)
    minimum_codes = torch.cat((middle & 63, (high >> 4) | ((middle >> 6) << 4)), dim=-1).flatten(1)
    octets = blocks[..., 16:].unflatten(-1, (4, 32))  # 64 columns each
    return PackedWeight(
        codes=pack_nibbles(_split_nibbles(octets).flatten(1)),
        scales=_halves(blocks[..., :2]),
        two_level=TwoLevel(_halves(blocks[..., 2:4]), scale_codes, minimum_codes),
        group_size=32,
    )


def _q4_k_pack(weight: PackedWeight) -> Tensor:
    _require(weight, 32, weight.two_level is not None)
    level = weight.two_level
    assert level is not None
    scale, minimum = level.scale_codes.unflatten(1, (-1, 8)), level.minimum_codes.unflatten(1, (-1, 8))
    low = scale[..., :4] | ((scale[..., 4:] >> 4) << 6)
    middle = minimum[..., :4] | ((minimum[..., 4:] >> 4) << 6)
    high = (scale[..., 4:] & 15) | ((minimum[..., 4:] & 15) << 4)
    codes = _join_nibbles(weight.unpacked().unflatten(1, (-1, 4, 64))).flatten(2)
    parts = (_bytes_of(weight.scales), _bytes_of(level.minima), low, middle, high, codes)
    return torch.cat(parts, dim=-1).flatten(1)


def _require(weight: PackedWeight, group_size: int, has_kind: bool) -> None:
    is_half = weight.scales.dtype == torch.float16
    if weight.group_size != group_size or weight.g_idx is not None or not has_kind or not is_half:
        raise ValueError("this block type cannot hold the matrix")


def _bytes_of(halves: Tensor) -> Tensor:
    return halves.contiguous().unsqueeze(-1).view(torch.uint8)  # [N, blocks, 2]


def _codes_of(weight: PackedWeight) -> Tensor:
    return _join_nibbles(weight.unpacked().unflatten(1, (-1, 32)))  # [N, blocks, 16]


LAYOUTS: Mapping[str, BlockLayout] = {
    "q4_0": BlockLayout(32, 18, 32, _q4_0_unpack, _q4_0_pack),
    "q4_1": BlockLayout(32, 20, 32, _q4_1_unpack, _q4_1_pack),
    "q4_k": BlockLayout(256, 144, 32, _q4_k_unpack, _q4_k_pack),
}
