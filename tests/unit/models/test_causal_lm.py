"""The forward pass against transformers, for every family, kind of rotary positions and odd shape."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from factories import random_weights, tiny_config, tiny_model
from torch import Tensor

from specq.checkpoint import ModelSpec
from specq.models import layers
from specq.models.causal_lm import CausalLM
from specq.models.rope import rope_frequencies
from specq.spec.tree import DraftTree, chain

TOLERANCE = 1e-4
"""On logits of about unit size in fp32: forty times the rounding seen, a hundredth of what a wrong position does."""

NEW_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
CASES: dict[str, dict[str, Any]] = {
    "llama": tiny_config("llama"),
    "llama-all-biases": tiny_config("llama", attention_bias=True, mlp_bias=True),
    "llama-three-groups-tied": tiny_config(
        "llama", hidden_size=72, num_attention_heads=9, num_key_value_heads=3, tie_word_embeddings=True
    ),
    "llama-multi-head": tiny_config("llama", num_key_value_heads=None),
    "llama-multi-query-own-head-dim": tiny_config("llama", num_key_value_heads=1, head_dim=32),
    "llama-padded-vocab-tied": tiny_config("llama", vocab_size=328, tie_word_embeddings=True),
    "llama-linear": tiny_config("llama", rope_scaling={"type": "linear", "factor": 4.0}),
    "llama-llama3": tiny_config("llama", rope_theta=None, rope_parameters=NEW_LLAMA3),
    "mistral": tiny_config("mistral"),
    "mistral-window": tiny_config("mistral", sliding_window=16, num_key_value_heads=1),
    "mistral-window-shorter-than-a-branch": tiny_config("mistral", sliding_window=4),
    "mistral-own-head-dim": tiny_config("mistral", head_dim=24),
    "qwen2": tiny_config("qwen2", tie_word_embeddings=True),
    "qwen2-window": tiny_config("qwen2", use_sliding_window=True, sliding_window=16, max_window_layers=1),
    "qwen2-yarn": tiny_config(
        "qwen2",
        rope_scaling={"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
    ),
    "qwen3": tiny_config("qwen3", head_dim=32, attention_bias=True),
    "qwen3-window": tiny_config(
        "qwen3",
        use_sliding_window=True,
        sliding_window=16,
        layer_types=["sliding_attention", "full_attention"],
    ),
    "qwen3-yarn-factors": tiny_config(
        "qwen3",
        rope_theta=None,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "attention_factor": 1.3,
            "beta_fast": 16.0,
            "beta_slow": 2.0,
            "original_max_position_embeddings": 64,
        },
    ),
}
WINDOWED = [name for name in CASES if "window" in name]

# Branches of different depth, siblings side by side and apart; on the longest, slots run ahead of positions early.
PARENTS = [-1, 0, 0, 2, 2, 3, 1, 5, 5, 8, 6, 4, 9]
TREE_TOKENS = [7, 300, 12, 45, 12, 8, 199, 7, 64, 250, 31, 5, 9]


@cache
def weights_of(case: str) -> dict[str, Tensor]:
    """Random weights; the biases of q, k and v are large, as Qwen2's are."""
    weights = random_weights(CASES[case])
    if case.startswith("qwen2"):
        for name, weight in weights.items():
            if name.endswith(".bias"):
                weight.mul_(6.0)
    return weights


@cache
def ours(case: str, dtype: str = "float32") -> CausalLM:
    return tiny_model(CASES[case], weights=weights_of(case), dtype=dtype)


@cache
def theirs(case: str) -> Any:
    import transformers

    config = dict(CASES[case])
    model = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.for_model(config.pop("model_type"), **config), attn_implementation="eager"
    )
    missing, unexpected = model.load_state_dict(weights_of(case), strict=False)
    assert not unexpected
    assert set(missing) <= {"lm_head.weight"}
    return model.eval()


@cache
def prompt(count: int) -> tuple[int, ...]:
    generator = torch.Generator().manual_seed(count)
    return tuple(torch.randint(0, 320, (count,), generator=generator).tolist())


@torch.inference_mode()
def reference(case: str, tokens: tuple[int, ...]) -> Tensor:
    """transformers' logits [tokens, vocab] of plain text."""
    return theirs(case)(torch.tensor([tokens])).logits[0]


@torch.inference_mode()
def logits_in_pieces(model: CausalLM, tokens: tuple[int, ...], sizes: list[int]) -> Tensor:
    """Logits of the tokens run as chains of these sizes, each committed before the next."""
    cache = model.new_cache(len(tokens))
    parts = []
    for size in sizes:
        nodes = chain(tokens[cache.length : cache.length + size])
        parts.append(model(nodes, cache).logits)
        cache.keep(range(size))
    assert cache.length == len(tokens)
    return torch.cat(parts)


def paths(parents: list[int]) -> list[list[int]]:
    """Root-to-node paths of every leaf."""
    leaves = [node for node in range(len(parents)) if node not in parents]
    found = []
    for leaf in leaves:
        path = [leaf]
        while parents[path[0]] >= 0:
            path.insert(0, parents[path[0]])
        found.append(path)
    return found


@pytest.mark.parametrize("case", CASES)
def test_prompt_logits_equal_transformers(case: str) -> None:
    tokens = prompt(40)
    torch.testing.assert_close(
        logits_in_pieces(ours(case), tokens, [40]), reference(case, tokens), atol=TOLERANCE, rtol=0
    )


@pytest.mark.parametrize("case", CASES)
def test_token_by_token_logits_equal_transformers(case: str) -> None:
    tokens = prompt(40)
    torch.testing.assert_close(
        logits_in_pieces(ours(case), tokens, [1] * 40), reference(case, tokens), atol=TOLERANCE, rtol=0
    )


@pytest.mark.parametrize("case", CASES)
@torch.inference_mode()
def test_every_branch_of_a_tree_equals_its_plain_text(case: str) -> None:
    context = prompt(40)[:30]
    model = ours(case)
    cache = model.new_cache(64)
    model(chain(context), cache)
    cache.keep(range(len(context)))
    out = model(DraftTree.from_lists(TREE_TOKENS, PARENTS), cache)
    for path in paths(PARENTS):
        expected = reference(case, (*context, *(TREE_TOKENS[node] for node in path)))[len(context) :]
        torch.testing.assert_close(out.logits[path], expected, atol=TOLERANCE, rtol=0)
        assert out.positions[path].tolist() == [len(context) + depth for depth in range(len(path))]


@pytest.mark.parametrize("case", ["llama-three-groups-tied", "mistral-window", "qwen2-window", "qwen3-window"])
def test_long_chunks_equal_transformers(case: str) -> None:
    """More than 64 nodes at once: the causal product at the start, a mask over the cache after it."""
    tokens = prompt(230)
    torch.testing.assert_close(
        logits_in_pieces(ours(case), tokens, [100, 100, 30]), reference(case, tokens), atol=TOLERANCE, rtol=0
    )


@pytest.mark.parametrize("case", CASES)
def test_in_float64_the_cut_of_a_prompt_changes_nothing(case: str) -> None:
    tokens = prompt(40)
    model = ours(case, "float64")
    whole = logits_in_pieces(model, tokens, [40])
    assert whole.dtype == torch.float64
    for sizes in ([1] * 40, [17, 1, 1, 21], [39, 1]):
        torch.testing.assert_close(logits_in_pieces(model, tokens, sizes), whole, atol=1e-11, rtol=0)


@pytest.mark.parametrize("case", ["llama", *WINDOWED])
@torch.inference_mode()
def test_committing_a_branch_equals_running_its_text(case: str) -> None:
    model = ours(case, "float64")
    context = prompt(40)[:30]
    for path in paths(PARENTS):
        cache = model.new_cache(64, features="final")
        model(chain(context), cache)
        cache.keep(range(30))
        model(DraftTree.from_lists(TREE_TOKENS, PARENTS), cache)
        cache.keep(path)
        text = (*context, *(TREE_TOKENS[node] for node in path))
        plain = model.new_cache(64, features="final")
        model(chain(text), plain)
        plain.keep(range(len(text)))
        assert cache.length == len(text)
        for ours_, theirs_ in ((cache.k, plain.k), (cache.v, plain.v)):
            torch.testing.assert_close(ours_[:, :, : len(text)], theirs_[:, :, : len(text)], atol=1e-11, rtol=0)
        torch.testing.assert_close(cache.features[: len(text)], plain.features[: len(text)], atol=1e-11, rtol=0)
        following = [model(chain([77]), c).logits for c in (cache, plain)]
        torch.testing.assert_close(following[0], following[1], atol=1e-11, rtol=0)


@pytest.mark.parametrize("case", ["llama", *WINDOWED])
@torch.inference_mode()
def test_what_was_rolled_back_leaves_no_trace(case: str) -> None:
    model = ours(case)
    fresh, used = model.new_cache(64), model.new_cache(64)
    tokens = prompt(40)
    for kept in (fresh, used):
        model(chain(tokens[:20]), kept)
        kept.keep(range(20))
    model(chain(tokens[20:40]), used)
    used.keep(range(20))
    model(DraftTree.from_lists(TREE_TOKENS, PARENTS), used)
    used.truncate(20)
    nodes = DraftTree.from_lists(TREE_TOKENS, PARENTS)
    assert torch.equal(model(nodes, used).logits, model(nodes, fresh).logits)


@torch.inference_mode()
def test_features_are_the_hidden_states_transformers_names() -> None:
    tokens = prompt(40)
    model = ours("llama")
    states = theirs("llama")(torch.tensor([tokens]), output_hidden_states=True).hidden_states
    final = model.new_cache(40, features="final")
    out = model(chain(tokens), final)
    torch.testing.assert_close(final.features, states[-1][0], atol=TOLERANCE, rtol=0)
    torch.testing.assert_close(out.features, final.features, atol=0, rtol=0)
    inner = model.new_cache(40, features=(0, 1))
    model(chain(tokens), inner)
    torch.testing.assert_close(inner.features, torch.cat((states[0][0], states[1][0]), -1), atol=TOLERANCE, rtol=0)


@torch.inference_mode()
def test_last_residual_state_can_be_a_feature() -> None:
    model = ours("llama")
    cache = model.new_cache(8, features=(2,))
    out = model(chain([1, 2, 3]), cache)
    normed = torch.nn.functional.rms_norm(cache.features[:3], (64,), model.norm, model.spec.norm_eps)
    torch.testing.assert_close(model.logits(normed), out.logits, atol=1e-6, rtol=0)


@torch.inference_mode()
def test_rows_choose_which_logits_are_made() -> None:
    model = ours("llama")
    nodes = DraftTree.from_lists(TREE_TOKENS, PARENTS)
    every = model(nodes, model.new_cache(16)).logits
    some = model(nodes, model.new_cache(16), rows=slice(4, None)).logits
    torch.testing.assert_close(some, every[4:], atol=1e-5, rtol=0)  # another number of rows rounds differently
    assert model(nodes, model.new_cache(16), rows=slice(0, 0)).logits.shape == (0, 320)


@torch.inference_mode()
def test_bfloat16_gives_float32_logits_near_those_of_float32() -> None:
    tokens = prompt(40)
    low = logits_in_pieces(ours("qwen3", "bfloat16"), tokens, [30, 1, 9])
    high = logits_in_pieces(ours("qwen3"), tokens, [40])
    assert low.dtype == torch.float32
    # bf16 keeps 8 bits, through two layers: a tenth of the spread of the logits.
    assert (low - high).abs().mean() < 0.1 * high.std()


def test_nodes_past_the_end_of_the_cache_are_refused() -> None:
    model = ours("llama")
    cache = model.new_cache(8)
    with pytest.raises(ValueError, match="9 nodes after 0 tokens"):
        model(chain(range(9)), cache)


def test_features_of_a_layer_that_is_not_there_are_refused() -> None:
    with pytest.raises(ValueError, match="not layers"):
        ours("llama").new_cache(8, features=(3,))


@pytest.mark.parametrize("case", ["llama", "llama-linear", "llama-llama3", "qwen2-yarn", "qwen3-yarn-factors"])
def test_frequencies_equal_transformers(case: str) -> None:
    spec = ModelSpec.from_config(CASES[case])
    frequencies, scale = rope_frequencies(spec.rope, spec.head_dim)
    rotary = theirs(case).model.rotary_emb
    torch.testing.assert_close(frequencies, rotary.inv_freq, rtol=1e-6, atol=0)
    assert scale == pytest.approx(rotary.attention_scaling)


def test_real_llama3_and_yarn_frequencies_equal_transformers() -> None:
    """The numbers of Llama 3.1 8B and of Qwen2.5 with its recommended YaRN, at head_dim 128."""
    import transformers
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    llama3 = {**NEW_LLAMA3, "rope_theta": 500000.0, "original_max_position_embeddings": 8192}
    yarn = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 32768}
    for given in (llama3, yarn, {**yarn, "truncate": False}, {**yarn, "mscale": 0.7, "mscale_all_dim": 1.0}):
        changes = {"hidden_size": 512, "head_dim": 128, "max_position_embeddings": 131072, "rope_theta": None}
        config = tiny_config("llama", rope_parameters=given, **changes)
        spec = ModelSpec.from_config(config)
        expected, factor = ROPE_INIT_FUNCTIONS[given["rope_type"]](transformers.LlamaConfig(**config), "cpu")
        frequencies, scale = rope_frequencies(spec.rope, spec.head_dim)
        torch.testing.assert_close(frequencies, expected, rtol=1e-6, atol=0)
        assert scale == pytest.approx(factor)


@pytest.mark.parametrize("window", [None, 40])
def test_folded_queries_of_a_long_chunk_give_the_same(window: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a GPU does with every mask, a CPU only for few nodes."""
    config = tiny_config("llama") if window is None else tiny_config("mistral", sliding_window=window)
    model, found = tiny_model(config, dtype="float64"), []
    for folded in (64, 1000):
        monkeypatch.setattr(layers, "FOLDED_NODES", folded)
        cache = model.new_cache(200)
        model(chain([i % 300 for i in range(80)]), cache)
        cache.keep(range(80))
        found.append(model(chain([i % 290 for i in range(100)]), cache).logits)
    torch.testing.assert_close(found[1], found[0], atol=1e-10, rtol=0)
