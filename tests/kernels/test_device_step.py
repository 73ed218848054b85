"""The step on kernels in the interpreter: logits, K, V and features are those of CausalLM.forward."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from factories import VOCAB, WeightsInMemory, random_weights, tiny_config
from step_cases import (
    DENSE,
    FORMS,
    Form,
    PackedInMemory,
    Steps,
    assert_equal_to_plain,
    fast_model,
    packed_config,
    random_chain,
    random_tree,
    run_forwards,
)

from specq.checkpoint import ModelSpec
from specq.errors import UsageError
from specq.models import causal_lm
from specq.models.device_step import BUCKETS, padded_count
from specq.models.loader import build_model
from specq.quant.kernel_linear import DenseKernelLinear, KernelGateUp, KernelLinear
from specq.quant.linear import DenseLinear, DequantizedLinear
from specq.spec.tree import DraftTree, chain

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # rows beyond x in group sums hold nothing


SMALL = tiny_config(num_hidden_layers=1, hidden_size=32, num_attention_heads=2, num_key_value_heads=1)


@pytest.fixture(autouse=True)
def _prompts_in_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of 64 nodes take the interpreter long."""
    monkeypatch.setattr(causal_lm, "SHORT_CHAIN", 64)


def test_a_prompt_longer_than_a_step_runs_in_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(causal_lm, "SHORT_CHAIN", 256)
    source = WeightsInMemory(random_weights(SMALL))
    steps = [(random_chain(67, seed=5), range(67)), (random_chain(1, seed=6), [0])]
    assert_equal_to_plain(fast_model(SMALL, source, dtype="float16"), source, steps, max_len=80, skip=1)


def forwards(*, prompt: int) -> Steps:
    """A prompt, a short chain of which some is kept, a tree of which a branch is, and one more node."""
    tree = DraftTree.from_lists([5, 9, 30, 77, 4, 8, 200], [-1, 0, 0, 2, 1, 2, 5])
    return [
        (random_chain(prompt, seed=1), range(prompt)),
        (random_chain(3, seed=2), range(2)),
        (tree, [0, 2, 5, 6]),
        (random_chain(1, seed=3), [0]),
    ]


@pytest.mark.parametrize("case", DENSE)
def test_chains_and_trees_equal_the_plain_forward(case: str) -> None:
    source = WeightsInMemory(random_weights(DENSE[case]))
    fast = fast_model(DENSE[case], source, dtype="float32")
    assert_equal_to_plain(fast, source, forwards(prompt=66), max_len=90, skip=1)


@pytest.mark.parametrize("form", FORMS)
def test_every_4_bit_form_equals_the_plain_forward(form: str) -> None:
    config = packed_config(FORMS[form], num_hidden_layers=1)
    source = PackedInMemory(config, FORMS[form])
    fast = fast_model(config, source, dtype="float16")
    layer = fast.layers[0]
    kinds = {type(module) for module in (layer.qkv, layer.o, layer.gate_up, layer.down)}
    assert kinds == ({KernelLinear, KernelGateUp} if FORMS[form].group_size != 16 else {DequantizedLinear})
    steps = [(random_chain(66, seed=1), range(66)), (random_tree(4, seed=2), [0])]
    assert_equal_to_plain(fast, source, steps, max_len=90, skip=1)


def test_a_full_tree_equals_the_plain_forward() -> None:
    source = WeightsInMemory(random_weights(SMALL))
    fast = fast_model(SMALL, source, dtype="float16")
    steps = [(random_chain(65, seed=5), range(65)), (random_tree(64, seed=6), [0])]
    assert_equal_to_plain(fast, source, steps, max_len=140)


def test_features_of_layers_are_kept_in_the_order_asked_for() -> None:
    config = tiny_config(num_attention_heads=2, num_key_value_heads=1)
    source = WeightsInMemory(random_weights(config))
    fast = fast_model(config, source, dtype="float32")
    steps = [(random_chain(2, seed=1), range(2)), (random_tree(4, seed=2), [0])]
    assert_equal_to_plain(fast, source, steps, max_len=16, features=(2, 0, 1))


def test_a_chain_row_does_not_depend_on_how_many_rows_run() -> None:
    form = Form(128)
    config = packed_config(form, num_hidden_layers=1)
    fast = fast_model(config, PackedInMemory(config, form), dtype="float16")
    tokens = random_chain(8, seed=7).tokens.tolist()
    whole = run_forwards(fast, [(chain(tokens), range(8))], max_len=40)
    for cut in (1, 6):
        parts = [(chain(tokens[:cut]), range(cut)), (chain(tokens[cut:]), range(8 - cut))]
        ran = run_forwards(fast, parts, max_len=40)
        for name in ("logits", "k", "v", "features"):
            assert torch.equal(getattr(ran, name), getattr(whole, name)), name


def test_padding_nodes_change_nothing() -> None:
    """Five nodes run as a bucket of eight, or alone where the cache has no room for eight."""
    fast = fast_model(tiny_config(num_hidden_layers=1), dtype="float16")
    nodes = random_tree(5, seed=8)
    padded, alone = (run_forwards(fast, [(nodes, [0])], max_len=max_len) for max_len in (32, 5))
    for name in ("logits", "k", "v", "features"):
        assert torch.equal(getattr(padded, name), getattr(alone, name)), name


def test_nodes_are_padded_to_buckets_that_fit() -> None:
    assert [padded_count(n, room=100) for n in (1, 3, 9, 11, 33, 64)] == [1, 4, 10, 16, 64, 64]
    assert padded_count(5, room=7) == 5
    assert BUCKETS[-1] == 64


def test_only_the_rows_asked_for_get_logits() -> None:
    fast = fast_model(tiny_config(num_hidden_layers=1), dtype="float32")
    nodes, cache = random_chain(3, seed=9), fast.new_cache(16)
    whole = fast(nodes, cache)
    assert torch.equal(fast(nodes, cache, rows=slice(1, None)).logits, whole.logits[1:])
    assert fast(nodes, cache, rows=slice(0, 0)).logits.shape == (0, VOCAB)
    assert cache.length == 0


def test_a_model_with_its_step_is_freed_with_its_last_name() -> None:
    """And a cache that a step was bound to: on a GPU both are most of the memory."""
    fast = fast_model(tiny_config(num_hidden_layers=1), dtype="float32")
    cache = fast.new_cache(8)
    fast(random_chain(1, seed=1), cache)
    gone = weakref.ref(cache), weakref.ref(fast)
    gc.disable()
    try:
        del cache
        assert gone[0]() is None
        del fast
        assert gone[1]() is None
    finally:
        gc.enable()


def test_logits_are_not_rounded_to_the_models_dtype() -> None:
    fast = fast_model(tiny_config(num_hidden_layers=1), dtype="float16")
    logits = fast(random_chain(2, seed=1), fast.new_cache(8)).logits
    assert logits.dtype == torch.float32
    assert not torch.equal(logits, logits.half().float())


def test_a_model_no_kernel_runs_is_left_to_torch_and_says_why(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("SPECQ_KERNELS", "triton")
    config = tiny_config(hidden_size=72, num_attention_heads=3, num_key_value_heads=3)
    source = WeightsInMemory(random_weights(config))
    model = build_model(ModelSpec.from_config(config), source, dtype="float32")
    assert model.device_step is None
    assert "a head_dim of 24 is not a multiple of 16 up to 128" in caplog.text
    wide = build_model(
        ModelSpec.from_config(tiny_config()), WeightsInMemory(random_weights(tiny_config())), dtype="float64"
    )
    assert wide.device_step is None
    assert not isinstance(wide.head, DenseKernelLinear)
    assert "they do not run torch.float64" in caplog.text


def test_kernels_run_only_when_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    spec, source = ModelSpec.from_config(tiny_config()), WeightsInMemory(random_weights(tiny_config()))
    for value in (None, "", "reference"):
        if value is None:
            monkeypatch.delenv("SPECQ_KERNELS", raising=False)
        else:
            monkeypatch.setenv("SPECQ_KERNELS", value)
        model = build_model(spec, source, dtype="float32")
        assert model.device_step is None
        assert type(model.head) is DenseLinear
    monkeypatch.setenv("SPECQ_KERNELS", "cuda")
    with pytest.raises(UsageError, match="SPECQ_KERNELS is `cuda`"):
        build_model(spec, source, dtype="float32")
