"""Real weights: greedy text on a GPU is the CPU's up to ties, with graphs and without, with kernels and without.

SPECQ_TEXT_MODEL names the model, a folder or a .gguf file; without it the demo model is taken where it is cached.
"""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path

import pytest
import torch

from specq.bench.contestants import Decoding
from specq.bench.match import Asked, Matcher
from specq.bench.prompts import load_suite
from specq.demo import demo_folder
from specq.errors import SpecqError
from specq.recipe import Sampling
from specq.spec.load import load_pipeline
from specq.spec.session import Generation, Pipeline

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

GREEDY = Sampling(temperature=0.0)
TOKENS, PROMPTS = 48, 6


@pytest.fixture(scope="module")
def path() -> Path:
    named = os.environ.get("SPECQ_TEXT_MODEL")
    try:
        found = Path(named) if named else demo_folder(offline=True)
    except SpecqError as error:
        pytest.skip(f"no real weights: {error}")
    if not found.exists():
        pytest.skip(f"SPECQ_TEXT_MODEL names `{found}`, which is not there")
    return found


@pytest.fixture(scope="module")
def asked(path: Path) -> list[Asked]:
    """The prompts with what the CPU answers in float32."""
    cpu = load_pipeline(str(path), device="cpu", dtype="float32", pipeline="plain", context=1024)
    prompts = [cpu.encode(prompt.turns[0]) for prompt in load_suite("bundled").take(PROMPTS).prompts]
    return [Asked(tuple(prompt), GREEDY, answer(cpu, "plain", prompt)) for prompt in prompts]


def answer(pipeline: Pipeline, name: str, prompt: list[int] | tuple[int, ...]) -> Generation:
    pipeline.parts.rollback(0)
    pipeline.use(name)
    stream = pipeline.stream(prompt, sampling=GREEDY, max_new_tokens=TOKENS, ignore_stop_ids=True)
    for _ in stream:
        pass
    return stream.result


@pytest.mark.parametrize("name", ["plain", "lookup"])
def test_greedy_text_is_that_of_the_cpu_up_to_ties(path: Path, asked: list[Asked], name: str) -> None:
    gpu = load_pipeline(str(path), device="cuda", context=1024)
    assert gpu.target.device_step is not None
    decoding = Decoding(sampling=GREEDY, max_new_tokens=TOKENS, is_forced=True)
    matcher = Matcher(gpu, path, dtype="auto", decoding=decoding, asked=asked)
    found = [matcher.verdict(each, answer(gpu, name, each.prompt_ids)) for each in asked]
    kinds = Counter(verdict.kind for verdict in found)
    print(f"{name}, {gpu.target.dtype}, against the CPU in float32: {dict(kinds)}")
    assert set(kinds) <= {"exact", "tie"}, found


def test_graphs_change_nothing_and_kernels_ties_only(
    path: Path, asked: list[Asked], monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = {}
    for name, use_graphs, kernels in (("graphs", True, ""), ("none", False, ""), ("torch", True, "reference")):
        monkeypatch.setenv("SPECQ_KERNELS", kernels)
        gpu = load_pipeline(str(path), device="cuda", context=1024, use_graphs=use_graphs)
        assert (gpu.target.device_step is None) == (kernels == "reference")
        texts[name] = [answer(gpu, "plain", each.prompt_ids) for each in asked]
    assert [each.token_ids for each in texts["graphs"]] == [each.token_ids for each in texts["none"]]
    plain = [Asked(each.prompt_ids, GREEDY, generation) for each, generation in zip(asked, texts["torch"], strict=True)]
    decoding = Decoding(sampling=GREEDY, max_new_tokens=TOKENS, is_forced=True)
    matcher = Matcher(gpu, path, dtype="auto", decoding=decoding, asked=plain)
    kinds = Counter(matcher.verdict(each, found).kind for each, found in zip(plain, texts["graphs"], strict=True))
    print(f"kernels against torch in {gpu.target.dtype}: {dict(kinds)}")
    assert set(kinds) <= {"exact", "tie"}
