"""What a trained drafter is worth: accept length of the real pipeline on held-out prompts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from specq.models.causal_lm import CausalLM
from specq.models.eagle import EagleHead
from specq.recipe import Recipe, Sampling
from specq.spec.pipelines import HeadSeat, Parts, Seat, tree_shape
from specq.spec.session import Generation, Pipeline, pooled_accept_length
from specq.spec.tree import MAX_NODES
from specq.tokenizer import Tokenizer

EVAL_NODES, EVAL_DEPTH, EVAL_TOP_K, EVAL_DRAFT = 60, 6, 10, 5
"""The tree of a head (as the EAGLE-2 paper's), and the draft of an intermediate, that are measured."""

EVAL_TEMPERATURES = (0.0, 1.0)


def eagle2_pipeline(
    recipe: Recipe, target: CausalLM, head: EagleHead, tokenizer: Tokenizer, *, context: int
) -> Pipeline:
    """The target with its head, drafting the tree that heads are judged by."""
    tree = {"nodes": EVAL_NODES, "depth": EVAL_DEPTH, "top_k": EVAL_TOP_K}
    judged = recipe.model_copy(update={"drafter": recipe.drafter.model_copy(update=tree)})
    slots = context + MAX_NODES
    seat = Seat(target, target.new_cache(slots, features=head.spec.features))
    head_seat = HeadSeat(head, head.new_cache(slots + tree_shape(judged).scratch_rows))
    return _pipeline(judged, Parts(seat, target_head=head_seat), tokenizer, context, name="eagle2")


def sequence_pipeline(
    recipe: Recipe, target: CausalLM, intermediate: CausalLM, tokenizer: Tokenizer, *, context: int
) -> Pipeline:
    """The target with an intermediate that drafts for it."""
    draft = recipe.pipeline.model_copy(update={"draft_length": EVAL_DRAFT})
    judged = recipe.model_copy(update={"pipeline": draft})
    slots = context + MAX_NODES
    parts = Parts(Seat(target, target.new_cache(slots)), intermediate=Seat(intermediate, intermediate.new_cache(slots)))
    return _pipeline(judged, parts, tokenizer, context, name="sequence")


def _pipeline(recipe: Recipe, parts: Parts, tokenizer: Tokenizer, context: int, *, name: str) -> Pipeline:
    pipeline = Pipeline(
        recipe=recipe, parts=parts, tokenizer=tokenizer, context=context, defaults=Sampling(), models={}
    )
    pipeline.use(name)
    return pipeline


def measure_accept_lengths(
    pipeline: Pipeline, prompts: Sequence[Sequence[int]], *, max_new_tokens: int, say: Callable[[str], None]
) -> list[dict[str, Any]]:
    """For each temperature: accept length over all prompts (the target's own token included), and of each prompt."""
    results = []
    for temperature in EVAL_TEMPERATURES:
        answers = []
        for number, ids in enumerate(prompts):
            say(f"evaluating {pipeline.name} at temperature {temperature:g}: prompt {number + 1} of {len(prompts)}")
            sampling = Sampling(temperature=temperature, top_p=1.0, top_k=0, repetition_penalty=1.0, seed=number)
            answers.append(_answer(pipeline, ids, sampling, max_new_tokens))
        rounds, pooled = sum(answer.rounds for answer in answers), pooled_accept_length(answers)
        results.append(
            {
                "pipeline": pipeline.name,
                "temperature": temperature,
                "prompts": len(answers),
                "tokens": sum(answer.tokens_out for answer in answers),
                "rounds": rounds,
                "accept_len": None if pooled is None else round(pooled, 3),
                "by_prompt": [None if a.accept_len is None else round(a.accept_len, 2) for a in answers],
            }
        )
    return results


def _answer(pipeline: Pipeline, ids: Sequence[int], sampling: Sampling, max_new_tokens: int) -> Generation:
    stream = pipeline.stream(ids, sampling=sampling, max_new_tokens=max_new_tokens)
    for _ in stream:
        pass
    return stream.result
