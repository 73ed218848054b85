"""Whether a target and a drafter fit, test by test, from settings, tokenizers and tensor headers.

No weights are loaded. What a head must look like is in check_head.py.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from specq.checkpoint import ModelSpec
from specq.errors import SpecqError
from specq.models.eagle_files import HeadFiles
from specq.models.inventory import check_tensors
from specq.models.loader import check_memory, model_spec
from specq.models.shared import lent_names, read_shared, require_lender
from specq.spec.check_head import CheckResult, check_head, failed, head_bytes, head_kv, is_head
from specq.tensors import open_weights
from specq.tokenizer import Tokenizer
from specq.words import counted

__all__ = ["CheckResult", "check_pair"]

MEMORY_CONTEXT = 8192

T = TypeVar("T")


def check_pair(target: Path, drafter: Path, *, role: str | None = None) -> list[CheckResult]:
    """The tests of a pair, in the order in which a reader needs them; `fail` means that it cannot run.

    With a `role`, a part of a pipeline such as `intermediate` or `target_head`, also whether it is of the right kind.
    """
    results = _pair_tests(target, drafter)
    if role is None or any(result.status == "fail" for result in results):
        return results
    wants_head = role.endswith("_head")
    if is_head(drafter) == wants_head:
        return results
    is_not = "is a whole model and no EAGLE head" if wants_head else "is an EAGLE head and no whole model"
    return [*results, CheckResult("kind", "fail", f"`{drafter.name}` {is_not}")]


def _pair_tests(target: Path, drafter: Path) -> list[CheckResult]:
    results: list[CheckResult] = []
    target_spec = _attempt(results, "target", lambda: model_spec(target), _describe_model)
    whole = [_weights(results, "target weights", target_spec, target)]
    if not whole[0] and _holds_head(target):
        return [
            CheckResult("target", "fail", "this is an EAGLE head; the model comes first, what drafts for it second")
        ]
    target_tokenizer = None
    if not (whole[0] and _is_sharing(results, "target embeddings", target)):
        target_tokenizer = _attempt(results, "target tokenizer", lambda: Tokenizer.load(target), _describe_tokenizer)
    try:
        drafter_is_head = is_head(drafter)
    except SpecqError as error:
        return [*results, failed("drafter", error)]
    if drafter_is_head:
        of_head = check_head(drafter, target_spec, target_tokenizer)
        if target_spec and all(whole) and of_head[0].status == "pass":
            of_head.append(_memory((target_spec, target), head=drafter))
        return results + of_head
    drafter_spec = _attempt(results, "drafter", lambda: model_spec(drafter), _describe_model)
    whole.append(_weights(results, "drafter weights", drafter_spec, drafter))
    drafter_tokenizer = None
    if whole[1] and _is_sharing(results, "drafter embeddings", drafter):
        if target_spec and whole[0]:
            results[-1] = _lender(drafter, target_spec, target)
    else:
        drafter_tokenizer = _attempt(results, "drafter tokenizer", lambda: Tokenizer.load(drafter), _describe_tokenizer)
    if target_tokenizer and drafter_tokenizer:
        results += [
            _same_ids(target_tokenizer, drafter_tokenizer),
            _special_tokens(target_tokenizer, drafter_tokenizer),
            _stop_ids(target_tokenizer, drafter_tokenizer),
            _chat_template(target_tokenizer, drafter_tokenizer),
        ]
    if target_spec and drafter_spec:
        if target_tokenizer:
            results.append(_vocabulary(target_spec, drafter_spec, target_tokenizer.size))
        results += [
            _context(target_spec, drafter_spec),
            _rope(target_spec, drafter_spec),
            _cost(target_spec, drafter_spec),
        ]
        if all(whole):
            results.append(_memory((target_spec, target), (drafter_spec, drafter)))
    return results


def _holds_head(folder: Path) -> bool:
    try:
        return is_head(folder)
    except SpecqError:  # files that cannot be opened: the test of the weights says why
        return False


def _attempt(results: list[CheckResult], name: str, read: Callable[[], T], describe: Callable[[T], str]) -> T | None:
    """What `read` returns, or None where it refuses; either way one test is noted."""
    try:
        found = read()
    except SpecqError as error:
        results.append(failed(name, error))
        return None
    results.append(CheckResult(name, "pass", describe(found)))
    return found


def _weights(results: list[CheckResult], name: str, spec: ModelSpec | None, path: Path) -> bool:
    """Whether the headers of the weights promise every tensor in its shape."""

    if spec is None:
        return False
    known = spec

    def read() -> int:
        source = open_weights(path, known)
        check_tensors(known, source, lent=lent_names(path))
        return source.bytes()

    return _attempt(results, name, read, lambda size: f"{size / 1e6:.0f} MB on disk") is not None


def _is_sharing(results: list[CheckResult], name: str, folder: Path) -> bool:
    """Whether a folder of sound weights leaves embedding, output head and tokenizer to another model; noted if so."""
    shared = read_shared(folder)
    if shared is not None:
        results.append(CheckResult(name, "pass", f"those of `{shared.lender}`, with its output head and tokenizer"))
    return shared is not None


def _lender(drafter: Path, target: ModelSpec, path: Path) -> CheckResult:
    """Whether the target is the model whose embedding, output head and tokenizer the drafter uses."""
    shared = read_shared(drafter)
    assert shared is not None
    try:
        require_lender(shared, open_weights(path, target), name=path.name)
    except SpecqError as error:
        return failed("drafter embeddings", error)
    return CheckResult("drafter embeddings", "pass", "the target's, with its output head and tokenizer: loaded once")


def _same_ids(target: Tokenizer, drafter: Tokenizer) -> CheckResult:
    """Ids are all that passes between the two, so each must mean the same token in both."""
    ours, theirs = target.id_table(), drafter.id_table()
    different = sorted(index for index in ours.keys() & theirs.keys() if ours[index] != theirs[index])
    if different:
        first = different[0]
        detail = (
            f"{len(different)} ids mean different tokens, the first is {first}: `{ours[first]}` and `{theirs[first]}`"
        )
        return CheckResult("tokenizers", "fail", detail)
    only_target, only_drafter = ours.keys() - theirs.keys(), theirs.keys() - ours.keys()
    shared = f"{len(ours.keys() & theirs.keys())} ids are the same"
    if only_target:
        return CheckResult("tokenizers", "warn", f"{shared}, {len(only_target)} of the target are never drafted")
    if only_drafter:
        return CheckResult("tokenizers", "warn", f"{shared}, {len(only_drafter)} of the drafter alone are masked")
    return CheckResult("tokenizers", "pass", f"all {shared}")


def _special_tokens(target: Tokenizer, drafter: Tokenizer) -> CheckResult:
    different = sorted(target.special_ids ^ drafter.special_ids)
    if different:
        ours, theirs = target.id_table(), drafter.id_table()
        named = ", ".join(f"`{(ours if index in target.special_ids else theirs)[index]}`" for index in different[:4])
        detail = f"{len(different)} tokens are special in one of the two only, such as {named}; the target's count"
        return CheckResult("special tokens", "warn", detail)
    return CheckResult("special tokens", "pass", f"the same {len(target.special_ids)} in both")


def _stop_ids(target: Tokenizer, drafter: Tokenizer) -> CheckResult:
    ours, theirs = sorted(target.eos_ids), sorted(drafter.eos_ids)
    if not ours:
        return CheckResult("end of an answer", "warn", "the target names no stop id: answers end at the token limit")
    if ours != theirs:
        detail = f"the target stops at ids {ours}, the drafter at {theirs}; the target decides"
        return CheckResult("end of an answer", "warn", detail)
    return CheckResult("end of an answer", "pass", f"both stop at ids {ours}")


def _chat_template(target: Tokenizer, drafter: Tokenizer) -> CheckResult:
    if target.chat_template == drafter.chat_template:
        what = "the same in both" if target.chat_template else "none: two base models, use --raw"
        return CheckResult("chat template", "pass", what)
    if target.chat_template is None:
        return CheckResult("chat template", "warn", "the target has none: use --raw or --chat-template FILE")
    why = "the drafter has none" if drafter.chat_template is None else "they differ"
    return CheckResult(
        "chat template", "warn", f"{why}; the target's is used, and text new to the drafter is drafted less well"
    )


def _vocabulary(target: ModelSpec, drafter: ModelSpec, size: int) -> CheckResult:
    """Rows beyond the tokenizer only pad the embedding: they may differ, but every id needs a row in both."""
    detail = f"{target.vocab} and {drafter.vocab} rows for the {size} ids of the tokenizer"
    for who, spec in (("target", target), ("drafter", drafter)):
        if spec.vocab < size:
            return CheckResult("vocabulary", "fail", f"{detail}: the {who} cannot read ids from {spec.vocab} on")
    return CheckResult("vocabulary", "pass", detail)


def _context(target: ModelSpec, drafter: ModelSpec) -> CheckResult:
    detail = f"{target.max_context} tokens, the drafter {drafter.max_context}"
    if drafter.max_context < target.max_context:
        return CheckResult("context", "warn", f"{detail}: nothing is drafted beyond that")
    return CheckResult("context", "pass", detail)


def _rope(target: ModelSpec, drafter: ModelSpec) -> CheckResult:
    kinds = [f"{spec.rope.kind}, base {spec.rope.theta:g}" for spec in (target, drafter)]
    return CheckResult("rotary positions", "pass", f"{kinds[0]}; the drafter's own: {kinds[1]}")


def _cost(target: ModelSpec, drafter: ModelSpec) -> CheckResult:
    """At one sequence at a time a step's time follows the number of layers more than that of weights."""
    drafts = "drafts" if drafter.layers == 1 else "draft"
    detail = f"{_layers(drafter)} of {drafter.hidden} {drafts} for {target.layers} of {target.hidden}"
    if drafter.layers >= target.layers:
        return CheckResult("cost", "warn", f"{detail}: a draft step may take as long as the target's own")
    return CheckResult("cost", "pass", detail)


def _memory(*models: tuple[ModelSpec, Path], head: Path | None = None) -> CheckResult:
    """Of a target and an intermediate, or of a target and an EAGLE head in the folder `head`."""
    import torch

    device = "cuda:0" if torch.cuda.is_available() else "cpu"
    context = min(MEMORY_CONTEXT, *(spec.max_context for spec, _ in models))
    file, kept = 0, 0
    if head is not None:
        file = head_bytes(head)
        kept = head_kv(HeadFiles(head), models[0][0], context, device=device, dtype="auto")
    try:
        check_memory(
            [(spec, path, context) for spec, path in models],
            device=device,
            dtype="auto",
            head_bytes=file,
            head_kv=kept,
        )
    except SpecqError as error:
        return CheckResult("memory", "warn", f"together, on this machine: {error.message}; {error.hint}")
    counted = f"; the head counts with its file of {file / 1e6:.1f} MB" if head is not None else ""
    return CheckResult("memory", "pass", f"both fit `{device}` with a context of {context}{counted}")


def _describe_model(spec: ModelSpec) -> str:
    quantized = spec.quantization.method if spec.quantization else spec.dtype
    return f"{spec.family}, {_layers(spec)} of {spec.hidden}, {quantized}"


def _layers(spec: ModelSpec) -> str:
    return counted(spec.layers, "layer")


def _describe_tokenizer(tokenizer: Tokenizer) -> str:
    return f"{tokenizer.size} ids, {len(tokenizer.special_ids)} of them special"
