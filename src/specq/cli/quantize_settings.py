"""What a recipe's section and the flags of `specq quantize` mean, what they may not say, and the command they make."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specq.errors import UsageError

if TYPE_CHECKING:
    from specq.models.shared import Lender
    from specq.recipe import QuantizeSection, Recipe


def recipe_of(model: str | None, overrides: Sequence[str]) -> Recipe:
    """The recipe of MODEL with a quantize section in any case."""
    from specq.recipe import QuantizeSection, resolve

    recipe = resolve(model, overrides=overrides)
    return recipe if recipe.quantize else recipe.model_copy(update={"quantize": QuantizeSection()})


def require_unset(recipe: Recipe, names: Iterable[str], why: str) -> None:
    """Raise UsageError for the first of these settings that is not what it is when nobody sets it."""
    assert recipe.quantize is not None
    given = recipe.quantize.model_dump(exclude_defaults=True)
    for name in names:
        if name in given:
            raise UsageError(f"--{name.replace('_', '-')} {why}", hint="leave it out")


def require_rounding(recipe: Recipe) -> None:
    """Raise UsageError when GPTQ was asked for by name: without a flag a model gets it, and a head is rounded."""
    section = recipe.quantize
    if section is not None and section.method == "gptq" and "method" in section.model_fields_set:
        raise UsageError(
            "`--method gptq` is for models: an EAGLE head is rounded to nearest", hint="leave it out, or --method rtn"
        )


def job_settings(section: QuantizeSection) -> tuple[Any, Any]:
    """The compress Settings and Calibration that a recipe's section means."""
    from specq.compress.plan import Settings
    from specq.compress.runner import Calibration

    settings = Settings(
        method=section.method,
        group_size=section.group_size,
        stored_order=section.act_order,
        symmetric=not section.asym,
        format=section.format,
        strict_shapes=section.strict_shapes,
        head_bits=section.head_bits,
    )
    return settings, Calibration(section.calib, section.samples, section.seq_len)


def command_line(name: str, section: QuantizeSection, lender: Lender | None = None) -> str:
    """The command that makes this model again, without any path of this machine."""
    words = ["specq", "quantize", name, "-o", "DIR"]
    if lender is not None:
        words += ["--share-embeddings", lender.name]
    for key, value in section.model_dump(exclude_defaults=True).items():
        words.append(f"--{key.replace('_', '-')}")
        if key == "calib" and not str(value).startswith("hub:"):
            value = Path(str(value)).name
        if value is not True:
            words.append(str(value))
    return " ".join(words)


def public_name(model: str, path: Path) -> str:
    """What to call a model in files that others read: never a path of this machine."""
    return model if model.startswith("specq:") else path.resolve().name
