"""Comparison with a baseline: of one run, task by task, and of several finished runs with the
first of them. Verdicts are corrected for the number of comparisons (Holm)."""

import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from quantkit.common.atomic_write import write_atomic
from quantkit.common.errors import QuantkitError
from quantkit.evaluation.results.folder import Looks
from quantkit.evaluation.results.pages import accuracy_plot, differences_plot, render
from quantkit.evaluation.results.stored import read_results, read_samples
from quantkit.evaluation.results.task_results import MAX_ERROR_SHARE, EvalResults, TaskResult
from quantkit.evaluation.statistics.comparison import Comparison, compare, holm_corrected
from quantkit.evaluation.statistics.estimates import accuracy, mean_bounds, problem_means
from quantkit.evaluation.tasks.definitions import EXCLUDED


@dataclass(frozen=True)
class Baseline:
    """The run that others are compared with. scores: task -> problem -> 0/1 per repeat; samples:
    task -> problem -> sample rows; planned: number of samples per task, failed ones included."""

    name: str
    scores: dict[str, dict[str, list[float]]]
    samples: dict[str, dict[str, list[dict[str, Any]]]]
    facts: dict[str, dict[str, Any]]
    planned: dict[str, int] = field(default_factory=dict)

    @classmethod
    def from_results(cls, results: EvalResults) -> "Baseline":
        return cls.from_rows(
            results.model,
            results.samples(),
            {name: task.facts for name, task in results.tasks.items()},
        )

    @classmethod
    def from_rows(
        cls, name: str, rows: list[dict[str, Any]], facts: dict[str, dict[str, Any]]
    ) -> "Baseline":
        scores: dict[str, dict[str, list[float]]] = {}
        planned: dict[str, int] = {}
        samples: dict[str, dict[str, list[dict[str, Any]]]] = {}
        for row in rows:
            planned[row["task"]] = planned.get(row["task"], 0) + 1
            samples.setdefault(row["task"], {}).setdefault(row["problem"], []).append(row)
            if row["reason"] not in EXCLUDED:
                scores.setdefault(row["task"], {}).setdefault(row["problem"], []).append(
                    float(row["correct"])
                )
        return cls(name, scores, samples, facts, planned)

    def graded(self, task: str) -> int:
        return sum(map(len, self.scores.get(task, {}).values()))

    def fault(self, task: str) -> str | None:
        """Why no verdict can use this baseline (too many failed samples), or None."""
        lost = self.planned.get(task, 0) - self.graded(task)
        if lost <= MAX_ERROR_SHARE * self.planned.get(task, 0):
            return None
        return (
            f"{lost} of {self.planned[task]} samples of {task} failed with the baseline "
            f"{self.name}: no verdict"
        )

    def changed_facts(self, task: str, facts: dict[str, Any]) -> list[str]:
        """Names of the facts, other than model and seed, that differ from this run's."""
        theirs = self.facts.get(task, {})
        return [
            name
            for name in facts
            if name not in ("model", "seed") and theirs.get(name) != facts[name]
        ]


def read_baseline(name: str) -> Baseline | None:
    """The run in a folder (or at its results.json); None where `name` is a model that must be
    run."""
    path = Path(name)
    folder = path.parent if path.name == "results.json" else path
    results, samples = folder / "results.json", folder / "samples.jsonl"
    if not results.is_file():
        if path.name == "results.json":
            raise QuantkitError(
                f"baseline {name} does not exist",
                "give a model, or the --out folder of an earlier run",
            )
        return None
    if not samples.is_file():
        raise QuantkitError(
            f"baseline {folder} has no samples.jsonl",
            "run it again: a comparison needs every sample",
        )
    stored = read_results(results)
    facts = {name: task.get("facts") or {} for name, task in stored["results"].items()}
    return Baseline.from_rows(stored["model"], read_samples(samples), facts)


def compare_results(
    results: EvalResults, reference: Baseline, margin: float, seed: int, stage: int | None = None
) -> EvalResults:
    """`results` with a comparison in every task that shares problems with `reference`, unless
    either lost too many samples. `seed` seeds the bounds. stage: of a sequential plan."""
    looks = Looks(results.out)
    tasks = {
        name: _compare_task(task, reference, margin, seed, looks, stage, len(results.tasks))
        for name, task in results.tasks.items()
    }
    found = holm_corrected(
        {name: task.comparison for name, task in tasks.items() if task.comparison is not None}
    )
    tasks = {name: replace(task, comparison=found.get(name)) for name, task in tasks.items()}
    return replace(results, tasks=tasks, baseline=reference.name)


def _compare_task(
    task: TaskResult,
    reference: Baseline,
    margin: float,
    seed: int,
    looks: Looks,
    stage: int | None,
    tasks: int,
) -> TaskResult:
    scores, facts = reference.scores.get(task.name, {}), reference.facts.get(task.name, {})
    task = replace(task, baseline_fault=reference.fault(task.name))
    if task.fault is not None:
        return task
    ours = task.table()
    if not any(problem in scores for problem in ours):
        return replace(
            task,
            notes=[*task.notes, f"the baseline {reference.name} has no samples of these problems"],
        )
    look = looks.number(task.facts, facts, (len(task.graded), reference.graded(task.name)))
    greedy = task.setting.generation.temperature == 0
    comparison = compare(
        ours,
        scores,
        margin=margin,
        seed=seed,
        greedy=greedy,
        look=look,
        stage=stage,
        tasks=tasks,
    )
    notes = list(task.notes)
    if changed := reference.changed_facts(task.name, task.facts):
        notes.append(
            f"the baseline was run with another {', '.join(changed)}: the two runs are not "
            "directly comparable"
        )
    return replace(
        task, comparison=comparison, notes=notes, group_differences=_by_group(task, scores, seed)
    )


def _by_group(
    task: TaskResult, scores: dict[str, list[float]], seed: int
) -> dict[str, dict[str, float]]:
    """Per group: the baseline's accuracy and the difference with its 95 % interval."""
    ours = task.table()
    members: dict[str, list[str]] = {}
    groups = {sample.problem.id: sample.problem.group for sample in task.graded}
    for problem, group in groups.items():
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


@dataclass(frozen=True)
class ComparedRun:
    """One run: its metrics by task, comparisons with the baseline for the tasks of both, and
    notes."""

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
class RunComparison:
    """Several runs, the baseline first. Verdicts are corrected over all comparisons (Holm)."""

    runs: list[ComparedRun]
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


def compare_runs(folders: list[Path], *, margin: float, seed: int = 0) -> RunComparison:
    """Compare the --out folders of finished evaluations, the baseline's first. Raises
    QuantkitError where a folder holds no results."""
    if len(folders) < 2:
        raise QuantkitError(
            "one run cannot be compared", "give the baseline's folder first, then others"
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
            comparison, messages = _compare_run(run, reference, task, margin, seed)
            notes[name] += messages
            if comparison is not None:
                found[f"{name}\n{task}"] = comparison
    verdicts = holm_corrected(found)
    runs = []
    for name, folder, run in zip(names, folders, read):
        tasks = {task: _figures(run, task) for task in run.scores}
        own = {
            task: verdicts[f"{name}\n{task}"]
            for task in run.scores
            if f"{name}\n{task}" in verdicts
        }
        runs.append(ComparedRun(name, str(folder), tasks, own, notes[name]))
    return RunComparison(runs, margin)


def _read(folder: Path) -> Baseline:
    run = read_baseline(str(folder))
    if run is None:
        raise QuantkitError(
            f"{folder} holds no results", "give the --out folders of finished evaluations"
        )
    return run


def _names(folders: list[Path], models: list[str]) -> list[str]:
    """Model names, with the folder where two runs have the same model."""
    return [
        name if models.count(name) == 1 else f"{name} ({folder})"
        for folder, name in zip(folders, models)
    ]


def _compare_run(
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
    changed = reference.changed_facts(task, facts)
    return comparison, [
        f"{task}: run with another {', '.join(changed)}; not directly comparable"
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


def write_page(out: Path, table: RunComparison) -> None:
    """Write comparison.html and comparison.json to `out`."""
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
        drawn[task] = {"accuracy": accuracy_plot(rows)}
        compared = [
            (_label(run.name), run.comparisons[task])
            for run in table.runs
            if task in run.comparisons
        ]
        if compared:
            drawn[task]["differences"] = differences_plot(compared)
    write_atomic(out / "comparison.html", render("comparison.html.j2", table=table, plots=drawn))
    write_atomic(out / "comparison.json", json.dumps(table.to_json(), indent=1) + "\n")


def _label(name: str) -> str:
    """The name, shortened to fit a plot's axis."""
    return name if len(name) <= 40 else f"{name[:18]}...{name[-19:]}"
