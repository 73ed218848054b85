"""Tokens a second of transformers' own generate on exactly the weights specq decodes with: the outside baseline.

`python -m specq.bench.transformers_baseline [MODEL]` prints ours and theirs side by side on this CPU. A 4-bit model is
dequantised for transformers, which runs no 4-bit format on a CPU by itself.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch

PROMPTS = (
    "What is the capital of France, and what is it known for?",
    "Write a short story about a lighthouse keeper who finds a message in a bottle.",
    "Explain how a bicycle stays upright when it moves.",
)


class TransformersModel:
    """A transformers causal LM with this model's weights, `dtype` float32 or bfloat16."""

    def __init__(self, path: Path, *, dtype: torch.dtype) -> None:
        from transformers import AutoConfig, AutoModelForCausalLM

        from specq.checkpoint import read_config
        from specq.models.loader import model_spec
        from specq.tensors import open_weights

        config = {k: v for k, v in read_config(path).items() if k != "quantization_config"}
        weights = open_weights(path, model_spec(path))
        hf_config = AutoConfig.for_model(**config)
        self.model = AutoModelForCausalLM.from_config(hf_config, dtype=dtype).eval()
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                parameter.copy_(weights.tensor(name))

    def decode(self, prompt_ids: list[int], *, tokens: int) -> tuple[float, list[int]]:
        """(decode tokens a second, new ids) of greedy generation of exactly `tokens` tokens."""
        clock = _TokenClock()
        out = self.model.generate(
            torch.tensor([prompt_ids]),
            attention_mask=torch.ones(1, len(prompt_ids), dtype=torch.long),
            do_sample=False,
            min_new_tokens=tokens,
            max_new_tokens=tokens,
            streamer=clock,
            pad_token_id=0,
        )
        first, *_, last = clock.times[1:]  # the first call hands over the prompt
        return (tokens - 1) / (last - first), out[0, len(prompt_ids) :].tolist()


class _TokenClock:
    """A transformers streamer that only notes when each token came."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: torch.Tensor) -> None:
        self.times.append(perf_counter())

    def end(self) -> None:
        pass


def compare(model: str | None, *, tokens: int, repeats: int, threads: int | None) -> dict[str, Any]:
    """Median decode tokens a second of specq's plain pipeline and of transformers in fp32 and bf16, same threads.

    Runs alternate between the contestants, so that a drifting machine hits all of them.
    """
    from specq.hub import resolve_model
    from specq.recipe import Sampling, resolve
    from specq.spec.load import load_pipeline

    recipe = resolve(model)
    pipeline = load_pipeline(recipe, pipeline="plain", device="cpu", threads=threads)
    path = resolve_model(recipe.target.model, revision=recipe.target.revision).path
    peers = {
        "transformers fp32": TransformersModel(path, dtype=torch.float32),
        "transformers bf16": TransformersModel(path, dtype=torch.bfloat16),
    }
    rates: dict[str, list[float]] = {"specq plain": [], **{name: [] for name in peers}}

    def ours(ids: list[int]) -> float:
        stream = pipeline.stream(ids, sampling=Sampling(temperature=0.0), max_new_tokens=tokens, ignore_stop_ids=True)
        for _ in stream:
            pass
        return stream.result.decode_tps or 0.0

    for repeat in range(repeats + 1):
        for prompt in PROMPTS:
            ids = pipeline.encode(prompt)
            contestants = list(rates) if repeat % 2 else list(rates)[::-1]
            for name in contestants:
                rate = ours(ids) if name == "specq plain" else peers[name].decode(ids, tokens=tokens)[0]
                if repeat:  # the first pass warms up
                    rates[name].append(rate)
    return {
        "environment": pipeline.environment(),
        "tokens": tokens,
        "prompts": len(PROMPTS),
        "decode_tps": {name: median(values) for name, values in rates.items()},
        "samples": rates,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    record = compare(args.model, tokens=args.tokens, repeats=args.repeats, threads=args.threads)
    if args.json:
        json.dump(record, sys.stdout, indent=2)
        return
    environment = record["environment"]
    print(f"{environment['device']}, {environment['threads']} threads, torch {environment['torch']}")
    for name, rate in record["decode_tps"].items():
        print(f"{name:20} {rate:8.1f} tokens/s")


if __name__ == "__main__":
    main()
