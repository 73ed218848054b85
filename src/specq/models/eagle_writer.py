"""How specq stores a head: in the published form, its matrices in 16 or 4 bits, and a manifest beside it.

4-bit matrices are rounded to nearest with searched scales, in the format `specq quantize` writes. A head only drafts:
what rounding costs is acceptance, never the text.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from specq.errors import UnsupportedError, UsageError
from specq.quant.formats import FORMATS
from specq.quant.gptq import Grid, round_to_nearest

HEAD_MANIFEST = "specq_head.json"
BITS_KEY, HEAD_BITS_KEY = "bits", "draft_head_bits"
"""Keys of the manifest: bits of the head's own matrices, and of the output head that it drafts with."""

HEAD_BITS = (4, 8, 16)
GROUP_SIZES = (128, 64, 32)
FORMAT = "gptq"


def write_head(
    folder: Path,
    tensors: Mapping[str, Tensor],
    config: Mapping[str, Any],
    *,
    bits: int = 16,
    group_size: int | None = None,
) -> None:
    """Write weights and config.json of a head, `tensors` under their published names; `group_size` as in `pack_head`.

    Raises UnsupportedError where 4 bits do not hold a matrix.
    """
    stored, settings = dict(tensors), {key: value for key, value in config.items() if key != "quantization_config"}
    if bits == 4:
        stored, settings["quantization_config"] = pack_head(stored, group_size=group_size)
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(settings, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def pack_head(
    tensors: Mapping[str, Tensor], *, group_size: int | None = None
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """(the tensors with fc and the layer's matrices in 4 bits, the `quantization_config` that says so).

    Without a group size the largest of GROUP_SIZES that divides every matrix's inputs is taken. An embedding, output
    head and vocabulary map stay as they are. Raises UnsupportedError for sizes that are no multiples of 8.
    """
    packable = [name for name, tensor in tensors.items() if is_packable(name, tensor)]
    odd = [name for name in packable if tensors[name].shape[0] % 8 or tensors[name].shape[1] % 8]
    if odd:
        raise UnsupportedError(
            f"`{odd[0]}` of the head is {list(tensors[odd[0]].shape)}: 4 bits need multiples of 8",
            hint="leave the head in 16 bits",
        )
    size = group_size or fitting_group([tensors[name].shape[1] for name in packable])
    packed = {name: tensor for name, tensor in tensors.items() if name not in packable}
    for name in packable:
        weight = round_to_nearest(tensors[name].float(), Grid(size))
        prefix = name.removesuffix(".weight")
        packed |= {f"{prefix}.{suffix}": part.contiguous() for suffix, part in FORMATS[FORMAT].pack(weight).items()}
    return packed, {
        "quant_method": "gptq",
        "bits": 4,
        "group_size": size,
        "desc_act": False,
        "sym": True,
        "checkpoint_format": FORMAT,
    }


def fitting_group(columns: Collection[int]) -> int:
    """The group size of matrices with so many inputs: the largest that divides all of them, else the smallest."""
    fitting = (size for size in GROUP_SIZES if all(count % size == 0 for count in columns))
    return next(fitting, GROUP_SIZES[-1])


def is_packable(name: str, tensor: Tensor) -> bool:
    """Whether this is fc or one of the layer's matrices."""
    return name.endswith(("fc.weight", "_proj.weight")) and tensor.ndim == 2 and tensor.is_floating_point()


def stored_head_bits(folder: Path) -> int:
    """The bits of the output head that the folder's manifest asks for, 16 without one.

    Raises UsageError for a manifest that cannot be read or names no such precision.
    """
    file = folder / HEAD_MANIFEST
    if not file.is_file():
        return 16
    try:
        bits = json.loads(file.read_text(encoding="utf-8")).get(HEAD_BITS_KEY, 16)
    except (OSError, ValueError, AttributeError) as error:
        raise UsageError(f"`{file}` cannot be read: {error}", hint="make the folder again") from error
    if bits not in HEAD_BITS:
        raise UsageError(f"`{HEAD_BITS_KEY}` in `{file}` is `{bits}`", hint="give 4, 8 or 16")
    return int(bits)
