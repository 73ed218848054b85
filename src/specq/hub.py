"""Where models lie: local folders, GGUF files, Hub ids at a pinned revision, and the demo set."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from pathlib import Path

from specq.errors import OfflineError, UsageError
from specq.files import holds_config, named_path, reason
from specq.recipe import DEMO_HEAD, DEMO_INTERMEDIATE, DEMO_INTERMEDIATE_HEAD, DEMO_NAME, HUB_ID
from specq.storage import Progress, is_offline

_DEMO_SET = Path(__file__).parent / "demo_set"
SHIPPED = {
    DEMO_HEAD: _DEMO_SET / "head",
    DEMO_INTERMEDIATE: _DEMO_SET / "intermediate",
    DEMO_INTERMEDIATE_HEAD: _DEMO_SET / "intermediate-head",
}
"""Drafters of the demo model that come with specq itself."""

NAME_HINT = "name a folder, a .gguf file or a Hub id of the form org/name"


@dataclass(frozen=True)
class Snapshot:
    """A model on this machine; a Hub model has its id and the commit it is pinned to."""

    path: Path
    repo_id: str | None = None
    revision: str | None = None

    @property
    def name(self) -> str:
        """What people call it: its Hub id, specq's own name for what comes with it, or the folder's name."""
        own = next((name for name, folder in SHIPPED.items() if folder == self.path), None)
        return self.repo_id or own or self.path.name


def resolve_model(
    name: str, *, revision: str | None = None, offline: bool | None = None, progress: Progress | None = None
) -> Snapshot:
    """The local files of a model: `specq:demo` and its drafters, a GGUF file, a folder with a config.json, or a Hub id.

    What a Hub model lacks on this machine is downloaded, code never.
    Raises: UsageError for a name that is none of these or a revision of what has none, AccessError, OfflineError,
    DiskFullError.
    """
    path = named_path(name)
    is_hub_id = HUB_ID.fullmatch(name) is not None
    is_own = name == DEMO_NAME or name in SHIPPED
    is_local = _holds_model(path) or name.startswith(("/", "./", "../", "~")) or (path.exists() and not is_hub_id)
    if revision is not None and (is_own or is_local):
        raise UsageError(f"`{name}` is no Hub model, so it has no revision `{revision}`", hint="leave out the revision")
    if name == DEMO_NAME:
        from specq.demo import demo_folder

        return Snapshot(demo_folder(offline=offline, progress=progress))
    if name in SHIPPED:
        return Snapshot(SHIPPED[name])
    if is_local:
        return Snapshot(_check_local(path, name))
    if not is_hub_id:
        raise UsageError(
            f"`{name}` is neither a folder, a .gguf file nor a Hub id",
            hint=_suggest(path) or "Hub ids have the form org/name, such as HuggingFaceTB/SmolLM2-135M-Instruct",
        )
    from specq.hub_download import cached_snapshot, download

    if is_offline(offline):
        folder = cached_snapshot(name, revision)
        if folder is None:
            raise OfflineError(
                f"`{name}`{f' at revision `{revision}`' if revision else ''} is not in the Hub cache, "
                "or only in part, and specq is offline",
                hint="run once without --offline and HF_HUB_OFFLINE, or name a local folder",
            )
    else:
        folder = download(name, revision, progress=progress)
    return Snapshot(folder, repo_id=name, revision=folder.name)


def _check_local(path: Path, name: str) -> Path:
    """The path itself when it holds a model; what was found there instead is in the message."""
    if not path.exists():
        raise UsageError(f"`{name}` does not exist", hint=_suggest(path) or NAME_HINT)
    if _holds_model(path):
        return path
    if path.is_file():
        raise UsageError(
            f"`{path}` is not a model: it is neither a folder nor a .gguf file",
            hint=f"name its folder: {path.parent}" if holds_config(path.parent) else None,
        )
    try:
        entries = sorted(path.iterdir())
    except OSError as error:
        raise UsageError(f"`{path}` cannot be read: {reason(error)}", hint="name a folder of yours") from None
    shown = ", ".join(entry.name for entry in entries[:6]) + (", ..." if len(entries) > 6 else "")
    below = [entry for entry in entries if holds_config(entry)]
    raise UsageError(
        f"`{path}` holds neither a config.json nor a .gguf file: {shown or 'it is empty'}",
        hint=f"did you mean {below[0]}?" if below else "name the folder that a model or a drafter was saved to",
    )


def _holds_model(path: Path) -> bool:
    return holds_config(path) or any(path.glob("*.gguf")) or (path.is_file() and path.suffix == ".gguf")


def _suggest(path: Path) -> str | None:
    """A hint with the entry beside `path` whose name comes closest."""
    if not path.parent.is_dir():
        return None
    names = [entry.name for entry in path.parent.iterdir() if entry.is_dir() or entry.suffix == ".gguf"]
    close = difflib.get_close_matches(path.name, names, n=1)
    return f"did you mean {path.parent / close[0]}?" if close else None
