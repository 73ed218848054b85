"""A product that is trained on the numbers which its matrix will have in 4 bits."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from specq.quant.gptq import Grid, round_to_nearest
from specq.quant.linear import DenseLinear


class RoundedLinear(DenseLinear):
    """x @ weight.T, with the matrix moved to its 4-bit numbers once `settle` was called.

    The gradient passes as if nothing had moved (the straight-through estimator, arXiv 1308.3432).
    """

    def __init__(self, weight: Tensor) -> None:
        super().__init__(weight)
        self.moves: Tensor | None = None

    @torch.no_grad()
    def settle(self, group_size: int) -> None:
        """Choose the moves anew, for groups of so many columns. They stay until the next call, whatever is learnt."""
        weight = self.weight.float()
        self.moves = (round_to_nearest(weight, Grid(group_size)).dequantize() - weight).to(self.weight.dtype)

    def forward(self, x: Tensor, act: str = "a16") -> Tensor:
        """[..., N] in x's dtype."""
        return F.linear(x, self.weight if self.moves is None else self.weight + self.moves)
