"""How often a draft token is the target's own, by the rule that couples the two: `python -m specq.bench.coupling`.

specq draws draft and target with the same noise, so that the text does not depend on the drafter. This measures what
that costs against the best possible coupling, and what the noise gains in a tree's score, on a recipe's models.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from specq.bench.prompts import load_suite
from specq.models.causal_lm import CausalLM
from specq.models.eagle import EagleHead
from specq.recipe import Sampling, resolve
from specq.spec.load import load_pipeline
from specq.spec.parts import DRAFTING_ROLES
from specq.spec.session import Pipeline
from specq.spec.tree import chain

CHILDREN = 4
DRAWS = 16
TEMPERATURES = (0.7, 1.0)


@dataclass(frozen=True)
class Rates:
    """Chances over all positions. First token: by maximal coupling (the most any rule can), with shared noise, of the
    draft's argmax, of an independent sample. Among CHILDREN: those best by score with the noise, and without."""

    maximal: float
    shared_noise: float
    greedy: float
    independent: float
    among_noisy: float
    among_plain: float


@torch.inference_mode()
def coupling_rates(
    target: Tensor, draft: Tensor, *, temperature: float, draws: int = DRAWS, generator: torch.Generator | None = None
) -> Rates:
    """The rates of draft logits against target logits, [positions, vocab] each; noise is drawn `draws` times."""
    p, q = ((logits.float() / temperature).log_softmax(-1) for logits in (target, draft))
    best = q.argmax(-1, keepdim=True)
    children = q.topk(min(CHILDREN, q.shape[1]), -1).indices
    shared = noisy = plain = 0.0
    for _ in range(draws):
        noise = -torch.empty_like(p).exponential_(generator=generator).log_()
        chosen = (p + noise).argmax(-1, keepdim=True)
        ranked = (q + noise).topk(children.shape[1], -1).indices
        shared += float((ranked[:, :1] == chosen).float().mean())
        noisy += float((ranked == chosen).any(-1).float().mean())
        plain += float((children == chosen).any(-1).float().mean())
    return Rates(
        maximal=float(torch.minimum(p, q).exp().sum(-1).mean()),
        shared_noise=shared / draws,
        greedy=float(p.gather(1, best).exp().mean()),
        independent=float((p + q).exp().sum(-1).mean()),
        among_noisy=noisy / draws,
        among_plain=plain / draws,
    )


@torch.inference_mode()
def logits_of(model: CausalLM, ids: Sequence[int]) -> Tensor:
    """[len(ids), vocab]: the model's logits after every id."""
    return model.forward(chain(ids, device=model.device), model.new_cache(len(ids))).logits


@torch.inference_mode()
def head_logits_of(head: EagleHead, ids: Sequence[int]) -> Tensor:
    """[len(ids) - 1, vocab]: what a head expects after every id but the first, from the true features before it."""
    target = head.target
    cache = target.new_cache(len(ids), features=head.spec.features)
    target.forward(chain(ids, device=target.device), cache)
    assert cache.features is not None
    rows = chain(ids[1:], device=target.device)
    return head.logits(head(rows, head.enter(cache.features[: len(ids) - 1]), head.new_cache(len(ids))))


def drafted_pairs(pipeline: Pipeline, texts: Sequence[tuple[list[int], int]]) -> Iterator[tuple[str, Tensor, Tensor]]:
    """(drafter, target logits, draft logits) over the answers of `texts`, each ids and where its answer begins."""
    parts = pipeline.parts
    answers = [(logits_of(pipeline.target, ids), start) for ids, start in texts]
    own = torch.cat([logits[start - 1 : -1] for logits, start in answers])
    if parts.intermediate is not None:
        model = parts.intermediate.model
        yield "intermediate", own, torch.cat([logits_of(model, ids)[start - 1 : -1] for ids, start in texts])
    if parts.target_head is not None:
        head = parts.target_head.head
        yield "head", own, torch.cat([head_logits_of(head, ids)[start - 2 : -1] for ids, start in texts])


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints a table for each drafter of the recipe and temperature."""
    parser = argparse.ArgumentParser(prog="python -m specq.bench.coupling", description=__doc__)
    parser.add_argument("model", nargs="?", default="demo")
    parser.add_argument("--limit", type=int, default=8, help="bundled prompts")
    parser.add_argument("--max-new-tokens", type=int, default=64)
    options = parser.parse_args(arguments)
    pipeline = load_pipeline(resolve(options.model), pipeline="plain", also=DRAFTING_ROLES)
    suite = load_suite("bundled").take(options.limit)
    prompts = [pipeline.encode([{"role": "user", "content": each.turns[0]}]) for each in suite.prompts]
    names = [field.name for field in fields(Rates)]
    print(f"{'drafter':14}{'T':>5}{'tokens':>8}" + "".join(f"{name:>14}" for name in names))
    for temperature in TEMPERATURES:
        texts = [
            (_answer(pipeline, ids, temperature, seed, options.max_new_tokens), len(ids))
            for seed, ids in enumerate(prompts)
        ]
        for drafter, target, draft in drafted_pairs(pipeline, texts):
            rates = coupling_rates(target, draft, temperature=temperature, generator=_seeded(target))
            values = "".join(f"{getattr(rates, name):14.3f}" for name in names)
            print(f"{drafter:14}{temperature:5g}{len(target):8}{values}", flush=True)
    return 0


def _answer(pipeline: Pipeline, prompt: list[int], temperature: float, seed: int, count: int) -> list[int]:
    """The prompt with the target's own answer."""
    sampling = Sampling(temperature=temperature, top_p=1.0, top_k=0, repetition_penalty=1.0, seed=seed)
    stream = pipeline.stream(prompt, sampling=sampling, max_new_tokens=count)
    for _ in stream:
        pass
    return [*prompt, *stream.result.token_ids]


def _seeded(like: Tensor) -> torch.Generator:
    return torch.Generator(like.device).manual_seed(0)


if __name__ == "__main__":
    sys.exit(main())
