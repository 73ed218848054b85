"""What a model takes on a GPU, weights, cache, prompt and the graphs of its rounds, is what was said before loading."""

from __future__ import annotations

import gc

import pytest
import torch

from specq.models.loader import choose_dtype
from specq.models.memory import estimate_bytes
from specq.models.random_weights import RandomWeights, llama_config, random_model
from specq.spec.pipelines import Seat
from specq.spec.sampling import Sampler
from specq.spec.tree import MAX_NODES, chain

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

CONTEXT = 4096
SIZES = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32}


def settled(of: str) -> int:
    """Bytes held, what is free given back first."""
    torch.cuda.synchronize()
    gc.collect()
    torch.cuda.empty_cache()
    return torch.cuda.memory_reserved() if of == "reserved" else torch.cuda.memory_allocated()


def test_a_4_bit_model_takes_what_was_predicted() -> None:
    settled("allocated")
    before = {of: settled(of) for of in ("allocated", "reserved")}
    model = random_model(llama_config(**SIZES), device="cuda", dtype="bfloat16")
    spec, source = model.spec, RandomWeights(model.spec, torch.device("cpu"))
    packed = [name for name in source.names() if source.is_packed(name.removesuffix(".weight"))]
    kind = choose_dtype("bfloat16", spec, "cuda")
    said = estimate_bytes(spec, dtype=kind, context=CONTEXT, device="cuda", packed=packed)
    weights = settled("allocated") - before["allocated"]
    cache = model.new_cache(CONTEXT + MAX_NODES)
    for sampler in (Sampler(), Sampler(temperature=0.8), Sampler(temperature=0.8, top_p=0.9)):
        verifier = Seat(model, cache).verifier(sampler)
        verifier.rollback(0)
        context = [1] * 1500
        context += verifier.prefill(context)
        for nodes in (1, 2, 4, 8, 10, 16, 32, 62):
            verifier.rollback(1500)
            context = context[:1501]
            verifier.verify(context, chain([2] * (nodes - 1)))
    whole = settled("reserved") - before["reserved"]
    mib = 2.0**20
    print(
        f"weights {weights / mib:.0f} MiB, said {said.weights / mib:.0f}; cache {2 * cache.k.nbytes / mib:.0f}, "
        f"said {said.kv / mib:.0f}; the rest {(whole - weights - 2 * cache.k.nbytes) / mib:.0f}, "
        f"said {said.activations / mib:.0f}; all {whole / mib:.0f}, said {said.total / mib:.0f}"
    )
    assert weights == pytest.approx(said.weights, rel=0.03)
    assert whole == pytest.approx(said.total, rel=0.04)
