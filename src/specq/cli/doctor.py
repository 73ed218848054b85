"""`specq doctor`: what this machine has, and with a MODEL what that would need here."""

from __future__ import annotations

import os
import platform
import shutil
import sys
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from specq.cli.cache import size_of
from specq.cli.console import Console, size_text, table
from specq.cli.options import OutputOptions, PlanOptions, VerbCommand, takes_options
from specq.cli.pairs import DRAFTS_FOR, Models, same_model
from specq.errors import UsageError

if TYPE_CHECKING:
    from specq.recipe import ModelRef, Recipe

SAMPLE_QUESTION = "Why is the sky blue?"
PACKAGES = ("torch", "triton", "transformers", "tokenizers", "safetensors", "gguf")

LABELS = {"intermediate": "intermediate", "target_head": "drafter", "intermediate_head": "intermediate_drafter"}
TEXT_WIDTH = 88
"""Characters of one line of the prompt; it has a column of labels before it."""

app = typer.Typer(rich_markup_mode=None, add_completion=False)


@app.command(cls=VerbCommand)
@takes_options
def doctor(
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL",
            help="A recipe (.yaml file or name), a local folder or a Hub id; without it only the machine.",
            show_default=False,
        ),
    ] = None,
    *,
    plan: PlanOptions,
    output: OutputOptions,
) -> None:
    """Show what this machine has: processor, memory, GPU, driver, torch, triton, caches and disk.

    With MODEL first what it is, the memory it needs, which pipelines it can run, and a prompt as its chat template
    renders it; the flags say what drafts for it. No weights are loaded, but a model that is not here yet is downloaded.
    """
    with Console(quiet=output.quiet).working() as console:
        found: dict[str, dict[str, Any]] = {}
        if model is not None:
            found["model"] = model_facts(model, plan, Models(console, is_offline=plan.offline))
        elif plan != PlanOptions(offline=plan.offline):
            raise UsageError(
                "the flags of a pipeline need a MODEL", hint="specq doctor MODEL, such as specq doctor demo"
            )
        found |= {"system": system_facts(), "gpu": gpu_facts(), "packages": package_facts(), "disk": disk_facts()}
        if output.as_json:
            console.document(found)
            return
        for title, facts in found.items():
            rows = [row for fact in facts.items() for row in _rows(*fact)]
            console.line(f"{title}\n{table(rows, indent='  ')}")


def system_facts() -> dict[str, Any]:
    """Python, system, processor and memory."""
    import torch

    from specq.environment import cpu_name, num_processors

    total, free = _memory_bytes()
    return {
        "python": f"{platform.python_version()} ({sys.executable})",
        "system": platform.platform(),
        "cpu": cpu_name(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "cores": num_processors(),
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

    from specq.storage import cache_dir

    facts: dict[str, Any] = {}
    for name, folder in (("specq_cache", cache_dir()), ("hub_cache", Path(HF_HUB_CACHE))):
        facts[f"{name}_folder"] = str(folder)
        facts[f"{name}_bytes"] = size_of(folder) if folder.is_dir() else 0
        facts[f"{name}_disk_free_bytes"] = _free_bytes(folder)
    return facts


def model_facts(model: str, plan: PlanOptions, models: Models) -> dict[str, Any]:
    """What a MODEL argument and the flags mean: the target, what all its models need here, and what they can run."""
    from specq.models.loader import model_spec
    from specq.recipe import resolve
    from specq.spec.load import choose_context, choose_device, model_refs
    from specq.tokenizer import Tokenizer

    recipe = resolve(model, overrides=plan.overrides())
    device = choose_device(plan.device)
    refs = model_refs(recipe, recipe.pipeline.name)
    snapshot = models.snapshot(refs["target"])
    spec = model_spec(snapshot.path)
    context = choose_context(spec, recipe.context)
    tokenizer = Tokenizer.load(snapshot.path)
    named = same_model(refs["target"].model)
    facts: dict[str, Any] = {
        "target": refs["target"].model,
        **({"same_model": named} if named else {}),
        "folder": str(snapshot.path),
        "revision": snapshot.revision,
        "family": spec.family,
        "size": f"{spec.layers} layers, hidden {spec.hidden}, vocabulary {spec.vocab}",
        "weights": f"{spec.quantization.bits}-bit {spec.quantization.method}" if spec.quantization else spec.dtype,
        "context": f"{context} of {spec.max_context} tokens",
        "tokenizer": f"{tokenizer.size} ids, an answer ends at {sorted(tokenizer.eos_ids)}",
    }
    facts |= {LABELS[part]: refs[part].model for part in DRAFTS_FOR if part in refs}
    facts |= _needs(refs, models, context, device=device, dtype=plan.dtype.value)
    facts |= {f"pipeline_{name}": reason or "available" for name, reason in _pipelines(recipe, models).items()}
    if tokenizer.chat_template is None:
        facts["prompt"] = "no chat template: a base model, for run, or chat with --raw or --chat-template FILE"
    else:
        facts["prompt"] = tokenizer.render_chat([{"role": "user", "content": SAMPLE_QUESTION}])
    return facts


def _needs(refs: Mapping[str, ModelRef], models: Models, context: int, *, device: str, dtype: str) -> dict[str, Any]:
    """Memory of the target and of every drafter that fits; a head counts with the bytes of its file."""
    from specq.models.loader import estimate_memory, model_spec
    from specq.spec.check_head import head_bytes

    fitting = [part for part in DRAFTS_FOR if part in refs and models.pair(refs, part).fits]
    folders = {part: models.snapshot(refs[part]).path for part in ("target", *fitting)}
    heads = sum(head_bytes(folder) for part, folder in folders.items() if part.endswith("_head"))
    needed = []
    for part, folder in folders.items():
        if not part.endswith("_head"):
            spec = model_spec(folder)
            limit = min(context, spec.max_context)
            needed.append(estimate_memory(spec, folder, limit, device=device, dtype=dtype))
    return {
        "needs_on": device,
        "needs_bytes": sum(each.total for each in needed) + heads,
        "needs_weights_bytes": sum(each.weights for each in needed),
        "needs_cache_bytes": sum(each.kv for each in needed),
        **({"needs_heads_bytes": heads} if heads else {}),
    }


def _pipelines(recipe: Recipe, models: Models) -> dict[str, str | None]:
    """Every pipeline; None, or what it needs and the recipe does not name, or why what that names does not fit."""
    from specq.models.loader import model_spec
    from specq.spec.load import model_refs
    from specq.spec.pipelines import PIPELINES, four_bits

    reasons = {}
    matrices = four_bits(model_spec(models.snapshot(recipe.target).path))
    for name, kind in PIPELINES.items():
        refs = model_refs(recipe, name)
        reasons[name] = kind.missing(refs.keys() | matrices) or _misfit(refs, kind.needs, models)
    return reasons


def _misfit(refs: Mapping[str, ModelRef], parts: Sequence[str], models: Models) -> str | None:
    """The first failed test among the pairs of these parts, or None."""
    for pair in (models.pair(refs, part) for part in parts):
        if not pair.fits:
            return f"`{pair.drafter}` does not fit: {pair.failed[0].name}: {pair.failed[0].detail}"
    return None


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


def _rows(name: str, value: Any) -> list[tuple[str, str]]:
    """A fact as a row; the prompt as a row for each of its lines, line breaks and the like written out."""
    label = name.replace("_", " ")
    if value is None:
        return [(label.removesuffix(" bytes"), "none")]
    if name.endswith("_bytes"):
        return [(label.removesuffix(" bytes"), size_text(value))]
    if name != "prompt":
        return [(label, str(value))]
    lines = [piece for line in value.splitlines(keepends=True) for piece in _pieces(line)]
    return [(label if index == 0 else "", line) for index, line in enumerate(lines)]


def _pieces(line: str) -> list[str]:
    """The line in pieces that a terminal shows as they are; nothing is left out."""
    line = "".join(c if c.isprintable() else repr(c)[1:-1] for c in line)
    return textwrap.wrap(line, TEXT_WIDTH, replace_whitespace=False, drop_whitespace=False, break_on_hyphens=False)
