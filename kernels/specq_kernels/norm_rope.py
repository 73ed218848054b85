"""The vector kernels between products: RMSNorm with residual, SiLU of gate and up; both can emit their result's sides.

Rotary embedding lives with the cache (kv_cache.append_rotary), where its result is written.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from specq_kernels.group_sums import Sides, empty_sides, side_arguments, sides_ref, store_sides
from specq_kernels.launch import check_tensor, has_dependent_launch, interpreted, runs_kernel, wide
from specq_kernels.w4_device import sum_parts

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)  # the last for the definitions only
COLUMNS_A_WARP = 512  # of a norm


def rms_norm(
    x: Tensor,
    weight: Tensor,
    *,
    eps: float,
    residual: Tensor | None = None,
    group: int | None = None,
    lanes: bool = False,
) -> tuple[Tensor, Tensor, Sides | None]:
    """(y, h, sides): h = x + residual (x itself without one), y = h / rms(h) * weight, `sides(y, group, lanes=lanes)`.

    x and residual [rows, K]; weight [K]. h is rounded to x's dtype before it is normalised; `sides` is None without
    `group`. Raises ValueError naming the argument.
    """
    rows, k = check_matrix("x", x)
    check_tensor("weight", weight, shape=(k,), dtype=FLOATS, device=x.device)
    if residual is not None:
        check_tensor("residual", residual, shape=(rows, k), dtype=x.dtype, device=x.device)
    if not runs_kernel(x):
        return rms_norm_ref(x, weight, eps=eps, residual=residual, group=group, lanes=lanes)
    h = torch.empty_like(x) if residual is not None else x
    y, sides = _launch(x, weight, eps, h, group, lanes, residual=residual)
    return y, h, sides


def rms_norm_parts(
    parts: Tensor, residual: Tensor, weight: Tensor, *, eps: float, group: int | None = None, lanes: bool = False
) -> tuple[Tensor, Tensor, Sides | None]:
    """As `rms_norm`, of a product that `w4a16_parts` left in parts: h = sum of parts + residual, rounded once.

    parts float32 [parts, rows, at least K]; residual [rows, K]. Raises ValueError naming the argument.
    """
    rows, k = check_matrix("residual", residual)
    check_tensor("parts", parts, shape=(None, rows, None), device=residual.device)
    check_tensor("weight", weight, shape=(k,), dtype=FLOATS, device=residual.device)
    if parts.shape[2] < k:
        raise ValueError(f"parts: {parts.shape[2]} columns, the residual has {k}")
    if not runs_kernel(residual):
        return rms_norm_parts_ref(parts, residual, weight, eps=eps, group=group, lanes=lanes)
    h = torch.empty_like(residual)
    y, sides = _launch(parts, weight, eps, h, group, lanes, residual=residual)
    return y, h, sides


def _launch(
    x: Tensor, weight: Tensor, eps: float, h: Tensor, group: int | None, lanes: bool, *, residual: Tensor | None
) -> tuple[Tensor, Sides | None]:
    """(y, its sides) of x [rows, K], or of parts [parts, rows, at least K]; fills h where there is a residual."""
    rows, k = h.shape
    y = torch.empty_like(h)
    sides = empty_sides(y, group, lanes=lanes) if group else None
    to, constants = side_arguments(sides, y, group)
    block = max(256, triton.next_power_of_2(k))
    early = has_dependent_launch(h)
    options = {} if interpreted() else {"num_warps": min(16, max(4, block // COLUMNS_A_WARP)), "launch_pdl": early}
    _rms_norm_kernel[(rows,)](
        x, residual if residual is not None else x, weight, y, h, *to, k, x.shape[-1], eps,
        HAS_RESIDUAL=residual is not None, PARTS=x.shape[0] if x.dim() == 3 else 0, **constants, BLOCK=block,
        EARLY=early, **options,
    )  # fmt: skip
    return y, sides


def rms_norm_parts_ref(
    parts: Tensor, residual: Tensor, weight: Tensor, *, eps: float, group: int | None = None, lanes: bool = False
) -> tuple[Tensor, Tensor, Sides | None]:
    """The definition."""
    total = torch.zeros_like(parts[0])
    for part in parts:
        total = total + part
    h = (total[:, : residual.shape[1]] + wide(residual)).to(residual.dtype)
    return rms_norm_ref(h, weight, eps=eps, group=group, lanes=lanes)


def rms_norm_ref(
    x: Tensor,
    weight: Tensor,
    *,
    eps: float,
    residual: Tensor | None = None,
    group: int | None = None,
    lanes: bool = False,
) -> tuple[Tensor, Tensor, Sides | None]:
    """The definition, in float32 (float64 for a float64 x)."""
    h = x if residual is None else (wide(x) + wide(residual)).to(x.dtype)
    scale = torch.rsqrt(wide(h).square().mean(-1, keepdim=True) + eps)
    y = (wide(h) * scale * wide(weight)).to(x.dtype)
    return y, h, sides_ref(y, group, lanes=lanes) if group else None


def silu_mul(gate_up: Tensor, *, group: int | None = None, lanes: bool = False) -> tuple[Tensor, Sides | None]:
    """(y, sides): y = silu(gate) * up, [rows, K], of gate_up [rows, 2K] (gate first); sides as in `rms_norm`."""
    rows, twice = check_matrix("gate_up", gate_up)
    if twice % 2:
        raise ValueError(f"gate_up: {twice} columns are not two halves")
    if not runs_kernel(gate_up):
        return silu_mul_ref(gate_up, group=group, lanes=lanes)
    y = gate_up.new_empty(rows, twice // 2)
    sides = empty_sides(y, group, lanes=lanes) if group else None
    to, constants = side_arguments(sides, y, group)
    columns = max(y.shape[1], to[2] * constants["GROUP"])
    early = has_dependent_launch(gate_up)
    options = {} if interpreted() else {"num_warps": 4, "launch_pdl": early}
    _silu_mul_kernel[(rows, triton.cdiv(columns, 1024))](
        gate_up, y, *to, y.shape[1], **constants, EARLY=early, **options
    )
    return y, sides


def silu_mul_ref(gate_up: Tensor, *, group: int | None = None, lanes: bool = False) -> tuple[Tensor, Sides | None]:
    """The definition, in float32 (float64 for a float64 gate_up)."""
    gate, up = wide(gate_up).chunk(2, dim=-1)
    y = (torch.nn.functional.silu(gate) * up).to(gate_up.dtype)
    return y, sides_ref(y, group, lanes=lanes) if group else None


def check_matrix(name: str, x: Tensor) -> tuple[int, int]:
    check_tensor(name, x, shape=(None, None), dtype=FLOATS)
    return x.shape[0], x.shape[1]


@triton.jit
def _rms_norm_kernel(
    x_ptr, residual_ptr, weight_ptr, y_ptr, h_ptr, sums_ptr, lanes_ptr, groups, k, columns, eps,
    HAS_RESIDUAL: tl.constexpr, PARTS: tl.constexpr, GROUP: tl.constexpr, STRIDE: tl.constexpr, LANES: tl.constexpr,
    BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """One row a program; all matrices [rows, k], but x [PARTS, rows, columns] where it is in parts."""
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0)
    offs = tl.arange(0, BLOCK)
    mask = offs < k
    weight = tl.load(weight_ptr + offs, mask=mask, other=0.0).to(tl.float32)
    if EARLY:
        tl.extra.cuda.gdc_wait()
    at = row.to(tl.int64) * k + offs
    if PARTS > 0:
        stride = tl.num_programs(0).to(tl.int64) * columns
        h = sum_parts(x_ptr, row.to(tl.int64) * columns + offs, mask, stride, PARTS)
        h += tl.load(residual_ptr + at, mask=mask, other=0.0).to(tl.float32)
        h = h.to(h_ptr.dtype.element_ty)
        tl.store(h_ptr + at, h, mask=mask)
    else:
        h = tl.load(x_ptr + at, mask=mask, other=0.0)
    if HAS_RESIDUAL and PARTS == 0:
        h = (h.to(tl.float32) + tl.load(residual_ptr + at, mask=mask, other=0.0).to(tl.float32)).to(h.dtype)
        tl.store(h_ptr + at, h, mask=mask)
    wide = h.to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(wide * wide, 0) / k + eps)
    y = (wide * scale * weight).to(y_ptr.dtype.element_ty)
    tl.store(y_ptr + at, y, mask=mask)
    store_sides(y, sums_ptr, lanes_ptr, groups, row, 0, k, GROUP, STRIDE, LANES, BLOCK)


@triton.jit
def _silu_mul_kernel(
    x_ptr, y_ptr, sums_ptr, lanes_ptr, groups, k,
    GROUP: tl.constexpr, STRIDE: tl.constexpr, LANES: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """1024 columns of one row a program; x [rows, 2k] gate first, y [rows, k]."""
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0)
    block = tl.program_id(1)
    offs = block * 1024 + tl.arange(0, 1024)
    mask = offs < k
    base = x_ptr + row.to(tl.int64) * 2 * k
    gate = tl.load(base + offs, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(base + k + offs, mask=mask, other=0.0).to(tl.float32)
    y = (gate / (1.0 + tl.exp(-gate)) * up).to(y_ptr.dtype.element_ty)
    tl.store(y_ptr + row.to(tl.int64) * k + offs, y, mask=mask)
    store_sides(y, sums_ptr, lanes_ptr, groups, row, block, k, GROUP, STRIDE, LANES, 1024)
