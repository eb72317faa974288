"""How many problems and repeats a verdict will need, computed before any model runs."""

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from quantkit.common.errors import QuantkitError
from quantkit.evaluation.generation import TaskRun, prepare
from quantkit.evaluation.options import EvaluateOptions
from quantkit.evaluation.results.baseline import Baseline, read_baseline
from quantkit.evaluation.statistics import power, sampling
from quantkit.evaluation.statistics.comparison import check_margin
from quantkit.evaluation.statistics.estimates import accuracy as mean_accuracy
from quantkit.evaluation.statistics.estimates import reply_variance


@dataclass(frozen=True)
class TaskPlan:
    """What is needed to distinguish a loss of the margin from none in one task, each with
    probability 80 %.

    measured: the sampling noise is the baseline's; else the maximum at this accuracy. enough:
    repeats of both models after which the task's own `problems` give `held` if nothing is lost;
    None where no number of repeats suffices.
    """

    task: str
    problems: int
    accuracy: float
    measured: bool
    enough: int | None
    rows: list[power.PlannedRow]
    sampled: str = ""
    """What the verdict on these problems alone needs."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def plan_evaluation(
    tasks: list[str], options: EvaluateOptions, accuracy: float | None
) -> list[TaskPlan]:
    """A plan for every task. accuracy: the expected one; None takes that of the baseline, the
    folder of an earlier run. Raises QuantkitError if neither is known."""
    check_margin(options.margin)
    baseline = options.baseline
    reference = read_baseline(str(baseline)) if baseline is not None else None
    return [_plan(task, options, reference, accuracy) for task in tasks]


def _plan(
    name: str, options: EvaluateOptions, reference: Baseline | None, accuracy: float | None
) -> TaskPlan:
    protocol = options.protocol or "r1"
    work = prepare(name, protocol, options.data_dir, options.limit, None, None, 0)
    task = work.setting.task.name
    noise, known = _noise(task, reference)
    if accuracy is None:
        if known is None:
            raise QuantkitError(
                f"the accuracy of the model in {task} is not known",
                "give --accuracy, or a run of it with --baseline",
            )
        accuracy = known
    worst = 2 * accuracy * (1 - accuracy)
    enough = power.repeats_for_held(
        len(work.problems), options.margin, worst if noise is None else noise
    )
    return TaskPlan(
        task,
        len(work.problems),
        accuracy,
        noise is not None,
        enough,
        power.plan(accuracy, options.margin, noise),
        forecast(work, options, reference, accuracy),
    )


def _noise(task: str, reference: Baseline | None) -> tuple[float | None, float | None]:
    """Variance that one repeat of both models adds to a problem, by the baseline's repeats, and
    its accuracy; None where not known."""
    scores = reference.scores(task).values() if reference is not None else ()
    noise = reply_variance(scores)
    return (
        None if noise is None else 2 * noise,
        mean_accuracy(scores) if scores else None,
    )


def forecast(
    work: TaskRun,
    options: EvaluateOptions,
    reference: Baseline | None,
    accuracy: float | None = None,
) -> str:
    """Which loss the asked repeats, and a budget of tokens, detect on these problems alone,
    and what the asked margin takes. Without a baseline's replies noise and lengths are upper
    limits."""
    task, problems = work.setting.task.name, len(work.problems)
    noise, known = _noise(task, reference)
    p = accuracy if accuracy is not None else known if known is not None else 0.5
    variance = 2 * p * (1 - p) if noise is None else noise
    rows = reference.samples.get(task, {}) if reference is not None else {}
    lengths = [row["completion_tokens"] for replies in rows.values() for row in replies]
    length = float(np.mean(lengths)) if lengths else work.setting.generation.max_tokens
    each = 2 * problems * length if length else None  # tokens of one repeat of both models

    def detectable(repeats: float) -> str:
        loss = sampling.decidable_margin(variance, problems, repeats)
        cost = f", {_short(each * repeats)} tokens" if each else ""
        return f"{repeats:,.0f} repeats of both{cost}: a loss of {100 * loss:.1f} points"

    said = [detectable(work.setting.repeats)]
    if options.token_budget is not None and each:
        said.append(detectable(options.token_budget / each))
    needed = sampling.repeats_for_margin(variance, problems, options.margin)
    cost = f", {_short(each * needed)} tokens" if each else ""
    said.append(f"{100 * options.margin:g} points take {needed:,} repeats{cost}")
    most = "" if noise is not None and lengths else " (at most: no replies are known yet)"
    return f"{task}: on its {problems} problems alone can be detected{most}: {'; '.join(said)}"


def _short(count: float) -> str:
    return f"{count / 1e6:,.1f} M" if count >= 1e6 else f"{count / 1e3:,.0f} K"
