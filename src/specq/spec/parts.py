"""The models of a recipe, found on this machine and brought into memory part by part, when a pipeline needs them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from specq.checkpoint import ModelSpec
from specq.errors import SpecqError, UnsupportedError
from specq.hub import NAME_HINT, Snapshot
from specq.models.eagle_files import HeadFiles
from specq.models.eagle_loader import build_head
from specq.models.loader import Engine, check_memory, load_model, model_spec
from specq.spec.check import check_pair
from specq.spec.check_head import head_bytes, head_kv
from specq.spec.pipelines import HeadSeat, Parts, Seat
from specq.spec.tree import MAX_NODES
from specq.tokenizer import Tokenizer

HEAD = "_head"
"""What the role of a head adds to that of the model it drafts for."""

MODEL_ROLES = ("target", "intermediate")
DRAFTING_ROLES = ("intermediate", "target_head", "intermediate_head")

NAMED_BY = {
    "intermediate": "`--intermediate` (intermediate.model)",
    "target_head": "`--drafter` (drafter.model)",
    "intermediate_head": "`--drafter` (intermediate.drafter, drafter.model)",
}
"""The flags that name what drafts, and the keys of a recipe."""

DRAFTER_HINT = "specq fetch MODEL gets a drafter that is known, specq distill trains one"


@contextmanager
def naming(role: str) -> Iterator[None]:
    """An error inside about what drafts says which flag or key named it."""
    try:
        yield
    except SpecqError as error:
        if role not in NAMED_BY:
            raise
        hint = DRAFTER_HINT if error.hint in (None, NAME_HINT) else error.hint
        raise type(error)(f"{NAMED_BY[role]}: {error.message}", hint=hint) from None


@dataclass(frozen=True)
class Space:
    """Where models are loaded, and the room of their caches: tokens of context, and rows a head drafts in."""

    device: str
    dtype: str
    context: int
    scratch_rows: int
    engine: Engine = field(default_factory=Engine)


class PartLoader:
    """Loads the parts of `snapshots`, by role; what a new one fits is checked before any weight of it is read."""

    def __init__(
        self,
        snapshots: Mapping[str, Snapshot],
        tokenizer: Tokenizer,
        space: Space,
        *,
        head_bits: int | None,
        say: Callable[[str], None],
    ) -> None:
        """`head_bits` are those of the output heads that draft, None for what each head's manifest says."""
        self._snapshots, self._tokenizer, self._space = snapshots, tokenizer, space
        self._head_bits, self.say = head_bits, say
        self._specs: dict[str, ModelSpec] = {}

    @property
    def roles(self) -> frozenset[str]:
        """Every part that can be loaded."""
        return frozenset(self._snapshots)

    def load(self, parts: Parts | None, roles: Collection[str]) -> Parts:
        """The parts with those of `roles` that were missing, and the models that these draft for.

        A model whose cache did not keep what a new head reads gets another, empty one. Raises a SpecqError of the
        fitting kind before weights are read; roles that nothing was named for are passed over.
        """
        wanted = {"target", *roles, *(role.removesuffix(HEAD) for role in roles)} & self.roles
        new = [role for role in self._snapshots if role in wanted - (parts.roles if parts else frozenset())]
        if parts is not None and not new:
            return parts
        heads = {role.removesuffix(HEAD): self._head_files(role) for role in new if role.endswith(HEAD)}
        self._check(new, heads)
        seats: dict[str, Seat | HeadSeat] = {} if parts is None else dict(parts.items())
        for role in (role for role in MODEL_ROLES if role in new):
            seats[role] = self._seat(role, heads.get(role), seats.get("target"))
        for role, files in heads.items():
            seats[role] = seat = self._reading(seats[role], files)
            head = build_head(files, seat.model, head_bits=self._head_bits)
            cache = head.new_cache(seat.cache.max_len + self._space.scratch_rows)
            seats[f"{role}{HEAD}"] = HeadSeat(head, cache, files)
        return Parts(**seats)  # type: ignore[arg-type]

    def _check(self, new: Collection[str], heads: Mapping[str, HeadFiles]) -> None:
        if "intermediate" in new:
            _require_fit(self._path("target"), self._path("intermediate"))
        for role, files in heads.items():
            with naming(f"{role}{HEAD}"):
                files.check_fit(self._spec(role), ids=self._tokenizer.size)
        models = [(self._spec(role), self._path(role), self._context(role)) for role in MODEL_ROLES if role in new]
        files_bytes = sum(head_bytes(self._path(f"{role}{HEAD}")) for role in heads)
        copies = sum(files.copied_bytes(self._spec(role), self._head_bits) for role, files in heads.items())
        check_memory(
            models,
            device=self._space.device,
            dtype=self._space.dtype,
            head_bytes=files_bytes + copies,
            head_kv=sum(self._head_kv(role, files) for role, files in heads.items()),
        )

    def _head_files(self, role: str) -> HeadFiles:
        with naming(role):
            return HeadFiles(self._path(role))

    def _head_kv(self, role: str, head: HeadFiles) -> int:
        """Bytes a head and the cache of its model keep of the context for its sake."""
        space = self._space
        slots = self._context(role) + space.scratch_rows
        return head_kv(head, self._spec(role), slots, device=space.device, dtype=space.dtype)

    def _seat(self, role: str, head: HeadFiles | None, target: Seat | HeadSeat | None) -> Seat:
        """A model in memory with an empty cache, which keeps what the head reads."""
        snapshot = self._snapshots[role]
        self.say(f"loading {role} {snapshot.name}")
        lender = target.model if isinstance(target, Seat) else None
        space = self._space
        model = load_model(snapshot.path, device=space.device, dtype=space.dtype, lender=lender, engine=space.engine)
        features = head.spec(model.spec.layers).features if head else None
        # Slots past the context hold the draft nodes of the last rounds.
        return Seat(model, model.new_cache(self._context(role) + MAX_NODES, features=features))

    def _reading(self, seat: Seat | HeadSeat, head: HeadFiles) -> Seat:
        """The seat of the model that a head drafts for, with a cache that keeps what this head reads."""
        assert isinstance(seat, Seat)
        features = head.spec(seat.model.spec.layers).features
        if seat.cache.feature_layers == features:
            return seat
        return Seat(seat.model, seat.model.new_cache(seat.cache.max_len, features=features))

    def _path(self, role: str) -> Path:
        return self._snapshots[role].path

    def _spec(self, role: str) -> ModelSpec:
        if role not in self._specs:
            self._specs[role] = model_spec(self._path(role))
        return self._specs[role]

    def _context(self, role: str) -> int:
        return min(self._space.context, self._spec(role).max_context)


def _require_fit(target: Path, drafter: Path) -> None:
    """Raise UnsupportedError naming the first test this pair does not pass."""
    for result in check_pair(target, drafter, role="intermediate"):
        if result.status == "fail":
            raise UnsupportedError(
                f"target and intermediate do not fit: {result.name}: {result.detail}",
                hint="specq check TARGET DRAFTER shows every test",
            )
