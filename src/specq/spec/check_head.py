"""Whether an EAGLE head fits a target, from the head's settings and the names and shapes of its tensors.

Configs of published heads are unreliable (`bias`, `architectures`), so tensors decide wherever they can.
Source of names and shapes: SafeAILab/EAGLE, model/cnets1.py (EAGLE-1, 2) and model/cnets.py (EAGLE-3).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from specq.checkpoint import ModelSpec, read_config
from specq.errors import SpecqError
from specq.tensor_files import find_files, open_file, safe_path
from specq.tokenizer import Tokenizer

Shapes = Mapping[str, tuple[int, ...]]

LAYER = "layers.0."
PRODUCTS = (
    *(f"self_attn.{name}_proj" for name in "qkvo"),
    *(f"mlp.{name}_proj" for name in ("gate", "up", "down")),
)
NEEDED = {
    "EAGLE-2": {
        "fc.weight",
        f"{LAYER}post_attention_layernorm.weight",
        *(f"{LAYER}{name}.weight" for name in PRODUCTS),
    },
}
NEEDED["EAGLE-3"] = NEEDED["EAGLE-2"] | {
    f"{LAYER}hidden_norm.weight",
    f"{LAYER}input_layernorm.weight",
    "norm.weight",
    "lm_head.weight",
}
OPTIONAL = {"fc.bias", "embed_tokens.weight", *(f"{LAYER}self_attn.{name}_proj.bias" for name in "qkv")}
OPTIONAL_OF = {"EAGLE-2": OPTIONAL, "EAGLE-3": OPTIONAL | {"d2t", "t2d"}}


@dataclass(frozen=True)
class CheckResult:
    """One test of a pair: what was compared, how it ended, and the values with the reason."""

    name: str
    status: Literal["pass", "warn", "fail"]
    detail: str


def head_tensors(folder: Path) -> Shapes | None:
    """Shapes by name when the folder's weights are those of an EAGLE head, None for anything else.

    Names are brought to one form: `midlayer.` of EAGLE-3 is `layers.0.`, a leading `model.` is dropped.
    Raises: UsageError, UnsupportedError for files that cannot be opened safely.
    """
    if not folder.is_dir():
        return None
    try:
        files = find_files(folder)
    except SpecqError:
        return None
    promised = [name for names in files.values() for name in names]
    if promised and "fc.weight" not in map(_plain, promised):
        return None
    opened = [open_file(safe_path(folder, name)) for name in files]
    shapes = {_plain(name): header.shape for file in opened for name, header in file.headers.items()}
    return shapes if "fc.weight" in shapes else None


def check_head(
    folder: Path, tensors: Shapes, target: ModelSpec | None, tokenizer: Tokenizer | None
) -> list[CheckResult]:
    """The tests of a head whose tensors are known; a target or tokenizer that was refused leaves some out."""
    kind = "EAGLE-3" if f"{LAYER}hidden_norm.weight" in tensors else "EAGLE-2"
    try:
        config = read_config(folder)
    except SpecqError as error:
        return [CheckResult("drafter", "fail", error.message)]
    results = [CheckResult("drafter", "pass", f"an {kind} head of {len(tensors)} tensors"), _names(tensors, kind)]
    if results[-1].status == "fail":
        return results
    results.append(_fc_bias(tensors, config))
    if target is not None:
        results += [
            _hidden_size(tensors, kind, target),
            _attention(tensors, config, kind),
            _head_context(config, target),
        ]
    if tokenizer is not None:
        results.append(_head_vocabulary(tensors, config, tokenizer))
    results.append(_head_rope(config))
    return results


def _plain(name: str) -> str:
    name = name.removeprefix("model.")
    return LAYER + name.removeprefix("midlayer.") if name.startswith("midlayer.") else name


def _names(tensors: Shapes, kind: str) -> CheckResult:
    lacking = sorted(NEEDED[kind] - tensors.keys())
    unknown = sorted(tensors.keys() - NEEDED[kind] - OPTIONAL_OF[kind])
    if lacking or unknown:
        parts = [f"{what} {_some(names)}" for what, names in (("it lacks", lacking), ("unknown are", unknown)) if names]
        return CheckResult("tensors", "fail", f"not those of an {kind} head: {', and '.join(parts)}")
    odd = sorted(name for name in NEEDED[kind] if len(tensors[name]) != (1 if "norm" in name else 2))
    if odd:
        return CheckResult("tensors", "fail", f"these have a wrong number of dimensions: {_some(odd)}")
    return CheckResult("tensors", "pass", f"those of an {kind} head")


def _fc_bias(tensors: Shapes, config: Mapping[str, Any]) -> CheckResult:
    """The file decides; many configs say false beside a bias that is there."""
    is_there, said = "fc.bias" in tensors, config.get("bias")
    what = "there is one" if is_there else "there is none"
    if said is True and not is_there:
        return CheckResult("fc bias", "fail", "config.json says `bias`: true and the file has none")
    if said is False and is_there:
        return CheckResult("fc bias", "warn", f"{what} though config.json says `bias`: false; the file counts")
    return CheckResult("fc bias", "pass", what)


def _hidden_size(tensors: Shapes, kind: str, target: ModelSpec) -> CheckResult:
    rows, columns = tensors["fc.weight"]
    states = 3 if kind == "EAGLE-3" else 2
    expected = states * target.hidden
    detail = f"fc is {rows} x {columns}, the target's hidden size {target.hidden}"
    if columns != expected or (kind == "EAGLE-2" and rows != target.hidden):
        return CheckResult("hidden size", "fail", f"{detail}: it takes {states} x {target.hidden} = {expected} columns")
    return CheckResult("hidden size", "pass", detail)


def _attention(tensors: Shapes, config: Mapping[str, Any], kind: str) -> CheckResult:
    """Shapes of the head's own layer against its own config."""
    hidden = tensors["fc.weight"][0]
    heads = config.get("num_attention_heads")
    if not isinstance(heads, int) or heads < 1:
        return CheckResult("attention", "fail", f"config.json gives `num_attention_heads` as `{heads}`")
    kv_heads = config.get("num_key_value_heads") or heads
    head_dim = config.get("head_dim") or hidden // heads
    columns = 2 * hidden if kind == "EAGLE-3" else hidden
    for name, count in (("q_proj", heads), ("k_proj", kv_heads), ("v_proj", kv_heads)):
        shape, expected = tensors[f"{LAYER}self_attn.{name}.weight"], (count * head_dim, columns)
        if shape != expected:
            detail = f"{name} is {shape[0]} x {shape[1]}, config.json makes it {expected[0]} x {expected[1]}"
            return CheckResult("attention", "fail", detail)
    bias = ", q, k, v with bias" if f"{LAYER}self_attn.q_proj.bias" in tensors else ""
    return CheckResult("attention", "pass", f"{heads} heads of {head_dim}, {kv_heads} for keys and values{bias}")


def _head_vocabulary(tensors: Shapes, config: Mapping[str, Any], tokenizer: Tokenizer) -> CheckResult:
    rows = config.get("draft_vocab_size") or config.get("vocab_size") or tokenizer.size
    if "embed_tokens.weight" in tensors and tensors["embed_tokens.weight"][0] < tokenizer.size:
        detail = f"its embedding has {tensors['embed_tokens.weight'][0]} rows, the tokenizer {tokenizer.size} ids"
        return CheckResult("vocabulary", "fail", detail)
    if "lm_head.weight" in tensors:
        rows = tensors["lm_head.weight"][0]
    detail = f"{rows} rows for the {tokenizer.size} ids of the tokenizer"
    if rows >= tokenizer.size:
        return CheckResult("vocabulary", "pass", detail)
    if "d2t" not in tensors:
        return CheckResult("vocabulary", "fail", f"{detail}, and no table `d2t` that says which they are")
    if tensors["d2t"] != (rows,):
        return CheckResult("vocabulary", "fail", f"{detail}, but `d2t` has {tensors['d2t'][0]} entries")
    return CheckResult("vocabulary", "pass", f"{detail}, named by `d2t`")


def _head_context(config: Mapping[str, Any], target: ModelSpec) -> CheckResult:
    trained = config.get("max_position_embeddings")
    if isinstance(trained, int) and trained < target.max_context:
        detail = f"trained to {trained} tokens, the target reads {target.max_context}: acceptance falls beyond"
        return CheckResult("context", "warn", detail)
    return CheckResult("context", "pass", f"{target.max_context} tokens")


def _head_rope(config: Mapping[str, Any]) -> CheckResult:
    """A head keeps the base it was trained with; the target's is never taken over."""
    theta = config.get("rope_theta") or (config.get("rope_parameters") or {}).get("rope_theta")
    if theta is None:
        return CheckResult("rotary positions", "warn", "config.json has no `rope_theta`: 10000 is used")
    return CheckResult("rotary positions", "pass", f"base {theta}")


def _some(names: list[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(f"`{name}`" for name in names[:3]) + more
