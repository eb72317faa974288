"""Finished runs beside each other: one of them the baseline, every other paired with it over the
problems they share."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quantkit.common.atomic_write import write_atomic
from quantkit.common.errors import QuantkitError
from quantkit.evaluation.results import plots
from quantkit.evaluation.results.pages import render
from quantkit.evaluation.statistics.baseline import Baseline, read_baseline
from quantkit.evaluation.statistics.bounds import mean_bounds
from quantkit.evaluation.statistics.comparison import Comparison, compare, corrected
from quantkit.evaluation.statistics.estimates import accuracy, problem_means


@dataclass(frozen=True)
class RunBeside:
    """One run: `tasks` its figures by task, `comparisons` with the baseline where both have the
    task, `notes` what must be said of them."""

    name: str
    folder: str
    tasks: dict[str, dict[str, Any]]
    comparisons: dict[str, Comparison]
    notes: list[str]

    def to_json(self) -> dict[str, Any]:
        results = {
            task: figures
            | {"comparison": self.comparisons[task].to_json() if task in self.comparisons else None}
            for task, figures in self.tasks.items()
        }
        return {"run": self.name, "folder": self.folder, "results": results, "notes": self.notes}


@dataclass(frozen=True)
class RunsSideBySide:
    """The baseline first. Verdicts are corrected for all comparisons together (Holm)."""

    runs: list[RunBeside]
    margin: float

    @property
    def tasks(self) -> list[str]:
        return list(dict.fromkeys(task for run in self.runs for task in run.tasks))

    def to_json(self) -> dict[str, Any]:
        return {
            "baseline": self.runs[0].name,
            "margin": self.margin,
            "runs": [run.to_json() for run in self.runs],
        }


def compare_runs(folders: list[Path], *, margin: float, seed: int = 0) -> RunsSideBySide:
    """The --out folders of finished evaluations, the baseline's first. Raises QuantkitError where
    one is not that."""
    if len(folders) < 2:
        raise QuantkitError(
            "one run has nothing to be compared with",
            "give the baseline's folder first, then others",
        )
    if not 0 < margin < 1:
        raise QuantkitError(
            f"--margin is {margin}", "give a share between 0 and 1; 0.01 is one point"
        )
    read = [_read(folder) for folder in folders]
    names = _names(folders, [run.name for run in read])
    reference, others = read[0], read[1:]
    found: dict[str, Comparison] = {}
    notes: dict[str, list[str]] = {name: [] for name in names}
    for name, run in zip(names[1:], others):
        for task in run.scores:
            comparison, said = _compared(run, reference, task, margin, seed)
            notes[name] += said
            if comparison is not None:
                found[f"{name}\n{task}"] = comparison
    verdicts = corrected(found)
    runs = []
    for name, folder, run in zip(names, folders, read):
        tasks = {task: _figures(run, task) for task in run.scores}
        own = {
            task: verdicts[f"{name}\n{task}"]
            for task in run.scores
            if f"{name}\n{task}" in verdicts
        }
        runs.append(RunBeside(name, str(folder), tasks, own, notes[name]))
    return RunsSideBySide(runs, margin)


def _read(folder: Path) -> Baseline:
    run = read_baseline(str(folder))
    if run is None:
        raise QuantkitError(
            f"{folder} holds no results", "give the --out folders of finished evaluations"
        )
    return run


def _names(folders: list[Path], models: list[str]) -> list[str]:
    """What the models are called; with the folder where two are called alike."""
    return [
        name if models.count(name) == 1 else f"{name} ({folder})"
        for folder, name in zip(folders, models)
    ]


def _compared(
    run: Baseline, reference: Baseline, task: str, margin: float, seed: int
) -> tuple[Comparison | None, list[str]]:
    for side in (run, reference):
        if (fault := side.fault(task)) is not None:
            return None, [fault]
    facts = run.facts.get(task, {})
    greedy = facts.get("generation", {}).get("temperature") == 0
    comparison = compare(
        run.scores[task], reference.scores.get(task, {}), margin=margin, seed=seed, greedy=greedy
    )
    if comparison is None:
        return None, [f"{task}: no problem in common with {reference.name}"]
    changed = reference.differs(task, facts)
    return comparison, [
        f"{task}: run with another {', '.join(changed)}; not like for like"
    ] if changed else []


def _figures(run: Baseline, task: str) -> dict[str, Any]:
    scores = list(run.scores[task].values())
    rows = [row for problem in run.samples[task].values() for row in problem]
    low, high = mean_bounds(problem_means(scores), 0, 1).interval()
    return {
        "accuracy": accuracy(scores),
        "interval": [low, high],
        "n": len(scores),
        "repeats": max(map(len, scores)),
        "unfinished": sum(row["reason"] == "unfinished" for row in rows) / len(rows),
        "tokens": sum(row["completion_tokens"] for row in rows) / len(rows),
    }


def write_page(out: Path, table: RunsSideBySide) -> None:
    """comparison.html and comparison.json in `out`."""
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise QuantkitError(
            f"cannot write {out}: {error.strerror}", "choose another --out"
        ) from error
    drawn = {}
    for task in table.tasks:
        rows = [
            (_label(run.name), run.tasks[task]["accuracy"], *run.tasks[task]["interval"], True)
            for run in table.runs
            if task in run.tasks
        ]
        drawn[task] = {"accuracy": plots.accuracy_plot(rows)}
        compared = [
            (_label(run.name), run.comparisons[task])
            for run in table.runs
            if task in run.comparisons
        ]
        if compared:
            drawn[task]["differences"] = plots.differences_plot(compared)
    write_atomic(out / "comparison.html", render("comparison.html.j2", table=table, plots=drawn))
    write_atomic(out / "comparison.json", json.dumps(table.to_json(), indent=1) + "\n")


def _label(name: str) -> str:
    """What fits beside a plot."""
    return name if len(name) <= 40 else f"{name[:18]}...{name[-19:]}"
