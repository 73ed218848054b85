"""A draft head of few bits is close to the matrix it copies, and every row of it stands alone."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from specq.quant.draft_head import Int8Linear, draft_head_bits, make_draft_head, pack_ranges, round_rows
from specq.quant.linear import Int4Linear

CPU = torch.device("cpu")


@pytest.fixture
def weight() -> Tensor:
    # two rows a thousand times as large as the others, one of zeros
    weight = torch.randn(320, 64, generator=torch.Generator().manual_seed(0))
    weight[[3, 77]] *= 1000
    weight[5] = 0
    return weight


def errors(found: Tensor, weight: Tensor, x: Tensor) -> Tensor:
    """[N]: the error of each output relative to its row's size."""
    exact = x.double() @ weight.double().T
    return (found.double() - exact).abs().amax(0) / weight.double().norm(dim=1).clamp_min(1e-9)


@pytest.mark.parametrize(("bits", "kind", "limit"), [(8, Int8Linear, 0.05), (4, Int4Linear, 0.5)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_are_near_those_of_the_matrix(weight, bits, kind, limit, dtype) -> None:
    head = make_draft_head(weight, bits=bits, device=CPU, dtype=dtype)
    assert isinstance(head, kind)
    x = torch.randn(7, 64, generator=torch.Generator().manual_seed(1)).to(dtype)
    found = errors(head(x), weight, x)
    # uniform rounding to 255 and 16 steps of a normal row, and bf16 on top; a row of zeros stays exact
    assert found.max() < limit
    assert found[5] == 0


def test_4_bits_of_a_float64_target_are_exact_in_what_they_mean(weight) -> None:
    head = make_draft_head(weight, bits=4, device=CPU, dtype=torch.float64)
    x = torch.randn(2, 64, dtype=torch.float64)
    torch.testing.assert_close(head(x), x @ pack_ranges(weight).dequantize(torch.float64).T)


def test_codes_reach_over_the_range_of_each_row_and_group(weight) -> None:
    codes, scales = round_rows(weight)
    assert codes.abs().amax(1).tolist() == [0 if row == 5 else 127 for row in range(320)]
    assert ((codes.float() * scales[:, None] - weight).abs() <= 0.51 * scales[:, None]).all()
    packed = pack_ranges(weight)
    step = packed.scales.float().repeat_interleave(packed.group_size, 1)
    # half a step, and what fp16 loses of the minimum of a large row
    assert ((packed.dequantize() - weight).abs() <= 0.55 * step + weight.abs() / 500).all()


@pytest.mark.parametrize("columns", [32, 96, 40])
def test_any_multiple_of_8_columns_is_packed(columns) -> None:
    weight = torch.randn(16, columns)
    assert (pack_ranges(weight).dequantize() - weight).abs().max() < 0.5


@pytest.mark.parametrize("bits", [16, 3])
def test_other_widths_are_refused(bits) -> None:
    with pytest.raises(ValueError, match="bits: no product for a draft head"):
        make_draft_head(torch.zeros(8, 8), bits=bits, device=CPU, dtype=torch.float32)


def test_8_bits_are_refused_off_a_cpu_where_no_kernel_runs(monkeypatch) -> None:
    monkeypatch.setattr("specq.quant.draft_head.runs_kernels", lambda device, dtype: False)
    assert draft_head_bits(torch.device("cuda"), torch.float32) == (16, 4)
    with pytest.raises(ValueError, match="bits: no product for a draft head of 8 bits on cuda"):
        make_draft_head(torch.zeros(8, 8), bits=8, device=torch.device("cuda"), dtype=torch.float32)
