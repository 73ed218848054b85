"""File formats of packed matrices: inverse to each other, and equal to words worked out by hand."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from packed_weights import random_packed, same

from specq.quant.formats import FORMATS, Header, PackedWeight
from specq.quant.packed import pack_codes, pack_nibbles

FOLDER_FORMATS = ("gptq", "gptq_v2", "awq", "compressed-tensors")
EIGHT_BITS = ("gptq-8bit", "gptq_v2-8bit", "compressed-tensors-8bit")
BLOCK_KINDS = {"gguf-q4_0": "symmetric", "gguf-q4_1": "minima", "gguf-q4_k": "two-level"}


def _as_signed(word: int) -> int:
    return word - 2**32 if word >= 2**31 else word


def _words(*values: int) -> torch.Tensor:
    return torch.tensor([_as_signed(value) for value in values], dtype=torch.int32)


def _headers(tensors: dict[str, torch.Tensor]) -> dict[str, Header]:
    return {name: Header(tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}


def _counting(offset: int = 0) -> PackedWeight:
    """8 rows of 8 columns, code (column + row + offset) % 16, one group, scale 1."""
    codes = (torch.arange(8)[:, None] + torch.arange(8) + offset) % 16
    return PackedWeight(codes=pack_nibbles(codes), scales=torch.ones(8, 1).half(), group_size=8)


@settings(max_examples=40, deadline=None)
@given(
    name=st.sampled_from(FOLDER_FORMATS + EIGHT_BITS),
    rows=st.integers(1, 5),
    columns=st.integers(1, 12),
    group_size=st.sampled_from([8, 16, 24, 32, 96]),
    is_symmetric=st.booleans(),
    is_permuted=st.booleans(),
    seed=st.integers(0, 2**16),
)
def test_unpack_inverts_pack(
    name: str, rows: int, columns: int, group_size: int, is_symmetric: bool, is_permuted: bool, seed: int
) -> None:
    rows, columns = 8 * rows - (seed % 8 if name.startswith("compressed-tensors") else 0), 8 * columns
    bits = 8 if name in EIGHT_BITS else 4
    kind = "symmetric" if is_symmetric else "zeros"
    size = min(group_size, columns)
    is_permuted = is_permuted and name != "awq"
    weight = random_packed(rows, columns, size, kind=kind, is_permuted=is_permuted, seed=seed, bits=bits)
    if weight.g_idx is not None and torch.equal(weight.group_of(), torch.arange(columns) // size):
        weight = random_packed(rows, columns, size, kind=kind, seed=seed, bits=bits)
    tensors = FORMATS[name].pack(weight)
    assert FORMATS[name].check(_headers(tensors), size) == weight.shape
    assert same(FORMATS[name].unpack(tensors, size), weight)


@pytest.mark.parametrize("name", BLOCK_KINDS)
def test_unpack_inverts_pack_for_blocks(name: str) -> None:
    weight = random_packed(5, 512, 32, kind=BLOCK_KINDS[name])
    tensors = FORMATS[name].pack(weight)
    assert FORMATS[name].check(_headers(tensors), -1) == weight.shape
    assert same(FORMATS[name].unpack(tensors, -1), weight)


def test_every_format_has_a_round_trip() -> None:
    assert set(FORMATS) == {*FOLDER_FORMATS, *EIGHT_BITS, *BLOCK_KINDS}


def test_gptq_words_run_along_k_and_a_symmetric_zero_is_stored_as_seven() -> None:
    tensors = FORMATS["gptq"].pack(_counting())
    assert tensors["qweight"].tolist() == [[_as_signed(0x76543210 + row * 0x11111111) for row in range(8)]]
    assert tensors["qzeros"].tolist() == [[0x77777777]]
    assert tensors["g_idx"].tolist() == [0] * 8
    assert FORMATS["gptq_v2"].pack(_counting())["qzeros"].tolist() == [[_as_signed(0x88888888)]]


def test_eight_bits_are_four_to_a_word_with_128_in_the_middle() -> None:
    codes = torch.arange(4)[:, None] * 16 + torch.arange(4)
    weight = PackedWeight(codes=pack_codes(codes, 8), scales=torch.ones(4, 1).half(), group_size=4, bits=8)
    assert weight.shape == (4, 4)
    assert weight.dequantize()[1].tolist() == [-112, -111, -110, -109]
    tensors = FORMATS["gptq-8bit"].pack(weight)
    assert tensors["qweight"].tolist() == [[0x03020100, 0x13121110, 0x23222120, 0x33323130]]
    assert tensors["qzeros"].tolist() == [[0x7F7F7F7F]]
    assert FORMATS["gptq_v2-8bit"].pack(weight)["qzeros"].tolist() == [[_as_signed(0x80808080)]]
    packed = FORMATS["compressed-tensors-8bit"].pack(weight)["weight_packed"]
    assert packed.tolist() == [[0x03020100], [0x13121110], [0x23222120], [0x33323130]]


def test_a_zero_of_256_is_outside_eight_bits() -> None:
    tensors = FORMATS["gptq-8bit"].pack(random_packed(8, 64, 32, bits=8)) | {"qzeros": torch.full((2, 2), -1).int()}
    with pytest.raises(ValueError, match="zero of 256"):
        FORMATS["gptq-8bit"].unpack(tensors, 32)


@pytest.mark.parametrize("name", [*FOLDER_FORMATS, *EIGHT_BITS, "gguf-q4_0"])
def test_a_matrix_of_other_bits_is_refused(name: str) -> None:
    weight = random_packed(8, 64, 32, bits=4 if name in EIGHT_BITS else 8)
    with pytest.raises(ValueError, match="bits in a format of"):
        FORMATS[name].pack(weight)


def test_awq_words_run_along_n_in_their_own_order() -> None:
    tensors = FORMATS["awq"].pack(_counting())
    assert tensors["qweight"][0].tolist() == [0x75316420]
    assert tensors["qzeros"].tolist() == [[_as_signed(0x88888888)]]


def test_awq_zeros_follow_the_same_order_and_are_not_shifted() -> None:
    tensors = FORMATS["awq"].pack(_counting()) | {"qzeros": _words(0x75316420)[None]}
    assert FORMATS["awq"].unpack(tensors, 8).zeros.flatten().tolist() == list(range(8))


def test_compressed_tensors_words_run_along_k_and_zeros_along_n() -> None:
    weight = PackedWeight(
        codes=_counting().codes[:3],
        scales=torch.ones(3, 1).half(),
        zeros=torch.tensor([[1], [2], [3]], dtype=torch.uint8),
        group_size=8,
    )
    tensors = FORMATS["compressed-tensors"].pack(weight)
    assert tensors["weight_packed"].tolist() == [[0x76543210], [_as_signed(0x87654321)], [_as_signed(0x98765432)]]
    assert tensors["weight_zero_point"].tolist() == [[0x321]]
    assert tensors["weight_shape"].tolist() == [3, 8]


def test_compressed_tensors_reads_unpacked_signed_zeros() -> None:
    tensors = FORMATS["compressed-tensors"].pack(_counting())
    tensors["weight_zero_point"] = torch.arange(-8, 0, dtype=torch.int8)[:, None]
    assert FORMATS["compressed-tensors"].check(_headers(tensors), -1) == (8, 8)
    assert FORMATS["compressed-tensors"].unpack(tensors, -1).zeros.flatten().tolist() == list(range(8))
    wide = FORMATS["compressed-tensors-8bit"].pack(random_packed(4, 8, 8, bits=8))
    wide["weight_zero_point"] = torch.tensor([[-128], [-1], [0], [127]], dtype=torch.int8)
    assert FORMATS["compressed-tensors-8bit"].unpack(wide, -1).zeros.flatten().tolist() == [0, 127, 128, 255]


def test_version_one_zeros_gain_one_without_carry() -> None:
    tensors = FORMATS["gptq"].pack(_counting()) | {"qzeros": _words(0xF0F27F01)[None]}
    zeros = FORMATS["gptq"].unpack(tensors, -1).zeros
    assert zeros.flatten().tolist() == [2, 1, 16, 8, 3, 16, 1, 16]


@pytest.mark.parametrize(("name", "zero"), [("gptq", 0), ("gptq", 16), ("gptq_v2", 16), ("awq", 16)])
def test_a_zero_the_format_cannot_hold_is_refused(name: str, zero: int) -> None:
    counting = _counting()
    zeros = torch.full((8, 1), zero, dtype=torch.uint8)
    weight = PackedWeight(codes=counting.codes, scales=counting.scales, zeros=zeros, group_size=8)
    with pytest.raises(ValueError, match="zeros must be"):
        FORMATS[name].pack(weight)


def test_reading_version_one_as_version_two_is_off_by_one_scale() -> None:
    """The label matters: the control for the readers agreeing by accident."""
    weight = random_packed(8, 64, 32, kind="zeros")
    read = FORMATS["gptq_v2"].unpack(FORMATS["gptq"].pack(weight), 32)
    scale, _ = weight.scale_offset()
    assert torch.allclose(read.dequantize() - weight.dequantize(), scale.repeat_interleave(32, 1), atol=1e-6)


@pytest.mark.parametrize("name", FOLDER_FORMATS)
def test_files_dequantise_to_scale_times_code_minus_zero(name: str) -> None:
    weight = random_packed(16, 80, 32, kind="zeros")
    read = FORMATS[name].unpack(FORMATS[name].pack(weight), 32)
    group = torch.arange(80) // 32
    codes, zeros, scales = weight.unpacked().double(), weight.zeros.double(), weight.scales.double()
    assert torch.equal(read.dequantize().double(), (codes - zeros[:, group]) * scales[:, group])


def test_plain_and_unset_column_orders_are_dropped() -> None:
    tensors = FORMATS["gptq"].pack(random_packed(8, 64, 32))
    assert FORMATS["gptq"].unpack(tensors, 32).g_idx is None
    assert FORMATS["gptq"].unpack(tensors | {"g_idx": torch.full((64,), -1, dtype=torch.int32)}, 32).g_idx is None


def test_a_column_order_that_names_no_group_is_refused() -> None:
    tensors = FORMATS["gptq"].pack(random_packed(8, 64, 32))
    tensors["g_idx"][5] = 2
    with pytest.raises(ValueError, match=r"names groups 0\.\.2 of 2"):
        FORMATS["gptq"].unpack(tensors, 32)


@pytest.mark.parametrize(
    ("name", "suffix", "header", "message"),
    [
        ("gptq", "qweight", Header(torch.int64, (8, 16)), "type"),
        ("gptq", "qweight", Header(torch.int32, (8, 12)), "scales"),
        ("gptq", "scales", Header(torch.float16, (1, 16)), r"\[1, 16\], not \[2, 16\]"),
        ("gptq", "scales", Header(torch.float64, (2, 16)), "float64"),
        ("gptq", "qzeros", Header(torch.int32, (2, 3)), "qzeros"),
        ("gptq", "g_idx", Header(torch.int32, (63,)), "g_idx"),
        ("awq", "qzeros", Header(torch.int32, (2, 1)), "qzeros"),
        ("awq", "qweight", Header(torch.int32, (64,)), "two dimensions"),
        ("compressed-tensors", "weight_scale", Header(torch.float16, (16, 3)), "weight_scale"),
        ("compressed-tensors", "weight_shape", Header(torch.int64, (3,)), "weight_shape"),
    ],
)
def test_headers_that_do_not_fit_are_refused(name: str, suffix: str, header: Header, message: str) -> None:
    headers = _headers(FORMATS[name].pack(random_packed(16, 64, 32)))
    assert FORMATS[name].check(headers, 32) == (16, 64)
    with pytest.raises(ValueError, match=message):
        FORMATS[name].check(headers | {suffix: header}, 32)
