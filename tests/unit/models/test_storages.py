"""Bytes of what a module holds, wherever it holds it."""

from __future__ import annotations

import torch
from torch import nn

from specq.models.storages import storages


def test_a_view_of_a_large_file_counts_what_it_shows_and_a_shared_tensor_once() -> None:
    file = torch.zeros(1_000_000)  # what a mapped file is: one storage that every vector of it is a view of
    module = nn.Module()
    module.norms = [file[10:20], file[500:520]]
    module.again = file[10:20]
    module.weight = nn.Parameter(torch.zeros(8, 4), requires_grad=False)
    assert sum(storages(module).values()) == 4 * (10 + 20 + 32)


def test_an_expanded_tensor_counts_what_is_stored() -> None:
    assert sum(storages([torch.zeros(1, 8).expand(1000, 8)]).values()) == 4 * 8
