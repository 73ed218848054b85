"""Times one decoding step of random 4-bit models: `SPECQ_KERNELS=triton python -m specq.bench.step_times [8b] [70b]`.

Milliseconds a step of chains, median of 7 runs of 20, with the logits of the last node; random weights, so timing
only. The floor is the bytes of all weights, and of K and V of the context, over the copy bandwidth measured first.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from specq.checkpoint import ModelSpec
from specq.models.cache import KVCache
from specq.models.causal_lm import CausalLM
from specq.models.inventory import expected_tensors
from specq.models.loader import build_model
from specq.quant.kernel_linear import DenseKernelLinear, KernelGateUp, KernelLinear
from specq.quant.packed import PackedWeight
from specq.spec.tree import MAX_NODES, chain
from specq_kernels.launch import device_name
from specq_kernels.timing import copy_bandwidth, require_cuda

GROUP = 128
NODES = (1, 4, 8, 10, 16, 30, 32, 60)
CONTEXTS = (1024, 8192)
STEPS, RUNS = 20, 7
SHAPES: Mapping[str, Mapping[str, int]] = {
    "8b": {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32},
    "70b": {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64},
}
"""Llama 3's; 8 key-value heads and 128256 ids in both."""


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m specq.bench.step_times", description=__doc__)
    parser.add_argument("models", nargs="*", default=list(SHAPES))
    parser.add_argument("--nodes", type=int, nargs="+", default=list(NODES))
    parser.add_argument("--contexts", type=int, nargs="+", default=list(CONTEXTS))
    options = parser.parse_args(arguments)
    require_cuda("the benchmark")
    bandwidth = copy_bandwidth()
    print(f"{device_name(0)}, torch {torch.__version__}, copy {bandwidth / 1e12:.2f} TB/s, bf16, groups of {GROUP}")
    print(f"{'model':<6}{'context':>8}{'nodes':>6}{'ms':>9}{'floor':>9}{'share':>7}   (random weights, timing only)")
    for name in options.models:
        model = random_model(llama_config(**SHAPES[name]), device="cuda", dtype="bfloat16")
        if model.device_step is None:
            sys.exit("the step on kernels is off: set SPECQ_KERNELS=triton")
        for context in options.contexts:
            cache = model.new_cache(context + MAX_NODES)
            cache.keep(range(context))
            floor = (weight_bytes(model) + 2 * cache.k.nbytes) / bandwidth * 1e3
            for nodes in options.nodes:
                ms = step_ms(model, cache, nodes)
                print(f"{name:<6}{context:>8}{nodes:>6}{ms:>9.3f}{floor:>9.3f}{floor / ms:>7.0%}", flush=True)
        del model, cache
        torch.cuda.empty_cache()


@torch.inference_mode()
def step_ms(model: CausalLM, cache: KVCache, nodes: int) -> float:
    """Median milliseconds of a forward of `nodes` nodes behind what the cache holds; commits nothing."""
    step = chain([1] * nodes, device=model.device)
    times = []
    for _ in range(RUNS + 1):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(STEPS):
            model(step, cache, rows=slice(nodes - 1, None))
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / STEPS)
    return statistics.median(times[1:])  # the first run compiles and captures


def llama_config(**sizes: int) -> dict[str, Any]:
    """A config.json of a 4-bit Llama 3 of these sizes."""
    return {
        "model_type": "llama",
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "max_position_embeddings": 131072,
        "rope_theta": 500000.0,
        "rms_norm_eps": 1e-5,
        "torch_dtype": "bfloat16",
        "quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "sym": True},
        **sizes,
    }


def random_model(config: Mapping[str, Any], *, device: str, dtype: str) -> CausalLM:
    """A model of this config whose layers are random 4-bit matrices, all made on `device`."""
    spec = ModelSpec.from_config(config)
    return build_model(spec, RandomWeights(spec, torch.device(device)), device=device, dtype=dtype)


def weight_bytes(model: CausalLM) -> int:
    """Bytes of the matrices one step reads."""
    total = 0
    for module in model.modules():
        if isinstance(module, KernelLinear | KernelGateUp):
            total += module.weight.num_bytes()
        elif isinstance(module, DenseKernelLinear):
            total += module.weight.nbytes
    return total


class RandomWeights:
    """A weight source of random tensors, drawn anew at every call: products 4-bit, the rest dense."""

    def __init__(self, spec: ModelSpec, device: torch.device) -> None:
        self._shapes, self._device = expected_tensors(spec), device

    def names(self) -> frozenset[str]:
        return frozenset(self._shapes)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._shapes[name]

    def tensor(self, name: str) -> Tensor:
        shape = self._shapes[name]
        if len(shape) == 1:
            return torch.ones(shape, dtype=torch.float16, device=self._device)
        return torch.randn(shape, dtype=torch.float16, device=self._device) * shape[1] ** -0.5

    def linear(self, prefix: str) -> Tensor | PackedWeight:
        if not self.is_packed(prefix):
            return self.tensor(f"{prefix}.weight")
        rows, columns = self._shapes[f"{prefix}.weight"]
        codes = torch.randint(-(2**31), 2**31 - 1, (rows, columns // 8), dtype=torch.int32, device=self._device)
        # codes around 8 have a deviation of 4.6
        scales = torch.full((rows, -(-columns // GROUP)), columns**-0.5 / 4.6, dtype=torch.float16, device=self._device)
        return PackedWeight(codes, scales, group_size=min(GROUP, columns))

    def is_packed(self, prefix: str) -> bool:
        return prefix.endswith("_proj")

    def bytes(self) -> int:
        return 0


if __name__ == "__main__":
    main()
