"""HTML pages of evaluation results: self-contained, from the Jinja2 templates in this folder,
with plots as inline SVG."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from quantkit.common.pages import Filters, render_page
from quantkit.common.plots import GREY, OURS, THEIRS, draw


def render(template: str, **values: object) -> str:
    """Render a template of this folder."""
    return render_page(Path(__file__).with_name(template), _FILTERS, **values)


def points(share: float | None) -> str:
    """A share in percent."""
    return "-" if share is None else f"{100 * share:.1f}"


def signed(share: Any) -> str:
    """A difference in percentage points, with its sign."""
    return f"{100 * share:+.1f}"


_FILTERS: Filters = {
    "points": points,
    "signed": signed,
    "colour": {"held": "held", "lost": "lost", "cannot tell": "tell"}.__getitem__,
}


def _bar(axes: Any, low: float, high: float, place: int, colour: str, width: int) -> None:
    axes.plot(
        [100 * low, 100 * high],
        [place, place],
        color=colour,
        linewidth=width,
        alpha=0.4,
        solid_capstyle="butt",
    )


def accuracy_plot(rows: Sequence[tuple[str, float, float, float, bool]]) -> str:
    """Accuracies with intervals: (label, share, low, high, is ours); low == high for published
    scores."""
    axes, figure = draw(5.0, 0.6 + 0.34 * len(rows))
    for place, (_label, share, low, high, ours) in enumerate(rows):
        colour = OURS if ours else GREY
        _bar(axes, low, high, place, colour, 3)
        axes.plot([100 * share], [place], marker="o" if ours else "D", color=colour)
    axes.set_yticks(range(len(rows)), [row[0] for row in rows], fontsize=8)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_xlabel("accuracy, % (bar: 95 % interval over problems)", fontsize=8)
    axes.tick_params(axis="x", labelsize=8)
    return figure.svg()


def tokens_plot(right: Sequence[int], wrong: Sequence[int], limit: int | None) -> str:
    """Histogram of reply lengths in tokens, of right and wrong replies."""
    axes, figure = draw(5.0, 2.2)
    top = max([*right, *wrong, 1])
    edges = [top * i / 30 for i in range(31)]
    axes.hist(
        [list(right), list(wrong)],
        bins=edges,
        stacked=True,
        color=[OURS, THEIRS],
        label=["right", "wrong"],
    )
    if limit is not None and limit <= 1.05 * top:
        axes.axvline(limit, color="black", linewidth=1, linestyle=":", label="token limit")
    axes.set_xlabel("tokens in the reply", fontsize=8)
    axes.set_ylabel("replies", fontsize=8)
    axes.tick_params(labelsize=8)
    axes.legend(fontsize=8, frameon=False)
    return figure.svg()


def differences_plot(comparisons: Sequence[tuple[str, dict[str, Any]]]) -> str:
    """Paired differences from one baseline, with intervals, zero and the margin: (label, comparison
    as JSON)."""
    axes, figure = draw(5.0, 0.6 + 0.34 * len(comparisons))
    for place, (_label, one) in enumerate(comparisons):
        _bar(axes, one["low"], one["high"], place, OURS, 3)
        axes.plot([100 * one["difference"]], [place], marker="o", color=OURS)
    axes.axvline(0, color="black", linewidth=1)
    axes.axvline(-100 * comparisons[0][1]["margin"], color=THEIRS, linewidth=1, linestyle="--")
    axes.set_yticks(range(len(comparisons)), [label for label, _ in comparisons], fontsize=8)
    axes.set_ylim(len(comparisons) - 0.5, -0.5)
    axes.set_xlabel("points against the baseline (bar: interval; dashed: the margin)", fontsize=8)
    axes.tick_params(axis="x", labelsize=8)
    return figure.svg()


def problems_plot(ours: Sequence[float], theirs: Sequence[float]) -> str:
    """Mean score per problem, candidate over baseline; dot size is the number of problems."""
    axes, figure = draw(3.4, 3.2)
    counts: dict[tuple[float, float], int] = {}
    for pair in zip(theirs, ours):
        counts[pair] = counts.get(pair, 0) + 1
    axes.plot([0, 1], [0, 1], color=GREY, linewidth=1)
    axes.scatter(
        [x for x, _ in counts],
        [y for _, y in counts],
        s=[12 + 6 * count**0.7 for count in counts.values()],
        color=OURS,
        alpha=0.6,
    )
    axes.set_xlabel("baseline, share right per problem", fontsize=8)
    axes.set_ylabel("here, share right per problem", fontsize=8)
    axes.tick_params(labelsize=8)
    return figure.svg()
