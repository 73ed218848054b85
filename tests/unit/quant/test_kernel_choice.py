"""Where kernels are asked for: on a GPU, unless the environment says otherwise."""

from __future__ import annotations

import pytest

from specq.errors import UsageError
from specq.quant.kernel_choice import asks_for_kernels


def test_kernels_are_the_choice_on_a_gpu_and_the_environment_overrides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SPECQ_KERNELS", raising=False)
    assert asks_for_kernels("cuda:0")
    assert not asks_for_kernels("cpu")
    monkeypatch.setenv("SPECQ_KERNELS", "reference")
    assert not asks_for_kernels("cuda")
    monkeypatch.setenv("SPECQ_KERNELS", "triton")
    assert asks_for_kernels("cpu")
    monkeypatch.setenv("SPECQ_KERNELS", "fast")
    with pytest.raises(UsageError, match="SPECQ_KERNELS is `fast`"):
        asks_for_kernels("cuda")
