"""What stands beside trained weights: the manifest for programs, the model card for people."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

CURVE_ROWS = 12


def write_card(folder: Path, manifest: Mapping[str, Any], *, title: str, use: str) -> None:
    """Write README.md: what it is, how it is used, how it was made and what was measured."""
    training, environment = manifest["training"], manifest["environment"]
    curve: Sequence[Mapping[str, Any]] = training["curve"]
    lines = [
        "---",
        "library_name: specq",
        "tags: [speculative-decoding]",
        "---",
        "",
        f"# {title}",
        "",
        f"Trained by specq {environment['specq']} for `{manifest['target']['name']}` on answers that this model wrote "
        "itself. The weights derive from the target's: its licence holds.",
        "",
        "```",
        use,
        "```",
        "",
        "## Accept length on held-out prompts",
        "",
        "Tokens decided a round, the target's own included, decode rounds only, by the real pipeline.",
        "",
        "| pipeline | temperature | prompts | tokens | accept length |",
        "|---|---|---|---|---|",
    ]
    for result in manifest["evaluation"]:
        cells = (result["pipeline"], f"{result['temperature']:g}", result["prompts"], result["tokens"])
        lines.append(f"| {' | '.join(map(str, cells))} | {result['accept_len']} |")
    lines += [
        "",
        "## Training",
        "",
        f"{training['answer_tokens_seen']:,} answer tokens in {training['steps']} steps and {training['seconds']:.0f} "
        f"s on {environment['device']} (torch {environment['torch']}), from {training['sequences']:,} answers of "
        f"{training['answer_tokens']:,} tokens.",
        "",
        "| step | seconds | loss | top-1 by depth | accept length of a chain, estimated |",
        "|---|---|---|---|---|",
    ]
    *earlier, last = curve
    for record in [*earlier[:: max(1, len(curve) // CURVE_ROWS)], last]:
        depths = " ".join(f"{rate:.3f}" for rate in record["top1"])
        lines.append(
            f"| {record['step']} | {record['seconds']:.0f} | {record['loss']:.3f} | {depths} "
            f"| {record['accept_len_estimate']:.2f} |"
        )
    lines += ["", "Settings:", "", "```json", json.dumps(manifest["settings"], indent=2), "```", ""]
    (folder / "README.md").write_text("\n".join(lines), encoding="utf-8")
