"""Rotary positions: the frequencies of every kind, and tables shared by all layers of a model."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from specq.checkpoint import RopeSpec


class RopeTable:
    """cos and sin of every position up to a context, [positions, head_dim], grown on demand.

    Angles are worked out in fp32 and rounded once to `dtype`, as in transformers. The first half of `sin` is
    negated, so that rotating x is `x * cos + roll(x, head_dim / 2) * sin`.
    """

    def __init__(self, spec: RopeSpec, head_dim: int, *, dtype: torch.dtype, device: torch.device) -> None:
        frequencies, self._scale = rope_frequencies(spec, head_dim)
        self._frequencies = frequencies.to(device)
        self._dtype = dtype
        self.cos = torch.empty(0, head_dim, dtype=dtype, device=device)
        self.sin = torch.empty_like(self.cos)

    def grow(self, positions: int) -> None:
        """Make the tables cover this many positions."""
        if positions <= self.cos.shape[0]:
            return
        steps = torch.arange(positions, dtype=torch.float32, device=self._frequencies.device)
        angles = steps[:, None] * self._frequencies  # [positions, head_dim / 2]
        cos, sin = angles.cos() * self._scale, angles.sin() * self._scale
        self.cos = torch.cat((cos, cos), -1).to(self._dtype)
        self.sin = torch.cat((-sin, sin), -1).to(self._dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [nodes, heads, head_dim] turned by its positions; cos and sin are [nodes, 1, head_dim] from a RopeTable."""
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), sin)


def rope_frequencies(spec: RopeSpec, head_dim: int) -> tuple[Tensor, float]:
    """Angles a position, fp32 [head_dim / 2], and the factor on cos and sin (1 but for YaRN).

    Source: arXiv 2104.09864; 2306.15595 (linear); Llama 3.1's reference code (llama3); 2309.00071 (yarn).
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    frequencies = 1.0 / spec.theta**exponents
    if spec.kind == "linear":
        return frequencies / spec["factor"], 1.0
    if spec.kind == "llama3":
        return _llama3(spec, frequencies), 1.0
    if spec.kind == "yarn":
        return _yarn(spec, frequencies, head_dim), spec["attention_factor"]
    return frequencies, 1.0


def _llama3(spec: RopeSpec, frequencies: Tensor) -> Tensor:
    """Long wavelengths are stretched by `factor`, short ones kept, those between blended."""
    turns = spec["original_max_position_embeddings"] * frequencies / (2 * math.pi)
    low, high = spec["low_freq_factor"], spec["high_freq_factor"]
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return frequencies * ((1 - kept) / spec["factor"] + kept)


def _yarn(spec: RopeSpec, frequencies: Tensor, head_dim: int) -> Tensor:
    """Dimensions that turn less than `beta_slow` times over the original context are stretched, those that turn
    more than `beta_fast` times kept, with a linear ramp between."""

    def dimension(turns: float) -> float:
        length = spec["original_max_position_embeddings"]
        return head_dim * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(spec.theta))

    low, high = dimension(spec["beta_fast"]), dimension(spec["beta_slow"])
    if spec["truncate"]:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    ramp = (torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low or 0.001)
    stretched = ramp.clamp(0, 1)
    return frequencies * (stretched / spec["factor"] + 1 - stretched)
