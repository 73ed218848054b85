"""Summaries of paired measurements and the chi-square test; pure functions of numbers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

RESAMPLES = 10_000
CONFIDENCE = 0.95
LEAST_EXPECTED = 5.0
"""Cells that expect fewer draws than this are put together: chi-square is an approximation there."""


@dataclass(frozen=True)
class Ratios:
    """A paired comparison: `mean` is the geometric mean over prompts, `low` and `high` its 95 % interval.

    The interval is None for fewer than two prompts; `slower` counts prompts with a ratio below 1.
    """

    mean: float
    low: float | None
    high: float | None
    median: float
    worst: float
    worst_prompt: str
    slower: int
    prompts: int


def geometric_mean(values: Sequence[float]) -> float:
    """The n-th root of the product."""
    return math.exp(math.fsum(math.log(value) for value in values) / len(values))


def summarize_ratios(ratios: Mapping[str, float]) -> Ratios | None:
    """What paired ratios by prompt say together; None when there are none."""
    if not ratios:
        return None
    values = list(ratios.values())
    low, high = bootstrap_interval(values) if len(values) > 1 else (None, None)
    worst = min(ratios, key=ratios.__getitem__)
    return Ratios(
        mean=geometric_mean(values),
        low=low,
        high=high,
        median=float(np.median(values)),
        worst=ratios[worst],
        worst_prompt=worst,
        slower=sum(value < 1.0 for value in values),
        prompts=len(values),
    )


def bootstrap_interval(ratios: Sequence[float]) -> tuple[float, float]:
    """The percentile bootstrap interval of the geometric mean; the same ratios always give the same interval."""
    logs = np.log(np.asarray(ratios))
    draws = np.random.default_rng(0).integers(0, len(logs), (RESAMPLES, len(logs)))
    means = logs[draws].mean(1)
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(means, (tail, 1 - tail))
    return float(np.exp(low)), float(np.exp(high))


def chi_square(counts: Sequence[int], probabilities: Sequence[float]) -> float:
    """The p-value of draws counted per outcome against the probabilities they should have.

    Rare outcomes are put together; one that cannot occur but did makes it 0.
    """
    total = sum(counts)
    # By probability alone: among equals the counts must not decide what is put together.
    pairs = sorted(zip(probabilities, counts, strict=True), key=lambda pair: pair[0])
    cells: list[list[float]] = [[0.0, 0]]
    for probability, count in pairs:
        if probability == 0.0 and count:
            return 0.0
        if cells[-1][0] * total >= LEAST_EXPECTED:
            cells.append([0.0, 0])
        cells[-1][0] += probability
        cells[-1][1] += count
    if len(cells) < 2:
        if sum(probability > 0.0 for probability in probabilities) > 1:
            raise ValueError(f"counts: {total} draws are too few for a chi-square test")
        return 1.0  # nothing else can occur, and nothing else did
    statistic = sum((count - p * total) ** 2 / (p * total) for p, count in cells)
    half = torch.tensor([(len(cells) - 1) / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))
