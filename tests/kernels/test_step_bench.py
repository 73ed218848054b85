"""The benchmark of steps, drafting and rounds: its models decode, its drafts are accepted, its shares add up."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from factories import VOCAB
from step_cases import random_chain

from specq.bench.step_drafts import FORMS, draft_bytes, module_bytes, random_drafter
from specq.bench.step_shares import Kernel, kernel_lines, share_out
from specq.bench.step_times import DRAFT_DEPTH, DraftBench, StepBench, draft, rows
from specq.models.causal_lm import CausalLM
from specq.models.random_weights import llama_config, random_model

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


@pytest.fixture(scope="module")
def model() -> CausalLM:
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 1, "num_attention_heads": 2}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPECQ_KERNELS", "triton")
        config = llama_config(**sizes, num_key_value_heads=1, vocab_size=VOCAB)
        return random_model(config, device="cpu", dtype="float16")


def test_random_models_decode(model: CausalLM) -> None:
    logits = model(random_chain(1, seed=0), model.new_cache(8)).logits
    assert 0.3 < float(logits.std()) < 3
    # qkv, o, gate and up, down in 4 bits and padded to 128 by 256, with a scale a group; the head in 16
    padded = 256 * 256 + 128 * 256 + 512 * 256 + 128 * 256
    assert module_bytes(model) == padded // 2 + padded // 128 * 2 + VOCAB * 128 * 2


def test_steps_and_rounds_run(model: CausalLM) -> None:
    bench = StepBench(model, 20)
    bench.load(12, "tree")
    bench.run()
    speculator = bench.speculator(1, "chain")
    assert len(speculator.step([1] * 21, 64)) == 1


def test_heads_of_the_benchmark_draft(model: CausalLM) -> None:
    assert random_drafter(model, FORMS[0]).output is None
    head = random_drafter(model, replace(FORMS[4], vocab=64))
    assert head.output is not None
    DraftBench(model, 20, head).run()
    parts = (head.fc, head.layer, head.output)
    assert draft_bytes(head, DRAFT_DEPTH) == DRAFT_DEPTH * sum(module_bytes(part) for part in parts)


def test_drafts_have_the_nodes_and_the_shape_asked_for() -> None:
    assert len(draft(1, "chain")) == len(draft(1, "tree")) == 0
    tree = draft(30, "tree")
    assert len(tree) == 29
    assert torch.bincount(tree.depths().long()).tolist() == [10, 10, 9]
    assert rows([1, 30]) == [(1, "chain"), (30, "chain"), (30, "tree")]


def test_shares_count_a_waiting_kernel_from_the_end_of_the_one_ahead() -> None:
    kernels = [
        Kernel("_w4a16_kernel", 0.0, 100.0),
        Kernel("_attention_chunk_kernel", 90.0, 150.0),  # started early, waited for 10
        Kernel("_rms_norm_kernel", 160.0, 170.0),
        Kernel("nvjet_tst_64x8", 170.0, 200.0),
    ]
    shares = share_out(reversed(kernels), runs=2)
    assert shares.products == pytest.approx(0.065)
    assert shares.attention == pytest.approx(0.025)
    assert (shares.small, shares.gaps) == pytest.approx((0.005, 0.005))
    assert str(shares) == "  65%   25%    5%    5%"


def test_lines_of_kernels_tell_the_places_of_one_apart() -> None:
    layer = [
        ("norm", 0.0, 2.0),
        ("w4a16", 1.0, 12.0),
        ("merge", 12.0, 14.0),
        ("norm", 14.0, 15.0),
        ("w4a16", 15.0, 55.0),
    ]
    kernels = [Kernel(name, start + at, end + at) for at in (0.0, 55.0) for name, start, end in layer]
    lines = [" ".join(line.split()) for line in kernel_lines(kernels, runs=2)]
    assert lines[0] == "40.0 us 1.0 x 40.00 w4a16 < norm < merge < w4a16"
    assert "5.0 us 0.5 x 10.00 w4a16 < norm < w4a16 < norm" in lines  # the second layer's
    assert len(lines) == 8
