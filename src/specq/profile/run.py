"""A whole profile: load, time, observe, plan, measure again; what is there when it is interrupted is kept."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime, timezone

import torch

from specq.environment import device_state
from specq.errors import NotEnoughMemoryError, UsageError
from specq.models.memory import free_bytes
from specq.profile.cost import Tree
from specq.profile.duration import BRIEF_SECONDS, longer_note, shortest_s
from specq.profile.learn import with_real_answers, with_real_rounds
from specq.profile.measure import (
    SELF_LENGTHS,
    AnyKey,
    Grid,
    StepKey,
    cost_model,
    drafted_trees,
    memory_of,
    time_models,
)
from specq.profile.observe import FEWEST_PROMPTS, Observation, Setting, observe, remeasure
from specq.profile.plan import Plan, Verdict, levels, plan, settle
from specq.profile.predict import (
    LONGEST_SEQUENCE,
    LOOKUP_LENGTHS,
    Candidate,
    Measured,
    self_settings,
    tree_settings,
    why_no_qspec,
)
from specq.profile.result import Profile
from specq.profile.split import split_steps
from specq.profile.study import make_subject
from specq.profile.subject import Request, Subject, load_subject
from specq.profile.timing import Samples, stability_notes
from specq.spec.decision import Decision
from specq.spec.drafters import PromptLookup
from specq.spec.pipelines import Parts, Seat
from specq.spec.stopwatch import quiet_heap
from specq.spec.tree import MAX_NODES

log = logging.getLogger("specq")

UNQUANTIZED = "target_unquantized"
ROUNDS = {"cpu": 5, "cuda": 30}
SECONDS = {"cpu": 60.0, "cuda": 90.0}
ANSWER = {"cpu": 32, "cuda": 128}
"""Defaults by kind of device: repetitions of every step, seconds in all, tokens of a calibration answer."""

STUDY_ANSWER = 24
"""Tokens that models of random weights decode with every pipeline, to time its rounds."""

BEST = 2
"""Pipelines that are measured again on every prompt; the others, on a CPU, on a few."""


def profile(
    request: Request,
    *,
    on_progress: Callable[[str], None] = lambda what: None,
    on_start: Callable[[Profile], None] = lambda profile: None,
) -> Profile:
    """The profile of a recipe on this device. `on_start` gets it while it is still empty, to keep what an interrupt
    leaves.

    Raises a SpecqError of the fitting kind before weights are read when models do not fit each other or the device.
    """
    load = make_subject if request.is_random else load_subject
    return _Run(request, load(request, on_progress), on_progress, on_start).run()


class _Run:
    """One profile in the making."""

    def __init__(
        self,
        request: Request,
        subject: Subject,
        say: Callable[[str], None],
        on_start: Callable[[Profile], None],
    ) -> None:
        self.request, self.subject, self.parts, self.say = request, subject, subject.parts, say
        self.device = subject.device
        kind = self.device.type
        self.seconds = SECONDS[kind] if request.seconds is None else request.seconds
        self.is_brief = kind == "cpu" and self.seconds < BRIEF_SECONDS
        self.samples: Samples[AnyKey] = Samples()
        self.seen = Observation()
        recipe = request.recipe
        drafter = recipe.drafter
        self.missing = dict(subject.available)
        if self.is_brief and self.missing["qspec"] is None and "qspec" not in request.by_hand:
            self.missing["qspec"] = f"needs more time (--seconds {BRIEF_SECONDS:g})"
        self.recipe_tree = Tree(drafter.nodes, drafter.depth, drafter.top_k, drafter.head_bits or 16)
        asked = {"nodes", "depth", "top_k"} & drafter.model_fields_set or request.by_hand
        tree = self.recipe_tree if asked else None
        self.grid = Grid.of(
            self.device,
            context=subject.context,
            tree=tree,
            head_bits=subject.head_bits,
            act_bits=() if self.missing["qspec"] else (recipe.pipeline.act_bits,),
            is_padded=self.parts.target.model.device_step is not None,
            is_brief=self.is_brief,
        )
        self.setting = Setting(
            parts=self.parts,
            recipe=recipe,
            sampler=subject.sampler,
            stop_ids=subject.stop_ids,
            context=subject.context,
            max_new_tokens=request.max_new_tokens or ANSWER[kind],
            reader=subject.reader,
        )
        self.prompts = self._fitting_prompts()
        tokens = [token for prompt in self.prompts for token in prompt]
        self.text = [tokens[i % len(tokens)] for i in range(self.grid.contexts[-1] + MAX_NODES)]
        self.profile = Profile(
            key=subject.key,
            recipe=recipe,
            environment=subject.environment,
            device=str(self.device),
            seconds=self.seconds,
            measured_at=datetime.now(timezone.utc).isoformat(" ", "minutes"),
            memory=memory_of(self.parts),
            by_hand=tuple(request.by_hand),
            is_random=request.is_random,
            sampling=subject.sampling,
        )
        on_start(self.profile)

    def run(self) -> Profile:
        profile = self.profile
        profile.states.append(device_state(str(self.device)))
        try:
            with quiet_heap():
                self._time()
                self._observe()
        finally:
            self._summarize()
        profile.states.append(device_state(str(self.device)))
        if self.request.compare_fp16:
            self._compare_fp16()
        if not self.is_brief:
            self._split()
        self._choose()
        profile.states.append(device_state(str(self.device)))
        profile.notes += stability_notes(profile.states, drift=self.samples.drift(), spread=self.samples.spread())
        return profile

    def _time(self) -> None:
        section = self.request.recipe.pipeline
        rounds = ROUNDS[self.device.type]
        self.say("timing: first calls")
        time_models(
            self.parts,
            self.setting.sampler,
            self.text,
            self.grid,
            self.samples,
            lookup=PromptLookup(draft_length=16, max_ngram=section.max_ngram, min_ngram=section.min_ngram),
            seconds=0.3 * self.seconds,
            rounds=rounds,
            on_round=lambda done: self.say(f"timing: {done} of {rounds} rounds over all steps"),
            # on a GPU it is the first calls that take long, and no step tells of them
            on_start=self._say_how_long if self.device.type == "cpu" else None,
        )

    def _say_how_long(self, jobs: int, step_s: float) -> None:
        """Say how long it will take where that is much longer than asked for."""
        tasks = self._open_tasks()
        again = 2 if self.is_brief else len({candidate.pipeline for candidate, _ in tasks})
        tokens = 0 if self.request.by_hand else again * FEWEST_PROMPTS * self.setting.max_new_tokens
        expected_s = shortest_s(step_s, jobs=jobs, tasks=len(tasks), tokens=tokens)
        if note := longer_note(expected_s, asked_s=self.seconds, step_s=step_s):
            log.info(note)

    def _observe(self) -> None:
        if self.missing["qspec"] is None and "qspec" not in self.request.by_hand:
            self.missing["qspec"] = why_no_qspec(cost_model(self.samples), self.grid.contexts[0])
        tasks = self._open_tasks()
        observe(self.setting, self.prompts, tasks, self.seen, seconds=0.35 * self.seconds, on_run=self.say)

    def _open_tasks(self) -> list[tuple[Candidate, str]]:
        """Those tasks that tell what was not given by hand, of pipelines that can run."""
        return [
            task
            for task in self._tasks()
            if task[1] not in self.request.by_hand and self.missing[task[0].pipeline] is None
        ]

    def _tasks(self) -> list[tuple[Candidate, str]]:
        """What runs to measure acceptance: the longest drafts, whose beginnings tell of the shorter ones."""
        nodes = max(self.grid.trees)
        length = min(LONGEST_SEQUENCE, max(self.grid.sequences) - 1, 8 if self.device.type == "cpu" else 12)
        tasks = [
            (Candidate("plain"), "plain"),
            (Candidate("lookup", (("pipeline.draft_length", max(LOOKUP_LENGTHS)),)), "lookup"),
            (Candidate("sequence", (("pipeline.draft_length", length),)), "sequence"),
        ]
        shapes = [(top_k, 16) for top_k in self.grid.top_ks]
        # What a coarser draft head costs in acceptance is measured on the widest tree.
        shapes += [(self.grid.top_ks[-1], bits) for bits in self.grid.head_bits if bits != 16]
        for top_k, bits in shapes:
            tree = tree_settings(Tree(nodes, self._deepest(top_k), top_k, bits))
            tasks += [
                (Candidate("eagle2", tree), "eagle2"),
                (Candidate("hierarchical", (*tree, ("pipeline.min_draft", 6))), "inner"),
            ]
        return tasks + [(Candidate("qspec", self_settings(max(SELF_LENGTHS), b)), "qspec") for b in self.grid.act_bits]

    def _deepest(self, top_k: int) -> int:
        """The most levels whose nodes the drafting kernels hold at this width, or those that the recipe asks for.

        Deeper trees draft slowly; what they would gain below these levels is not known and counts as nothing.
        """
        depths = self.grid.depths
        return max(d for d in depths if (d - 1) * top_k <= MAX_NODES or d == self.recipe_tree.depth)

    def _summarize(self) -> None:
        """Put what was measured so far into the profile; draft heads of other bits have been made by then."""
        self.profile.memory = memory_of(self.parts)
        trees, act_bits = drafted_trees(self.grid), self.request.recipe.pipeline.act_bits
        acceptance = self.seen.acceptance(trees, self.request.by_hand, self.recipe_tree, act_bits)
        if any(isinstance(key, StepKey) for key in self.samples):
            self.profile.costs = with_real_rounds(cost_model(self.samples), acceptance, self.seen.measured)
        self.profile.acceptance = acceptance
        self.profile.num_prompts = len(self.seen.prompts)

    def _plan(self, context: int) -> Plan:
        assert self.profile.costs is not None
        assert self.profile.acceptance is not None
        free = free_bytes(str(self.device))
        return plan(
            self.profile.costs,
            self.profile.acceptance,
            context=context,
            answer=self.setting.max_new_tokens,
            missing=self.missing,
            memory=self.profile.memory,
            available_bytes=None if free is None else free + sum(self.profile.memory.values()),
        )

    def _choose(self) -> None:
        """Plan, measure the best of every pipeline again, settle on one, and plan with what its rounds really took."""
        profile, acceptance = self.profile, self.profile.acceptance
        assert profile.costs is not None
        assert acceptance is not None
        starts = [len(self.prompts[number]) for number in self.seen.prompts] or [self.grid.contexts[0]]
        context = sum(starts) // len(starts) + self.setting.max_new_tokens // 2
        first = profile.plan = profile.first_plan = self._plan(context)
        verdict = Verdict(first.winner.candidate, first.winner.gain, first.winner.uncertainty)
        if self.request.is_random:
            ran = self._remeasure(first, replace(self.setting, max_new_tokens=STUDY_ANSWER))
            profile.costs = with_real_rounds(profile.costs, acceptance.none_of_it, ran)
            profile.plan = self._plan(context)
            winner = profile.plan.winner
            verdict = Verdict(winner.candidate, winner.gain, winner.uncertainty)
        elif not self.request.by_hand and len(first.ranking) > 1:
            profile.measured = self._remeasure(first, self.setting)
            verdict = settle(first, profile.measured)
            profile.costs = with_real_rounds(profile.costs, acceptance, profile.measured)
            profile.acceptance = acceptance = with_real_answers(profile.costs, acceptance, profile.measured)
            profile.plan = self._plan(context)
        profile.other_plans = [self._plan(context) for context in self.grid.contexts]
        profile.verdict = verdict
        plain_tps = next((m.tokens_per_s for m in profile.measured), first.plain.tokens_per_s)
        profile.decision = Decision(
            pipeline=verdict.winner.pipeline,
            settings=verdict.winner.settings,
            levels=levels(profile.costs, acceptance, verdict.winner),
            plain_tps=plain_tps,
            gain=verdict.gain,
            threads=torch.get_num_threads() if self.device.type == "cpu" else None,
            measured_at=profile.measured_at,
        )

    def _remeasure(self, first: Plan, setting: Setting) -> list[Measured]:
        """The best of every pipeline as it runs, plain decoding first."""
        rivals = [p.candidate for p in first.best_of_each() if p.candidate.pipeline != "plain"]
        if self.is_brief and not self.request.is_random:  # a study only times rounds, of every pipeline
            rivals = rivals[:1]
        with quiet_heap():
            return remeasure(
                setting,
                self.prompts,
                [first.plain.candidate, *rivals],
                best=BEST,
                seconds=0.25 * self.seconds,
                on_run=self.say,
            )

    def _split(self) -> None:
        context = self.grid.contexts[0]
        for role in ("target", "intermediate"):
            seat = getattr(self.parts, role)
            if seat is not None:
                self.say(f"splitting a step of the {role}")
                self.profile.splits[role] = split_steps(seat, self.setting.sampler, self.text, context)

    def _compare_fp16(self) -> None:
        """Time the target without 4-bit matrices, as sequence and tree at the shortest context."""
        context = self.grid.contexts[0]
        self.say("loading the target unquantized")
        try:
            model = self.subject.load_dense(context)
        except NotEnoughMemoryError as error:
            self.profile.notes.append(f"the unquantized target is not compared: {error.message}")
            return
        samples: Samples[AnyKey] = Samples()
        grid = self.grid.at(context)
        seat = Seat(model, model.new_cache(context + MAX_NODES))
        time_models(
            Parts(seat),
            self.setting.sampler,
            self.text,
            grid,
            samples,
            lookup=PromptLookup(draft_length=1, max_ngram=1),
            seconds=0.2 * self.seconds,
            rounds=ROUNDS[self.device.type],
            on_round=lambda done: self.say(f"timing the target unquantized: round {done}"),
        )
        assert self.profile.costs is not None
        dense = cost_model(samples).steps["target"]
        self.profile.costs = self.profile.costs.with_steps(UNQUANTIZED, dense)

    def _fitting_prompts(self) -> list[list[int]]:
        room = self.subject.context - self.setting.max_new_tokens
        found = self.subject.encode(room) if room > 0 else []
        if not found:
            raise UsageError(
                f"no calibration prompt fits a context of {self.subject.context} tokens beside an answer of "
                f"{self.setting.max_new_tokens}",
                hint="give a larger --context, or shorter prompts with --prompts FILE",
            )
        return found
