"""Norm, SiLU, cache writes and sampling in the interpreter, against their definitions."""

from __future__ import annotations

import pytest
import torch

from specq.spec.sampling import Sampler
from specq_kernels.group_sums import group_sums_ref
from specq_kernels.kv_cache import append_rotary, append_rotary_ref, compact, compact_ref
from specq_kernels.norm_rope import (
    rms_norm,
    rms_norm_parts,
    rms_norm_parts_ref,
    rms_norm_ref,
    silu_mul,
    silu_mul_ref,
)
from specq_kernels.sampling import Draw, argmax, gumbel_argmax, gumbel_argmax_ref
from specq_kernels.step_rows import embed_rows, embed_rows_ref, keep_rows, keep_rows_ref
from specq_kernels.w4a16 import sum_parts_ref

DTYPES = (torch.float16, torch.float32)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "k", "group"), [(1, 576, 128), (17, 1000, 32), (3, 2048, 64)])
def test_norm_adds_the_residual_and_sums_its_groups(rows: int, k: int, group: int, dtype: torch.dtype) -> None:
    x, residual, weight = torch.randn(rows, k).to(dtype), torch.randn(rows, k).to(dtype), torch.rand(k).to(dtype)
    y, h, sides = rms_norm(x, weight, eps=1e-5, residual=residual, group=group)
    expected, expected_h, _ = rms_norm_ref(x, weight, eps=1e-5, residual=residual)
    torch.testing.assert_close(h, expected_h)
    torch.testing.assert_close(y, expected, rtol=2e-3, atol=1e-3)
    assert sides is not None
    assert sides.lanes is None
    torch.testing.assert_close(sides.sums[:, :rows], group_sums_ref(y, group)[:, :rows], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", DTYPES)
def test_norm_adds_the_parts_of_a_product_as_the_product_does(dtype: torch.dtype) -> None:
    parts, residual, weight = torch.randn(3, 5, 320), torch.randn(5, 300).to(dtype), torch.rand(300).to(dtype)
    y, h, sides = rms_norm_parts(parts, residual, weight, eps=1e-5, group=128)
    assert torch.equal(h, sum_parts_ref(parts, 300, residual=residual, out_dtype=dtype))
    expected, _, _ = rms_norm_parts_ref(parts, residual, weight, eps=1e-5)
    torch.testing.assert_close(y, expected, rtol=2e-3, atol=1e-3)
    assert sides is not None
    torch.testing.assert_close(sides.sums[:, :5], group_sums_ref(y, 128)[:, :5], rtol=1e-4, atol=1e-4)
    with pytest.raises(ValueError, match="parts: 280 columns"):
        rms_norm_parts(parts[:, :, :280].contiguous(), residual, weight, eps=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
def test_norm_without_residual_returns_its_input(dtype: torch.dtype) -> None:
    x, weight = torch.randn(2, 300).to(dtype), torch.rand(300)
    y, h, sides = rms_norm(x, weight, eps=1e-6, lanes=True)
    assert h is x
    assert sides is None
    torch.testing.assert_close(y, rms_norm_ref(x, weight, eps=1e-6)[0], rtol=2e-3, atol=1e-3)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "k"), [(1, 1536), (5, 1100)])
def test_silu_of_gate_times_up(rows: int, k: int, dtype: torch.dtype) -> None:
    gate_up = torch.randn(rows, 2 * k).to(dtype)
    y, sides = silu_mul(gate_up, group=128)
    torch.testing.assert_close(y, silu_mul_ref(gate_up)[0], rtol=2e-3, atol=1e-3)
    assert sides is not None
    torch.testing.assert_close(sides.sums[:, :rows], group_sums_ref(y, 128)[:, :rows], rtol=1e-4, atol=1e-4)


def test_rows_of_the_embedding_are_in_the_dtype_of_activations() -> None:
    embedding, tokens = torch.randn(20, 1100).half(), torch.tensor([3, 19, 0], dtype=torch.int32)
    found = embed_rows(embedding, tokens, dtype=torch.float32)
    assert found.dtype == torch.float32
    assert torch.equal(found, embed_rows_ref(embedding, tokens, dtype=torch.float32))


@pytest.mark.parametrize("has_kept", [False, True])
def test_rows_are_kept_beside_the_cache(has_kept: bool) -> None:
    x, length = torch.randn(3, 1100), torch.tensor([5], dtype=torch.int32)
    rows, kept = torch.zeros(4, 2300), torch.zeros(9, 2300) if has_kept else None
    expected, expected_kept = rows.clone(), None if kept is None else kept.clone()
    keep_rows(x, rows, kept, length, column=1200)
    keep_rows_ref(x, expected, expected_kept, length, column=1200)
    assert torch.equal(rows, expected)
    assert kept is expected_kept or torch.equal(kept, expected_kept)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="rows: "):
        keep_rows(x, rows, kept, length, column=1201)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "has_norm", "earlier"),
    [(3, 1, 80, False, 0), (4, 2, 64, True, 0), (9, 3, 32, True, 6)],
)
def test_append_rotates_and_writes_behind_the_length(
    heads: int, kv_heads: int, head_dim: int, has_norm: bool, earlier: int, dtype: torch.dtype
) -> None:
    qkv = torch.randn(5, (heads + 2 * kv_heads) * head_dim).to(dtype)
    k, v = torch.randn(2, kv_heads, 32, head_dim).to(dtype).unbind()
    angles = torch.outer(torch.arange(40.0), 10000 ** -torch.linspace(0, 1, head_dim // 2))
    depths = torch.tensor([0, 1, 1, 2, 2], dtype=torch.int32)
    norms = {"q_norm": torch.rand(head_dim), "k_norm": torch.rand(head_dim)} if has_norm else {}
    length = torch.tensor([7], dtype=torch.int32)
    expected_k, expected_v = k.clone(), v.clone()
    tables = (angles.cos(), angles.sin(), depths, length)
    expected = append_rotary_ref(qkv, expected_k, expected_v, *tables, earlier=earlier, **norms)
    q = append_rotary(qkv, k, v, *tables, earlier=earlier, **norms)
    for ours, theirs in ((q, expected), (k, expected_k), (v, expected_v)):
        torch.testing.assert_close(ours, theirs, rtol=2e-3, atol=1e-3)
    parts = torch.randn(3, 5, qkv.shape[1] + 20)
    whole = sum_parts_ref(parts, qkv.shape[1], out_dtype=dtype).contiguous()
    rotated = append_rotary(whole, expected_k, expected_v, *tables, earlier=earlier, **norms)
    assert torch.equal(append_rotary(parts, k, v, *tables, heads=heads, earlier=earlier, **norms), rotated)
    assert torch.equal(k, expected_k)
    assert torch.equal(v, expected_v)
    again = append_rotary_ref(parts, k, v, *tables, heads=heads, earlier=earlier, **norms)
    torch.testing.assert_close(again, rotated, rtol=2e-3, atol=1e-3)


def test_compaction_moves_the_path_in_every_layer_and_nothing_else() -> None:
    k, v = torch.randn(2, 3, 2, 40, 80).half().unbind()
    expected_k, expected_v = k.clone(), v.clone()
    path = torch.tensor([0, 2, 3, 9, 11, 30, 30], dtype=torch.int32)
    count, length = torch.tensor([5], dtype=torch.int32), torch.tensor([6], dtype=torch.int32)
    compact_ref(expected_k, expected_v, path, count, length)
    compact(k, v, path, count, length)
    assert torch.equal(k, expected_k)
    assert torch.equal(v, expected_v)


def test_argmax_takes_the_lowest_id_of_equals_below_the_vocabulary() -> None:
    logits = torch.randn(3, 5000)
    logits[0, [17, 4000]] = 50.0
    logits[1, 4999] = 99.0
    assert argmax(logits, vocab=4990).tolist() == logits[:, :4990].argmax(-1).tolist()
    assert argmax(logits, vocab=4990)[0] == 17
    assert argmax(logits)[1] == 4999


@pytest.mark.parametrize("seed", [0, 3, 2**33 + 12345, 2**64 - 1])
def test_noise_is_the_samplers(seed: int) -> None:
    logits, positions = torch.randn(4, 3000), torch.tensor([1, 2, 900, 131071])
    draw = Draw.of(seed, 0.7)
    chosen = gumbel_argmax(logits, positions, draw, vocab=2999)
    sampler = Sampler(temperature=0.7, seed=seed, vocab=2999)
    assert chosen.tolist() == sampler(logits, positions).tolist()
    reference = gumbel_argmax_ref(logits, positions, draw, vocab=2999)
    assert chosen.tolist() == reference.tolist()


def test_errors_name_the_argument() -> None:
    with pytest.raises(ValueError, match="temperature: 0"):
        Draw.of(1, 0.0)
    with pytest.raises(ValueError, match="vocab: 9"):
        argmax(torch.zeros(1, 8), vocab=9)
    with pytest.raises(ValueError, match="weight: shape"):
        rms_norm(torch.zeros(1, 8), torch.zeros(4), eps=1e-6)
    cache, scalar = torch.zeros(1, 1, 80, 16), torch.zeros(1, dtype=torch.int32)
    with pytest.raises(ValueError, match="path: 65 entries"):
        compact(cache, cache.clone(), torch.zeros(65, dtype=torch.int32), scalar, scalar)
