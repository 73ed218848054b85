"""The 16-bit product with its argmax, and the 4-bit product of many rows, in the interpreter."""

from __future__ import annotations

import pytest
import torch

from specq_kernels.w4_layout import pack_w4
from specq_kernels.w4_prefill import w4_dequantize, w4_dequantize_ref, w4_prefill
from specq_kernels.w4a16 import w4a16_ref
from specq_kernels.w16a16 import W16Weight, w16a16, w16a16_argmax, w16a16_ref


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize(("rows", "n", "k"), [(1, 100, 576), (17, 128, 300), (64, 65, 512)])
def test_product_equals_the_definition(rows: int, n: int, k: int, dtype: torch.dtype) -> None:
    weight = W16Weight.of(torch.randn(n, k).to(dtype))
    x, bias, residual = (torch.randn(*shape).to(dtype) for shape in ((rows, k), (n,), (rows, n)))
    y = w16a16(x, weight, bias=bias, residual=residual)
    torch.testing.assert_close(y, w16a16_ref(x, weight, bias=bias, residual=residual), rtol=2e-3, atol=2e-2)
    assert not weight.counters.any()


def test_rows_do_not_depend_on_their_number() -> None:
    weight = W16Weight.of(torch.randn(192, 1024).half())
    x = torch.randn(40, 1024).half()
    config = {"split": 3, "block_n": 64, "stages": 1}
    whole = w16a16(x, weight, config={**config, "block_m": 64})
    for rows, block_m in ((1, 16), (16, 16), (21, 32)):
        assert torch.equal(w16a16(x[:rows].contiguous(), weight, config={**config, "block_m": block_m}), whole[:rows])


def test_argmax_is_that_of_the_logits_below_the_vocabulary() -> None:
    matrix = torch.randn(300, 256).half()
    matrix[[10, 200]] = matrix[10] * 0 + 3.0  # equal rows: the lower id wins where they win
    weight = W16Weight.of(matrix)
    x = torch.cat([torch.randn(4, 256).half(), torch.ones(1, 256).half()])
    logits = w16a16(x, weight, out_dtype=torch.float32)
    assert w16a16_argmax(x, weight).tolist() == logits.argmax(-1).tolist()
    assert w16a16_argmax(x, weight)[4] == 10
    assert w16a16_argmax(x, weight, vocab=9).tolist() == logits[:, :9].argmax(-1).tolist()


FORMS = ("symmetric", "zeros", "minima", "two-level")


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("is_gate_up", [False, True])
def test_many_rows_go_through_the_dequantised_matrix(form: str, is_gate_up: bool) -> None:
    n, k = 48, 512
    codes = torch.randint(-(2**31), 2**31 - 1, (n, k // 8), dtype=torch.int32)
    subs = torch.randint(0, 64, (2, n, k // 32), dtype=torch.uint8)
    scales, minima = torch.rand(n, k // 32).half() * 0.01, -torch.rand(n, k // 32).half() * 0.1
    parts = {
        "symmetric": {},
        "zeros": {"zeros": torch.randint(0, 17, (n, k // 32), dtype=torch.uint8)},
        "minima": {"minima": minima},
        "two-level": {"minima": minima[:, : k // 256], "sub_scales": subs[0], "sub_minima": subs[1]},
    }[form]
    if form == "two-level":
        scales = scales[:, : k // 256]
    weight = pack_w4(codes, scales, group_size=32, is_gate_up=is_gate_up, **parts)
    exact = w4_dequantize(weight, 0, 128, torch.float32)
    torch.testing.assert_close(exact, w4_dequantize_ref(weight, 0, 128, torch.float32), rtol=1e-6, atol=1e-6)
    x = torch.randn(70, k).half()
    reference = w4a16_ref(x.double(), weight)
    # the matrix is rounded to fp16 here and not in the reference: 2^-12 relative a weight, and the output's rounding
    assert (w4_prefill(x, weight).double() - reference).norm() / reference.norm() < 2e-3
