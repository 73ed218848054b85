"""Cost curves and ranking as a picture; needs matplotlib, which the extra `plot` installs."""

from __future__ import annotations

import importlib.util
import io
from pathlib import Path
from typing import Any

from specq.errors import UsageError
from specq.files import named_path, write_atomically, write_text
from specq.profile.cost import SEQUENCE, TREE
from specq.profile.result import Profile

SUFFIXES = (".png", ".svg", ".html")


def check_plot(path: Path) -> None:
    """Raise UsageError when no picture of this name could be drawn here; asked before anything is measured."""
    if path.suffix not in SUFFIXES:
        raise UsageError(f"--plot `{path}` is not of a kind that is drawn", hint=f"end it in {', '.join(SUFFIXES)}")
    if importlib.util.find_spec("matplotlib") is None:
        raise UsageError("`--plot` needs matplotlib, which is not installed", hint="pip install 'specq[plot]'")


def write_plot(profile: Profile, path: Path) -> None:
    """Draw what the profile holds into a .png, .svg or .html file."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.6), layout="constrained")
    FigureCanvasAgg(figure)
    curves, ranking = figure.subplots(1, 2)
    _draw_curves(profile, curves)
    _draw_ranking(profile, ranking)
    what = " (random weights, timing only)" if profile.is_random else ""
    figure.suptitle(f"{profile.recipe.target.model}{what} on {profile.environment['device']}", fontsize=9)
    if path.suffix != ".html":
        with write_atomically(named_path(path)) as temporary:
            figure.savefig(temporary, dpi=150, format=path.suffix.removeprefix("."))
        return
    picture = io.StringIO()
    figure.savefig(picture, format="svg")
    svg = picture.getvalue()
    page = f"<!doctype html><meta charset=utf-8><title>specq profile</title>\n{svg[svg.index('<svg') :]}\n"
    write_text(path, page)


def _draw_curves(profile: Profile, axes: Any) -> None:
    """T(n)/T(1) of every model at its shortest context; a step function, as the planner reads it."""
    assert profile.costs is not None
    for role, curve in profile.costs.steps.items():
        context = curve.contexts()[0]
        one = curve.step(1, context).ms
        for form, style in ((SEQUENCE, "-o"), (TREE, "--s")):
            steps = curve.forms.get(form, {}).get(context, {})
            counts = sorted(steps)
            ratios = [steps[n].median_ms / one for n in counts]
            axes.plot(counts, ratios, style, drawstyle="steps-pre", markersize=3, label=f"{role}, {form}")
    axes.set(xlabel="nodes verified", ylabel="T(n) / T(1)", title="cost of verification")
    axes.legend(fontsize=7)
    axes.grid(alpha=0.3)


def _draw_ranking(profile: Profile, axes: Any) -> None:
    """Predicted tokens a second of each pipeline's best candidate, and what was measured again."""
    best = profile.plan.best_of_each()[::-1] if profile.plan is not None else []
    names = [f"{p.candidate.pipeline}\n{p.candidate.label}" for p in best]
    axes.barh(names, [p.tokens_per_s for p in best], color="tab:blue", alpha=0.6, label="predicted")
    places = {p.candidate: place for place, p in enumerate(best)}
    measured = [(m.tokens_per_s, places[m.candidate]) for m in profile.measured if m.candidate in places]
    if measured:
        axes.plot(*zip(*measured, strict=True), "k|", markersize=16, label="measured again")
    axes.set(xlabel="tokens/s", title="pipelines")
    axes.tick_params(axis="y", labelsize=7)
    axes.legend(fontsize=7)
