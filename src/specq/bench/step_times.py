"""Times one decoding step of random 4-bit models: `SPECQ_KERNELS=triton python -m specq.bench.step_times [8b] [70b]`.

Milliseconds a step of chains, median of 7 runs of 20, with the logits of the last node; random weights, so timing
only. The floor is the bytes of all weights, and of K and V of the context, over the copy bandwidth measured first.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence

import torch

from specq.models.cache import KVCache
from specq.models.causal_lm import CausalLM
from specq.models.random_weights import GROUP, SHAPES, llama_config, random_model
from specq.quant.kernel_linear import DenseKernelLinear, KernelGateUp, KernelLinear
from specq.spec.tree import MAX_NODES, chain
from specq_kernels.launch import device_name
from specq_kernels.timing import copy_bandwidth, require_cuda

NODES = (1, 4, 8, 10, 16, 30, 32, 60)
CONTEXTS = (1024, 8192)
STEPS, RUNS = 20, 7


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


def weight_bytes(model: CausalLM) -> int:
    """Bytes of the matrices one step reads."""
    total = 0
    for module in model.modules():
        if isinstance(module, KernelLinear | KernelGateUp):
            total += module.weight.num_bytes()
        elif isinstance(module, DenseKernelLinear):
            total += module.weight.nbytes
    return total


if __name__ == "__main__":
    main()
