"""Comparison with a baseline: of one run, task by task, and of several finished runs with the
first of them. Verdicts are corrected for the number of comparisons (Holm)."""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from quantkit.common.atomic_write import write_atomic
from quantkit.common.errors import QuantkitError
from quantkit.evaluation.results.folder import Looks
from quantkit.evaluation.results.pages import accuracy_plot, differences_plot, render
from quantkit.evaluation.results.stored import read_results, read_samples
from quantkit.evaluation.results.task_results import MAX_ERROR_SHARE, EvalResults, TaskResult
from quantkit.evaluation.statistics.comparison import Comparison, compare, holm_corrected
from quantkit.evaluation.statistics.estimates import accuracy, interval, mean_bounds, problem_means
from quantkit.evaluation.tasks.definitions import EXCLUDED


@dataclass(frozen=True)
class Baseline:
    """The run that others are compared with. samples: task -> problem -> sample rows, failed ones
    included; facts: by task."""

    name: str
    samples: dict[str, dict[str, list[dict[str, Any]]]]
    facts: dict[str, dict[str, Any]]

    @classmethod
    def from_results(cls, results: EvalResults) -> "Baseline":
        facts = {name: task.facts for name, task in results.tasks.items()}
        return cls.from_rows(results.model, results.samples(), facts)

    @classmethod
    def from_rows(
        cls, name: str, rows: list[dict[str, Any]], facts: dict[str, dict[str, Any]]
    ) -> "Baseline":
        samples: dict[str, dict[str, list[dict[str, Any]]]] = {}
        for row in rows:
            samples.setdefault(row["task"], {}).setdefault(row["problem"], []).append(row)
        return cls(name, samples, facts)

    def scores(self, task: str) -> dict[str, list[float]]:
        """Problem -> 0/1 per repeat, without failed samples."""
        found = {
            problem: [float(row["correct"]) for row in rows if row["reason"] not in EXCLUDED]
            for problem, rows in self.samples.get(task, {}).items()
        }
        return {problem: row for problem, row in found.items() if row}

    def graded(self, task: str) -> int:
        return sum(map(len, self.scores(task).values()))

    def fault(self, task: str) -> str | None:
        """Why no verdict can use this baseline (too many failed samples), or None."""
        planned = sum(map(len, self.samples.get(task, {}).values()))
        lost = planned - self.graded(task)
        if lost <= MAX_ERROR_SHARE * planned:
            return None
        return f"{lost} of {planned} samples of {task} failed with the baseline {self.name}: no verdict"

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
    scores, facts = reference.scores(task.name), reference.facts.get(task.name, {})
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


def compare_runs(folders: list[Path], *, margin: float, seed: int = 0) -> dict[str, Any]:
    """Compare the --out folders of finished evaluations, the baseline's first: `baseline`, `margin`,
    and `runs`, each with its `results` by task, whose `comparison` is None where there is none. Verdicts
    are corrected over all comparisons (Holm). Raises QuantkitError where a folder holds no results."""
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
    found: dict[str, Comparison] = {}
    compared: dict[str, dict[str, Any]] = {}
    runs = []
    for name, folder, run in zip(names, folders, read):
        results, notes = {}, list[str]()
        for task in run.samples:
            if not (scores := run.scores(task)):
                continue
            results[task] = _figures(scores, run.samples[task]) | {"comparison": None}
            if run is not read[0]:
                comparison, messages = _compare_run(run, read[0], task, margin, seed)
                notes += messages
                if comparison is not None:
                    key = f"{name}\n{task}"
                    found[key], compared[key] = comparison, results[task]
        runs.append({"run": name, "folder": str(folder), "results": results, "notes": notes})
    for key, comparison in holm_corrected(found).items():
        compared[key]["comparison"] = comparison.to_json()
    return {"baseline": names[0], "margin": margin, "runs": runs}


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
        run.scores(task), reference.scores(task), margin=margin, seed=seed, greedy=greedy
    )
    if comparison is None:
        return None, [f"{task}: no problem in common with {reference.name}"]
    changed = reference.changed_facts(task, facts)
    return comparison, [
        f"{task}: run with another {', '.join(changed)}; not directly comparable"
    ] if changed else []


def _figures(
    table: dict[str, list[float]], samples: dict[str, list[dict[str, Any]]]
) -> dict[str, Any]:
    scores, rows = list(table.values()), [row for rows in samples.values() for row in rows]
    return {
        "accuracy": accuracy(scores),
        "interval": list(interval(scores)),
        "n": len(scores),
        "repeats": max(map(len, scores)),
        "unfinished": sum(row["reason"] == "unfinished" for row in rows) / len(rows),
        "tokens": sum(row["completion_tokens"] for row in rows) / len(rows),
    }


def write_page(out: Path, table: dict[str, Any]) -> None:
    """Write comparison.html and comparison.json, of what `compare_runs` returns, to `out`."""
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise QuantkitError(
            f"cannot write {out}: {error.strerror}", "choose another --out"
        ) from error
    drawn = {}
    for task in dict.fromkeys(task for run in table["runs"] for task in run["results"]):
        found = [(_label(run["run"]), run["results"].get(task)) for run in table["runs"]]
        shown = [(name, figures) for name, figures in found if figures]
        rows = [(name, one["accuracy"], *one["interval"], True) for name, one in shown]
        drawn[task] = {"accuracy": accuracy_plot(rows)}
        if compared := [(name, one["comparison"]) for name, one in shown if one["comparison"]]:
            drawn[task]["differences"] = differences_plot(compared)
    write_atomic(out / "comparison.html", render("comparison.html.j2", table=table, plots=drawn))
    write_atomic(out / "comparison.json", json.dumps(table, indent=1) + "\n")


def _label(name: str) -> str:
    """The name, shortened to fit a plot's axis."""
    return name if len(name) <= 40 else f"{name[:18]}...{name[-19:]}"
