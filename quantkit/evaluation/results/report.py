"""The files of a finished run: samples, prompts, results.json, and report.html.

report.html is one self-contained page: scores, warnings, the verdict against the baseline, plots,
and replies next to the baseline's with the prompts as sent, failures first. Replies are filtered by
reason without a script.

The export in evalscope's report schema (version 2) is one JSON per task, for dashboards that read
its folders: OUT/reports/MODEL/TASK.json. The schema has no field for an interval; those are in
results.json only.
"""

import json
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from statistics import fmean

from quantkit.common.atomic_write import make_folder, write_atomic
from quantkit.common.errors import QuantkitError
from quantkit.common.result import JsonObject
from quantkit.evaluation.results.baseline import Baseline
from quantkit.evaluation.results.folder import write_samples
from quantkit.evaluation.results.pages import (
    ACCURACY,
    DIFFERENCE,
    Bar,
    bars_plot,
    problems_plot,
    render,
    tokens_plot,
)
from quantkit.evaluation.results.published import published_scores
from quantkit.evaluation.results.task_results import EvalResults, TaskResult, grouped
from quantkit.evaluation.statistics.estimates import interval, pass_at_k, problem_means
from quantkit.evaluation.tasks.prompts import prompt_parts

FAILURES, SUCCESSES = 60, 20  # problems shown per task


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
    prompts = [
        {"task": name, "problem": problem, "prompt": parts}
        for name, task in results.tasks.items()
        for problem, parts in _prompts(task).items()
    ]
    write_samples(results.out / "prompts.jsonl", prompts)
    if export == "evalscope":
        write_evalscope(results.out / "evalscope", results)
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


def _prompts(task: TaskResult) -> dict[str, list[dict[str, str]]]:
    """Every problem's prompt as it was sent, once."""
    problems = {sample.problem.id: sample.problem for sample in task.samples}
    render = task.render
    return {} if render is None else {name: prompt_parts(render(p)) for name, p in problems.items()}


def write_report(path: Path, results: EvalResults, baseline: Baseline | None) -> None:
    tasks = [_task(results.model, task, baseline) for task in results.tasks.values()]
    page = render(
        "report.html.j2", results=results, tasks=tasks, baseline=baseline.name if baseline else None
    )
    write_atomic(path, page)


def _task(model: str, task: TaskResult, baseline: Baseline | None) -> JsonObject:
    figures, published = task.to_json(), published_scores(task.name)
    rows, plots, theirs = list[Bar](), {}, None
    if figures["n"]:
        rows.append((f"{model} (here)", figures["accuracy"], *figures["interval"], True))
    if (found := task.comparison) is not None and baseline is not None:
        table, before = task.table(), baseline.scores(task.name)
        pairs = [[scores[name] for name in table if name in before] for scores in (table, before)]
        theirs = interval(pairs[1])
        rows.append((f"{baseline.name} (baseline)", found.baseline_accuracy, *theirs, True))
        bar = ("", found.difference, found.low, found.high, True)
        plots["difference"] = bars_plot([bar], DIFFERENCE, found.margin)
        plots["problems"] = problems_plot(*(problem_means(scores).tolist() for scores in pairs))
    if figures["n"]:
        for row in published:
            rows.append((f"{row['model']} {row['scheme']}", *[row["score"] / 100] * 3, False))
        plots["accuracy"] = bars_plot(rows, ACCURACY)
        right, wrong = (
            [s.completion.completion_tokens for s in task.graded if s.grade.correct == correct]
            for correct in (True, False)
        )
        if figures["lengths"]:
            plots["lengths"] = _lengths_plot(
                figures["lengths"], None if found is None else found.margin
            )
        plots["tokens"] = tokens_plot(right, wrong, task.setting.generation.max_tokens)
    replies = _replies(task, baseline)
    wrong_ones = [one for one in replies if not one["ours"]["correct"]]
    shown = wrong_ones[:FAILURES] + replies[len(wrong_ones) :][:SUCCESSES]
    return {
        "anchor": re.sub(r"[^A-Za-z0-9]+", "-", f"task-{task.name}"),
        "about": task.setting.task,
        "setting": task.setting,
        "figures": figures,
        "comparison": task.comparison,
        "baseline_interval": theirs,
        "published": published,
        "plots": plots,
        "replies": shown,
        "shown_reasons": dict(Counter(reply["ours"]["reason"] for reply in shown)),
        "more": len(replies) - len(shown),
    }


def _lengths_plot(lengths: dict[str, JsonObject], margin: float | None) -> str:
    """The difference from the baseline by length of the replies, or without one the accuracy."""
    if margin is None:
        bars = [(name, one["accuracy"], *one["interval"], True) for name, one in lengths.items()]
        return bars_plot(bars, ACCURACY)
    compared = {name: one for name, one in lengths.items() if "difference" in one}
    return bars_plot(
        [
            (name, one["difference"], one["low"], one["high"], True)
            for name, one in compared.items()
        ],
        DIFFERENCE,
        margin,
    )


def _replies(task: TaskResult, baseline: Baseline | None) -> list[JsonObject]:
    """One reply of each problem, a wrong one if there is any, and the baseline's, of the same repeat
    if it has that: both models then answered the same draw. Failures first, of those the ones that
    the baseline solves first."""
    table, prompts = task.table(), _prompts(task)
    theirs = baseline.samples.get(task.name, {}) if baseline else {}
    found: dict[str, JsonObject] = {}
    for sample in sorted(task.graded, key=lambda sample: sample.grade.correct):
        name, repeat = sample.problem.id, sample.repeat
        rows = theirs.get(name, [])
        same = [row for row in rows if row["repeat"] == repeat]
        if name not in found:
            found[name] = {
                "problem": sample.problem,
                "prompt": prompts.get(name, []),
                "solved": fmean(table[name]),
                "baseline_solved": fmean(row["correct"] for row in rows) if rows else None,
                "ours": sample.to_json(task.name),
                "theirs": next(iter(same or rows), None),
            }
    return sorted(
        found.values(),
        key=lambda one: (one["ours"]["correct"], one["solved"] - (one["baseline_solved"] or 0.0)),
    )


_LONGEST_NAME = 60  # characters; at most 240 bytes of the 255 that a name may have


def write_evalscope(out: Path, results: EvalResults) -> None:
    # evalscope's name of the folder; a server may give a name that is no name of a folder.
    name = re.sub(r"[\x00-\x1f/]", "__", results.model)[:_LONGEST_NAME]
    folder = out / "reports" / (name if name.strip(".") else "model")
    make_folder(folder)
    for name, task in results.tasks.items():
        text = json.dumps(evalscope_report(results.model, task), indent=4, ensure_ascii=False)
        write_atomic(folder / f"{name.replace('-', '_')}.json", text + "\n")


def evalscope_report(model: str, task: TaskResult) -> JsonObject:
    """One task as evalscope's Report. As there, `num` counts samples and scores are rounded to
    four digits."""
    about, repeats, num = task.setting.task, task.setting.repeats, len(task.graded)
    groups = grouped((one.problem.group or "default", one.grade.correct) for one in task.graded)
    best = pass_at_k(task.table().values(), repeats)
    page = render(
        "evalscope.json.j2",
        model=model,
        task=task,
        about=about,
        dataset=about.name.replace("-", "_"),
        num=num,
        repeats=repeats,
        subsets=[_subset(name, sum(one), len(one)) for name, one in sorted(groups.items())],
        best=[] if best is None or repeats == 1 else [_subset("default", best * num, num)],
    )
    found: JsonObject = json.loads(page)
    return found


def _subset(name: str, points: float, num: int) -> JsonObject:
    return {"name": name, "points": points, "num": num, "score": points / num}
