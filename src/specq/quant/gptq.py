"""GPTQ: codes of 4 or 8 bits for one matrix so that its outputs, on the inputs it was calibrated with, change least.

Pure torch, one matrix at a time; which inputs are seen and what is stored is compress/'s business.
Source: arXiv 2210.17323 (GPTQ). Scales are searched with each column's error weighed by its input's mean
square, and may be negative, so that the longer end of the range (-8 of 4 bits) falls on the side that needs it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from specq.errors import SpecqError
from specq.quant.packed import PackedWeight, pack_codes

BLOCK = 128
"""Columns whose updates of the rest are applied together."""

LARGEST = 1.06
SMALLEST = {4: 0.45, 8: 0.93}
CANDIDATES = {4: 48, 8: 11}
"""Scales tried for codes of so many bits, as shares of the one that just covers a group's range."""

FIRST_DAMPING, LAST_DAMPING = 0.01, 1.0
"""Shares of the mean diagonal added to a Hessian: the usual one, and where raising it tenfold ends."""

SHARE_MADE_UP = 0.5
"""How much of what outputs lack is made up for: all of it fits the calibration text and no other. SmolLM2-135M, 32 x
256 tokens: a KL divergence of 0.122 with all, 0.094 with half, 0.122 with none."""

LEAST_SCALE = 2.0**-24
"""fp16's smallest positive number, the scale of a group of zeros."""


@dataclass(frozen=True)
class Grid:
    """What the codes of a matrix may mean: columns a group (-1 for whole rows), whether all zeros are the middle code.

    `has_stored_order` groups columns by the size of their inputs, an order the file then stores (desc_act).
    """

    group_size: int = 128
    is_symmetric: bool = True
    has_stored_order: bool = False
    bits: int = 4

    @property
    def largest(self) -> int:
        """The largest code."""
        return (1 << self.bits) - 1

    @property
    def middle(self) -> int:
        """The zero of a symmetric matrix."""
        return 1 << (self.bits - 1)


@dataclass(frozen=True)
class Solution:
    """The packed matrix, each row's squared output error and squared output [N] (means over tokens), and what was
    needed: the damping used and the columns that never had an input."""

    weight: PackedWeight
    errors: Tensor
    energies: Tensor
    damping: float
    dead_columns: int


class InputMoments:
    """What a product of K inputs and N outputs sees on calibration text, as means over tokens.

    Beside x, the input behind layers already quantized, it may be told `drift`, what x lacks of the input in the
    original model, and `residual`, what the stream that the product's output is added to lacks.
    """

    def __init__(self, columns: int, *, device: torch.device | str) -> None:
        self._device = torch.device(device)
        self._inputs = torch.zeros(columns, columns, device=device)
        self._drift: Tensor | None = None
        self._residual: Tensor | None = None
        self._rows = 0

    def add(self, x: Tensor, *, drift: Tensor | None = None, residual: Tensor | None = None) -> None:
        """Take in x [..., K] with its drift [..., K] and residual [..., N]."""
        rows = _as_rows(x)
        self._inputs.addmm_(rows.T, rows)
        self._rows += rows.shape[0]
        if drift is not None:
            if self._drift is None:
                self._drift = torch.zeros_like(self._inputs)
            self._drift.addmm_(_as_rows(drift).T, rows)
        if residual is not None:
            if self._residual is None:
                self._residual = torch.zeros(residual.shape[-1], rows.shape[1], device=self._device)
            self._residual.addmm_(_as_rows(residual).T, rows)

    def hessian(self) -> Tensor:
        """fp32 [K, K], the mean of x x^T. Ends the collection: nothing may be added afterwards."""
        return self._inputs.div_(max(self._rows, 1))

    def shortfall(self, weight: Tensor) -> Tensor | None:
        """fp32 [N, K]: half the mean of d x^T; d is what outputs of `weight` [N, K] lack of the original model's.

        None where no drift was told. `weight` may be some of the rows where no residual was told.
        """
        if self._drift is None:
            return None
        lacking = weight.float() @ self._drift
        if self._residual is not None:
            lacking.add_(self._residual)
        return lacking.mul_(SHARE_MADE_UP / self._rows)


def _as_rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1]).float()


def round_to_nearest(weight: Tensor, grid: Grid, *, importance: Tensor | None = None) -> PackedWeight:
    """The matrix [N, K] with every number at its nearest code (RTN), scales searched per group.

    `importance` [K] weighs the columns' squared errors in that search; by default all are equal.
    """
    weight = weight.float()
    order = _stored_order(importance, grid)
    group_of = _group_of(weight.shape[1], grid, order).to(weight.device)
    scales, zeros = _search(weight, importance, grid, order)
    codes = _nearest(weight, scales[:, group_of], zeros[:, group_of], grid)
    return _packed(codes, scales, zeros, grid, None if order is None else group_of)


def solve(weight: Tensor, hessian: Tensor, grid: Grid, *, shortfall: Tensor | None = None) -> Solution:
    """The packed matrix whose outputs differ least from those of `weight` [N, K] under `hessian` [K, K].

    With a `shortfall` [N, K] (see InputMoments) the outputs aimed at are larger by it. Columns are taken in the order
    of their inputs' size. The hessian is changed in place, and may then serve other rows; rows do not see each other.
    Raises SpecqError when it is not finite, or not positive definite even with the largest damping.
    """
    weight = weight.float()
    diagonal = hessian.diagonal()
    if not bool(torch.isfinite(hessian).all()):
        raise SpecqError(
            "the inputs of a product are not finite",
            hint="give other text with --calib, or --device cpu, which computes in float32",
        )
    dead = diagonal == 0
    diagonal[dead] = 1.0 if bool(dead.all()) else diagonal[~dead].mean()
    importance = diagonal.clone()
    order = torch.argsort(importance, descending=True, stable=True)
    stored = order if grid.has_stored_order else None
    group_of = _group_of(weight.shape[1], grid, stored).to(weight.device)
    inverse, damping = _inverse_factor(hessian, order)
    if shortfall is not None:
        # Source: GPTAQ (arXiv 2504.02692) takes the same target column by column; here it is solved for at once.
        weight = weight.clone()
        weight[:, order] += shortfall[:, order] @ inverse.T @ inverse
    scales, zeros = _search(weight, importance, grid, stored)
    codes = _descend_columns(weight, inverse, scales, zeros, group_of, order, grid)
    packed = _packed(codes, scales, zeros, grid, None if stored is None else group_of)
    del inverse
    difference = weight - packed.dequantize()
    return Solution(
        weight=packed,
        errors=((difference @ hessian) * difference).sum(1),
        energies=((weight @ hessian) * weight).sum(1),
        damping=damping,
        dead_columns=int(dead.sum()),
    )


def _stored_order(importance: Tensor | None, grid: Grid) -> Tensor | None:
    if not grid.has_stored_order or importance is None:
        return None
    return torch.argsort(importance, descending=True, stable=True)


def _group_of(columns: int, grid: Grid, order: Tensor | None) -> Tensor:
    """int64 [K]: the group of each column; with an order, of its place in that order."""
    size = columns if grid.group_size == -1 else grid.group_size
    groups = torch.arange(columns) // size
    if order is None:
        return groups
    placed = torch.empty_like(groups)
    placed[order.cpu()] = groups
    return placed


def _search(weight: Tensor, importance: Tensor | None, grid: Grid, order: Tensor | None) -> tuple[Tensor, Tensor]:
    """Scale (rounded to fp16) and zero of every row and group, fp32 [N, G], of least weighed squared error."""
    rows, columns = weight.shape
    size = columns if grid.group_size == -1 else min(grid.group_size, columns)
    weighed = weight.new_ones(columns) if importance is None else importance
    if order is not None:
        weight, weighed = weight[:, order], weighed[order]
    padding = -columns % size
    groups = torch.nn.functional.pad(weight, (0, padding)).view(rows, -1, size)
    weighed = torch.nn.functional.pad(weighed, (0, padding)).view(-1, size)
    best = torch.full(groups.shape[:2], torch.inf, device=weight.device)
    scales, zeros = torch.full_like(best, LEAST_SCALE), torch.full_like(best, grid.middle)
    for scale, zero in _candidates(groups, grid):
        scale_of, zero_of = scale[..., None], zero[..., None]
        restored = _nearest(groups, scale_of, zero_of, grid).sub_(zero_of).mul_(scale_of)
        error = restored.sub_(groups).square_().mul_(weighed).sum(-1)
        is_better = error < best
        best = torch.where(is_better, error, best)
        scales, zeros = torch.where(is_better, scale, scales), torch.where(is_better, zero, zeros)
    return scales, zeros


def _candidates(groups: Tensor, grid: Grid) -> Iterator[tuple[Tensor, Tensor]]:
    """Pairs of scale and zero [N, G] to try for groups [N, G, size]."""
    shares = torch.linspace(LARGEST, SMALLEST[grid.bits], CANDIDATES[grid.bits]).tolist()
    if grid.is_symmetric:
        zero = torch.full(groups.shape[:2], float(grid.middle), device=groups.device)
        reach = groups.abs().amax(-1) / (grid.middle - 0.5)
        for share in shares:
            scale = _rounded(reach * share)
            yield scale, zero
            yield -scale, zero
        return
    low, high = groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)
    for share in shares:
        scale = _rounded((high - low) / grid.largest * share)
        # Zeros of 0 and 16 are left out: version 1 of the format cannot hold the first, readers disagree on the other.
        yield scale, (-low * share / scale).round().clamp(1, grid.largest)


def _rounded(scale: Tensor) -> Tensor:
    """The scale as fp16 stores it, never 0. Raises nothing: an overflow shows as inf and is never the best."""
    return scale.half().float().clamp(min=LEAST_SCALE)


def _nearest(weight: Tensor, scale: Tensor, zero: Tensor, grid: Grid) -> Tensor:
    """The code nearest to each number, as fp32."""
    return (weight / scale).round_().add_(zero).clamp_(0, grid.largest)


def _inverse_factor(hessian: Tensor, order: Tensor) -> tuple[Tensor, float]:
    """Upper triangular U with U^T U = (hessian + damping)^-1 in the given order, and the damping that made it possible.

    The factor of the matrix in reversed order, reversed again, is U^-1: one Cholesky and one triangular solve.
    """
    backwards = order.flip(0)
    mean = hessian.diagonal().mean()
    damping = FIRST_DAMPING
    while damping <= LAST_DAMPING:
        # One dimension after the other: on a GPU an index of both takes two integers of 64 bits an element.
        damped = hessian.index_select(0, backwards).index_select(1, backwards)
        damped.diagonal().add_(damping * mean)
        lower, failed = torch.linalg.cholesky_ex(damped)
        if not bool(failed):
            solved = torch.linalg.solve_triangular(lower, _identity(damped), upper=False)
            del lower, damped
            inverse = solved.flip(0, 1)
            if bool(torch.isfinite(inverse).all()):
                return inverse, damping
        damping *= 10
    raise SpecqError(
        f"the inputs of a product make no positive definite Hessian, even with damping {LAST_DAMPING:g}",
        hint="give more calibration text with --samples, or other text with --calib",
    )


def _identity(square: Tensor) -> Tensor:
    """The identity, in the memory of a square matrix that is no longer needed."""
    square.zero_().diagonal().fill_(1.0)
    return square


def _descend_columns(
    weight: Tensor, inverse: Tensor, scales: Tensor, zeros: Tensor, group_of: Tensor, order: Tensor, grid: Grid
) -> Tensor:
    """Codes [N, K] as fp32: each column's rounding error is spread over the columns after it in `order`."""
    left = weight.T[order].contiguous()  # [K, N], what each column should still become
    scale_rows, zero_rows = scales.T.contiguous(), zeros.T.contiguous()  # [G, N]
    groups = group_of[order].tolist()
    codes = torch.empty_like(left)
    for start in range(0, len(groups), BLOCK):
        end = min(start + BLOCK, len(groups))
        block = left[start:end].clone()
        errors = torch.empty_like(block)
        coupling = inverse[start:end, start:end]
        shares = (coupling / coupling.diagonal()[:, None]).contiguous()
        for i in range(end - start):
            scale, zero = scale_rows[groups[start + i]], zero_rows[groups[start + i]]
            code = torch.div(block[i], scale, out=codes[start + i]).round_().add_(zero).clamp_(0, grid.largest)
            torch.addcmul(block[i], code - zero, scale, value=-1, out=errors[i])
            block[i + 1 :].addr_(shares[i, i + 1 :], errors[i], alpha=-1)
        left[end:].addmm_((inverse[start:end, end:] / coupling.diagonal()[:, None]).T, errors, alpha=-1)
    placed = torch.empty_like(weight)
    placed[:, order] = codes.T
    return placed


def _packed(codes: Tensor, scales: Tensor, zeros: Tensor, grid: Grid, group_of: Tensor | None) -> PackedWeight:
    columns = codes.shape[1]
    return PackedWeight(
        codes=pack_codes(codes.to(torch.uint8), grid.bits),
        scales=scales.half(),
        zeros=None if grid.is_symmetric else zeros.to(torch.uint8),
        group_size=columns if grid.group_size == -1 else min(grid.group_size, columns),
        g_idx=None if group_of is None else group_of.to(torch.int32),
        bits=grid.bits,
    )
