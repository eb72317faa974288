"""Results beside a baseline: a verdict for every task that both have, corrected for the number of
tasks."""

from dataclasses import replace

from quantkit.evaluation.results.figures import EvalResults, TaskResult
from quantkit.evaluation.results.store import Looks
from quantkit.evaluation.statistics.baseline import Baseline
from quantkit.evaluation.statistics.bounds import mean_bounds
from quantkit.evaluation.statistics.comparison import compare, corrected
from quantkit.evaluation.statistics.estimates import accuracy, problem_means


def compare_results(
    results: EvalResults, reference: Baseline, margin: float, seed: int
) -> EvalResults:
    """The results with a comparison in every task that shares problems with `reference`, unless
    either lost too many samples."""
    looks = Looks(results.out)
    tasks = {
        name: _compared(task, reference, margin, seed, looks)
        for name, task in results.tasks.items()
    }
    found = corrected(
        {name: task.comparison for name, task in tasks.items() if task.comparison is not None}
    )
    tasks = {name: replace(task, comparison=found.get(name)) for name, task in tasks.items()}
    return replace(results, tasks=tasks, baseline=reference.name)


def _compared(
    task: TaskResult, reference: Baseline, margin: float, seed: int, looks: Looks
) -> TaskResult:
    scores, facts = reference.scores.get(task.name, {}), reference.facts.get(task.name, {})
    task = replace(task, baseline_fault=reference.fault(task.name))
    if task.fault is not None:
        return task
    ours = task.table()
    if not any(problem in scores for problem in ours):
        return replace(
            task,
            notes=[*task.notes, f"the baseline {reference.name} has no sample of these problems"],
        )
    look = looks.number(task.facts, facts, (len(task.graded), reference.graded(task.name)))
    greedy = task.setting.generation.temperature == 0
    comparison = compare(ours, scores, margin=margin, seed=seed, greedy=greedy, look=look)
    notes = list(task.notes)
    if changed := reference.differs(task.name, task.facts):
        notes.append(
            f"the baseline was run with another {', '.join(changed)}: the comparison is not like "
            "for like"
        )
    return replace(
        task, comparison=comparison, notes=notes, group_differences=_by_group(task, scores, seed)
    )


def _by_group(
    task: TaskResult, scores: dict[str, list[float]], seed: int
) -> dict[str, dict[str, float]]:
    """Of every group: the baseline's accuracy, and the difference with its 95 % interval, for that
    group alone."""
    ours = task.table()
    members: dict[str, list[str]] = {}
    for problem, group in {
        sample.problem.id: sample.problem.group for sample in task.graded
    }.items():
        if group and problem in scores:
            members.setdefault(group, []).append(problem)
    found = {}
    for group, problems in members.items():
        theirs = [scores[problem] for problem in problems]
        differences = problem_means([ours[problem] for problem in problems]) - problem_means(theirs)
        low, high = mean_bounds(differences, -1, 1, seed).interval()
        found[group] = {
            "baseline_accuracy": accuracy(theirs),
            "difference": float(differences.mean()),
            "low": low,
            "high": high,
        }
    return found
