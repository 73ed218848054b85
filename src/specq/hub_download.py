"""Hub models in the Hub's own cache: which files are needed, fetched at one commit, and what went wrong.

hub.py decides whether the network is used at all.
"""

from __future__ import annotations

import difflib
import fnmatch
import glob
import json
import logging
import os
import re
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import huggingface_hub
from huggingface_hub import constants, errors
from huggingface_hub import utils as hub_utils

from specq.errors import AccessError, DiskFullError, OfflineError, SpecqError, UsageError
from specq.files import DISK_FULL, reason
from specq.storage import NOT_WRITABLE, Progress, bytes_below, progress_line, require_space

logger = logging.getLogger("specq")

CONFIG_FILES = ("*.json", "*.jinja", "*.model", "merges.txt", "vocab.txt")
# Of each kind the names that transformers itself loads, then any: GPTQ folders and heads have names of their own.
WEIGHT_FILES = (
    ("model.safetensors", "model-*-of-*.safetensors"),
    ("*.safetensors",),
    ("pytorch_model.bin", "pytorch_model-*-of-*.bin"),
    ("*.bin",),
)
NOT_WEIGHTS = ("consolidated*", "training_args.bin", "optimizer*", "scheduler*", "*.index.json", "trainer_state.json")
DESCRIPTION_FILES = ("config.json", "README.md")
INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")


def wanted_files(names: Sequence[str]) -> list[str]:
    """The files of a repository that specq reads: settings, tokenizer and one set of weights; code never.

    Pickled weights only where there are no safetensors.
    """
    top = [name for name in names if "/" not in name]
    weights: list[str] = []
    for patterns in WEIGHT_FILES:
        weights = [name for name in _matching(top, patterns) if not _matching([name], NOT_WEIGHTS)]
        if weights:
            break
    settings = [name for name in _matching(top, CONFIG_FILES) if not _matching([name], NOT_WEIGHTS)]
    kind = Path(weights[0]).suffix if weights else ""
    indexes = [name for name in INDEXES if name in top and name.endswith(f"{kind}.index.json")]
    return sorted({*settings, *weights, *indexes})


def cached_snapshot(repo_id: str, revision: str | None) -> Path | None:
    """The cached folder of a model when it is whole, without any network; the folder's name is the commit."""
    found = huggingface_hub.try_to_load_from_cache(repo_id, "config.json", revision=revision)
    folder = Path(found).parent if isinstance(found, str) else None
    return folder if folder is not None and _is_whole(folder) else None


def download(repo_id: str, revision: str | None, *, progress: Progress | None = None) -> Path:
    """The folder of a model at one commit, in the Hub's cache.

    Files that came whole are not fetched again, a broken connection is taken up where it broke.
    A Hub that cannot be reached is no error when the cache holds the model.
    Raises: AccessError, OfflineError, UsageError for what is no model, DiskFullError.
    """
    if revision and len(revision) == 40 and (folder := cached_snapshot(repo_id, revision)):
        return folder
    try:
        info = huggingface_hub.HfApi().model_info(repo_id, revision=revision, files_metadata=True)
        return _fetch(repo_id, revision, info, progress)
    except (errors.HFValidationError, transport_error(), OSError) as error:
        problem = _explain(error, repo_id, revision)
    folder = cached_snapshot(repo_id, revision) if isinstance(problem, OfflineError) else None
    if folder is None:
        raise problem
    logger.warning(f"{problem.message}: the cached commit {folder.name} of `{repo_id}` is used")
    return folder


def fetch_description(repo_id: str, revision: str | None) -> Path:
    """The cached folder with a Hub model's config.json and model card, fetched where they are missing; weights never.

    Raises: AccessError, OfflineError, UsageError, DiskFullError.
    """
    try:
        with _quiet():
            folder = huggingface_hub.snapshot_download(
                repo_id, revision=revision, allow_patterns=list(DESCRIPTION_FILES)
            )
        return Path(folder)
    except (errors.HFValidationError, transport_error(), OSError) as error:
        raise _explain(error, repo_id, revision) from error


def dataset_files(repo_id: str) -> list[str]:
    """The names of a Hub dataset's files. Raises: AccessError, OfflineError, UsageError."""
    try:
        return sorted(file.rfilename for file in huggingface_hub.HfApi().dataset_info(repo_id).siblings or ())
    except (errors.HFValidationError, transport_error(), OSError) as error:
        raise _explain(error, repo_id, None, kind="dataset") from None


def dataset_file(repo_id: str, name: str, *, offline: bool) -> Path:
    """A file of a Hub dataset in the Hub's cache, fetched if need be and allowed.

    A Hub that cannot be reached is no error when the cache holds the file.
    Raises: AccessError, OfflineError, UsageError for a dataset that has no such file, DiskFullError.
    """
    try:
        if not offline and name not in dataset_files(repo_id):  # one request, so that a dead network is known at once
            raise UsageError(
                f"dataset `{repo_id}` has no file `{name}`", hint=f"look at {constants.ENDPOINT}/datasets/{repo_id}"
            )
        with _quiet():
            return Path(huggingface_hub.hf_hub_download(repo_id, name, repo_type="dataset", local_files_only=offline))
    except errors.LocalEntryNotFoundError as error:
        if not offline:
            raise _explain(error, repo_id, None, kind="dataset") from None
        raise OfflineError(
            f"`{name}` of dataset `{repo_id}` is not in the cache, and specq is offline", hint="run once with network"
        ) from None
    except OfflineError as problem:
        found = huggingface_hub.try_to_load_from_cache(repo_id, name, repo_type="dataset")
        if not isinstance(found, str):
            raise
        logger.warning(f"{problem.message}: the cached file is used")
        return Path(found)
    except (errors.HFValidationError, transport_error(), OSError) as error:
        raise _explain(error, repo_id, None, kind="dataset") from None


def _fetch(repo_id: str, revision: str | None, info: Any, progress: Progress | None) -> Path:
    sizes = {file.rfilename: file.size or 0 for file in info.siblings}
    wanted = wanted_files(list(sizes))
    _check_contents(repo_id, list(sizes), wanted)
    missing = [
        name
        for name in wanted
        if not isinstance(huggingface_hub.try_to_load_from_cache(repo_id, name, revision=info.sha), str)
    ]
    cache = Path(constants.HF_HUB_CACHE)
    cache.mkdir(parents=True, exist_ok=True)
    total = sum(sizes[name] for name in missing)
    require_space(cache, total)
    blobs = cache / f"models--{repo_id.replace('/', '--')}" / "blobs"
    with _watched(blobs, f"fetching {repo_id}", total, progress), _quiet():
        folder = huggingface_hub.snapshot_download(
            repo_id, revision=revision, allow_patterns=[glob.escape(name) for name in wanted]
        )
    return Path(folder)


def _check_contents(repo_id: str, names: Sequence[str], wanted: Sequence[str]) -> None:
    """Raises UsageError for a repository that holds no model, with what it holds."""
    if "config.json" in wanted and any(name.endswith((".safetensors", ".bin")) for name in wanted):
        return
    ggufs = [name for name in names if name.endswith(".gguf")]
    if ggufs:
        raise UsageError(
            f"`{repo_id}` holds {len(ggufs)} GGUF files, and specq does not choose among them",
            hint=f"hf download {repo_id} {ggufs[0]} --local-dir DIR, then name DIR/{ggufs[0]}",
        )
    lacks = "config.json" if "config.json" not in names else "weights (.safetensors or .bin)"
    shown = ", ".join(sorted(names)[:6])
    raise UsageError(f"`{repo_id}` is no causal language model: it has no {lacks}, but {shown or 'nothing'}")


def _explain(error: Exception, repo_id: str, revision: str | None, *, kind: str = "model") -> SpecqError:
    """The SpecqError that says what a failure of the Hub's client means and what to do."""
    if isinstance(error, OSError) and error.errno in DISK_FULL:
        return DiskFullError(
            f"no room left in the Hub cache `{constants.HF_HUB_CACHE}`",
            hint="free some space, or set HF_HOME to another disk",
        )
    if isinstance(error, OSError) and error.errno in NOT_WRITABLE:
        return UsageError(
            f"the Hub cache `{constants.HF_HUB_CACHE}` cannot be written: {reason(error)}",
            hint="set HF_HOME to a folder of yours",
        )
    name, url = f"`{repo_id}`", f"{constants.ENDPOINT}/{repo_id}"
    if kind == "dataset":
        name, url = f"dataset {name}", f"{constants.ENDPOINT}/datasets/{repo_id}"
    status = getattr(getattr(error, "response", None), "status_code", None)
    has_token = bool(huggingface_hub.get_token())
    if isinstance(error, errors.HFValidationError):
        return UsageError(f"{name} is not a Hub id: {error}")
    if isinstance(error, errors.GatedRepoError):
        then = "your token has no access to it yet" if has_token else "then sign in: hf auth login"
        return AccessError(f"{name} is gated", hint=f"ask for access at {url}, {then}")
    if isinstance(error, errors.RevisionNotFoundError):
        return UsageError(f"{name} has no revision `{revision}`", hint=f"look at {url}/commits/main")
    if "Invalid credentials" in str(error) or "Invalid username or password" in str(error):
        return AccessError(
            "the Hub does not take your token: it is wrong or expired",
            hint="hf auth login, or unset HF_TOKEN for public models",
        )
    if isinstance(error, errors.RepositoryNotFoundError) or status in (401, 403):
        close = _cached_names_like(repo_id) if kind == "model" else None
        missing = "does not exist, or is private and your token does not open it"
        return AccessError(
            f"{name} {missing if has_token else 'does not exist, or is private'}",
            hint=f"did you mean {close}?" if close else f"look at {url}; for a private one: hf auth login",
        )
    return OfflineError(
        f"{name} could not be fetched from {constants.ENDPOINT}: {_reason(error)}",
        hint="check the network and run the same command again: finished files are kept",
    )


def _reason(error: Exception) -> str:
    """The first line of what stopped a transfer, without the client's wrapping of it."""
    wrapped = error.__cause__ if isinstance(error, errors.LocalEntryNotFoundError) and error.__cause__ else error
    first = next(iter(str(wrapped).strip().splitlines()), type(wrapped).__name__)
    return re.sub(r"^Got: \w+: ", "", first)


def _cached_names_like(repo_id: str) -> str | None:
    cache = Path(constants.HF_HUB_CACHE)
    names = [entry.name.removeprefix("models--").replace("--", "/") for entry in cache.glob("models--*")]
    return next(iter(difflib.get_close_matches(repo_id, names, n=1, cutoff=0.8)), None)


def _is_whole(folder: Path) -> bool:
    """Whether the weights that belong together are all there; a broken download leaves none or some."""
    for name in INDEXES:
        if (folder / name).is_file():
            shards = json.loads((folder / name).read_text(encoding="utf-8"))["weight_map"].values()
            return all((folder / shard).is_file() for shard in shards)
    return any(name.endswith((".safetensors", ".bin")) for name in wanted_files(os.listdir(folder)))


def _matching(names: Sequence[str], patterns: Sequence[str]) -> list[str]:
    return [name for name in names if any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)]


def transport_error() -> type[Exception]:
    """The base of all errors of the HTTP library that this version of the Hub's client was built on."""
    return next(base for base in errors.HfHubHTTPError.__mro__ if base.__module__.startswith("httpx"))


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the client's own progress bars and lines about new attempts."""
    silent, level = hub_utils.are_progress_bars_disabled(), hub_utils.logging.get_verbosity()
    hub_utils.logging.set_verbosity_error()
    if not silent:
        hub_utils.disable_progress_bars()
    try:
        yield
    finally:
        hub_utils.logging.set_verbosity(level)
        if not silent:
            hub_utils.enable_progress_bars()


@contextmanager
def _watched(folder: Path, what: str, total: int, progress: Progress | None) -> Iterator[None]:
    """Reports how a folder grows towards `total` bytes while the body runs."""
    if progress is None or total == 0:
        yield
        return
    before, over = bytes_below(folder), threading.Event()

    def watch() -> None:
        while not over.wait(0.2):
            progress(progress_line(what, bytes_below(folder) - before, total))

    watcher = threading.Thread(target=watch, daemon=True)
    progress(progress_line(what, 0, total))
    watcher.start()
    try:
        yield
    finally:
        over.set()
        watcher.join()
