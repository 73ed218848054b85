"""Timing jobs, the grid of steps on tiny models, acceptance out of real rounds."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
import torch
from tiny_models import VOCAB, make_head, make_model

from specq.models.causal_lm import CausalLM
from specq.profile.acceptance import tree_rates
from specq.profile.cost import Tree
from specq.profile.measure import (
    BUCKETS,
    SELF_LENGTHS,
    DraftKey,
    Grid,
    StepKey,
    cost_model,
    drafted_trees,
    memory_of,
    time_models,
    tree_of,
)
from specq.profile.observe import Mute, Observation, Run, Setting, observe, remeasure
from specq.profile.predict import SELF, Candidate, qspec_rounds, self_settings, tree_settings
from specq.profile.split import kind_of, split_steps
from specq.profile.timing import FEWEST_ROUNDS, Samples, measure, stability_notes
from specq.recipe import Recipe
from specq.spec.drafters import PromptLookup
from specq.spec.eagle_tree import EagleTree, TreeShape
from specq.spec.pipelines import HeadSeat, Parts, Seat
from specq.spec.sampling import Sampler
from specq.spec.speculator import Round
from specq.spec.tree import MAX_NODES

CONTEXT = 200
RECIPE = Recipe.model_validate({"target": "tiny", "drafter": {"nodes": 16, "depth": 3, "top_k": 4}})
GRID = Grid(sequences=(1, 2, 8), trees=(4, 8, 16), contexts=(10, 40), depths=(1, 3), top_ks=(4,), prefill=8)
CPU = torch.device("cpu")
TEXT = [(5 * i) % VOCAB for i in range(50)]


@pytest.fixture(scope="module")
def models() -> tuple[CausalLM, CausalLM]:
    torch.set_num_threads(1)
    return make_model(), make_model(noise=0.05)


@pytest.fixture(scope="module")
def parts(models: tuple[CausalLM, CausalLM]) -> Parts:
    target, small = models
    head, inner = make_head(target), make_head(small, eagle3=True, trimmed=VOCAB - 8)
    slots = CONTEXT + MAX_NODES
    return Parts(
        target=Seat(target, target.new_cache(slots, features=head.spec.features)),
        intermediate=Seat(small, small.new_cache(slots, features=inner.spec.features)),
        target_head=HeadSeat(head, head.new_cache(slots + 60)),
        intermediate_head=HeadSeat(inner, inner.new_cache(slots + 60)),
    )


def setting(parts: Parts) -> Setting:
    return Setting(parts, RECIPE, Sampler(), frozenset(), CONTEXT, 30)


def test_jobs_run_interleaved_and_back_again_after_one_unmeasured_call() -> None:
    order: list[str] = []
    jobs = {name: lambda name=name: order.append(name) for name in "abc"}
    samples: Samples[str] = Samples()
    measure(jobs, samples, device=CPU, seconds=60, rounds=3)
    assert "".join(order) == "abc" + "abc" + "cba" + "abc"
    assert {name: len(ms) for name, ms in samples.items()} == {"a": 3, "b": 3, "c": 3}


def test_a_slow_first_call_is_no_sample() -> None:
    """AutoAWQ#645: first rows without warm-up."""
    calls: list[int] = []

    def job() -> None:
        calls.append(1)
        time.sleep(0.2 if len(calls) == 1 else 0.0)

    samples: Samples[str] = Samples()
    measure({"job": job}, samples, device=CPU, seconds=60, rounds=5)
    assert max(samples["job"]) < 150


def test_time_ends_the_measurement_but_not_before_three_rounds() -> None:
    samples: Samples[str] = Samples()
    measure({"job": lambda: None}, samples, device=CPU, seconds=0.0, rounds=50)
    assert len(samples["job"]) == FEWEST_ROUNDS


def test_an_interrupt_leaves_the_samples_taken() -> None:
    samples: Samples[str] = Samples()

    def stop(done: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        measure({"job": lambda: None}, samples, device=CPU, seconds=60, rounds=50, on_round=stop)
    assert len(samples["job"]) == 1


def test_drift_between_the_halves_and_spread_are_seen_and_said() -> None:
    steady: Samples[str] = Samples({"a": [1.0] * 6})
    drifting: Samples[str] = Samples({"a": [1.0, 1.0, 1.0, 1.2, 1.2, 1.2]})
    assert (steady.drift(), steady.spread()) == (0.0, 0.0)
    assert drifting.drift() == pytest.approx(0.2)
    assert stability_notes([], drift=0.0, spread=0.0) == []
    (note,) = stability_notes([], drift=0.2, spread=0.3)
    assert "± 15 % of their median" in note
    assert "by 20 %" in note
    (busy,) = stability_notes([{"load": 1e4}, {"load": 0.5}], drift=0.0, spread=0.0)
    assert busy.startswith("other work ran beside (a load of up to 10000 on ")
    assert stability_notes([{"load": 0.5}], drift=0.0, spread=0.0) == []
    states = [{"clock_mhz": 1980.0, "is_throttled": False}, {"clock_mhz": 1200.0, "is_throttled": True}]
    throttled, moved = stability_notes(states, drift=0.0, spread=0.0)
    assert "throttled" in throttled
    assert "between 1200 and 1980 MHz" in moved


def test_the_grid_of_a_gpu_holds_every_bucket_and_no_context_past_the_recipe() -> None:
    tree = Tree(30, 5, 10)
    for device, context in (("cuda", 2048), ("cpu", 300)):
        grid = Grid.of(torch.device(device), context=context, tree=tree)
        assert max(grid.contexts) < context
        assert 30 in grid.trees
        assert (5 in grid.depths, 10 in grid.top_ks) == (True, True)
        assert Tree(30, 5, 10) in drafted_trees(grid)
        assert Grid.of(torch.device(device), context=context, tree=None).sequences == grid.sequences
        wanted = set(BUCKETS) if device == "cuda" else {1, 2, 4, 8, 16}  # every row costs on a CPU
        assert wanted <= {*grid.sequences, *grid.trees}
    padded = Grid.of(torch.device("cuda"), context=2048, tree=tree, is_padded=True)
    assert (padded.sequences, padded.trees) == (BUCKETS, (4, 8, 16, 30, 32, 64))


def test_a_gpu_tries_no_tree_that_its_drafting_kernels_cannot_hold_unless_it_is_asked_for() -> None:
    for tree, has in ((None, False), (Tree(60, 8, 10), True)):
        trees = drafted_trees(Grid.of(torch.device("cuda"), context=2048, tree=tree, head_bits=(16, 4)))
        assert Tree(64, 6, 10, 4) in trees
        assert (Tree(64, 8, 10) in trees) == has
        assert all(tree.top_k == 10 for tree in trees if tree.head_bits != 16)
        assert Tree(64, 6, 10) in trees


def test_trees_that_are_timed_are_trees_and_can_hold_their_nodes() -> None:
    tree = tree_of(list(range(20)), device=CPU)
    assert not tree.is_chain
    assert int(tree.depths().max()) == 2
    grid = replace(GRID, top_ks=(1, 4))
    assert all(tree.nodes <= 1 + tree.top_k + (tree.depth - 1) * tree.top_k**2 for tree in drafted_trees(grid))
    assert [tree for tree in drafted_trees(grid) if tree.top_k == 1] == [Tree(2, 1, 1), Tree(4, 3, 1)]


def test_every_step_and_drafting_of_every_model_is_timed(parts: Parts) -> None:
    samples: Samples = Samples()
    lookup = PromptLookup(draft_length=4, max_ngram=3)
    time_models(parts, Sampler(), TEXT, GRID, samples, lookup=lookup, seconds=0.0, rounds=3)
    costs = cost_model(samples)
    for role in ("target", "intermediate"):
        assert {k for k in samples if isinstance(k, StepKey) and k.role == role} == {
            StepKey(role, form, context, nodes)
            for form, counts in (("sequence", GRID.sequences), ("tree", GRID.trees))
            for context in GRID.contexts
            for nodes in counts
        }
        assert set(costs.drafting[f"{role}_head"]) == {(1, 4, 16), (3, 4, 16)}
        assert costs.steps[role].prefill_ms_per_token > 0
    assert costs.plain_round(10).ms > 0
    assert set(costs.lookup) == {10, 40}
    assert (parts.target.cache.length, parts.target_head.cache.length) == (0, 0)
    deep, flat = (min(samples[DraftKey("target_head", 10, depth, 4)]) for depth in (3, 1))
    assert deep > flat
    assert costs.draft("target_head", Tree(16, 3, 4), 10).ms >= deep


def test_memory_counts_weights_and_caches_of_each_role(models: tuple[CausalLM, CausalLM]) -> None:
    target = models[0]
    cache = target.new_cache(100)
    weights = sum({p.data_ptr(): p.nbytes for p in (*target.parameters(), *target.buffers())}.values())
    assert memory_of(Parts(Seat(target, cache))) == {"target": weights + cache.k.nbytes + cache.v.nbytes}


def test_what_models_share_counts_once(parts: Parts) -> None:
    found = memory_of(parts)
    assert set(found) == {"target", "intermediate", "target_head", "intermediate_head"}
    assert parts.target_head is not None
    head = parts.target_head
    own = sum({p.data_ptr(): p.nbytes for p in head.head.parameters()}.values())
    # a head leads to its target, whose weights are not its own
    assert found["target_head"] == own + head.cache.k.nbytes + head.cache.v.nbytes


PROMPTS = [[i, 3 * i % VOCAB, i + 1] for i in range(1, 6)]
TASKS = [
    (Candidate("plain"), "plain"),
    (Candidate("lookup", (("pipeline.draft_length", 9),)), "lookup"),
    (Candidate("sequence", (("pipeline.draft_length", 6),)), "sequence"),
    (Candidate("eagle2", tree_settings(Tree(16, 3, 4))), "eagle2"),
    (Candidate("hierarchical", tree_settings(Tree(16, 3, 4))), "inner"),
]


def test_a_self_draft_is_observed_to_be_accepted_whole(models: tuple[CausalLM, CausalLM]) -> None:
    target = models[0]
    slots = CONTEXT + MAX_NODES
    found = Observation()
    same = Parts(Seat(target, target.new_cache(slots)), Seat(target, target.new_cache(slots)))
    observe(setting(same), PROMPTS, [TASKS[2]], found, seconds=60)
    rates = found.acceptance([], {}, Tree(16, 3, 4)).sequence
    assert rates is not None
    assert rates.rates == (1.0,) * 6
    assert rates.rounds == 5 * 5  # 30 tokens after the prefill's one, seven a round


def test_expected_tokens_are_those_of_the_rounds_seen(parts: Parts) -> None:
    found = Observation()
    observe(setting(parts), PROMPTS, TASKS, found, seconds=60)
    tree = Tree(16, 3, 4)
    acceptance = found.acceptance([tree], {}, tree)
    rounds = [r for run in found.sequence for r in run.rounds]
    mean = sum(r.decided for r in rounds) / len(rounds)
    assert acceptance.sequence is not None
    assert 1 + acceptance.sequence.accepted(6) == pytest.approx(mean, rel=0.05)
    assert all(r.drafted == 6 for r in rounds)
    assert 0 < acceptance.lookup_share <= 1
    for rates, seen in ((acceptance.eagle2, found.eagle2), (acceptance.inner, found.inner)):
        accepted = [len(r.path) for r in seen[4, 16]]
        assert rates[tree].accepted(3) == pytest.approx(sum(accepted) / len(accepted), rel=0.05)
    assert {each.candidate for each in found.measured if each.round_ms > 0} == {candidate for candidate, _ in TASKS}


def test_the_target_is_timed_and_observed_drafting_for_itself(parts: Parts) -> None:
    """Where nothing is rounded its drafts are all accepted; of a 4-bit target they cost about a step a token."""
    samples: Samples = Samples()
    lookup = PromptLookup(draft_length=4, max_ngram=3)
    alone, grid = Parts(parts.target), replace(GRID, act_bits=(8,))
    time_models(alone, Sampler(), TEXT, grid, samples, lookup=lookup, seconds=0.0, rounds=3)
    found = Observation()
    task = Candidate("qspec", self_settings(max(SELF_LENGTHS), 8)), "qspec"
    observe(setting(parts), PROMPTS, [task], found, seconds=60)
    acceptance = found.acceptance([], {}, Tree(16, 3, 4))
    assert acceptance.qspec[8].rates == (1.0,) * 8
    costs = cost_model(samples)
    assert set(costs.drafting[SELF]) == {(length, 1, 8) for length in SELF_LENGTHS}
    rounds = dict(qspec_rounds(costs, acceptance, 20))
    sizes = {each.settings for each in rounds}
    assert sizes == {self_settings(length, 8) for length in range(1, 8)}  # 8 of them verify 9 rows, not timed


def test_lookup_that_found_nothing_is_known_to_find_nothing(parts: Parts) -> None:
    found = Observation()
    never = replace(setting(parts), recipe=Recipe.model_validate({"target": "x", "pipeline": {"min_ngram": 16}}))
    never.recipe.pipeline.max_ngram = 16
    observe(never, [[1, 2, 3]], [TASKS[1]], found, seconds=60)
    acceptance = found.acceptance([], {}, Tree(16, 3, 4))
    assert (acceptance.lookup_share, acceptance.lookup.accepted(5)) == (0.0, 0.0)


def test_no_time_means_one_prompt_for_every_task(parts: Parts) -> None:
    found = Observation()
    observe(setting(parts), PROMPTS, TASKS, found, seconds=0.0)
    assert [len(runs) for runs in found.runs.values()] == [1] * 5
    assert found.prompts == {0}


def test_a_smaller_tree_is_the_beginning_of_a_larger_one(parts: Parts) -> None:
    """What `tree_rates` rests on: the head's tree of n nodes holds the first n - 1 of its larger trees."""
    head = parts.target_head
    assert head is not None
    parts.rollback(0)
    verifier = parts.target.verifier(Sampler())
    with torch.inference_mode():
        context = [1, 2, 3, 4, *verifier.prefill([1, 2, 3, 4])]
        trees = {
            nodes: EagleTree(head.head, head.cache, verifier, TreeShape(nodes, 3, 4)).propose(
                context, max_nodes=63, max_depth=3
            )
            for nodes in (5, 12, 30)
        }
    large = trees[30]
    for nodes in (5, 12):
        assert trees[nodes].tokens.tolist() == large.tokens[: nodes - 1].tolist()
        assert trees[nodes].parents.tolist() == large.parents[: nodes - 1].tolist()
    assert large.parents.tolist() != sorted(large.parents.tolist())  # best first, not level by level


def test_smaller_trees_have_the_rates_they_get_when_they_run(parts: Parts) -> None:
    wide, small = Tree(40, 3, 4), Tree(6, 3, 4)

    def run(tree: Tree) -> Observation:
        found = Observation()
        settings = tree_settings(tree)
        prompts = [[i % VOCAB, (7 * i) % VOCAB] for i in range(1, 26)]
        observe(setting(parts), prompts, [(Candidate("eagle2", settings), "eagle2")], found, seconds=60)
        return found

    predicted = tree_rates(run(wide).eagle2[4, 16], [small])[small]
    actual = tree_rates(run(small).eagle2[4, 16], [small])[small]
    error = predicted.error(3) + actual.error(3)
    assert predicted.accepted(3) == pytest.approx(actual.accepted(3), abs=error)


def test_remeasuring_runs_every_candidate_on_the_same_prompts(parts: Parts) -> None:
    candidates = [Candidate("plain"), Candidate("sequence", (("pipeline.draft_length", 4),))]
    plain, sequence = remeasure(setting(parts), PROMPTS, candidates, best=1, seconds=0.0)
    assert (plain.gain, plain.uncertainty, plain.accept_len) == (1.0, 0.0, 1.0)
    assert plain.context == pytest.approx(3 + 29 / 2)
    assert plain.prompts == sequence.prompts == 2
    assert sequence.accept_len > 1.5
    assert sequence.tokens_per_s > 0


def test_only_the_best_are_measured_again_on_every_prompt(parts: Parts) -> None:
    candidates = [Candidate("plain"), TASKS[2][0], TASKS[1][0]]
    found = remeasure(setting(parts), PROMPTS, candidates, best=1, seconds=60)
    assert [each.prompts for each in found] == [5, 5, 2]


def test_an_answer_is_read_as_text_while_it_is_measured(parts: Parts) -> None:
    class Reader(Mute):
        def push(self, token_id: int) -> str:
            time.sleep(0.005)
            return super().push(token_id)

    plain = [TASKS[0][0]]
    fast, slow = (
        remeasure(replace(setting(parts), reader=reader), PROMPTS, plain, best=1, seconds=0.0)[0]
        for reader in (Mute, Reader)
    )
    assert slow.round_ms > fast.round_ms + 4


def test_the_first_round_is_known_apart() -> None:
    rounds = [Round(False, 3, 2, ms, 1.0) for ms in (9.0, 1.0, 1.0)]
    run = Run(10, rounds, 6, 0.017)
    assert run.first_ms == pytest.approx(8.0)
    assert run.round_ms == pytest.approx((17 - 8) / 3)
    assert Run(10, rounds[:1], 2, 0.01).round_ms is None


def test_a_step_is_split_by_the_names_of_what_runs(parts: Parts) -> None:
    assert [kind_of(name) for name in ("aten::mm", "flash_fwd_kernel", "aten::mul", "aten::_weight_int4pack_mm")] == [
        "products",
        "attention",
        "rest",
        "products",
    ]
    shares = split_steps(parts.target, Sampler(), TEXT, 5)
    assert [each["nodes"] for each in shares] == [1, 8, 32]
    for each in shares:
        assert each["products"] + each["attention"] + each["rest"] == pytest.approx(1.0)
        assert each["products"] > 0
