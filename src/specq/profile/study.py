"""Planning studies: models of a given shape with random weights, made on the device. Times are real, and nothing else.

What such models accept means nothing, so it is given by hand; pipelines without it are not planned.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch

from specq.checkpoint import ModelSpec
from specq.environment import describe_environment
from specq.errors import UnsupportedError, UsageError
from specq.models.causal_lm import CausalLM
from specq.models.eagle_loader import build_head
from specq.models.inventory import expected_tensors
from specq.models.loader import choose_dtype, keeps_4_bits, runs_kernels
from specq.models.memory import MemoryEstimate, estimate_bytes, free_bytes, require_memory
from specq.models.random_weights import RandomWeights, random_head, random_model, shape_config
from specq.profile.acceptance import Rates
from specq.profile.subject import LARGEST, SEED, Request, Subject
from specq.recipe import Recipe
from specq.spec.decision import ProfileKey
from specq.spec.load import choose_context, set_threads, take_device
from specq.spec.pipelines import PIPELINES, HeadSeat, Parts, Seat
from specq.spec.sampling import Sampler
from specq.spec.tree import MAX_NODES

PROMPTS = 2
PROMPT_TOKENS = {"cpu": 64, "cuda": 1024}
"""Random prompts that plain decoding runs on, and their length by kind of device; they set the context planned for."""

GIVEN_FOR = {
    "lookup": ("lookup",),
    "sequence": ("sequence",),
    "eagle2": ("eagle2",),
    "hierarchical": ("sequence", "inner"),
    "qspec": ("qspec",),
}
"""The acceptance each pipeline is planned with."""


def make_subject(request: Request, say: Callable[[str], None]) -> Subject:
    """Models of the shapes the recipe names, made on the device, and heads for those whose trees have an acceptance.

    Raises UsageError for a name that is no shape, NotEnoughMemoryError before anything is made.
    """
    recipe, given = request.recipe, request.by_hand
    device = take_device(request.device)
    shapes = _shapes(recipe, given)
    configs = {role: shape_config(name) for role, name in shapes.items()}
    specs = {role: ModelSpec.from_config(config) for role, config in configs.items()}
    if len(sizes := {spec.vocab for spec in specs.values()}) > 1:
        raise UnsupportedError(
            f"shapes with vocabularies of {' and '.join(map(str, sorted(sizes)))} ids cannot draft for each other",
            hint="give both the same vocab_size",
        )
    limit = choose_context(specs["target"], recipe.context)
    contexts = {role: min(limit, spec.max_context) for role, spec in specs.items()}
    headed = {role for role, name in (("target", "eagle2"), ("intermediate", "inner")) if name in given}
    estimates = [
        _estimate(spec, device, request.dtype, contexts[role], has_head=role in headed) for role, spec in specs.items()
    ]
    require_memory(estimates, limit, device=device, free=free_bytes(device))
    seats: dict[str, Any] = {}
    for role, config in configs.items():
        say(f"making random weights of {shapes[role]}")
        model = random_model(config, device=device, dtype=request.dtype, use_graphs=request.use_graphs)
        seats |= _seats(role, model, contexts[role], recipe, has_head=role in headed)
    parts = Parts(**seats)
    if device == "cpu":
        set_threads(parts.target.model, request.threads)
    digests = {role: _digest(config) for role, config in configs.items()}
    prompt_tokens, vocab = PROMPT_TOKENS[torch.device(device).type], specs["target"].vocab
    return Subject(
        parts=parts,
        sampler=Sampler(seed=SEED, vocab=vocab),
        stop_ids=frozenset(),
        context=limit,
        encode=lambda room: _prompts(vocab, min(prompt_tokens, room - 1)),
        available={name: each.missing(parts.roles) or _not_given(name, given) for name, each in PIPELINES.items()},
        key=ProfileKey.of(digests, device=device, dtype=request.dtype, use_graphs=request.use_graphs),
        environment=describe_environment(device)
        | {"models": {f"{name} (random weights)": None for name in shapes.values()}},
        load_dense=lambda context: _dense(configs["target"], device=device, dtype=request.dtype, context=context),
    )


def _shapes(recipe: Recipe, given: Mapping[str, Rates]) -> dict[str, str]:
    """The names of shapes by role. Raises UsageError for an acceptance of an intermediate that is not named."""
    shapes = {"target": recipe.target.model}
    if recipe.intermediate is not None:
        shapes["intermediate"] = recipe.intermediate.model
    elif lacking := sorted(given.keys() & {"sequence", "inner"}):
        raise UsageError(
            f"`--acceptance {lacking[0]}=...` is that of an intermediate model, and there is none",
            hint="add --intermediate with its shape, for example --intermediate 8b",
        )
    return shapes


def _seats(role: str, model: CausalLM, context: int, recipe: Recipe, *, has_head: bool) -> dict[str, Any]:
    """The model's seat, and that of a head for it, with room for the largest tree that is tried."""
    slots = context + MAX_NODES
    seats: dict[str, Any] = {role: Seat(model, model.new_cache(slots, features="final" if has_head else None))}
    if has_head:
        scratch = (max(LARGEST.depth, recipe.drafter.depth) - 1) * max(LARGEST.top_k, recipe.drafter.top_k)
        files = random_head(model)
        head = build_head(files, model)
        seats[f"{role}_head"] = HeadSeat(head, head.new_cache(slots + scratch), files)
    return seats


def _digest(config: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps([config, "random"]).encode()).hexdigest()


def _estimate(spec: ModelSpec, device: str, dtype: str, context: int, *, has_head: bool) -> MemoryEstimate:
    kind = choose_dtype(dtype, spec, device)
    packed = frozenset[str]()
    if spec.quantization is not None and (keeps_4_bits(spec, dtype=dtype, device=device) or runs_kernels(kind, device)):
        source = RandomWeights(spec, torch.device(device))
        packed = frozenset(n for n in expected_tensors(spec) if source.is_packed(n.removesuffix(".weight")))
    found = estimate_bytes(spec, dtype=kind, context=context, device=device, packed=packed)
    if not has_head:
        return found
    q, kv = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    numbers = spec.hidden * (2 * spec.hidden + 2 * q + 2 * kv + 3 * spec.intermediate)
    return replace(found, weights=found.weights + numbers * kind.itemsize)


def _dense(config: dict[str, Any], *, device: str, dtype: str, context: int) -> CausalLM:
    """The target's shape in 16 bits. Raises NotEnoughMemoryError before weights are made."""
    plain = config | {"quantization_config": None}
    needed = _estimate(ModelSpec.from_config(plain), device, dtype, context, has_head=False)
    require_memory([needed], context, device=device, free=free_bytes(device))
    return random_model(plain, device=device, dtype=dtype)


def _prompts(vocab: int, tokens: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(SEED)
    return torch.randint(vocab, (PROMPTS, max(tokens, 1)), generator=generator).tolist()


def _not_given(pipeline: str, given: Mapping[str, Rates]) -> str | None:
    """The reason why a pipeline cannot be planned without measuring: random weights accept nothing by sense."""
    lacking = [name for name in GIVEN_FOR.get(pipeline, ()) if name not in given]
    return f"needs the acceptance of random weights by hand (--acceptance {lacking[0]}=P)" if lacking else None
