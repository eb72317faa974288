"""How many problems and repeats a verdict will need, computed before any model runs."""

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from quantkit.common.errors import QuantkitError
from quantkit.evaluation.generation import prepare
from quantkit.evaluation.options import EvaluateOptions
from quantkit.evaluation.results.baseline import Baseline, read_baseline
from quantkit.evaluation.run import check_margin
from quantkit.evaluation.statistics import power
from quantkit.evaluation.statistics.estimates import accuracy as mean_accuracy


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
    scores = list(reference.scores.get(task, {}).values()) if reference is not None else []
    if accuracy is None:
        if not scores:
            raise QuantkitError(
                f"the accuracy of the model in {task} is not known",
                "give --accuracy, or a run of it with --baseline",
            )
        accuracy = mean_accuracy(scores)
    repeated = [row for row in scores if len(row) > 1]
    noise = 2 * float(np.mean([np.var(row, ddof=1) for row in repeated])) if repeated else None
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
    )
