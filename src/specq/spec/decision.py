"""What a profile chose for these models on this device: how it is keyed, found and applied. `specq profile` writes it.

A profile's file is named by the digest of the models and the digest of what else its times depend on, so one that was
measured with another driver or version is found by the first and recognised as stale by the second.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from specq.checkpoint import model_digest
from specq.environment import describe_environment
from specq.quant.kernel_choice import asks_for_kernels
from specq.recipe import Recipe
from specq.storage import cache_dir

PROFILES = "profiles"
FORMAT = 3
"""Changes when old files cannot be read any more."""


@dataclass(frozen=True)
class Level:
    """A draft that adaptation may choose: its depth (None: as the pipeline drafts it) and the cost of a round.

    `costs` are (context, cost in plain decoding steps).
    """

    max_depth: int | None
    costs: tuple[tuple[int, float], ...]

    def cost(self, context: int) -> float:
        """The cost of a round at this context: between the measured ones on a line, outside the nearest."""
        (at, cost), *rest = self.costs
        for further, value in rest:
            if context <= at:
                break
            if context < further:
                return cost + (value - cost) * (context - at) / (further - at)
            at, cost = further, value
        return cost


@dataclass(frozen=True)
class Decision:
    """The pipeline that won, its sizes as recipe keys, and what run-time adaptation has to know."""

    pipeline: str
    settings: tuple[tuple[str, int], ...]
    levels: tuple[Level, ...]
    plain_tps: float
    gain: float
    threads: int | None
    measured_at: str

    def apply(self, recipe: Recipe) -> Recipe:
        """The recipe with the chosen sizes."""
        return with_settings(recipe, self.settings)

    def record(self) -> dict[str, Any]:
        return asdict(self) | {"settings": dict(self.settings)}

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> Decision:
        values = dict(record)
        values["settings"] = tuple(values["settings"].items())
        values["levels"] = tuple(
            Level(level["max_depth"], tuple((int(at), float(cost)) for at, cost in level["costs"]))
            for level in values["levels"]
        )
        return cls(**values)


def answer_rounds(accept_len: float, tokens: float) -> float:
    """Rounds that answers of so many tokens take behind their first one; the last round is cut in its middle."""
    return (max(tokens - 1, 0) + (accept_len - 1) / 2) / accept_len


def whole_accept_len(accept_len: float, tokens: float) -> float:
    """The accept length of rounds that are not cut, of one that was measured over answers of so many tokens."""
    if math.isinf(tokens):
        return accept_len
    rounds = (tokens - 1) / accept_len
    return (tokens - 1.5) / (rounds - 0.5) if rounds > 1 else accept_len


def answer_tps(*, accept_len: float, round_ms: float, first_ms: float, tokens: float) -> float:
    """Decoded tokens a second, from the first token on, over answers of so many tokens (at least two).

    `first_ms` is what an answer's first round takes beyond the others: drafters catch up with the prompt in it.
    """
    return 1e3 * (tokens - 1) / (first_ms + answer_rounds(accept_len, tokens) * round_ms)


@dataclass(frozen=True)
class Forecast:
    """What a profile predicts of a pipeline with its sizes: tokens a second and a round's tokens and milliseconds.

    `gain` is against plain decoding, `uncertainty` half of its 95 % interval. `first_ms` is what an answer's first
    round takes beyond `round_ms`.
    """

    pipeline: str
    settings: tuple[tuple[str, int], ...]
    tokens_per_s: float
    gain: float
    uncertainty: float
    accept_len: float
    round_ms: float
    first_ms: float = 0.0

    def tps(self, tokens: float) -> float:
        """Decoded tokens a second over answers of so many tokens."""
        return answer_tps(
            accept_len=self.accept_len, round_ms=self.round_ms, first_ms=self.first_ms, tokens=max(tokens, 2)
        )


@dataclass(frozen=True)
class Forecasts:
    """All forecasts of a profile, fastest first, with the context, answer length and sampling they hold for."""

    candidates: tuple[Forecast, ...]
    context: int
    answer_tokens: float
    sampling: Mapping[str, float]
    measured_at: str

    def best(self, pipeline: str) -> Forecast | None:
        """The fastest of this pipeline."""
        return next((each for each in self.candidates if each.pipeline == pipeline), None)

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> Forecasts:
        """Those of a stored profile."""
        candidates = tuple(
            Forecast(
                pipeline=each["pipeline"],
                settings=tuple(each["settings"].items()),
                tokens_per_s=each["predicted_tps"],
                gain=each["gain"],
                uncertainty=each["uncertainty"],
                accept_len=each["accept_len"],
                round_ms=each["round_ms"],
                first_ms=each["first_ms"],
            )
            for each in record["plan"]["candidates"]
        )
        plan = record["plan"]
        return cls(candidates, plan["context"], plan["answer_tokens"], record["sampling"], record["measured_at"])


@dataclass(frozen=True)
class ProfileKey:
    """What the times of a profile depend on: the models by role, device, driver, versions, number format, products.

    Products are `kernels`, which are ours, with or without graphs, or `torch`.
    """

    models: tuple[tuple[str, str], ...]
    environment: tuple[tuple[str, str | None], ...]

    @classmethod
    def here(cls, models: Mapping[str, Path], *, device: str, dtype: str, use_graphs: bool = True) -> ProfileKey:
        """The key of these model folders (by role) on this device now."""
        digests = {role: model_digest(path) for role, path in models.items()}
        return cls.of(digests, device=device, dtype=dtype, use_graphs=use_graphs)

    @classmethod
    def of(cls, digests: Mapping[str, str], *, device: str, dtype: str, use_graphs: bool = True) -> ProfileKey:
        """The key of models with these digests (by role) on this device now."""
        found = describe_environment(device)
        environment = {name: found[name] for name in ("device", "driver", "torch", "triton", "specq")}
        products = "torch"
        if device.startswith("cuda") and asks_for_kernels(device):
            products = "kernels" if use_graphs else "kernels without graphs"
        environment |= {"dtype": dtype, "products": products}
        return cls(tuple(sorted(digests.items())), tuple(sorted(environment.items())))

    @property
    def path(self) -> Path:
        """Where the profile of this key lies, if there is one."""
        return cache_dir() / PROFILES / f"{_short(self.models)}-{_short(self.environment)}.json"

    def find(self) -> tuple[Decision | None, str | None]:
        """(the decision of the profile for this key, or None and what there is instead in a few words, or None)."""
        record = _read(self.path)
        if record is not None:
            return Decision.from_record(record["decision"]), None
        others = [_read(path) for path in sorted(self.path.parent.glob(f"{_short(self.models)}-*.json"))]
        for other in others:
            if other is not None:
                then = other["key"]["environment"]
                changed = [
                    f"{name} was `{then.get(name)}` and is `{now}`"
                    for name, now in self.environment
                    if then.get(name) != now
                ]
                return None, f"the profile of {other['decision']['measured_at']} is stale: {', '.join(changed)}"
        return None, None

    def forecasts(self) -> Forecasts | None:
        """What the profile for this key predicts, None without one."""
        record = _read(self.path)
        return None if record is None else Forecasts.from_record(record)

    def record(self) -> dict[str, Any]:
        return {"models": dict(self.models), "environment": dict(self.environment)}


def with_settings(recipe: Recipe, settings: Iterable[tuple[str, int | str]]) -> Recipe:
    """A copy of the recipe with these `section.key` values."""
    changed = recipe.model_copy(deep=True)
    for key, value in settings:
        section, name = key.split(".")
        inner = getattr(changed, section)
        setattr(inner, name, value)
        setattr(changed, section, inner)  # so that it counts as set where only what is set is written
    return changed


def _short(value: Any) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:12]


def _read(path: Path) -> dict[str, Any] | None:
    """A complete profile of this format, or None."""
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    is_usable = isinstance(record, dict) and record.get("format") == FORMAT and record.get("is_complete")
    return record if is_usable else None
