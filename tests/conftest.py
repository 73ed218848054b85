"""What every test runs with: one thread, no network, a cache of its own."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported, and for every process a test starts
os.environ["HF_HUB_OFFLINE"] = "1"


def pytest_configure(config: pytest.Config) -> None:
    """Without a GPU kernels run in Triton's interpreter, which has to be said before any of them is imported."""
    if "not gpu" in config.getoption("markexpr"):
        os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPECQ_CACHE", str(tmp_path_factory.mktemp("specq_cache")))
        patch.delenv("SPECQ_DEBUG", raising=False)
        yield
