"""Paired comparison with a baseline over the same problems, and a verdict.

With d the mean over problems of (candidate - baseline):
  held         d <= -margin is rejected: a loss of `margin` or more is excluded
  lost         d >= 0 is rejected: some loss is shown
  cannot tell  neither; `repeats_needed` (or `problems_needed`) would decide with probability 80 %

Both tests and the interval use Gaffke's bounds over problems (estimates.py). The first look has an
error of 2.5 % on either side. A growing run is tested repeatedly: look j > 1 has an error of 2.5 %
/ (j (j - 1)), so all looks together stay below 5 %. Several tasks of one run are corrected by
Holm's method.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np

from quantkit.common.errors import QuantkitError
from quantkit.evaluation.statistics import power
from quantkit.evaluation.statistics.estimates import (
    ONE_SIDED,
    Difference,
    Verdict,
    mcnemar,
    mean_bounds,
    problem_means,
    ratio_bounds,
    reply_variance,
)
from quantkit.evaluation.statistics.sampling import SamplingComparison, compare_sampling

MARGIN = 0.01
K = TypeVar("K")
_NO_LOSS_IMPLAUSIBLE = 0.1  # below this p_lost, planning ignores the case of no loss


@dataclass(frozen=True, kw_only=True)
class Comparison(Difference):
    """Over problems as well as replies. After `holm_corrected` over `tasks` the p-values hold for
    all tasks jointly, and `alone` is the uncorrected verdict."""

    accuracy: float
    baseline_accuracy: float
    recovery: float | None  # accuracy over baseline_accuracy; None where that is 0
    recovery_interval: tuple[float, float] | None
    repeats: int
    baseline_repeats: int
    gained: int  # problems better than with the baseline
    lost: int
    mcnemar_p: float | None  # one repeat each only
    repeats_needed: int | None
    problems_needed: int | None
    look: int = 1
    tasks: int = 1
    alone: Verdict | None = None
    sampled: SamplingComparison | None = None  # None for greedy replies

    def sentence(self) -> str:
        """The verdict on all problems such as these, then that on these alone."""
        said = f"; {self.sampled.sentence()}" if self.sampled is not None else ""
        return self._on_all() + said

    def _on_all(self) -> str:
        seen = f"{self.seen} on {self.n} problems"
        if self.recovery is not None and self.recovery_interval is not None:
            low, high = (100 * end for end in self.recovery_interval)
            seen += f", recovery {100 * self.recovery:.1f} % ({low:.1f} to {high:.1f})"
        if self.look > 1:
            seen += f", look {self.look} at this run"
        if self.verdict == "held":
            return (
                f"held: {seen}; a loss of {100 * self.margin:g} "
                f"point{'s' if self.margin != 0.01 else ''} or more is excluded"
            )
        if self.verdict == "lost":
            return f"lost: {seen}"
        if self.alone is not None and self.alone != "cannot tell":
            seen += f"; by itself it would be {self.alone}, among {self.tasks} tasks it is not"
        if self.repeats_needed is not None:
            return f"cannot tell: {seen}; about {self.repeats_needed} repeats of both would decide"
        if self.problems_needed is None:
            return f"cannot tell: {seen}"
        return (
            f"cannot tell: {seen}; repeats will not decide, about {self.problems_needed} "
            "problems would"
        )


def one_sided_error(look: int) -> float:
    """Allowed one-sided error of look number `look`: 0.025 for the first, 0.025 for all later
    ones together."""
    return ONE_SIDED if look == 1 else ONE_SIDED / (look * (look - 1))


def compare(
    candidate: Mapping[str, Sequence[float]],
    baseline: Mapping[str, Sequence[float]],
    *,
    margin: float = MARGIN,
    seed: int = 0,
    greedy: bool = False,
    look: int = 1,
    stage: int | None = None,
    tasks: int = 1,
) -> Comparison | None:
    """Compare two runs, each problem id -> 0/1 per repeat; None where they share no problem.

    greedy: repeats would change nothing. look: how often these runs were compared while they grew,
    this time included. stage: of a sequential plan (sampling.py) of so many `tasks`.
    """
    shared = [problem for problem in candidate if problem in baseline]
    if not shared:
        return None
    ours, theirs = [candidate[p] for p in shared], [baseline[p] for p in shared]
    ours_mean, theirs_mean = problem_means(ours), problem_means(theirs)
    differences = ours_mean - theirs_mean
    repeats, baseline_repeats = min(map(len, ours)), min(map(len, theirs))
    bounds = mean_bounds(differences, -1, 1, seed)
    error = one_sided_error(look)
    low, high = bounds.interval(error)
    p_held, p_lost = bounds.p_at_most(-margin), bounds.p_at_least(0.0)
    verdict = _verdict(p_held, p_lost, error)
    needed: tuple[int | None, int | None] = (None, None)
    if verdict == "cannot tell":
        noise, other = reply_variance(ours), reply_variance(theirs)
        seen = _undecided_look(
            differences,
            None if noise is None or other is None else noise + other,
            min(repeats, baseline_repeats),
            p_lost >= _NO_LOSS_IMPLAUSIBLE,
        )
        needed = power.needed(seen, margin, one_sided_error(look + 1), greedy)
    solved = bool(theirs_mean.any())
    gained, lost = int((differences > 0).sum()), int((differences < 0).sum())
    return Comparison(
        verdict=verdict,
        difference=float(differences.mean()),
        low=low,
        high=high,
        level=1 - 2 * error,
        margin=margin,
        n=len(shared),
        accuracy=float(ours_mean.mean()),
        baseline_accuracy=float(theirs_mean.mean()),
        recovery=float(ours_mean.sum() / theirs_mean.sum()) if solved else None,
        recovery_interval=(
            ratio_bounds(ours_mean, theirs_mean, seed).interval(error) if solved else None
        ),
        repeats=repeats,
        baseline_repeats=baseline_repeats,
        gained=gained,
        lost=lost,
        p_held=p_held,
        p_lost=p_lost,
        mcnemar_p=mcnemar(gained, lost) if repeats == baseline_repeats == 1 else None,
        repeats_needed=needed[0],
        problems_needed=needed[1],
        look=look,
        sampled=None
        if greedy
        else compare_sampling(
            candidate,
            baseline,
            margin=margin,
            error=error if stage is None else ONE_SIDED / tasks,
            stage=stage,
        ),
    )


def check_margin(margin: float) -> None:
    if not 0 < margin < 1:
        raise QuantkitError(
            f"--margin is {margin}", "give a share between 0 and 1; 0.01 is one point"
        )


def holm_corrected(comparisons: Mapping[K, Comparison | None]) -> dict[K, Comparison]:
    """Comparisons of several tasks with family-wise corrected verdicts and p-values (Holm 1979);
    None is left out."""
    given = {name: one for name, one in comparisons.items() if one is not None}
    found = {
        name: one.sampled
        for name, one in given.items()
        if one.sampled is not None and one.sampled.stage is None
    }
    sampled = _holm_each(found, {name: (1 - one.level) / 2 for name, one in found.items()})
    errors = {name: one_sided_error(one.look) for name, one in given.items()}
    return {
        name: replace(
            one,
            tasks=len(given),
            alone=given[name].verdict,
            sampled=sampled.get(name, one.sampled),
        )
        for name, one in _holm_each(given, errors).items()
    }


def _holm_each(found: Mapping[K, Any], errors: Mapping[K, float]) -> dict[K, Any]:
    held = _holm({name: one.p_held for name, one in found.items()})
    lost = _holm({name: one.p_lost for name, one in found.items()})
    return {
        name: replace(
            one,
            verdict=_verdict(held[name], lost[name], errors[name]),
            p_held=held[name],
            p_lost=lost[name],
        )
        for name, one in found.items()
    }


def _verdict(p_held: float, p_lost: float, error: float) -> Verdict:
    return "held" if p_held <= error else "lost" if p_lost <= error else "cannot tell"


def _holm(p_values: Mapping[K, float]) -> dict[K, float]:
    """Adjusted p-values: the i-th smallest of m times m - i + 1, monotone."""
    adjusted, before = {}, 0.0
    for place, name in enumerate(sorted(p_values, key=lambda name: p_values[name])):
        before = min(1.0, max(before, (len(p_values) - place) * p_values[name]))
        adjusted[name] = before
    return adjusted


def _undecided_look(
    differences: np.ndarray, sampling: float | None, repeats: int, no_loss_plausible: bool
) -> power.UndecidedLook:
    """Input for planning. With one repeat, half of the variance is assumed to be sampling; else
    the part between problems gets one standard error more, since repeats do not reduce it.
    The minimum variance is that of one discordant reply."""
    n = len(differences)
    spread = max(float(differences.var(ddof=1)) if n > 1 else 0.0, 1.0 / (n * repeats))
    sampling = spread / 2 if sampling is None else max(sampling, 1.0 / n)
    between = max(0.0, spread - sampling / repeats) + (
        spread * math.sqrt(2 / n) if repeats > 1 else 0.0
    )
    return power.UndecidedLook(
        float(differences.mean()), between, sampling, n, repeats, no_loss_plausible
    )
