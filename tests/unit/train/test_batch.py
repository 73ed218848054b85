"""Batches of padded sequences give what one sequence alone gives; answers are those of plain decoding."""

from __future__ import annotations

import pytest
import torch
from factories import IM_END, VOCAB, tiny_config, tiny_model

from specq.models.causal_lm import CausalLM
from specq.spec.tree import chain
from specq.train.batch import BatchedForward, pad
from specq.train.generate import AnswerWriter

PROMPTS = [[5, 9, 33, 7], [11], [8, 8, 120, 4, 77, 31, 2], [64, 3]]


def windowed(window: int) -> dict[str, object]:
    return {"family": "mistral", "sliding_window": window}


@pytest.fixture(params=[{}, {"family": "qwen3"}, windowed(3)], ids=["llama", "qwen3", "window"])
def model(request) -> CausalLM:
    return tiny_model(tiny_config(**request.param))


def features_alone(model: CausalLM, ids: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        return model.forward(chain(ids), model.new_cache(64, features="final")).features


def greedy(model: CausalLM, prompt: list[int], count: int, *, stop: int | None = IM_END) -> list[int]:
    """What the model writes after the prompt, from a whole forward for every token."""
    context = list(prompt)
    for _ in range(count):
        with torch.inference_mode():
            logits = model.forward(chain(context), model.new_cache(64)).logits[-1]
        context.append(int(logits.argmax()))
        if context[-1] == stop:
            break
    return context[len(prompt) :]


def test_states_of_a_padded_batch_are_those_of_each_sequence(model) -> None:
    states = BatchedForward(model).states(pad(PROMPTS, multiple=4))
    assert states.shape[1] == 8
    for row, ids in enumerate(PROMPTS):
        torch.testing.assert_close(states[row, : len(ids)], features_alone(model, ids), rtol=1e-9, atol=1e-9)


def test_a_layer_left_out_changes_the_states() -> None:
    model = tiny_model()
    forward = BatchedForward(model)
    assert torch.equal(forward.states(pad(PROMPTS)), forward.states(pad(PROMPTS), layers=[0, 1]))
    assert not torch.allclose(forward.states(pad(PROMPTS)), forward.states(pad(PROMPTS), layers=[1]))


def test_answers_are_those_of_greedy_decoding_one_by_one(model) -> None:
    writer = AnswerWriter(model, vocab=VOCAB, stop_ids=frozenset({IM_END}), max_new_tokens=40)
    assert writer.answers(PROMPTS, temperature=0.0, seed=0) == [greedy(model, p, 40) for p in PROMPTS]


def test_an_answer_ends_with_its_first_stop_id_and_the_others_go_on() -> None:
    model = tiny_model()
    whole = {tuple(p): greedy(model, p, 40, stop=None) for p in PROMPTS}
    stops = frozenset({whole[tuple(PROMPTS[0])][2], whole[tuple(PROMPTS[1])][1], whole[tuple(PROMPTS[2])][4]})
    answers = AnswerWriter(model, vocab=VOCAB, stop_ids=stops, max_new_tokens=40).answers(
        PROMPTS, temperature=0.0, seed=0
    )
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        expected = whole[tuple(prompt)]
        end = next((i + 1 for i, token in enumerate(expected) if token in stops), 40)
        assert answer == expected[:end]
    assert len({len(answer) for answer in answers}) > 1


def test_ids_beyond_the_tokenizer_are_never_written() -> None:
    model = tiny_model()
    with torch.no_grad():
        model.head.weight[200:] *= 40
    writer = AnswerWriter(model, vocab=200, stop_ids=frozenset(), max_new_tokens=20)
    for temperature in (0.0, 1.0):
        answers = writer.answers(PROMPTS, temperature=temperature, seed=0)
        assert max(token for answer in answers for token in answer) < 200


def test_samples_depend_on_the_seed_and_follow_the_distribution() -> None:
    model = tiny_model()
    writer = AnswerWriter(model, vocab=VOCAB, stop_ids=frozenset(), max_new_tokens=1)
    many = [[5, 9, 33, 7]] * 4000
    first, again, other = (writer.answers(many, temperature=1.0, seed=seed) for seed in (1, 1, 2))
    assert first == again
    assert first != other
    found = torch.bincount(torch.tensor(first).flatten(), minlength=VOCAB) / len(many)
    with torch.inference_mode():
        expected = model.forward(chain(many[0]), model.new_cache(64)).logits[-1].softmax(-1)
    # 4000 draws: the total variation of a right sampler over these ids stays below 0.1, that of a wrong one does not
    assert 0.5 * (found - expected).abs().sum() < 0.1
