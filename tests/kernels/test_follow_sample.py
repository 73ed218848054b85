"""The kernel between two steps of a drafted chain, in the interpreter."""

from __future__ import annotations

import pytest
import torch

from specq_kernels.follow_sample import follow_sample, follow_sample_ref


@pytest.mark.parametrize("token", [7, -1])
def test_a_sample_is_followed_as_defined(token: int) -> None:
    states = []
    for function in (follow_sample, follow_sample_ref):
        state = {
            "chain": torch.arange(64, dtype=torch.int32),
            "ids": torch.arange(64, dtype=torch.int32) + 100,
            "length": torch.tensor([20], dtype=torch.int32),
            "position": torch.tensor([24]),
        }
        function(torch.tensor([token]), state.pop("chain"), 5, nodes=3, **state)
        states.append(state)
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    assert states[0]["ids"][:2].tolist() == [max(token, 0), 101]
    assert (int(states[0]["length"]), int(states[0]["position"])) == (23, 25)


def test_the_chain_gets_the_token() -> None:
    chain, one = torch.zeros(64, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    place = {"ids": chain.clone(), "length": one, "position": torch.zeros(1, dtype=torch.int64)}
    follow_sample(torch.tensor([9]), chain, 63, nodes=1, **place)
    assert chain.nonzero().flatten().tolist() == [63]
    with pytest.raises(ValueError, match="at: 64"):
        follow_sample(torch.tensor([9]), chain, 64, nodes=1, **place)
    with pytest.raises(ValueError, match="length: shape"):
        follow_sample(torch.tensor([9]), chain, 3, nodes=1, **(place | {"length": chain}))
