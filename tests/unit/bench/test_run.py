"""Who answers when: order, warm-up, lengths, turns, and times that a slow start or drafter must or must not move."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from factories import tiny_config, tiny_model

from specq.bench.contestants import Answer, Contestant, Decoding, PipelineContestant
from specq.bench.prompts import Prompt
from specq.bench.report import report_rows
from specq.bench.run import Asking, Run, Sample, run_benchmark
from specq.errors import UsageError
from specq.models.causal_lm import CausalLM
from specq.models.storages import storages
from specq.recipe import Sampling
from specq.spec.session import Pipeline

GREEDY = Decoding(Sampling(temperature=0.0, seed=1), 12)
PROMPTS = [Prompt(f"p{i}", "qa", (text,)) for i, text in enumerate(["one two", "the sea", "what is it", "a fox"])]


def contestants(pipeline: Pipeline, *kinds: str) -> list[Contestant]:
    return [PipelineContestant(kind, pipeline, kind=kind, recipe=pipeline.recipe) for kind in kinds]


def run(pipeline: Pipeline, *kinds: str, decoding: Decoding = GREEDY, prompts=PROMPTS, **options) -> Run:
    return run_benchmark(contestants(pipeline, *kinds), prompts, Asking(pipeline), decoding, **options)


def rates(run: Run, name: str) -> list[float | None]:
    return [s.generation.e2e_tps for s in run.samples if s.contestant == name]


def test_the_order_turns_round_with_every_prompt(make_pipeline: Callable[..., Pipeline]) -> None:
    done = run(make_pipeline(), "plain", "lookup")
    assert [s.contestant for s in done.samples] == ["plain", "lookup", "lookup", "plain"] * 2
    assert [s.order for s in done.samples] == list(range(8))
    repeated = run(make_pipeline(), "plain", "lookup", prompts=PROMPTS[:1], repeats=4)
    assert [s.contestant for s in repeated.samples] == ["plain", "lookup", "lookup", "plain"] * 2
    assert [s.repeat for s in repeated.samples] == [0, 0, 1, 1, 2, 2, 3, 3]


def test_every_answer_starts_with_empty_caches(make_pipeline: Callable[..., Pipeline]) -> None:
    done = run(make_pipeline(None, tiny_model()), "plain", "lookup", "sequence", prompts=PROMPTS[:1], repeats=2)
    assert all(s.generation.reused_tokens == 0 for s in done.samples)
    assert len({s.generation.rounds for s in done.samples if s.contestant == "sequence"}) == 1


def test_forced_answers_are_equally_long_and_natural_ones_end_at_a_stop(
    make_pipeline: Callable[..., Pipeline], monkeypatch: pytest.MonkeyPatch
) -> None:
    pipeline = make_pipeline()
    ids = run(pipeline, "plain").samples[0].generation.token_ids
    monkeypatch.setattr(pipeline.tokenizer, "eos_ids", frozenset({ids[4]}))
    stopped = run(pipeline, "plain", "lookup")
    assert {s.generation.tokens_out for s in stopped.samples[:2]} == {ids.index(ids[4]) + 1}
    forced = run(pipeline, "plain", "lookup", decoding=Decoding(GREEDY.sampling, 12, is_forced=True))
    assert {s.generation.tokens_out for s in forced.samples} == {12}


def test_later_turns_follow_the_answers_of_the_baseline(make_pipeline: Callable[..., Pipeline]) -> None:
    pipeline = make_pipeline()
    prompt = Prompt("p", "multi-turn", ("first", "second", "third"))
    done = run(pipeline, "plain", "lookup", prompts=[prompt])
    first, second, third = (
        next(s for s in done.samples if s.turn == turn and s.contestant == "lookup") for turn in range(3)
    )
    said = [s.generation.text for s in done.samples if s.contestant == "plain"]
    turns = [
        {"role": "user", "content": "first"},
        {"role": "assistant", "content": said[0]},
        {"role": "user", "content": "second"},
        {"role": "assistant", "content": said[1]},
        {"role": "user", "content": "third"},
    ]
    for sample, count in ((first, 1), (second, 3), (third, 5)):
        assert list(sample.prompt_ids) == pipeline.encode(turns[:count])
    assert said[0]


def test_a_base_model_continues_the_text_of_all_turns(make_pipeline: Callable[..., Pipeline]) -> None:
    pipeline = make_pipeline()
    asking = Asking(pipeline, is_raw=True)
    prompt = Prompt("p", "multi-turn", ("first", "second"), raw="stub")
    assert asking.ids(prompt, []) == pipeline.encode("stub", raw=True)
    assert asking.ids(prompt, ["yes"]) == pipeline.encode("stub\nyes\nsecond", raw=True)


def test_prompts_too_long_are_left_out_by_name(make_pipeline: Callable[..., Pipeline]) -> None:
    pipeline = make_pipeline(context=90)
    long = Prompt("long", "qa", ("word " * 60,))
    later = Prompt("later", "multi-turn", ("one", "word " * 60))
    done = run(pipeline, "plain", prompts=[long, PROMPTS[0], later])
    assert done.skipped == ["long", "later from turn 2 on"]
    assert [s.prompt.id for s in done.samples] == ["p0", "later"]
    with pytest.raises(UsageError, match="no prompt of the suite fits the context of 90 tokens"):
        run(pipeline, "plain", prompts=[long])


def test_old_turns_are_dropped_when_asked_for(make_pipeline: Callable[..., Pipeline]) -> None:
    pipeline = make_pipeline(context=100)
    prompt = Prompt("p", "multi-turn", ("word " * 20, "word " * 20))
    asking = Asking(pipeline, drops_oldest=True)
    assert Asking(pipeline).fitting_ids(prompt, ["so"]) is None
    assert asking.fitting_ids(prompt, ["so"]) == pipeline.encode([{"role": "user", "content": "word " * 20}])


def test_seeds_are_shared_by_contestants_and_differ_by_prompt(make_pipeline: Callable[..., Pipeline]) -> None:
    decoding = Decoding(Sampling(temperature=1.0, seed=2**64 - 1), 8)
    done = run(make_pipeline(), "plain", "lookup", decoding=decoding, prompts=PROMPTS[:2])
    assert [s.generation.seed for s in done.samples] == [2**64 - 1] * 2 + [0] * 2
    assert len({s.generation.token_ids for s in done.samples[:2]}) == 1


def test_a_first_call_of_5_s_does_not_move_the_mean(
    make_pipeline: Callable[..., Pipeline], clock, timed_forward: Callable[..., None]
) -> None:
    """L4: what only the first call pays for stays in the warm-up, and is reported there."""
    pipeline = make_pipeline()
    calls = []

    def seconds(model: CausalLM, nodes: int) -> float:
        calls.append(nodes)
        return 5.01 if len(calls) == 1 else 0.01

    timed_forward(seconds)
    slow_start = run(pipeline, "plain", "lookup")
    steady = run(pipeline, "plain", "lookup")
    assert slow_start.warmup_s["plain"][0] == pytest.approx(5 + steady.warmup_s["plain"][0])
    for name in ("plain", "lookup"):
        assert rates(slow_start, name) == pytest.approx(rates(steady, name), rel=1e-9)
    means = [
        report_rows(["plain", "lookup"], r.samples, verdicts={}, right={})[1].overall for r in (slow_start, steady)
    ]
    assert means[0].speedup.mean == pytest.approx(means[1].speedup.mean, rel=1e-9)
    calls.clear()
    cold = run(pipeline, "plain", "lookup", warmups=0)  # the control: without a warm-up it shows
    assert rates(cold, "plain")[0] < 0.1 * rates(steady, "plain")[0]


def test_a_drafter_prefill_of_1_s_shows_end_to_end(
    make_pipeline: Callable[..., Pipeline], clock, timed_forward: Callable[..., None]
) -> None:
    target, intermediate = tiny_model(), tiny_model()
    pipeline = make_pipeline(target, intermediate)

    def measure(prefill_s: float) -> Run:
        def seconds(model: CausalLM, nodes: int) -> float:
            if model is target:
                return 0.05
            return prefill_s if nodes > 8 else 0.001

        timed_forward(seconds)
        return run(pipeline, "plain", "sequence")

    fast, slow = measure(0.001), measure(1.0)
    for a, b in zip(fast.samples, slow.samples, strict=True):
        seconds = [s.generation.tokens_out / s.generation.e2e_tps for s in (a, b)]
        assert seconds[1] - seconds[0] == pytest.approx(0.999 if a.contestant == "sequence" else 0.0, abs=1e-9)
    speedups = [
        report_rows(["plain", "sequence"], r.samples, verdicts={}, right={})[1].overall.speedup for r in (fast, slow)
    ]
    assert speedups[0].mean > 1.5
    assert speedups[1].mean < 1.0


def test_times_of_a_round_add_up_to_the_decode_time(
    make_pipeline: Callable[..., Pipeline], clock, timed_forward: Callable[..., None]
) -> None:
    timed_forward(lambda model, nodes: 0.02)
    for sample in run(make_pipeline(None, tiny_model(seed=3)), "plain", "sequence").samples:
        g = sample.generation
        parts = g.draft_ms + g.intermediate_ms + g.verify_ms + g.overhead_ms
        assert parts == pytest.approx((g.tokens_out - 1) / g.decode_tps * 1e3)


def test_memory_of_models_a_row_does_not_use_is_not_its_peak(make_pipeline: Callable[..., Pipeline]) -> None:
    # 57 MB of weights, so that they stand out from what the process takes otherwise
    large = tiny_model(tiny_config(hidden_size=512, num_attention_heads=8, vocab_size=8000, num_hidden_layers=1))
    done = run(make_pipeline(None, large), "plain", "sequence", prompts=PROMPTS[:1])
    peak = {s.contestant: s.answer.peak_bytes for s in done.samples}
    if peak["plain"] is None:
        pytest.skip("this system does not tell a process its peak memory")
    weights = sum(storages(large).values())
    assert peak["sequence"] - peak["plain"] == pytest.approx(weights, abs=8e6)


def test_the_state_of_the_machine_is_kept_for_every_prompt(make_pipeline: Callable[..., Pipeline]) -> None:
    done = run(make_pipeline(), "plain")
    assert [state["prompt"] for state in done.machine] == ["p0", "p1", "p2", "p3", None]
    assert all(state["load"] >= 0 for state in done.machine)


def test_a_sample_is_recorded_under_the_names_of_the_run_record(make_pipeline: Callable[..., Pipeline]) -> None:
    sample: Sample = run(make_pipeline(), "plain").samples[0]
    record = sample.record()
    assert {"row", "prompt", "category", "turn", "repeat", "order", "peak_memory_bytes"} < set(record)
    assert {"tokens_out", "ttft_s", "decode_tps", "e2e_tps", "accept_len", "rounds", "verify_ms"} < set(record)
    assert isinstance(sample.answer, Answer)
