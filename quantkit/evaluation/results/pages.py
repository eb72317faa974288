"""HTML pages of evaluation results: self-contained, from the Jinja2 templates in this folder,
with plots as inline SVG."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from quantkit import __version__
from quantkit.common.pages import Filters, render_page
from quantkit.common.plots import GREY, OURS, THEIRS, draw, label_axes
from quantkit.evaluation.tasks.definitions import REASONS

_LONGEST = 20_000  # characters of one reply or prompt


def render(template: str, **values: object) -> str:
    """Render a template of this folder."""
    return render_page(
        Path(__file__).with_name(template), _FILTERS, reasons=REASONS, version=__version__, **values
    )


def _points(share: float | None) -> str:
    """A share in percent."""
    return "-" if share is None else f"{100 * share:.1f}"


def _signed(share: float) -> str:
    """A difference in percentage points, with its sign."""
    return f"{100 * share:+.1f}"


def _shorten(text: str) -> str:
    if len(text) <= _LONGEST:
        return text
    half = _LONGEST // 2
    return f"{text[:half]}\n\n[... {len(text) - 2 * half} characters omitted ...]\n\n{text[-half:]}"


_FILTERS: Filters = {"points": _points, "signed": _signed, "shorten": _shorten}
ACCURACY = "accuracy, % (bar: 95 % interval over problems)"
DIFFERENCE = "points against the baseline (bar: interval; dashed: the margin)"
Bar = tuple[str, float, float, float, bool]
"""A label, a share with its interval, and whether it is of a run here; low == high for published
scores."""


def bars_plot(rows: Sequence[Bar], label: str, margin: float | None = None) -> str:
    """Accuracies, or with a margin paired differences, each with its interval."""
    axes, figure = draw(5.0, 0.6 + 0.34 * len(rows))
    for place, (_, share, low, high, ours) in enumerate(rows):
        colour, marker = (OURS, "o") if ours else (GREY, "D")
        axes.barh(place, 100 * (high - low), 0.15, 100 * low, color=colour, alpha=0.4)
        axes.plot([100 * share], [place], marker=marker, color=colour)
    if margin is not None:
        axes.axvline(0, color="black", linewidth=1)
        axes.axvline(-100 * margin, color=THEIRS, linewidth=1, linestyle="--")
    axes.set_yticks(range(len(rows)), [row[0] for row in rows])
    axes.set_ylim(len(rows) - 0.5, -0.5)
    label_axes(axes, label, "")
    return figure.svg()


def tokens_plot(right: Sequence[int], wrong: Sequence[int], limit: int | None) -> str:
    """Histogram of reply lengths in tokens, of right and wrong replies."""
    axes, figure = draw(5.0, 2.2)
    top = max([*right, *wrong, 1])
    lengths, names = [list(right), list(wrong)], ["right", "wrong"]
    edges = [top * i / 30 for i in range(31)]
    axes.hist(lengths, bins=edges, stacked=True, color=[OURS, THEIRS], label=names)
    if limit is not None and limit <= 1.05 * top:
        axes.axvline(limit, color="black", linewidth=1, linestyle=":", label="token limit")
    axes.legend(fontsize=8, frameon=False)
    label_axes(axes, "tokens in the reply", "replies")
    return figure.svg()


def problems_plot(ours: Sequence[float], theirs: Sequence[float]) -> str:
    """Mean score per problem, candidate over baseline; dot size is the number of problems."""
    axes, figure = draw(3.4, 3.2)
    counts = Counter(zip(theirs, ours))
    axes.plot([0, 1], [0, 1], color=GREY, linewidth=1)
    sizes = [12 + 6 * count**0.7 for count in counts.values()]
    baseline, here = zip(*counts)
    axes.scatter(baseline, here, s=sizes, color=OURS, alpha=0.6)
    label_axes(axes, "baseline, share right per problem", "here, share right per problem")
    return figure.svg()
