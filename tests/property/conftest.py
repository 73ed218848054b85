"""Models shared by the property tests, and how hard hypothesis tries."""

from __future__ import annotations

import pytest
import torch
from hypothesis import settings
from tiny_models import make_model

from specq.models.causal_lm import CausalLM

settings.register_profile("specq", deadline=None, max_examples=15)
settings.load_profile("specq")


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def target() -> CausalLM:
    return make_model(bits=4)


@pytest.fixture(scope="session")
def intermediates() -> dict[str, CausalLM]:
    """Drafters by how much they agree with the target."""
    far = make_model(seed=7, num_hidden_layers=1)
    return {"same": make_model(bits=4), "close": make_model(noise=0.05, bits=4), "far": far}
