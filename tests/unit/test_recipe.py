"""Keys of a recipe: what is unknown is named with what is known there, however deep."""

from __future__ import annotations

import pytest

from specq.errors import UsageError
from specq.recipe import resolve


@pytest.mark.parametrize(
    ("override", "hint"),
    [
        ("foo=1", "known keys: target, quantize, intermediate, drafter, pipeline, sampling, distill, context"),
        ("drafter.nods=3", "did you mean `nodes`?"),
        ("intermediate.modl=a/b", "did you mean `model`?"),
        ("intermediate.drafter.modl=a/b", "did you mean `model`?"),
        ("sampling.temp=1", "known keys: temperature, top_p, top_k, repetition_penalty, seed"),
    ],
)
def test_an_unknown_key_is_named_with_those_known_beside_it(override: str, hint: str) -> None:
    known = ["intermediate.model=c/d", "intermediate.drafter.model=e/f"]
    with pytest.raises(UsageError, match="unknown key") as caught:
        resolve("a/b", overrides=[*known, override])
    assert caught.value.hint == hint
