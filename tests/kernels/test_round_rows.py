"""The kernel that rounds activations, in the interpreter: equal to its definition and to the law of specq/quant."""

from __future__ import annotations

import pytest
import torch

from specq.quant.rounding import round_rows as law
from specq_kernels.group_sums import group_sums_ref
from specq_kernels.round_rows import round_rows, round_rows_ref


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize(("rows", "columns", "group"), [(1, 128, 128), (3, 1100, 64), (17, 300, None), (2, 2304, 32)])
def test_rounded_rows_are_those_of_the_law(
    rows: int, columns: int, group: int | None, bits: int, dtype: torch.dtype
) -> None:
    x = (torch.randn(rows, columns) * torch.rand(rows, 1) * 5).to(dtype)
    x[0, : min(columns, 128)] = 0
    y, sides = round_rows(x, bits=bits, group=group)
    expected, expected_sides = round_rows_ref(x, bits=bits, group=group)
    assert torch.equal(y, expected)
    assert torch.equal(y, law(x, f"a{bits}"))
    if group is None:
        assert sides is expected_sides is None
    else:
        assert sides is not None
        torch.testing.assert_close(sides.sums[:, :rows], group_sums_ref(y, group)[:, :rows], rtol=1e-5, atol=1e-4)


def test_halves_round_to_even() -> None:
    x = torch.tensor([[127.0, 0.5, 1.5, -2.5, 3.49, 126.5]])
    assert round_rows(x, bits=8)[0].tolist() == [[127.0, 0.0, 2.0, -2.0, 3.0, 126.0]]


def test_errors_name_the_argument() -> None:
    x = torch.zeros(2, 128)
    for match, options in (("bits: 6", {"bits": 6}), ("group: 16", {"bits": 8, "group": 16})):
        with pytest.raises(ValueError, match=match):
            round_rows(x, **options)
    with pytest.raises(ValueError, match="x: 65 rows"):
        round_rows(torch.zeros(65, 128), bits=8)
