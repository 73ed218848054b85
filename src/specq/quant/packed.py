"""The 4 or 8-bit matrix specq keeps in memory, and the one law that turns it into numbers.

Every file format is read into `PackedWeight` (see formats.py and gguf_blocks.py) and every product starts
from it (see linear.py). Nothing here knows files or devices.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

SYMMETRIC_ZERO = 8
"""The zero of a symmetric matrix of 4 bits."""

WIDTHS = (4, 8)
"""Bits a code may have."""

SCALE_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def unpack_nibbles(words: Tensor) -> Tensor:
    """uint8 values [..., 8 W] of int32 words [..., W], lowest nibble first."""
    octets = words.flatten().view(torch.uint8).view(*words.shape, 4).flatten(-2)
    return torch.stack((octets & 15, octets >> 4), dim=-1).flatten(-2)


def pack_nibbles(values: Tensor) -> Tensor:
    """int32 words [..., W] of values 0..15 [..., 8 W], lowest nibble first."""
    if values.shape[-1] % 8:
        raise ValueError(f"the last dimension must be a multiple of 8, got {values.shape[-1]}")
    octets = values.to(torch.uint8)
    pairs = octets[..., 0::2] | (octets[..., 1::2] << 4)
    # Flat, because a dimension of size 1 may keep a stride that no wider type can have.
    return pairs.flatten().view(torch.int32).view(*pairs.shape[:-1], -1)


def unpack_codes(words: Tensor, bits: int) -> Tensor:
    """uint8 values [..., W * 32 / bits] of int32 words [..., W], lowest first."""
    if bits == 4:
        return unpack_nibbles(words)
    return words.flatten().view(torch.uint8).view(*words.shape[:-1], -1)


def pack_codes(values: Tensor, bits: int) -> Tensor:
    """int32 words [..., W] of values below 2 ** bits [..., W * 32 / bits], lowest first."""
    if bits == 4:
        return pack_nibbles(values)
    if values.shape[-1] % 4:
        raise ValueError(f"the last dimension must be a multiple of 4, got {values.shape[-1]}")
    octets = values.to(torch.uint8)
    return octets.flatten().view(torch.int32).view(*octets.shape[:-1], -1)


@dataclass(frozen=True)
class TwoLevel:
    """The second level of Q4_K's scales: per group scale = scales * scale_codes, minimum = minima * minimum_codes.

    One row of `PackedWeight.scales` then holds one 16-bit scale for each super-block of 8 groups.
    """

    minima: Tensor  # 16-bit [N, K/256], subtracted
    scale_codes: Tensor  # uint8 [N, G], 0..63
    minimum_codes: Tensor  # uint8 [N, G], 0..63


@dataclass(frozen=True)
class PackedWeight:
    """A matrix [N, K] of 4 or 8-bit codes under the law w = scale * q + offset, one scale and offset a row and group.

    The offset is -zero * scale for integer zeros (the `middle` of the codes when `zeros` is None and nothing else is
    given), the float minimum for `minima`, and minus the scaled minimum for `two_level`.
    Raises ValueError when the parts do not fit together.
    """

    codes: Tensor  # int32 [N, K * bits / 32], lowest first along K
    scales: Tensor  # the file's own float type [N, G]; with two_level [N, K/256]
    zeros: Tensor | None = None  # uint8 [N, G], 0..16 of 4 bits, 0..255 of 8
    minima: Tensor | None = None  # the file's own float type [N, G], added
    two_level: TwoLevel | None = None
    group_size: int = 128  # columns a group; K when per channel; the last group may be shorter
    g_idx: Tensor | None = None  # int32 [K], the group of each column, when it is not k // group_size
    bits: int = 4

    def __post_init__(self) -> None:
        if self.bits not in WIDTHS:
            raise ValueError(f"codes have 4 or 8 bits, got {self.bits}")
        if self.codes.dtype != torch.int32 or self.codes.ndim != 2:
            raise ValueError(f"codes must be int32 words of rows, got {self.codes.dtype} {list(self.codes.shape)}")
        if self.scales.dtype not in SCALE_DTYPES:
            raise ValueError(f"scales must be a 16 or 32-bit float, got {self.scales.dtype}")
        if not 0 < self.group_size <= self.shape[1]:
            raise ValueError(f"group size must be 1..{self.shape[1]}, got {self.group_size}")
        if sum(part is not None for part in (self.zeros, self.minima, self.two_level)) > 1:
            raise ValueError("zeros, minima and two-level scales exclude each other")
        for name, part in self._per_group().items():
            if tuple(part.shape) != (self.shape[0], self.num_groups):
                expected = [self.shape[0], self.num_groups]
                raise ValueError(f"{name} must be {expected}, got {list(part.shape)}")
        if self.g_idx is not None and tuple(self.g_idx.shape) != (self.shape[1],):
            raise ValueError(f"g_idx must be [{self.shape[1]}], got {list(self.g_idx.shape)}")

    def _per_group(self) -> dict[str, Tensor]:
        parts = {"zeros": self.zeros, "minima": self.minima}
        if self.two_level is None:
            parts["scales"] = self.scales
        else:
            parts["scale_codes"] = self.two_level.scale_codes
            parts["minimum_codes"] = self.two_level.minimum_codes
        return {name: part for name, part in parts.items() if part is not None}

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K): outputs and inputs."""
        return self.codes.shape[0], 32 // self.bits * self.codes.shape[1]

    @property
    def middle(self) -> int:
        """The zero of a symmetric matrix: half of the codes are below it."""
        return 1 << (self.bits - 1)

    @property
    def num_groups(self) -> int:
        """Groups a row."""
        return -(-self.shape[1] // self.group_size)

    @property
    def num_bytes(self) -> int:
        """Bytes all parts take."""
        level = () if self.two_level is None else vars(self.two_level).values()
        parts = (self.codes, self.scales, self.zeros, self.minima, self.g_idx, *level)
        return sum(part.nbytes for part in parts if part is not None)

    def is_finite(self) -> bool:
        """Whether every scale and minimum is a number."""
        level = None if self.two_level is None else self.two_level.minima
        floats = [part for part in (self.scales, self.minima, level) if part is not None]
        return all(bool(torch.isfinite(part).all()) for part in floats)

    def group_of(self) -> Tensor:
        """int64 [K]: the group of each column."""
        if self.g_idx is not None:
            return self.g_idx.long()
        return torch.arange(self.shape[1], device=self.codes.device) // self.group_size

    def unpacked(self) -> Tensor:
        """uint8 [N, K]: the codes, one a byte."""
        return unpack_codes(self.codes, self.bits)

    def scale_offset(self) -> tuple[Tensor, Tensor]:
        """fp32 scale and offset of every row and group, [N, G] each."""
        scales = self.scales.float()
        if self.two_level is not None:
            level = self.two_level
            share = self.num_groups // scales.shape[1]
            scale = scales.repeat_interleave(share, 1) * level.scale_codes.float()
            minima = level.minima.float().repeat_interleave(share, 1)
            return scale, -(minima * level.minimum_codes.float())
        if self.minima is not None:
            return scales, self.minima.float()
        if self.zeros is not None:
            return scales, -(self.zeros.float() * scales)
        return scales, -self.middle * scales

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """[N, K] numbers: the law in fp32, then rounded once to `dtype`."""
        rows, columns = self.shape
        scale, offset = self.scale_offset()
        weight = self.unpacked().float()
        if self.g_idx is None and columns % self.group_size == 0:
            grouped = weight.view(rows, self.num_groups, self.group_size)
            grouped.mul_(scale.unsqueeze(-1)).add_(offset.unsqueeze(-1))
        else:
            group = self.group_of()
            weight.mul_(scale[:, group]).add_(offset[:, group])
        return weight.to(dtype)

    def to(self, device: torch.device | str) -> PackedWeight:
        """The same matrix on another device."""
        return self._map(lambda part: part.to(device))

    def take_rows(self, index: Tensor) -> PackedWeight:
        """The matrix of the rows `index`, in that order."""
        return self._map(lambda part: part[index], rows_only=True)

    def _map(self, change: Callable[[Tensor], Tensor], *, rows_only: bool = False) -> PackedWeight:
        changed: dict[str, object] = {}
        for field in fields(self):
            part = getattr(self, field.name)
            if isinstance(part, TwoLevel):
                changed[field.name] = TwoLevel(
                    change(part.minima), change(part.scale_codes), change(part.minimum_codes)
                )
            elif isinstance(part, Tensor) and not (rows_only and field.name == "g_idx"):
                changed[field.name] = change(part)
        return replace(self, **changed)  # type: ignore[arg-type]


def concat_rows(parts: Sequence[PackedWeight]) -> PackedWeight | None:
    """One matrix with the rows of all parts below each other (q, k, v or gate, up).

    None when they cannot share one product: other bits, inputs, group sizes, column orders or kinds of offset.
    """
    first = parts[0]
    if any(_kind(part) != _kind(first) for part in parts):
        return None
    orders = [part.g_idx for part in parts]
    if not all(_same_order(order, first.g_idx) for order in orders):
        return None

    def join(pick: Callable[[PackedWeight], Tensor]) -> Tensor:
        return torch.cat([pick(part) for part in parts])

    levels = [part.two_level for part in parts if part.two_level is not None]
    minima = [part.minima for part in parts if part.minima is not None]
    has_zeros = any(part.zeros is not None for part in parts)
    return PackedWeight(
        codes=join(lambda part: part.codes),
        scales=join(lambda part: part.scales),
        zeros=join(integer_zeros) if has_zeros else None,
        minima=torch.cat(minima) if minima else None,
        two_level=_join_levels(levels) if levels else None,
        group_size=first.group_size,
        g_idx=first.g_idx,
        bits=first.bits,
    )


def _join_levels(levels: Sequence[TwoLevel]) -> TwoLevel:
    return TwoLevel(
        torch.cat([level.minima for level in levels]),
        torch.cat([level.scale_codes for level in levels]),
        torch.cat([level.minimum_codes for level in levels]),
    )


def integer_zeros(weight: PackedWeight) -> Tensor:
    """uint8 [N, G]: the integer zeros of a matrix that has them, its middle where it is symmetric.

    Raises ValueError for float minima and two-level scales.
    """
    if weight.minima is not None or weight.two_level is not None:
        raise ValueError("a matrix with float minima has no integer zeros")
    if weight.zeros is not None:
        return weight.zeros
    return torch.full(weight.scales.shape, weight.middle, dtype=torch.uint8, device=weight.scales.device)


def _kind(weight: PackedWeight) -> tuple[object, ...]:
    offset = "two" if weight.two_level is not None else "minima" if weight.minima is not None else "zeros"
    return weight.bits, weight.shape[1], weight.group_size, weight.scales.dtype, offset


def _same_order(left: Tensor | None, right: Tensor | None) -> bool:
    if left is None or right is None:
        return left is right
    return torch.equal(left, right)
