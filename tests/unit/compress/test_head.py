"""The head, solved in parts, against the solver on the whole."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from factories import WeightsInMemory, random_weights, tiny_config

from specq.checkpoint import ModelSpec
from specq.compress.activations import Activations
from specq.compress.head import quantize_head, rounded_head
from specq.compress.layers import Stream
from specq.compress.plan import Settings, plan_quantization
from specq.quant.formats import FORMATS
from specq.quant.gptq import Grid, InputMoments, round_to_nearest, solve
from specq.quant.packed import PackedWeight

CONFIG = tiny_config(intermediate_size=192)
SPEC = ModelSpec.from_config(CONFIG)
WEIGHTS = random_weights(CONFIG)
CPU = torch.device("cpu")


def streams() -> tuple[Stream, Stream]:
    """The residual streams behind the last layer: of the original, and a little off it."""
    generator = torch.Generator().manual_seed(0)
    before, now = (Stream(Activations(CPU, on_host=False), Activations(CPU, on_host=False)) for _ in range(2))
    for index in range(3):
        x = torch.randn(2, 40, 64, generator=generator)
        before.residual.write(index, x)
        now.residual.write(index, x + 0.1 * torch.randn(x.shape, generator=generator))
    return before, now


def head_of(settings: Settings, rows: int) -> PackedWeight:
    plan = replace(plan_quantization(SPEC, settings), head_rows=rows)
    tensors, report = quantize_head(
        SPEC,
        WeightsInMemory(WEIGHTS),
        plan=plan,
        settings=settings,
        streams=streams() if settings.method == "gptq" else None,
        device=CPU,
        dtype=torch.float32,
    )
    assert (report.error is None) == (settings.method == "rtn")
    parts = {name.removeprefix("lm_head."): tensor for name, tensor in tensors.items()}
    return FORMATS["gptq-8bit"].unpack(parts, plan.group_size)


@pytest.mark.parametrize("is_ordered", [False, True])
def test_parts_of_a_head_are_solved_like_the_whole(is_ordered: bool) -> None:
    settings = Settings(head_bits=8, group_size=32, stored_order=is_ordered)
    before, now = streams()
    norm, head = WEIGHTS["model.norm.weight"], WEIGHTS["lm_head.weight"]
    moments = InputMoments(64, device=CPU)
    for index in range(3):
        x, y = (F.rms_norm(stream.residual.read(index), (64,), norm, SPEC.norm_eps) for stream in (now, before))
        moments.add(x, drift=y - x)
    grid = Grid(32, has_stored_order=is_ordered, bits=8)
    expected = solve(head, moments.hessian(), grid, shortfall=moments.shortfall(head)).weight
    for rows in (320, 128):
        found = head_of(settings, rows)
        assert torch.equal(found.unpacked(), expected.unpacked())
        assert torch.equal(found.group_of(), expected.group_of())


def test_rounding_takes_the_nearest_codes() -> None:
    head = WEIGHTS["lm_head.weight"]
    expected = round_to_nearest(head, Grid(32, bits=8))
    assert torch.equal(head_of(Settings(method="rtn", head_bits=8, group_size=32), 128).codes, expected.codes)
    rounded = rounded_head(head, Grid(32, bits=8), rows_at_once=100, device="cpu")
    assert torch.equal(rounded, expected.dequantize())
