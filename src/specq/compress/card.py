"""The model card: what the folder holds, how it was made and what it lost, for people and for the Hub."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from specq.compress.evaluation import RESULT, ROUNDED, SOURCE

if TYPE_CHECKING:
    from specq.compress.layers import MatrixReport
    from specq.compress.report import Report

TITLES = {SOURCE: "source", ROUNDED: "rounding to nearest", RESULT: "this model"}


def model_card(report: Report) -> str:
    """The text of README.md, with the metadata the Hub reads."""
    provenance, plan, settings = report.provenance, report.plan, report.settings
    metadata = ["---", "library_name: transformers", "pipeline_tag: text-generation"]
    if "/" in provenance.name:
        metadata += [f"base_model: {provenance.name}", "base_model_relation: quantized"]
    metadata += ["tags:", f"- {settings.format}", "- 4-bit", "---"]
    group = "one group a row" if plan.group_size == -1 else f"groups of {plan.group_size}"
    kind = "symmetric" if settings.symmetric else "asymmetric"
    order = ", column order stored (desc_act)" if settings.stored_order else ""
    method = "GPTQ" if settings.method == "gptq" else "rounding to nearest"
    revision = f" at revision `{provenance.revision}`" if provenance.revision else ""
    lines = [
        *metadata,
        "",
        f"# {provenance.name} in 4 bits",
        "",
        f"`{provenance.name}`{revision}, its matrices in 4 bits by {method} ({kind}, {group}{order}), stored as "
        f"`{settings.format}`. {what_stays(report)} {report.num_bytes / 1e6:.0f} MB.",
        "",
        "## Evaluation",
        "",
        f"{report.evaluation_tokens} tokens of held-out text bundled with specq, fp32 arithmetic. "
        "KL divergence and top-1 agreement are against the source.",
        "",
        *markdown(evaluation_rows(report)),
        "",
        "## How it was made",
        "",
        *markdown(_provenance_rows(report)),
        "",
        "## Output error a layer",
        "",
        "Squared error of each matrix's outputs on the calibration text, relative to the outputs."
        if settings.method == "gptq"
        else "Rounding to nearest sees no inputs, so no output error is known.",
        "",
        *markdown(layer_rows(report.matrices)),
        "",
    ]
    remarks = {matrix.remark for matrix in report.matrices if matrix.remark}
    if remarks:
        lines += ["## Odd shapes", "", *(f"- {remark}" for remark in sorted(remarks)), ""]
    return "\n".join(lines)


def what_stays(report: Report) -> str:
    """What is not in 4 bits, as a sentence or two."""
    if report.shared is not None:
        return (
            f"Embedding, output head and tokenizer are those of `{report.shared.lender}`, beside which alone it runs; "
            "norms and biases are in 16 bits."
        )
    if report.plan.packs_head:
        unread = ", which transformers' own GPTQ loader leaves out" if report.settings.format == "gptq" else ""
        return f"The head is in {report.settings.head_bits} bits{unread}; embeddings, norms and biases are in 16."
    return "Embeddings, head, norms and biases are in 16 bits."


def evaluation_rows(report: Report) -> list[list[str]]:
    """A table of the scores: source, rounding to nearest, this model."""
    rows = [["model", "perplexity", "KL divergence", "same top-1"]]
    for name in (SOURCE, ROUNDED, RESULT):
        score = report.scores[name]
        rows.append([TITLES[name], f"{score.perplexity:.3f}", f"{score.kl:.4f}", f"{score.top1:.3f}"])
    return rows


def layer_rows(matrices: Sequence[MatrixReport]) -> list[list[str]]:
    """A table of the matrices' errors, a row for each layer and one for a head."""
    names: list[str] = []
    by_layer: dict[str, dict[str, str]] = {}
    for matrix in matrices:
        layer, name = matrix.place
        short = name.split(".")[-1].removesuffix("_proj")
        if short not in names:
            names.append(short)
        text = "16 bits" if matrix.bits == 16 else error_text(matrix.error)
        by_layer.setdefault(layer, {})[short] = text
    rows = ([layer, *(errors.get(name, "") for name in names)] for layer, errors in by_layer.items())
    return [["layer", *names], *rows]


def error_text(error: float | None) -> str:
    """An output error for a table, "-" where none is known."""
    if error is None:
        return "-"
    return f"{error:.5f}" if error >= 1e-4 else f"{error:.1e}"


def markdown(rows: Sequence[Sequence[str]]) -> list[str]:
    """The rows as a Markdown table, the first one its head."""
    head, *body = rows
    lines = [f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *body)]
    return lines


def _provenance_rows(report: Report) -> list[list[str]]:
    environment = report.environment
    rows = [["what", "value"], ["source", report.provenance.name]]
    if report.provenance.revision:
        rows.append(["revision", report.provenance.revision])
    if report.provenance.command:
        rows.append(["command", f"`{report.provenance.command}`"])
    rows.append(["specq, torch", f"{environment['specq']}, {environment['torch']}"])
    rows.append(["device", str(environment["device"])])
    if report.calibration is not None:
        text = report.calibration
        rows.append(["calibration", f"{text['source']}, {text['samples']} x {text['seq_len']} tokens"])
        rows.append(["calibration ids, sha256", str(text["sha256"])])
    raised = sorted({matrix.damping for matrix in report.matrices if matrix.damping is not None})
    if raised:
        rows.append(["damping", ", ".join(f"{value:g}" for value in raised)])
    return rows
