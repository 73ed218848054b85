"""`specq doctor`: what this machine has, and with a MODEL what that would need here."""

from __future__ import annotations

import os
import platform
import shutil
import sys
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import typer

from specq.cli.cache import size_of
from specq.cli.console import Console, size_text, table
from specq.cli.options import Model, Offline, OutputOptions, Overrides, VerbCommand, takes_options

if TYPE_CHECKING:
    from specq.recipe import Recipe

SAMPLE_QUESTION = "Why is the sky blue?"
PACKAGES = ("torch", "triton", "transformers", "tokenizers", "safetensors", "gguf")

app = typer.Typer(rich_markup_mode=None, add_completion=False)


@app.command(cls=VerbCommand)
@takes_options
def doctor(
    model: Model = None,
    *,
    overrides: Overrides = None,
    offline: Offline = False,
    output: OutputOptions,
) -> None:
    """Show what this machine has: processor, memory, GPU, driver, torch, triton, caches and disk.

    With MODEL also what it is, the memory it needs, which pipelines it can run, and a prompt as its chat template
    renders it. No weights are loaded, but a model that is not here yet is downloaded.
    """
    with Console(quiet=output.quiet).working() as console:
        found = {"system": system_facts(), "gpu": gpu_facts(), "packages": package_facts(), "disk": disk_facts()}
        if model is not None:
            found["model"] = model_facts(model, overrides or [], is_offline=offline, console=console)
        if output.as_json:
            console.document(found)
            return
        for title, facts in found.items():
            console.line(f"{title}\n{table([_row(*fact) for fact in facts.items()], indent='  ')}")


def system_facts() -> dict[str, Any]:
    """Python, system, processor and memory."""
    import torch

    from specq.environment import cpu_name

    total, free = _memory_bytes()
    return {
        "python": f"{platform.python_version()} ({sys.executable})",
        "system": platform.platform(),
        "cpu": cpu_name(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_bytes": total,
        "memory_free_bytes": free,
    }


def gpu_facts() -> dict[str, Any]:
    """Each GPU that torch can use, the driver, and why there is none."""
    import torch

    from specq.environment import gpu_driver

    driver = gpu_driver()
    if not torch.cuda.is_available():
        if driver is None:
            why = "no NVIDIA driver answers"
        elif torch.version.cuda is None:
            why = f"torch {torch.__version__} is a build without CUDA"
        else:
            why = f"torch is built for CUDA {torch.version.cuda}, which driver {driver} does not run"
        return {"driver": driver, "usable": f"none: {why}"}
    facts: dict[str, Any] = {"driver": driver, "cuda": torch.version.cuda}
    for index in range(torch.cuda.device_count()):
        about = torch.cuda.get_device_properties(index)
        free, total = torch.cuda.mem_get_info(index)
        facts[f"cuda:{index}"] = f"{about.name}, capability {about.major}.{about.minor}"
        facts |= {f"cuda:{index}_memory_bytes": total, f"cuda:{index}_memory_free_bytes": free}
    return facts


def package_facts() -> dict[str, Any]:
    """The versions that matter."""
    from specq.environment import package_version

    return {name: package_version(name) for name in ("specq", *PACKAGES)}


def disk_facts() -> dict[str, Any]:
    """The two cache folders with their sizes, and the room left beside them."""
    from huggingface_hub.constants import HF_HUB_CACHE

    from specq.hub import cache_dir

    facts: dict[str, Any] = {}
    for name, folder in (("specq_cache", cache_dir()), ("hub_cache", Path(HF_HUB_CACHE))):
        facts[f"{name}_folder"] = str(folder)
        facts[f"{name}_bytes"] = size_of(folder) if folder.is_dir() else 0
        facts[f"{name}_disk_free_bytes"] = _free_bytes(folder)
    return facts


def model_facts(model: str, overrides: list[str], *, is_offline: bool, console: Console) -> dict[str, Any]:
    """What the target of a MODEL argument is and needs here, and the pipelines it can run; no weights are read."""
    from specq.hub import resolve_model
    from specq.models.loader import estimate_memory, model_spec
    from specq.recipe import resolve
    from specq.spec.load import choose_context, choose_device
    from specq.tokenizer import Tokenizer

    recipe = resolve(model, overrides=overrides)
    progress, target = console.progress(), recipe.target
    try:
        snapshot = resolve_model(target.model, revision=target.revision, offline=is_offline or None, progress=progress)
    finally:
        progress.clear()
    spec = model_spec(snapshot.path)
    context, device = choose_context(spec, recipe.context), choose_device("auto")
    needed = estimate_memory(spec, snapshot.path, context, device=device, dtype="auto")
    tokenizer = Tokenizer.load(snapshot.path)
    facts: dict[str, Any] = {
        "target": target.model,
        "folder": str(snapshot.path),
        "revision": snapshot.revision,
        "family": spec.family,
        "size": f"{spec.layers} layers, hidden {spec.hidden}, vocabulary {spec.vocab}",
        "weights": f"{spec.quantization.bits}-bit {spec.quantization.method}" if spec.quantization else spec.dtype,
        "context": f"{context} of {spec.max_context} tokens",
        "needs_on": device,
        "needs_bytes": needed.total,
        "needs_weights_bytes": needed.weights,
        "needs_cache_bytes": needed.kv,
        "tokenizer": f"{tokenizer.size} ids, an answer ends at {sorted(tokenizer.eos_ids)}",
    }
    facts |= {f"pipeline_{name}": reason or "available" for name, reason in _pipelines(recipe).items()}
    if tokenizer.chat_template is None:
        facts["prompt"] = "no chat template: a base model, for run, or chat with --raw or --chat-template FILE"
    else:
        facts["prompt"] = tokenizer.render_chat([{"role": "user", "content": SAMPLE_QUESTION}])
    return facts


def _pipelines(recipe: Recipe) -> dict[str, str | None]:
    """Every pipeline; None, or what the recipe does not name and it needs."""
    from specq.spec.pipelines import PIPELINES, Parts

    named: Any = SimpleNamespace(
        intermediate=recipe.intermediate,
        target_head=recipe.drafter.model,
        intermediate_head=recipe.intermediate and recipe.intermediate.drafter,
    )
    assert set(vars(named)) == {field.name for field in fields(Parts)} - {"target"}
    return {name: kind.missing(named) for name, kind in PIPELINES.items()}


def _memory_bytes() -> tuple[int | None, int | None]:
    """Memory of the machine and what of it is free, as far as the system tells."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        if hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
            return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), None
        return None, None
    kilobytes = {name: int(rest.split()[0]) for name, _, rest in (line.partition(":") for line in lines)}
    return kilobytes["MemTotal"] * 1024, kilobytes["MemAvailable"] * 1024


def _free_bytes(folder: Path) -> int:
    """Room on the disk where the folder is, or would be."""
    there = next(path for path in (folder, *folder.absolute().parents) if path.is_dir())
    return shutil.disk_usage(there).free


def _row(name: str, value: Any) -> tuple[str, str]:
    label = name.replace("_", " ")
    if value is None:
        return label.removesuffix(" bytes"), "none"
    if name.endswith("_bytes"):
        return label.removesuffix(" bytes"), size_text(value)
    return label, repr(value) if isinstance(value, str) and "\n" in value else str(value)
