"""Did accuracy hold? A paired comparison with a baseline over the same problems, and a plain verdict.

With d the mean over problems of (candidate - baseline) and [low, high] its 95 % interval:
  held         low >= -margin: a loss of `margin` or more is excluded
  lost         high < 0: a loss of some size is shown
  cannot tell  neither; `repeats_needed` (or `problems_needed`) would settle it at the difference seen.
The interval is a bootstrap over problems, never narrower than what one more discordant reply would make it (Agresti and Min's
pseudo-count): a few identical replies prove nothing.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np

from quantkit.evaluation.statistics.estimates import Z, bootstrap_interval, mcnemar, problem_means

Verdict = Literal["held", "lost", "cannot tell"]
MARGIN = 0.01


@dataclass(frozen=True)
class Comparison:
    """Candidate against baseline on `n` shared problems; differences are shares (0.01 is one point)."""

    verdict: Verdict
    difference: float
    low: float
    high: float
    margin: float
    n: int
    accuracy: float
    baseline_accuracy: float
    repeats: int
    baseline_repeats: int
    gained: int  # problems better than with the baseline
    lost: int
    mcnemar_p: float | None  # one repeat each only
    repeats_needed: int | None
    problems_needed: int | None

    def sentence(self) -> str:
        """The verdict in words."""
        seen = f"{100 * self.difference:+.1f} points (95 %: {100 * self.low:+.1f} to {100 * self.high:+.1f}) on {self.n} problems"
        if self.verdict == "held":
            return f"held: {seen}; a loss of {100 * self.margin:g} point{'s' if self.margin != 0.01 else ''} or more is excluded"
        if self.verdict == "lost":
            return f"lost: {seen}"
        if self.repeats_needed is not None:
            return f"cannot tell: {seen}; about {self.repeats_needed} repeats of both would tell"
        return f"cannot tell: {seen}; repeats will not tell, about {self.problems_needed} problems would"

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"sentence": self.sentence()}


def compare(
    candidate: Mapping[str, Sequence[float]],
    baseline: Mapping[str, Sequence[float]],
    *,
    margin: float = MARGIN,
    seed: int = 0,
    greedy: bool = False,
) -> Comparison | None:
    """Compare two runs, each problem id -> 0/1 per repeat. None where they share no problem. greedy: repeats would change nothing."""
    shared = [problem for problem in candidate if problem in baseline]
    if not shared:
        return None
    ours, theirs = [candidate[p] for p in shared], [baseline[p] for p in shared]
    ours_mean, theirs_mean = problem_means(ours), problem_means(theirs)
    differences = ours_mean - theirs_mean
    n, repeats, baseline_repeats = len(shared), min(map(len, ours)), min(map(len, theirs))
    mean = float(differences.mean())
    low, high = bootstrap_interval(differences, seed)
    floor = Z / (n * min(repeats, baseline_repeats) + 2)
    low, high = min(low, mean - floor), max(high, mean + floor)
    verdict: Verdict = "held" if low >= -margin else "lost" if high < 0 else "cannot tell"
    gained, lost = int((differences > 0).sum()), int((differences < 0).sum())
    needed: tuple[int | None, int | None] = (None, None)
    if verdict == "cannot tell":
        needed = _needed(differences, _sampling_variance(ours, theirs), min(repeats, baseline_repeats), margin, greedy)
    return Comparison(
        verdict=verdict,
        difference=mean,
        low=low,
        high=high,
        margin=margin,
        n=n,
        accuracy=float(ours_mean.mean()),
        baseline_accuracy=float(theirs_mean.mean()),
        repeats=repeats,
        baseline_repeats=baseline_repeats,
        gained=gained,
        lost=lost,
        mcnemar_p=mcnemar(gained, lost) if repeats == baseline_repeats == 1 else None,
        repeats_needed=needed[0],
        problems_needed=needed[1],
    )


def _sampling_variance(ours: Sequence[Sequence[float]], theirs: Sequence[Sequence[float]]) -> float | None:
    """Mean over problems of the variance that sampling gives one repeat of the difference; None at a single repeat."""
    if any(len(row) < 2 for row in (*ours, *theirs)):
        return None
    return float(np.mean([np.var(a, ddof=1) + np.var(b, ddof=1) for a, b in zip(ours, theirs)]))


def _needed(differences: np.ndarray, sampling: float | None, repeats: int, margin: float, greedy: bool) -> tuple[int | None, int | None]:
    """(repeats, None) or (None, problems) after which the interval around the difference seen would exclude -margin or 0.

    Var(mean) = (between + sampling / k) / n. With one repeat the two cannot be told apart and all spread is taken for sampling.
    """
    n, mean = len(differences), float(differences.mean())
    reach = max(mean + margin, -mean)  # distance to the nearer bound that settles it; at least margin / 2
    allowed = (reach / Z) ** 2
    # One discordant reply in the sample is the least spread a finite sample can exclude.
    spread = max(float(differences.var(ddof=1)) if n > 1 else 0.0, 1.0 / (n * repeats))
    sampling = spread * repeats if sampling is None else max(sampling, 1.0 / n)
    between = max(0.0, spread - sampling / repeats)
    room = n * allowed - between
    if greedy or room <= 0:
        return None, math.ceil(spread / allowed)
    return max(repeats + 1, math.ceil(sampling / room)), None
