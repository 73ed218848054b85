"""Lane order in the interpreter: producers write what they return in that order as well, and nothing else moves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from step_cases import Form, PackedInMemory, fast_model, packed_config, random_chain, run_forwards
from torch import Tensor

from specq.quant import kernel_linear
from specq.quant.kernel_linear import KernelGateUp, KernelLinear
from specq_kernels.group_sums import Sides, empty_sides, group_sums_ref, sides, sides_ref
from specq_kernels.lane_order import has_lanes, lanes_ref, lanes_rows
from specq_kernels.norm_rope import rms_norm, rms_norm_parts, rms_norm_parts_ref, rms_norm_ref, silu_mul, silu_mul_ref
from specq_kernels.round_rows import round_rows, round_rows_ref
from specq_kernels.tree_attention import pack_mask, tree_attention

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # rows beyond x hold nothing

Made = tuple[Tensor, Sides | None]


def are_lanes_of(lanes: Tensor, x: Tensor) -> bool:
    is_row = lanes_ref(torch.ones_like(x)).bool()  # beyond x's lies anything
    return torch.equal(lanes[is_row], lanes_ref(x)[is_row])


def norm(x: Tensor, lanes: bool) -> Made:
    y, _, beside = rms_norm(x, torch.linspace(0.5, 2, x.shape[1]), eps=1e-5, residual=x, group=128, lanes=lanes)
    return y, beside


def norm_of_parts(x: Tensor, lanes: bool) -> Made:
    parts, weight = torch.stack([x.float(), 2 * x.float()]), torch.linspace(0.5, 2, x.shape[1])
    y, _, beside = rms_norm_parts(parts, x, weight, eps=1e-5, group=64, lanes=lanes)
    return y, beside


def silu(x: Tensor, lanes: bool) -> Made:
    return silu_mul(torch.cat([x, x.flip(1)], 1), group=32, lanes=lanes)


def rounded(x: Tensor, lanes: bool) -> Made:
    return round_rows(x, bits=8, group=128, lanes=lanes)


def plain(x: Tensor, lanes: bool) -> Made:
    return x, sides(x, 64, lanes=lanes)


def check(make: Callable[[Tensor, bool], Made], x: Tensor) -> None:
    """y and sums are the same with lanes as without, and lanes are y's."""
    rows, k = x.shape
    y, beside = make(x, True)
    alone, without = make(x, False)
    assert beside is not None
    assert without is not None
    assert torch.equal(y, alone)
    assert torch.equal(beside.sums[:, :rows], without.sums[:, :rows])
    assert without.lanes is None
    assert beside.lanes is not None
    assert beside.lanes.dtype == x.dtype
    assert beside.lanes.shape == (lanes_rows(rows) * k,)
    assert are_lanes_of(beside.lanes, y)


@pytest.mark.parametrize("rows", [3, 8, 20, 64])
def test_the_layout_is_that_of_the_matrix_instruction(rows: int) -> None:
    x = torch.randn(rows, 512)
    padded = torch.cat([x, x.new_zeros(lanes_rows(rows) - rows, 512)])
    found = lanes_ref(x).view(8, -1, 2, 8, 4, 2, 2, 2)
    draw = torch.randint(0, 2**30, (100, 8)) % torch.tensor(found.shape)
    for c, block, half, g, t, kb, r, j in draw.tolist():
        column = c * 64 + (half * 2 + kb) * 16 + r * 8 + t * 2 + j
        assert found[c, block, half, g, t, kb, r, j] == padded[block * 8 + g, column]


@pytest.mark.parametrize("make", [plain, norm, norm_of_parts, silu, rounded])
@pytest.mark.parametrize(
    ("rows", "k", "dtype"),
    [
        (1, 4096, torch.float16),
        (5, 256, torch.bfloat16),
        (8, 1280, torch.float32),
        (9, 768, torch.bfloat16),
        (16, 2048, torch.float16),
        (33, 256, torch.float16),
        (64, 512, torch.bfloat16),
    ],
)
def test_producers_write_their_result_in_lane_order(
    make: Callable[[Tensor, bool], Made], rows: int, k: int, dtype: torch.dtype
) -> None:
    check(make, torch.randn(rows, k).to(dtype))


@pytest.mark.parametrize(
    ("nodes", "heads", "head_dim", "group", "merged"),
    [
        (1, 32, 128, 128, 1),
        (5, 8, 64, 128, 2),
        (8, 8, 32, 128, 4),
        (9, 2, 128, 32, 4),
        (16, 4, 64, 64, 1),
        (33, 4, 64, 128, 2),
        (64, 2, 128, 128, 4),
    ],
)
def test_attention_writes_its_result_in_lane_order(
    nodes: int, heads: int, head_dim: int, group: int, merged: int
) -> None:
    q = torch.randn(nodes, heads, head_dim, dtype=torch.float16)
    k, v = torch.randn(2, 1, 144, head_dim, dtype=torch.float16).unbind()
    mask, length = pack_mask(torch.ones(nodes, nodes, dtype=torch.bool).tril()), torch.tensor([70], dtype=torch.int32)

    def attend(x: Tensor, lanes: bool) -> Made:
        beside = empty_sides(x, group, lanes=lanes)
        out = tree_attention(q, k, v, mask, length, sides=beside, config={"merged": merged})
        return out, beside

    check(attend, q.flatten(1))
    wrong = Sides(torch.zeros(heads * head_dim // group, 16 if nodes <= 16 else 64), torch.zeros(8).half())
    with pytest.raises(ValueError, match="sides: lanes of shape"):
        tree_attention(q, k, v, mask, length, sides=wrong)


def test_columns_that_the_weight_pads_have_no_lanes() -> None:
    x = torch.randn(3, 576).half()
    assert not has_lanes(576)
    for make in (plain, norm, silu, rounded):
        _, beside = make(x, True)
        assert beside is not None
        assert beside.lanes is None
    with pytest.raises(ValueError, match="x: 576 columns"):
        lanes_ref(x)
    with pytest.raises(ValueError, match="rows: 65"):
        lanes_rows(65)


def test_definitions_have_the_lanes_of_their_result() -> None:
    x, weight = torch.randn(5, 256, dtype=torch.float64), torch.rand(256)
    for y, beside in (
        rms_norm_ref(x, weight, eps=1e-5, group=128, lanes=True)[::2],
        rms_norm_parts_ref(x[None], x, weight, eps=1e-5, group=128, lanes=True)[::2],
        silu_mul_ref(torch.cat([x, x], 1), group=128, lanes=True),
        round_rows_ref(x, bits=4, group=128, lanes=True),
        (x, sides_ref(x, 128, lanes=True)),
    ):
        assert beside is not None
        assert torch.equal(beside.sums, group_sums_ref(y, 128))
        assert beside.lanes is not None
        assert torch.equal(beside.lanes, lanes_ref(y))


def test_every_product_of_a_step_gets_the_sides_it_asks_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_linear, "reads_lanes", lambda rows, weight: True)
    found: list[tuple[int, ...]] = []

    def watch(kind: type[KernelLinear] | type[KernelGateUp]) -> None:
        product = kind.product

        def watched(self: Any, x: Tensor, *, sides: Sides | None = None, **options: Any) -> Tensor:
            if sides is not None and sides.lanes is not None:
                assert are_lanes_of(sides.lanes, x)
                found.append(tuple(self.weight.shape))
            return product(self, x, sides=sides, **options)

        monkeypatch.setattr(kind, "product", watched)

    watch(KernelLinear)
    watch(KernelGateUp)
    form = Form(128, width=256)
    nodes = [(random_chain(3, seed=1), range(3))]
    config = packed_config(form, num_hidden_layers=1)
    run_forwards(fast_model(config, PackedInMemory(config, form), dtype="float16"), nodes, max_len=16)
    assert found == [(512, 256), (256, 256), (512, 256)]  # qkv, o, gate and up; down's x is the fused product's
    found.clear()
    config = packed_config(form, num_hidden_layers=1, mlp_bias=True)
    run_forwards(fast_model(config, PackedInMemory(config, form), dtype="float16"), nodes, max_len=16)
    assert found == [(512, 256), (256, 256), (512, 256), (256, 256)]
