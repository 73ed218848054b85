"""Heads of few bits on kernels: 8 bits as two planes, 4 bits, both with fp32 logits; what no kernel runs falls back."""

from __future__ import annotations

import pytest
import torch

from specq.quant.draft_head import make_draft_head, pack_ranges, pack_rows
from specq.quant.kernel_linear import KernelByteLinear, KernelLinear, make_kernel_linear
from specq.quant.linear import DenseLinear
from specq.quant.packed import PackedWeight, pack_codes

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # rows beyond x in group sums hold nothing
CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("bits", "kind", "packing"), [(8, KernelByteLinear, pack_rows), (4, KernelLinear, pack_ranges)]
)
def test_draft_heads_run_as_they_are_packed(monkeypatch, bits, kind, packing) -> None:
    monkeypatch.setenv("SPECQ_KERNELS", "triton")
    weight = torch.randn(96, 192)
    head = make_draft_head(weight, bits=bits, device=CPU, dtype=torch.float16)
    assert isinstance(head, kind)
    x = torch.randn(3, 192).half()
    found = head(x)
    assert found.dtype == torch.float32
    # sums in fp32 of some 200 products of unit size
    torch.testing.assert_close(found, x.float() @ packing(weight).dequantize().T, rtol=1e-4, atol=2e-3)


def packed_bytes(columns: int, group: int, scale: float = 0.01) -> PackedWeight:
    codes = pack_codes(torch.randint(0, 256, (16, columns), dtype=torch.uint8), 8)
    return PackedWeight(
        codes=codes, scales=torch.full((16, -(-columns // group)), scale).half(), group_size=group, bits=8
    )


@pytest.mark.parametrize(("columns", "group", "scale"), [(320, 128, 0.01), (80, 80, 0.01), (128, 64, 5000.0)])
def test_8_bit_matrices_of_other_forms_are_left_to_torch(columns: int, group: int, scale: float) -> None:
    weight = packed_bytes(columns, group, scale)
    assert isinstance(make_kernel_linear(weight, None, device=CPU, dtype=torch.float16), DenseLinear)


def test_a_prompt_through_an_8_bit_matrix_equals_its_rows() -> None:
    weight = packed_bytes(128, 64)
    module = make_kernel_linear(weight, None, device=CPU, dtype=torch.float16, out_dtype=torch.float32)
    x = torch.randn(70, 128).half()
    # the weight and the result are rounded to fp16 on the way
    torch.testing.assert_close(module(x), x.float() @ weight.dequantize().T, rtol=4e-3, atol=4e-2)
