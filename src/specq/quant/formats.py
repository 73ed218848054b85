"""How matrices of 4 and 8 bits lie in files: one `QuantFormat` each, to and from `PackedWeight`.

Reading the files is tensors.py's work; here names are suffixes ("qweight") and tensors are in memory.
The block formats of GGUF are in gguf_blocks.py and join the table at the end.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from specq.quant import gguf_blocks
from specq.quant.packed import (
    SCALE_DTYPES,
    WIDTHS,
    PackedWeight,
    TwoLevel,
    concat_rows,
    integer_zeros,
    pack_codes,
    pack_nibbles,
    unpack_codes,
    unpack_nibbles,
)

__all__ = ["FORMATS", "Header", "PackedWeight", "QuantFormat", "TwoLevel", "concat_rows", "format_name"]

# Position in a word -> column within its block of 8, for AWQ's "gemm" layout.
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


@dataclass(frozen=True)
class Header:
    """What a file says of a tensor before its data is read."""

    dtype: torch.dtype
    shape: tuple[int, ...]


@dataclass(frozen=True)
class QuantFormat:
    """One file format of a matrix, its number of bits included.

    `check(headers, group_size)` returns (N, K) or raises ValueError; `unpack(tensors, group_size)` reads;
    `pack(weight)` returns the tensors by suffix, ValueError when the format cannot hold the matrix.
    A group size of -1 is one group a row.
    """

    name: str
    required: tuple[str, ...]
    optional: tuple[str, ...]
    check: Callable[[Mapping[str, Header], int], tuple[int, int]]
    unpack: Callable[[Mapping[str, Tensor], int], PackedWeight]
    pack: Callable[[PackedWeight], dict[str, Tensor]]


def _expect(headers: Mapping[str, Header], suffix: str, shape: tuple[int, ...], *dtypes: torch.dtype) -> None:
    header = headers[suffix]
    if header.dtype not in dtypes:
        raise ValueError(f"{suffix} has type {header.dtype}, not {' or '.join(map(str, dtypes))}")
    if header.shape != shape:
        raise ValueError(f"{suffix} has shape {list(header.shape)}, not {list(shape)}")


def _matrix(headers: Mapping[str, Header], suffix: str) -> tuple[int, int]:
    shape = headers[suffix].shape
    if len(shape) != 2 or 0 in shape:
        raise ValueError(f"{suffix} has shape {list(shape)}, not two dimensions")
    return shape[0], shape[1]


def _num_groups(columns: int, group_size: int) -> int:
    if group_size != -1 and group_size <= 0:
        raise ValueError(f"group size {group_size} is neither positive nor -1")
    return 1 if group_size == -1 else -(-columns // group_size)


def _column_order(g_idx: Tensor | None, columns: int, group_size: int) -> Tensor | None:
    """The group of each column as int32, None when it is the plain k // group_size (or unset, all -1)."""
    if g_idx is None or bool((g_idx == -1).all()):
        return None
    groups = _num_groups(columns, group_size)
    if int(g_idx.min()) < 0 or int(g_idx.max()) >= groups:
        raise ValueError(f"g_idx names groups {int(g_idx.min())}..{int(g_idx.max())} of {groups}")
    plain = torch.arange(columns, device=g_idx.device) // (columns if group_size == -1 else group_size)
    return None if torch.equal(g_idx.long(), plain) else g_idx.to(torch.int32)


def _build(
    codes: Tensor, scales: Tensor, zeros: Tensor | None, g_idx: Tensor | None, group_size: int, *, bits: int = 4
) -> PackedWeight:
    columns = 32 // bits * codes.shape[1]
    if zeros is not None and bool((zeros == 1 << (bits - 1)).all()):
        zeros = None
    size = columns if group_size == -1 else min(group_size, columns)
    order = _column_order(g_idx, columns, group_size)
    return PackedWeight(codes=codes, scales=scales, zeros=zeros, group_size=size, g_idx=order, bits=bits)


def _require_bits(weight: PackedWeight, bits: int) -> None:
    if weight.bits != bits:
        raise ValueError(f"a matrix of {weight.bits} bits in a format of {bits}")


def _g_idx_of(weight: PackedWeight) -> Tensor:
    return weight.group_of().to(torch.int32)


# GPTQ: words along K, zeros along N; version 1 stores zero - 1.


def _gptq_format(name: str, stored_offset: int, bits: int) -> QuantFormat:
    """`stored_offset` is what version 1 takes off its zeros."""
    per_word = 32 // bits
    largest = (1 << bits) - 1

    def check(headers: Mapping[str, Header], group_size: int) -> tuple[int, int]:
        words, rows = _matrix(headers, "qweight")
        columns = per_word * words
        groups = _num_groups(columns, group_size)
        _expect(headers, "qweight", (words, rows), torch.int32)
        _expect(headers, "scales", (groups, rows), *SCALE_DTYPES)
        if rows % per_word:
            raise ValueError(f"{rows} outputs are not a multiple of {per_word}")
        _expect(headers, "qzeros", (groups, rows // per_word), torch.int32)
        if "g_idx" in headers:
            _expect(headers, "g_idx", (columns,), torch.int32, torch.int64)
        return rows, columns

    def unpack(tensors: Mapping[str, Tensor], group_size: int) -> PackedWeight:
        # Without carry: of 4 bits a stored 15 is zero 16.
        zeros = unpack_codes(tensors["qzeros"], bits).to(torch.int16) + stored_offset
        if int(zeros.max()) > 255:
            raise ValueError("a zero of 256 is outside the codes")
        return _build(
            tensors["qweight"].T.contiguous(),
            tensors["scales"].T.contiguous(),
            zeros.T.to(torch.uint8).contiguous(),
            tensors.get("g_idx"),
            group_size,
            bits=bits,
        )

    def pack(weight: PackedWeight) -> dict[str, Tensor]:
        _require_bits(weight, bits)
        stored = integer_zeros(weight).to(torch.int16) - stored_offset
        # A version 1 zero of 16 would be a stored 15, which other readers decode as 0 or with a carry.
        if int(stored.min()) < 0 or int(stored.max()) > largest - stored_offset:
            raise ValueError(f"gptq zeros must be {stored_offset}..{largest}")
        return {
            "qweight": weight.codes.T.contiguous(),
            "qzeros": pack_codes(stored.T.contiguous(), bits),
            "scales": weight.scales.T.contiguous(),
            "g_idx": _g_idx_of(weight),
        }

    return QuantFormat(format_name(name, bits), _GPTQ_PARTS, ("g_idx",), check, unpack, pack)


# AWQ gemm: words along N with interleaved columns, zeros the same, nothing subtracted.


def _awq_check(headers: Mapping[str, Header], group_size: int) -> tuple[int, int]:
    columns, words = _matrix(headers, "qweight")
    groups = _num_groups(columns, group_size)
    _expect(headers, "qweight", (columns, words), torch.int32)
    _expect(headers, "qzeros", (groups, words), torch.int32)
    _expect(headers, "scales", (groups, 8 * words), *SCALE_DTYPES)
    if columns % 8:
        raise ValueError(f"{columns} inputs are not a multiple of 8")
    return 8 * words, columns


def _awq_order(device: torch.device) -> Tensor:
    return torch.tensor(AWQ_ORDER, device=device)


def _awq_values(words: Tensor) -> Tensor:
    nibbles = unpack_nibbles(words).view(words.shape[0], -1, 8)
    return nibbles[..., torch.argsort(_awq_order(words.device))].flatten(-2)


def _awq_words(values: Tensor) -> Tensor:
    if values.shape[1] % 8:
        raise ValueError(f"awq needs a multiple of 8 outputs, got {values.shape[1]}")
    return pack_nibbles(values.reshape(values.shape[0], -1, 8)[..., _awq_order(values.device)].flatten(-2))


def _awq_unpack(tensors: Mapping[str, Tensor], group_size: int) -> PackedWeight:
    codes = pack_nibbles(_awq_values(tensors["qweight"]).T.contiguous())
    zeros = _awq_values(tensors["qzeros"]).T.contiguous()
    return _build(codes, tensors["scales"].T.contiguous(), zeros, None, group_size)


def _awq_pack(weight: PackedWeight) -> dict[str, Tensor]:
    _require_bits(weight, 4)
    if weight.g_idx is not None:
        raise ValueError("awq has no permuted column order")
    zeros = integer_zeros(weight)
    if int(zeros.max()) > 15:
        raise ValueError("awq zeros must be 0..15")
    return {
        "qweight": _awq_words(weight.unpacked().T),
        "qzeros": _awq_words(zeros.T),
        "scales": weight.scales.T.contiguous(),
    }


# compressed-tensors pack-quantized: signed values stored + middle, words along K, zeros packed along N.


def _ct_format(name: str, bits: int) -> QuantFormat:
    per_word = 32 // bits
    largest = (1 << bits) - 1

    def check(headers: Mapping[str, Header], group_size: int) -> tuple[int, int]:
        rows, words = _matrix(headers, "weight_packed")
        columns = per_word * words
        groups = _num_groups(columns, group_size)
        _expect(headers, "weight_packed", (rows, words), torch.int32)
        _expect(headers, "weight_scale", (rows, groups), *SCALE_DTYPES)
        _expect(headers, "weight_shape", (2,), torch.int64, torch.int32)
        if "weight_zero_point" in headers:
            is_packed = headers["weight_zero_point"].dtype == torch.int32
            shape = (-(-rows // per_word) if is_packed else rows, groups)
            _expect(headers, "weight_zero_point", shape, torch.int32, torch.int8)
        if "weight_g_idx" in headers:
            _expect(headers, "weight_g_idx", (columns,), torch.int32, torch.int64)
        return rows, columns

    def unpack(tensors: Mapping[str, Tensor], group_size: int) -> PackedWeight:
        codes = tensors["weight_packed"].contiguous()
        rows, columns = codes.shape[0], per_word * codes.shape[1]
        if tensors["weight_shape"].tolist() != [rows, columns]:
            raise ValueError(f"weight_shape says {tensors['weight_shape'].tolist()}, packed is {[rows, columns]}")
        zeros = tensors.get("weight_zero_point")
        if zeros is not None and zeros.dtype == torch.int8:
            zeros = (zeros.to(torch.int16) + (1 << (bits - 1))).to(torch.uint8)
        elif zeros is not None:
            zeros = unpack_codes(zeros.T, bits)[:, :rows].T.contiguous()
        scales = tensors["weight_scale"].contiguous()
        return _build(codes, scales, zeros, tensors.get("weight_g_idx"), group_size, bits=bits)

    def pack(weight: PackedWeight) -> dict[str, Tensor]:
        _require_bits(weight, bits)
        zeros = integer_zeros(weight)
        if int(zeros.max()) > largest:
            raise ValueError(f"compressed-tensors zeros must be 0..{largest}")
        packed = {
            "weight_packed": weight.codes.contiguous(),
            "weight_scale": weight.scales.contiguous(),
            "weight_shape": torch.tensor(weight.shape, dtype=torch.int64),
        }
        if weight.zeros is not None:
            padded = torch.nn.functional.pad(zeros.T, (0, -weight.shape[0] % per_word))
            packed["weight_zero_point"] = pack_codes(padded, bits).T.contiguous()
        if weight.g_idx is not None:
            packed["weight_g_idx"] = _g_idx_of(weight)
        return packed

    optional = ("weight_zero_point", "weight_g_idx")
    return QuantFormat(format_name(name, bits), _CT_PARTS, optional, check, unpack, pack)


# GGUF: rows of blocks; one tensor "blocks", uint8 [N, bytes a row].


def _gguf_format(name: str, layout: gguf_blocks.BlockLayout) -> QuantFormat:
    def check(headers: Mapping[str, Header], group_size: int) -> tuple[int, int]:
        rows, row_bytes = _matrix(headers, "blocks")
        _expect(headers, "blocks", (rows, row_bytes), torch.uint8)
        if row_bytes % layout.block_bytes:
            raise ValueError(f"rows of {row_bytes} bytes are not whole {layout.block_bytes}-byte blocks")
        if group_size not in (-1, layout.group_size):
            raise ValueError(f"{name} has groups of {layout.group_size}, not {group_size}")
        return rows, row_bytes // layout.block_bytes * layout.block_columns

    def unpack(tensors: Mapping[str, Tensor], group_size: int) -> PackedWeight:
        return layout.unpack(tensors["blocks"])

    def pack(weight: PackedWeight) -> dict[str, Tensor]:
        _require_bits(weight, 4)
        return {"blocks": layout.pack(weight)}

    return QuantFormat(name, ("blocks",), (), check, unpack, pack)


_GPTQ_PARTS = ("qweight", "qzeros", "scales")
_CT_PARTS = ("weight_packed", "weight_scale", "weight_shape")


def format_name(name: str, bits: int) -> str:
    """The key in FORMATS of a file format with codes of that many bits."""
    return name if bits == 4 else f"{name}-{bits}bit"


_ALL = (
    *(_gptq_format("gptq", 1, bits) for bits in WIDTHS),
    *(_gptq_format("gptq_v2", 0, bits) for bits in WIDTHS),
    QuantFormat("awq", _GPTQ_PARTS, (), _awq_check, _awq_unpack, _awq_pack),
    *(_ct_format("compressed-tensors", bits) for bits in WIDTHS),
    *(_gguf_format(f"gguf-{name}", layout) for name, layout in gguf_blocks.LAYOUTS.items()),
)

FORMATS: Mapping[str, QuantFormat] = {form.name: form for form in _ALL}
