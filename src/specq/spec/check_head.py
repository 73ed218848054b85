"""Whether an EAGLE head fits a target, from the head's settings and the headers of its tensors.

models/eagle_loader.py says what a head must hold; here its refusals become tests, beside those that only warn.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from specq.checkpoint import ModelSpec
from specq.errors import SpecqError
from specq.models.eagle_files import HeadFiles
from specq.models.loader import choose_dtype
from specq.models.memory import head_bytes_per_token
from specq.tensor_files import find_files, open_file, safe_path
from specq.tokenizer import Tokenizer

HEAD_PRODUCTS = ("fc", "fusion_fc")
"""What the product over embedding and features is called: no model has one."""


@dataclass(frozen=True)
class CheckResult:
    """One test of a pair: what was compared, how it ended, and the values with the reason."""

    name: str
    status: Literal["pass", "warn", "fail"]
    detail: str


def failed(name: str, error: SpecqError) -> CheckResult:
    """The test that a refusal stands for."""
    return CheckResult(name, "fail", error.message + (f" ({error.hint})" if error.hint else ""))


def is_head(folder: Path) -> bool:
    """Whether the folder's weights are those of an EAGLE head, by the names of its tensors.

    Raises: UsageError, UnsupportedError for files that cannot be opened safely.
    """
    if not folder.is_dir():
        return False
    try:
        files = find_files(folder)
    except SpecqError:  # no weights: whoever needs them says so
        return False
    names = [name for promised in files.values() for name in promised]
    if not names:
        names = [name for file in files for name in open_file(safe_path(folder, file)).headers]
    # packed matrices end in ".qweight" and the like
    return any(name.rpartition(".")[0].rpartition(".")[2] in HEAD_PRODUCTS for name in names)


def head_bytes(folder: Path) -> int:
    """Bytes of the head's weight files: about what it adds in memory, its cache of one layer apart.

    Raises: UsageError where there are none.
    """
    return sum(safe_path(folder, file).stat().st_size for file in find_files(folder))


def head_kv(head: HeadFiles, target: ModelSpec, slots: int, *, device: str, dtype: str) -> int:
    """Bytes that a head and the cache of its target keep of so many tokens for its sake."""
    return slots * head_bytes_per_token(head.spec(target.layers), choose_dtype(dtype, target, device))


def check_head(folder: Path, target: ModelSpec | None, tokenizer: Tokenizer | None) -> list[CheckResult]:
    """The tests of a head; a target or tokenizer that was refused leaves some out."""
    try:
        files = HeadFiles(folder)
    except SpecqError as error:
        return [failed("drafter", error)]
    kind = "EAGLE-3" if files.is_eagle3 else "EAGLE-2"
    results = [CheckResult("drafter", "pass", f"an {kind} head with all its tensors"), _fc_bias(files)]
    if target is not None:
        results += [_shapes(files, target), _context(files.config, target)]
    if tokenizer is not None:
        results.append(_vocabulary(files, tokenizer))
    results.append(_rope(files))
    return results


def _fc_bias(files: HeadFiles) -> CheckResult:
    """The file decides; many configs say false beside a bias that is there."""
    is_there = files.has("fc.bias")
    what = "there is one" if is_there else "there is none"
    if files.config.get("bias") is False and is_there:
        return CheckResult("fc bias", "warn", f"{what} though config.json says `bias`: false; the file counts")
    return CheckResult("fc bias", "pass", what)


def _shapes(files: HeadFiles, target: ModelSpec) -> CheckResult:
    try:
        files.check_sizes(target)
    except SpecqError as error:
        return failed("hidden size", error)
    detail = f"fc is {files.hidden} x {files.fc_inputs}, the target's hidden size {target.hidden}"
    return CheckResult("hidden size", "pass", detail)


def _context(config: Mapping[str, Any], target: ModelSpec) -> CheckResult:
    trained = config.get("max_position_embeddings")
    if isinstance(trained, int) and trained < target.max_context:
        detail = f"trained to {trained} tokens, the target reads {target.max_context}: acceptance falls beyond"
        return CheckResult("context", "warn", detail)
    return CheckResult("context", "pass", f"{target.max_context} tokens")


def _vocabulary(files: HeadFiles, tokenizer: Tokenizer) -> CheckResult:
    """Rows beyond the tokenizer only pad; a trimmed head needs the table of the ids it knows."""
    try:
        files.check_vocabulary(tokenizer.size)
    except SpecqError as error:
        return failed("vocabulary", error)
    detail = f"{files.draft_vocab} rows for the {tokenizer.size} ids of the tokenizer"
    return CheckResult("vocabulary", "pass", f"{detail}, named by `d2t`" if files.has("d2t") else detail)


def _rope(files: HeadFiles) -> CheckResult:
    """A head keeps the base it was trained with; the target's is never taken over."""
    try:
        rope = files.rope
    except SpecqError as error:
        return failed("rotary positions", error)
    detail = f"{rope.kind}, base {rope.theta:g}"
    if "rope_theta" not in files.config and "rope_parameters" not in files.config:
        return CheckResult("rotary positions", "warn", f"{detail}: config.json names no base")
    return CheckResult("rotary positions", "pass", detail)
