"""The step on kernels on a GPU: right in 16 bits, bitwise under graphs and for any number of rows, text unchanged."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from factories import WeightsInMemory, random_weights, tiny_config, write_model
from heads import write_head
from step_cases import (
    DENSE,
    FORMS,
    PackedInMemory,
    Ran,
    Steps,
    assert_equal_to_plain,
    fast_model,
    packed_config,
    plain_model,
    random_chain,
    random_tree,
    run_forwards,
)

from specq.bench.contestants import Decoding
from specq.bench.match import Asked, Matcher
from specq.models.causal_lm import CausalLM
from specq.models.device_step import BUCKETS, DeviceStep
from specq.recipe import Recipe, Sampling
from specq.spec.drafters import NoDrafter
from specq.spec.load import load_pipeline
from specq.spec.lossless import rounding_error, shortfall, teacher_forced, tolerance_for
from specq.spec.pipelines import Seat
from specq.spec.sampling import Sampler
from specq.spec.session import Generation, Pipeline
from specq.spec.speculator import Speculator, StopRule, generate
from specq.spec.tree import MAX_NODES, DraftTree, chain

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

DEVICE = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
DTYPES = ("bfloat16", "float16")


def forwards() -> Steps:
    """A prompt, then chains and trees of every bucket and sizes between, at lengths across a chunk of 256 keys."""
    steps: list[tuple[DraftTree, Sequence[int]]] = [(random_chain(200, seed=1, device=DEVICE), range(200))]
    for nodes in (1, 3, 5, 9, 13, 30, 60, 64):
        steps.append((random_chain(nodes, seed=nodes, device=DEVICE), range(nodes // 2)))
        tree = random_tree(nodes, seed=nodes, device=DEVICE)
        steps.append((tree, tree.ancestor_mask()[-1].nonzero().flatten().tolist()))
    return steps


def assert_bitwise(found: Ran, expected: Ran) -> None:
    for name in ("logits", "k", "v", "features"):
        assert torch.equal(getattr(found, name), getattr(expected, name)), name


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", DENSE)
def test_dense_models_equal_the_plain_forward(case: str, dtype: str) -> None:
    source = WeightsInMemory(random_weights(DENSE[case]))
    fast = fast_model(DENSE[case], source, dtype=dtype, device=str(DEVICE))
    assert_equal_to_plain(fast, source, forwards(), max_len=512)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", FORMS)
def test_4_bit_models_equal_the_plain_forward(form: str, dtype: str) -> None:
    config = packed_config(FORMS[form])
    source = PackedInMemory(config, FORMS[form])
    fast = fast_model(config, source, dtype=dtype, device=str(DEVICE))
    assert_equal_to_plain(fast, source, forwards(), max_len=512)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", ["symmetric", "zeros, act-order", "a group no kernel runs"])
def test_a_replayed_graph_equals_the_eager_step_bitwise(form: str, dtype: str) -> None:
    config = packed_config(FORMS[form])
    fast = fast_model(config, PackedInMemory(config, FORMS[form]), dtype=dtype, device=str(DEVICE))
    replayed = [run_forwards(fast, forwards(), max_len=512, features=(0, 2)) for _ in range(2)]
    fast.device_step = DeviceStep(fast, use_graphs=False)
    eager = run_forwards(fast, forwards(), max_len=512, features=(0, 2))
    assert_bitwise(replayed[0], eager)
    assert_bitwise(replayed[1], eager)


def test_two_caches_of_one_model_do_not_disturb_each_other() -> None:
    config = packed_config(FORMS["symmetric"])
    fast = fast_model(config, PackedInMemory(config, FORMS["symmetric"]), dtype="bfloat16", device=str(DEVICE))
    caches = [fast.new_cache(length, features="final") for length in (256, 512)]
    nodes = random_chain(4, seed=1, device=DEVICE)
    for _ in range(3):
        outputs = [fast(nodes, cache).logits for cache in caches]
        assert torch.equal(outputs[0], outputs[1])
        for cache in caches:
            cache.keep(range(2))
    assert torch.equal(caches[0].k[:, :, :6], caches[1].k[:, :, :6])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("config", [packed_config(FORMS["symmetric"]), tiny_config("qwen3")], ids=["4-bit", "dense"])
def test_a_chain_row_does_not_depend_on_how_many_rows_run(config: dict, dtype: str) -> None:
    packed = "quantization_config" in config
    source = PackedInMemory(config, FORMS["symmetric"]) if packed else None
    fast = fast_model(config, source, dtype=dtype, device=str(DEVICE))
    tokens = random_chain(264, seed=3).tokens.tolist()
    cuts = {
        "64": [0, 100, 200, 264],
        "mixed": [0, 100, 200, 201, 203, 207, 215, 225, 241, 264],
        "single": [0, 100, *range(200, 265)],
    }
    ran = {}
    for name, edges in cuts.items():
        steps = [(chain(tokens[a:b], device=DEVICE), range(b - a)) for a, b in pairwise(edges)]
        ran[name] = run_forwards(fast, steps, max_len=512)
    assert_bitwise(ran["mixed"], ran["64"])
    assert_bitwise(ran["single"], ran["64"])


class HalfRightTree(NoDrafter):
    """Trees along a text: three levels right, the fourth wrong, two siblings beside each."""

    def __init__(self, truth: Sequence[int]) -> None:
        self.truth = truth

    def propose(self, context: Sequence[int], *, max_nodes: int, max_depth: int) -> DraftTree:
        tokens: list[int] = []
        parents: list[int] = []
        parent = -1
        for level in range(min(4, max_depth, max_nodes // 3)):
            at = len(context) + level
            true = self.truth[at] if at < len(self.truth) and level < 3 else 7
            tokens += [(true + 1) % 256, true, (true + 2) % 256]
            parents += [parent] * 3
            parent = len(tokens) - 2
        return DraftTree.from_lists(tokens, parents)


def decode(target: CausalLM, drafter: NoDrafter, prompt: Sequence[int], count: int) -> tuple[list[int], list[int]]:
    """(tokens, how many each round decided), greedy."""
    verifier = Seat(target, target.new_cache(400 + MAX_NODES)).verifier(Sampler())
    rule = StopRule(start=len(prompt), stop_ids=frozenset(), max_new_tokens=count, context_limit=400)
    speculator = Speculator(drafter, verifier)
    tokens = list(generate(speculator, list(prompt), rule))
    return tokens, [r.decided for r in speculator.rounds]


@pytest.mark.parametrize("dtype", DTYPES)
def test_accepted_branches_of_trees_give_the_text_of_plain_decoding(dtype: str) -> None:
    """Up to near-ties: an accepted node's K and V come from a row that saw other slots."""
    config = packed_config(FORMS["symmetric"])
    source = PackedInMemory(config, FORMS["symmetric"])
    fast = fast_model(config, source, dtype=dtype, device=str(DEVICE))
    rough, precise = (plain_model(fast.spec, source, dtype=kind, device=str(DEVICE)) for kind in (dtype, "float32"))
    prompt = random_chain(12, seed=5).tokens.tolist()
    plain, _ = decode(fast, NoDrafter(), prompt, 200)
    drafted, decided = decode(fast, HalfRightTree([*prompt, *plain]), prompt, 200)
    # Behind the first tie the text is another, so that the trees hold nothing of it.
    same = next((i for i, (a, b) in enumerate(zip(plain, drafted, strict=True)) if a != b), 200)
    assert same > 20
    rounds = sum(sum(decided[:i]) < same for i in range(1, len(decided)))
    assert same / rounds > 2
    # how far 16 bits move these logits without our kernels, so that a fault of theirs cannot widen it
    tolerance = tolerance_for(dtype, rounding_error(rough, precise, prompt, plain, Sampler()))
    for answer in (plain, drafted):
        for start, logits, positions in teacher_forced(precise, prompt, answer, Sampler()):
            chosen = torch.tensor(answer[start : start + len(logits)], device=DEVICE)
            short = shortfall(logits, positions, chosen, Sampler(), tolerance=0.0)
            assert float(short.max()) <= tolerance


def answer(pipeline: Pipeline, name: str, prompt: Sequence[int], sampling: Sampling) -> Generation:
    pipeline.parts.rollback(0)
    pipeline.use(name)
    stream = pipeline.stream(prompt, sampling=sampling, max_new_tokens=64, ignore_stop_ids=True)
    for _ in stream:
        pass
    return stream.result


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_text_of_every_pipeline_is_that_of_plain_decoding(
    temperature: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPECQ_KERNELS", "triton")
    folder, head = write_model(tmp_path / "model", tiny_config()), write_head(tmp_path / "head")
    intermediate = {"model": str(folder), "drafter": str(head)}
    recipe = Recipe.model_validate({"target": str(folder), "intermediate": intermediate, "drafter": str(head)})
    pipeline = load_pipeline(recipe, device=DEVICE.type, dtype="float16", context=256)
    assert isinstance(pipeline.target.device_step, DeviceStep)
    runs = [name for name, reason in pipeline.available.items() if reason is None]
    assert set(pipeline.available) - set(runs) <= {"qspec"}  # which needs 4 bits
    sampling = Sampling(temperature=temperature, seed=1)
    prompt = pipeline.encode("the owl and the fox and the owl and", raw=True)
    asked = Asked(tuple(prompt), sampling, answer(pipeline, "plain", prompt, sampling))
    decoding = Decoding(sampling=sampling, max_new_tokens=64, is_forced=True)
    matcher = Matcher(pipeline, folder, dtype="float16", decoding=decoding, asked=[asked])
    for name in runs:
        verdict = matcher.verdict(asked, answer(pipeline, name, prompt, sampling))
        assert verdict.kind in ("exact", "tie"), (name, verdict)


def test_every_bucket_is_captured_once() -> None:
    config = packed_config(FORMS["symmetric"], num_hidden_layers=1)
    fast = fast_model(config, PackedInMemory(config, FORMS["symmetric"]), dtype="bfloat16", device=str(DEVICE))
    cache = fast.new_cache(128)
    for nodes in (*range(1, 65), 5, 64):
        fast(random_chain(nodes, seed=nodes, device=DEVICE), cache)
    step = fast.device_step
    assert isinstance(step, DeviceStep)
    assert step.captured(cache) == BUCKETS
