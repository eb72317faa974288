"""The files of a finished run: samples, prompts, results.json, and report.html.

report.html is one self-contained page: scores, warnings, the verdict against the baseline, plots,
and replies next to the baseline's with the prompts as sent, failures first. Replies are filtered by
reason without a script.
"""

import json
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quantkit.common.atomic_write import write_atomic
from quantkit.common.errors import QuantkitError
from quantkit.evaluation.grading.choices import LETTERS
from quantkit.evaluation.results.baseline import Baseline
from quantkit.evaluation.results.evalscope_format import write_reports
from quantkit.evaluation.results.folder import write_samples
from quantkit.evaluation.results.pages import (
    accuracy_plot,
    differences_plot,
    problems_plot,
    render,
    tokens_plot,
)
from quantkit.evaluation.results.published import published_scores
from quantkit.evaluation.results.task_results import EvalResults, Sample, TaskResult
from quantkit.evaluation.statistics.estimates import interval, problem_means
from quantkit.evaluation.tasks.definitions import REASONS, Problem
from quantkit.evaluation.tasks.prompts import prompt_parts


def write_results(
    results: EvalResults,
    reference: Baseline | None,
    export: str | None,
    notice: Callable[[str], None],
) -> None:
    """Write all files of the run to results.out. export: "evalscope" or None. A page that cannot be
    made is reported by `notice`: every figure is in results.json."""
    assert results.out is not None
    write_samples(results.out / "samples.jsonl", results.samples())
    write_samples(results.out / "prompts.jsonl", _prompts(results))
    if export == "evalscope":
        write_reports(results.out / "evalscope", results)
    write_atomic(results.out / "results.json", json.dumps(results.to_json(), indent=2) + "\n")
    try:
        write_report(results.out / "report.html", results, reference)
    except QuantkitError:
        raise
    except Exception as error:  # names, replies and figures of others are drawn
        notice(
            f"{results.out / 'report.html'} could not be made ({type(error).__name__}: {error}); "
            "results.json is complete"
        )


def _prompts(results: EvalResults) -> list[dict[str, Any]]:
    """Every problem's prompt as it was sent, once."""
    rows = []
    for task in results.tasks.values():
        for problem in {sample.problem.id: sample.problem for sample in task.samples}.values():
            if task.render is not None:
                parts = [
                    {"role": role, "content": text}
                    for role, text in prompt_parts(task.render(problem))
                ]
                rows.append({"task": task.name, "problem": problem.id, "prompt": parts})
    return rows


FAILURES, SUCCESSES = 60, 20  # problems shown per task
_MAX_CHARS = 20_000  # characters of one reply or prompt


def write_report(path: Path, results: EvalResults, baseline: Baseline | None) -> None:
    tasks = [_task(results.model, task, baseline) for task in results.tasks.values()]
    page = render(
        "report.html.j2", results=results, tasks=tasks, baseline=baseline.name if baseline else None
    )
    write_atomic(path, page)


def _task(model: str, task: TaskResult, baseline: Baseline | None) -> dict[str, Any]:
    figures, published = task.to_json(), published_scores(task.name)
    rows, plots, their_interval = [], {}, None
    if figures["n"]:
        rows.append((f"{model} (here)", figures["accuracy"], *figures["interval"], True))
    if task.comparison is not None and baseline is not None:
        ours, theirs = task.table(), baseline.scores(task.name)
        shared = [problem for problem in ours if problem in theirs]
        pairs = [[scores[problem] for problem in shared] for scores in (ours, theirs)]
        their_interval = interval(pairs[1])
        rows.append(
            (
                f"{baseline.name} (baseline)",
                task.comparison.baseline_accuracy,
                *their_interval,
                True,
            )
        )
        plots["difference"] = differences_plot([("", figures["comparison"])])
        plots["problems"] = problems_plot(*(problem_means(scores).tolist() for scores in pairs))
    if figures["n"]:
        for row in published:
            share = row["score"] / 100
            rows.append((f"{row['model']} {row['scheme']}", share, share, share, False))
        plots["accuracy"] = accuracy_plot(rows)
        right, wrong = (
            [s.completion.completion_tokens for s in task.graded if s.grade.correct == correct]
            for correct in (True, False)
        )
        plots["tokens"] = tokens_plot(right, wrong, task.setting.generation.max_tokens)
    selected = _select_replies(task, baseline)
    shown = [_reply_pair_json(task, pair) for pair in _limit_replies(selected)]
    return {
        "name": task.name,
        "anchor": re.sub(r"[^A-Za-z0-9]+", "-", f"task-{task.name}"),
        "about": task.setting.task,
        "setting": task.setting,
        "figures": figures,
        "reasons": [
            (count, reason, REASONS[reason]) for reason, count in figures.get("reasons", {}).items()
        ],
        "comparison": task.comparison,
        "baseline_interval": their_interval,
        "published": published,
        "plots": plots,
        "replies": shown,
        "shown_reasons": dict(Counter(reply["ours"]["reason"] for reply in shown)),
        "more": len(selected) - len(shown),
    }


@dataclass(frozen=True)
class _ReplyPair:
    """One reply to a problem (a wrong one if there is any) and the baseline's rows for that
    problem. `solved` and `baseline_solved` are shares over repeats."""

    sample: Sample
    solved: float
    theirs: list[dict[str, Any]]

    @property
    def baseline_solved(self) -> float | None:
        return (
            sum(row["correct"] for row in self.theirs) / len(self.theirs) if self.theirs else None
        )


def _select_replies(task: TaskResult, baseline: Baseline | None) -> list[_ReplyPair]:
    """One reply per problem: failures first, of those the ones that the baseline solves first."""
    first: dict[str, Sample] = {}
    for sample in task.graded:
        before = first.setdefault(sample.problem.id, sample)
        if before.grade.correct and not sample.grade.correct:
            first[sample.problem.id] = sample
    table = task.table()
    theirs = baseline.samples.get(task.name, {}) if baseline else {}
    found = [
        _ReplyPair(sample, sum(table[name]) / len(table[name]), theirs.get(name, []))
        for name, sample in first.items()
    ]
    return sorted(
        found, key=lambda one: (one.sample.grade.correct, one.solved - (one.baseline_solved or 0.0))
    )


def _limit_replies(pairs: list[_ReplyPair]) -> list[_ReplyPair]:
    """The failures and successes that the page shows."""
    wrong, right = (
        [pair for pair in pairs if pair.sample.grade.correct == correct]
        for correct in (False, True)
    )
    return wrong[:FAILURES] + right[:SUCCESSES]


def _reply_pair_json(task: TaskResult, one: _ReplyPair) -> dict[str, Any]:
    sample, problem = one.sample, one.sample.problem
    # Prefer the same repeat: both models then answered the same draw.
    other = next(
        (row for row in one.theirs if row["repeat"] == sample.repeat),
        one.theirs[0] if one.theirs else None,
    )
    return {
        "id": problem.id,
        "prompt": [(role, _shorten(text)) for role, text in prompt_parts(task.render(problem))]
        if task.render
        else [],
        "options": _options(problem),
        "gold": problem.gold,
        "solved": one.solved,
        "baseline_solved": one.baseline_solved,
        "ours": _reply(sample.to_json(task.name)),
        "theirs": _reply(other) if other else None,
    }


def _options(problem: Problem) -> list[dict[str, Any]]:
    """The options of a multiple-choice problem in order, with the right one marked; else empty."""
    options = problem.fields.get("options")
    if not isinstance(options, list):
        return []
    return [
        {"text": str(option), "gold": LETTERS[number] == problem.gold}
        for number, option in enumerate(options[: len(LETTERS)])
    ]


def _reply(row: dict[str, Any]) -> dict[str, Any]:
    text = (f"{row['reasoning']}\n</think>\n" if row.get("reasoning") else "") + row["text"]
    return {
        "reason": row["reason"],
        "meaning": REASONS[row["reason"]],
        "answer": row["answer"],
        "detail": row["detail"],
        "text": _shorten(text),
    }


def _shorten(text: str) -> str:
    if len(text) <= _MAX_CHARS:
        return text
    return (
        f"{text[: _MAX_CHARS // 2]}\n\n[... {len(text) - _MAX_CHARS} characters omitted "
        f"...]\n\n{text[-_MAX_CHARS // 2 :]}"
    )
