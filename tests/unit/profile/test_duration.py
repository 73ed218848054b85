"""How long a profile takes at least, and when that is said."""

from __future__ import annotations

from specq.profile.duration import longer_note, shortest_s


def test_twice_the_work_or_twice_the_step_takes_twice_as_long() -> None:
    counts = {"jobs": 27, "tasks": 5, "tokens": 128}
    # the demo set when brief, with a plain step of 32 ms: it took 14.5 s, and steps do not all grow alike
    assert 14.5 / 1.5 < shortest_s(0.032, **counts) < 14.5 * 1.5
    assert shortest_s(0.064, **counts) == 2 * shortest_s(0.032, **counts)
    twice = {name: 2 * count for name, count in counts.items()}
    assert shortest_s(0.032, **twice) == 2 * shortest_s(0.032, **counts)


def test_only_what_takes_much_longer_than_asked_for_is_said() -> None:
    assert longer_note(20.0, asked_s=10.0, step_s=0.03) is None
    note = longer_note(21.0, asked_s=10.0, step_s=0.03)
    assert note is not None
    assert note.startswith("this will take about 21 s, not 10 s: a plain step takes 30 ms")
    assert "fewer sizes" not in note  # they are already left out
