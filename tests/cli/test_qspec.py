"""The pipeline qspec on the command line: what it needs is said before anything is loaded."""

from __future__ import annotations

import pytest

from specq.spec import load
from specq.spec.pipelines import FOUR_BITS


def test_a_16_bit_target_is_refused_with_what_would_help(call, model) -> None:
    done = call("run", model, "hello", "--pipeline", "qspec")
    assert done.code == 6
    assert "error: pipeline `qspec` cannot run: it needs a target with 4-bit matrices" in done.err
    assert "specq quantize MODEL -o DIR" in done.err
    done = call("bench", model, "--pipeline", "plain,qspec")
    assert done.code == 6
    assert "`qspec` cannot run: it needs a target with 4-bit matrices" in done.err


def test_what_the_loaded_target_has_counts_and_not_what_its_config_promised(
    call, model, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(load, "four_bits", lambda spec: frozenset({FOUR_BITS}))
    done = call("run", model, "hello", "--pipeline", "qspec", "--max-new-tokens", "2")
    assert done.code == 6
    assert "error: pipeline `qspec` cannot run: it needs a target with 4-bit matrices" in done.err


def test_doctor_says_why_it_is_missing(call, model) -> None:
    done = call("doctor", model)
    assert done.code == 0, done.err
    assert "pipeline qspec" in done.out
    assert "needs a target with 4-bit matrices" in done.out
