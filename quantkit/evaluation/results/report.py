"""report.html: one self-contained page per run.

Figures, warnings, the verdict against the baseline, plots, and failures to read side by side.
"""

from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined

from quantkit.evaluation.results import plots
from quantkit.evaluation.results.figures import EvalResults, Sample, TaskResult
from quantkit.evaluation.results.published import published_scores
from quantkit.evaluation.results.store import write_atomically
from quantkit.evaluation.statistics.baseline import Baseline
from quantkit.evaluation.statistics.estimates import problem_means
from quantkit.evaluation.tasks.problems import REASONS

_TEMPLATE = Path(__file__).with_name("report.html.j2")
FAILURES = 40  # problems shown per task
_TEXT = 20_000  # characters of one reply


def write_report(path: Path, results: EvalResults, baseline: Baseline | None) -> None:
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters["points"] = _points
    tasks = [_task(results.model, task, baseline) for task in results.tasks.values()]
    page = environment.from_string(_TEMPLATE.read_text(encoding="utf-8")).render(
        results=results, tasks=tasks, baseline=baseline.name if baseline else None
    )
    write_atomically(path, page)


def _points(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.1f}"


def _task(model: str, task: TaskResult, baseline: Baseline | None) -> dict[str, Any]:
    figures = task.to_json()
    published = published_scores(task.name)
    drawn: dict[str, str] = {}
    if figures["n"]:
        low, high = figures["interval"]
        rows = [(f"{model} (here)", figures["accuracy"], low, high, True)]
        if task.comparison is not None and baseline is not None:
            share = task.comparison.baseline_accuracy
            rows.append((f"{baseline.name} (baseline)", share, share, share, True))
        rows += [(f"{score.model} {score.scheme}", score.score / 100, score.score / 100, score.score / 100, False) for score in published]
        drawn["accuracy"] = plots.accuracy_plot(rows)
        graded = task.graded
        right = [sample.completion.completion_tokens for sample in graded if sample.grade.correct]
        wrong = [sample.completion.completion_tokens for sample in graded if not sample.grade.correct]
        drawn["tokens"] = plots.tokens_plot(right, wrong, task.setting.generation.max_tokens)
    if task.comparison is not None and baseline is not None:
        drawn["difference"] = plots.difference_plot(task.comparison)
        ours, theirs = task.table(), baseline.scores[task.name]
        shared = [problem for problem in ours if problem in theirs]
        means = (problem_means([side[problem] for problem in shared]).tolist() for side in (ours, theirs))
        drawn["problems"] = plots.problems_plot(*means)
    failures = _failures(task, baseline)
    return {
        "name": task.name,
        "about": task.setting.task,
        "setting": task.setting,
        "figures": figures,
        "reasons": [(count, reason, REASONS[reason]) for reason, count in figures.get("reasons", {}).items()],
        "comparison": task.comparison,
        "published": published,
        "plots": drawn,
        "failures": failures[:FAILURES],
        "more": max(0, len(failures) - FAILURES),
    }


def _failures(task: TaskResult, baseline: Baseline | None) -> list[dict[str, Any]]:
    """One wrong reply per failed problem beside one of the baseline's; problems that the baseline solves come first."""
    first: dict[str, Sample] = {}
    for sample in task.graded:
        if not sample.grade.correct:
            first.setdefault(sample.problem.id, sample)
    table = task.table()
    found = []
    for name, sample in first.items():
        theirs = baseline.samples.get(task.name, {}).get(name, []) if baseline else []
        # The same repeat where there is one, else the first: what the two models made of the same draw.
        other = next((row for row in theirs if row["repeat"] == sample.repeat), theirs[0] if theirs else None)
        solved = sum(table[name]) / len(table[name])
        found.append(
            {
                "id": name,
                "question": str(sample.problem.fields.get("problem", "")),
                "gold": sample.problem.gold,
                "solved": solved,
                "baseline_solved": sum(row["correct"] for row in theirs) / len(theirs) if theirs else None,
                "ours": _shown(sample.to_json(task.name)),
                "theirs": _shown(other) if other else None,
            }
        )
    return sorted(found, key=lambda failure: failure["solved"] - (failure["baseline_solved"] or 0.0))


def _shown(row: dict[str, Any]) -> dict[str, Any]:
    text = (f"{row['reasoning']}\n</think>\n" if row.get("reasoning") else "") + row["text"]
    if len(text) > _TEXT:
        text = f"{text[: _TEXT // 2]}\n\n[... {len(text) - _TEXT} characters left out ...]\n\n{text[-_TEXT // 2 :]}"
    return {"reason": row["reason"], "meaning": REASONS[row["reason"]], "answer": row["answer"], "detail": row["detail"], "text": text}
