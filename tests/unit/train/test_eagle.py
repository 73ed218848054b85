"""A head in training computes what the same head computes when it drafts, and its files are the published form."""

from __future__ import annotations

import pytest
import torch
from factories import tiny_config, tiny_model
from safetensors.torch import load_file

from specq.checkpoint import RopeSpec
from specq.errors import UnsupportedError
from specq.models.causal_lm import CausalLM
from specq.models.eagle import EagleHead
from specq.models.eagle_files import HeadFiles
from specq.models.eagle_loader import load_head
from specq.models.eagle_writer import write_head
from specq.recipe import DistillSection
from specq.spec.tree import chain
from specq.train.batch import BatchedForward, pad
from specq.train.data import Batch
from specq.train.eagle import HeadTask, output_matrix
from specq.train.soft_loss import Teacher, soft_cross_entropy

TEXTS = [[5, 9, 33, 7, 12, 80, 41, 3, 19, 22], [64, 3, 90, 14, 71, 6, 28]]
STARTS = [4, 2]


@pytest.fixture
def target() -> CausalLM:
    return tiny_model()


def batch() -> Batch:
    width = max(map(len, TEXTS))
    spans = [torch.arange(s - 1, len(t) - 1) + r * width for r, (t, s) in enumerate(zip(TEXTS, STARTS, strict=True))]
    return Batch(pad(TEXTS), torch.cat(spans))


def saved_head(task: HeadTask, target: CausalLM, folder) -> EagleHead:
    write_head(folder, task.tensors(), task.config)
    return load_head(folder, target)


def drafted_states(head: EagleHead, target: CausalLM, ids: list[int], *, known: int, depth: int) -> torch.Tensor:
    """The head's predicted state at each depth when it has the true features of the first `known` ids only."""
    # Weights are drawn in fp32, so that the file's fp32 is exact here.
    with torch.inference_mode():
        features = target.forward(chain(ids), target.new_cache(64, features="final")).features
        cache = head.new_cache(64)
        state = head(chain(ids[1 : known + 1]), features[:known], cache)[-1:]
        cache.keep(range(known))
        states = [state]
        for j in range(1, depth):
            trunk = chain(ids[known + 1 : known + 1 + j])
            state = head(trunk, state, cache, start=j - 1)
            states.append(state)
    return torch.cat(states)


def test_unrolled_rows_are_the_states_the_head_drafts_with(target, tmp_path) -> None:
    task = HeadTask(target, DistillSection(unroll=4, noise=0.0))
    head = saved_head(task, target, tmp_path)
    tokens = pad(TEXTS)
    with torch.no_grad():
        unrolled = task._unroll(tokens, BatchedForward(target).states(tokens))
    for row, ids in enumerate(TEXTS):
        for known in (1, 2, len(ids) - 4):
            drafted = drafted_states(head, target, ids, known=known, depth=4 if known + 4 <= len(ids) - 1 else 3)
            trained = torch.stack([unrolled[j][row, known - 1 + j] for j in range(len(drafted))])
            torch.testing.assert_close(trained, drafted, rtol=1e-9, atol=1e-9)


def test_loss_is_the_two_losses_weighted_by_depth(target) -> None:
    settings = DistillSection(unroll=2, unroll_decay=0.5, feature_weight=0.3, ce_weight=0.7, noise=0.0)
    task = HeadTask(target, settings)
    loss, agreement = task.loss(batch(), torch.Generator().manual_seed(0), done=0.0)
    tokens = pad(TEXTS)
    features = BatchedForward(target).states(tokens)
    parts = []
    for states in task._unroll(tokens, features):
        terms = []
        for row, (ids, start) in enumerate(zip(TEXTS, STARTS, strict=True)):
            for position in range(start - 1, len(ids) - 1):
                wanted, guess = features[row, position], states[row, position - 1]
                ce = -(target.logits(wanted[None]).softmax(-1) * target.logits(guess[None]).log_softmax(-1)).sum()
                moved = (guess - wanted).abs()
                smooth = torch.where(moved < 1, 0.5 * moved**2, moved - 0.5).mean()
                terms.append(0.7 * ce + 0.3 * smooth)
        parts.append(torch.stack(terms).mean())
    expected = (parts[0] + 0.5 * parts[1]) / 1.5
    assert float(loss.detach()) == pytest.approx(
        float(expected.detach()), rel=1e-5
    )  # the cross-entropy is summed in fp32
    assert len(agreement) == 2


def test_loss_and_its_gradient_are_those_of_the_whole_distributions() -> None:
    draws = torch.Generator().manual_seed(3)
    states, wanted, head = (torch.randn(n, 6, generator=draws, dtype=torch.float64) for n in (5, 5, 11))
    states.requires_grad_()
    loss, _ = soft_cross_entropy(states, head, Teacher.of(wanted, head))
    (3 * loss).backward()
    plain = -((wanted @ head.T).softmax(-1) * (states @ head.T).log_softmax(-1)).sum(-1).mean()
    (expected,) = torch.autograd.grad(3 * plain, states)
    assert float(loss.detach()) == pytest.approx(float(plain.detach()), rel=1e-6)  # fp32
    torch.testing.assert_close(states.grad, expected, rtol=1e-5, atol=1e-7)


def test_rows_beyond_one_part_count_as_the_others(monkeypatch) -> None:
    draws = torch.Generator().manual_seed(5)
    states, wanted, head = (torch.randn(n, 6, generator=draws, dtype=torch.float64) for n in (7, 7, 11))
    whole = soft_cross_entropy(states, head, Teacher.of(wanted, head))
    monkeypatch.setattr("specq.train.soft_loss.ROWS_AT_ONCE", 3)
    torch.testing.assert_close(soft_cross_entropy(states, head, Teacher.of(wanted, head)), whole)


def test_teacher_agrees_with_itself_and_with_no_one_else() -> None:
    draws = torch.Generator().manual_seed(4)
    states, head = torch.randn(50, 8, generator=draws), torch.randn(30, 8, generator=draws)
    teacher = Teacher.of(states, head)
    assert float(soft_cross_entropy(states, head, teacher)[1]) == 1.0
    assert float(soft_cross_entropy(-states, head, teacher)[1]) < 0.2
    torch.testing.assert_close(teacher.expected, (states @ head.T).softmax(-1) @ head)


def test_files_have_the_published_names_and_every_number_is_in_the_config(target, tmp_path) -> None:
    task = HeadTask(target, DistillSection())
    saved_head(task, target, tmp_path)
    layer = [f"layers.0.self_attn.{n}_proj.weight" for n in "qkvo"]
    layer += [f"layers.0.mlp.{n}_proj.weight" for n in ("gate", "up", "down")]
    assert set(load_file(tmp_path / "model.safetensors")) == {
        "fc.weight",
        *layer,
        "layers.0.post_attention_layernorm.weight",
    }
    assert {key: task.config[key] for key in ("num_attention_heads", "num_key_value_heads", "rope_theta", "bias")} == {
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "rope_theta": 10000.0,
        "bias": False,
    }


def test_head_keeps_the_base_of_a_target_whose_positions_are_scaled(tmp_path) -> None:
    scaled = {"rope_type": "linear", "factor": 2.0, "rope_theta": 5000.0}
    target = tiny_model(tiny_config(rope_parameters=scaled, rope_theta=None))
    config = HeadTask(target, DistillSection()).config
    assert RopeSpec.from_config(config, max_positions=512) == RopeSpec("default", 5000.0)


def test_a_head_may_be_wider_than_the_target_and_grows_without_a_change(target, tmp_path) -> None:
    narrow = saved_head(HeadTask(target, DistillSection()), target, tmp_path)
    wide_task = HeadTask(target, DistillSection(width=target.spec.intermediate + 24), start=HeadFiles(tmp_path))
    (tmp_path / "wide").mkdir()
    wide = saved_head(wide_task, target, tmp_path / "wide")
    assert wide.spec.intermediate == target.spec.intermediate + 24 == wide_task.config["intermediate_size"]
    states, ids = torch.randn(3, target.spec.hidden, dtype=torch.float64), chain([5, 9, 7])
    with torch.inference_mode():
        old, new = (head(ids, states, head.new_cache(8)) for head in (narrow, wide))
    torch.testing.assert_close(new, old)
    gate = wide_task.tensors()["layers.0.mlp.gate_proj.weight"]
    assert bool(gate[-24:].any())  # or what was gained could never learn
    with pytest.raises(UnsupportedError, match="training cannot begin with this head"):
        HeadTask(target, DistillSection(), start=HeadFiles(tmp_path / "wide"))


def test_a_head_for_4_bits_ends_its_training_on_the_numbers_of_its_file(target, tmp_path) -> None:
    task = HeadTask(target, DistillSection(bits=4, noise=0.0))
    features, tokens = BatchedForward(target).states(pad(TEXTS)), pad(TEXTS)
    with torch.no_grad():
        exact = task._unroll(tokens, features)
        task.loss(batch(), torch.Generator().manual_seed(0), done=0.5)
        assert all(torch.equal(a, b) for a, b in zip(exact, task._unroll(tokens, features), strict=True))
    loss, _ = task.loss(batch(), torch.Generator().manual_seed(0), done=0.9)
    loss.backward()
    assert all(bool(parameter.grad.any()) for parameter in task.parameters.values())
    write_head(tmp_path, task.tensors(), task.config, bits=4)
    head, ids = load_head(tmp_path, target), TEXTS[0]
    with torch.inference_mode():
        stored = head(chain(ids[1:]), features[0, : len(ids) - 1], head.new_cache(16))
        trained = task._unroll(tokens, features)[0][0, : len(ids) - 1]
    torch.testing.assert_close(trained, stored)
    assert float((trained - exact[0][0, : len(ids) - 1]).abs().max()) > 1e-3


def test_trimmed_head_maps_its_ids_to_the_targets(target, tmp_path) -> None:
    kept = torch.tensor([3, 9, 40, 41, 200])
    head = saved_head(HeadTask(target, DistillSection(trim_vocab=5), kept_ids=kept), target, tmp_path)
    states = torch.randn(2, target.spec.hidden, dtype=torch.float64)
    logits = head.logits(states)
    torch.testing.assert_close(logits[:, kept], states @ output_matrix(target)[kept].T)
    assert int(logits.isfinite().sum()) == 2 * len(kept)
