"""How long a profile takes on a CPU at least, and below which `seconds` it leaves things out; pure."""

from __future__ import annotations

from specq.profile.observe import FEWEST_ROUNDS as FEWEST_WATCHED
from specq.profile.timing import FEWEST_ROUNDS as FEWEST_TIMED

BRIEF_SECONDS = 30.0
"""With less than this a CPU times few sizes, splits no step and runs only plain and the best pipeline again.

On two cores of a Xeon the demo set takes at least 66 s after loading, and less than a third of that when brief.
"""

JOB, FIRST_CALLS, WATCHED_ROUND, TOKEN = 1.5, 2, 6.0, 1.1
"""What takes how many plain steps of the target on a CPU, about: a job of the grid (its first call counts for two of
them), a round of a pipeline whose acceptance is watched, a token of an answer that is measured again."""

MUCH_LONGER = 2.0


def shortest_s(step_s: float, *, jobs: int, tasks: int, tokens: int) -> float:
    """Seconds that a profile takes however few were asked for, by those of one plain step.

    `jobs` are timed, `tasks` watched, and `tokens` decoded when the best run again.
    """
    timed = JOB * jobs * (FIRST_CALLS + FEWEST_TIMED)
    watched = WATCHED_ROUND * tasks * (FEWEST_WATCHED + 1)  # a round more for the prompt
    return step_s * (timed + watched + TOKEN * tokens)


def longer_note(expected_s: float, *, asked_s: float, step_s: float) -> str | None:
    """The line that says how long it will take, where that is much longer than asked for."""
    if expected_s <= MUCH_LONGER * asked_s:
        return None
    expected = f"{expected_s:.0f} s" if expected_s < 90 else f"{expected_s / 60:.0f} minutes"
    less = "" if asked_s < BRIEF_SECONDS else f"; with --seconds below {BRIEF_SECONDS:g} fewer sizes are timed"
    return (
        f"this will take about {expected}, not {asked_s:g} s: a plain step takes {1e3 * step_s:.0f} ms, every size is "
        f"timed {FEWEST_TIMED} times and every pipeline runs for {FEWEST_WATCHED} rounds{less}"
    )
