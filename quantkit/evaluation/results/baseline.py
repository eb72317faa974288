"""Comparison with a baseline: of one run, task by task, and of several finished runs with the
first of them. Verdicts are corrected for the number of comparisons (Holm)."""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from quantkit.common.atomic_write import make_folder, write_atomic
from quantkit.common.errors import QuantkitError
from quantkit.common.result import JsonObject
from quantkit.evaluation.results.folder import Looks
from quantkit.evaluation.results.pages import ACCURACY, DIFFERENCE, bars_plot, render
from quantkit.evaluation.results.stored import read_results, read_samples
from quantkit.evaluation.results.task_results import (
    MAX_ERROR_SHARE,
    EvalResults,
    grouped,
    reply_tokens,
)
from quantkit.evaluation.statistics.comparison import (
    Comparison,
    check_margin,
    compare,
    holm_corrected,
)
from quantkit.evaluation.statistics.estimates import Table, figures
from quantkit.evaluation.tasks.definitions import EXCLUDED

Rows = dict[str, list[JsonObject]]
"""Samples by problem."""


@dataclass(frozen=True)
class Baseline:
    """A run as it is compared. samples: by task, failed ones included; facts: by task."""

    name: str
    samples: dict[str, Rows]
    facts: dict[str, JsonObject]

    @classmethod
    def from_results(cls, results: EvalResults) -> "Baseline":
        facts = {name: task.facts for name, task in results.tasks.items()}
        return cls.from_rows(results.model, results.samples(), facts)

    @classmethod
    def from_rows(
        cls, name: str, rows: list[JsonObject], facts: dict[str, JsonObject]
    ) -> "Baseline":
        tasks = grouped((row["task"], row) for row in rows)
        samples = {
            task: grouped((row["problem"], row) for row in ours) for task, ours in tasks.items()
        }
        return cls(name, samples, facts)

    def scores(self, task: str) -> Table:
        """Problem -> 0/1 per repeat, without failed samples."""
        return grouped(
            (problem, float(row["correct"]))
            for problem, rows in self.samples.get(task, {}).items()
            for row in rows
            if row["reason"] not in EXCLUDED
        )

    def tokens(self, task: str) -> dict[str, float]:
        """Mean length of the replies to each problem, without failed samples."""
        return {
            problem: fmean(lengths)
            for problem, rows in self.samples.get(task, {}).items()
            if (lengths := [reply_tokens(row) for row in rows if row["reason"] not in EXCLUDED])
        }

    def graded(self, task: str) -> int:
        return sum(map(len, self.scores(task).values()))

    def fault(self, task: str) -> str | None:
        """Why no verdict can use this run (too many failed samples), or None."""
        planned = sum(map(len, self.samples.get(task, {}).values()))
        lost = planned - self.graded(task)
        if lost <= MAX_ERROR_SHARE * planned:
            return None
        return f"{lost} of {planned} samples of {task} failed with the baseline {self.name}: no verdict"

    def compared(
        self, reference: "Baseline", task: str, **options: Any
    ) -> tuple[Comparison | None, list[str]]:
        """This run against another in one task, and what is to be said of the two. options: of
        `compare`."""
        facts, theirs = self.facts.get(task, {}), reference.facts.get(task, {})
        greedy = facts.get("generation", {}).get("temperature") == 0
        found = compare(self.scores(task), reference.scores(task), greedy=greedy, **options)
        if found is None:
            return None, [
                f"the baseline {reference.name} has no samples of these problems of {task}"
            ]
        changed = [
            name for name in facts.keys() - {"model", "seed"} if theirs.get(name) != facts[name]
        ]
        if not changed:
            return found, []
        names = ", ".join(sorted(changed))
        return found, [
            f"the baseline was run with another {names} of {task}: the two runs are not directly "
            "comparable"
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


def read_run(folder: Path) -> Baseline:
    """The finished run in a folder. Raises QuantkitError where there is none."""
    if (run := read_baseline(str(folder))) is None:
        raise QuantkitError(
            f"{folder} holds no results", "give the --out folder of a finished evaluation"
        )
    return run


def compare_results(
    results: EvalResults, reference: Baseline, margin: float, seed: int, stage: int | None = None
) -> EvalResults:
    """`results` with a comparison in every task that shares problems with `reference`, unless
    either lost too many samples. `seed` seeds the bounds. stage: of a sequential plan."""
    looks, ours, tasks = Looks(results.out), Baseline.from_results(results), {}
    for name, task in results.tasks.items():
        task = replace(task, baseline_fault=reference.fault(name))
        theirs, facts = reference.scores(name), reference.facts.get(name, {})
        if task.fault is None:
            counts = len(task.graded), reference.graded(name)
            shares = any(problem in theirs for problem in task.table())
            found, notes = ours.compared(
                reference,
                name,
                margin=margin,
                seed=seed,
                look=looks.number(task.facts, facts, counts) if shares else 1,
                stage=stage,
                tasks=len(results.tasks),
            )
            notes = task.notes + notes
            task = replace(
                task,
                comparison=found,
                baseline_scores=theirs,
                baseline_tokens=reference.tokens(name),
                notes=notes,
            )
        tasks[name] = task
    corrected = holm_corrected({name: one.comparison for name, one in tasks.items()})
    tasks = {name: replace(one, comparison=corrected.get(name)) for name, one in tasks.items()}
    return replace(results, tasks=tasks, baseline=reference.name)


def compare_runs(folders: list[Path], *, margin: float, seed: int = 0) -> JsonObject:
    """Compare the --out folders of finished evaluations, the baseline's first: `baseline`, `margin`,
    and `runs`, each with its `results` by task, whose `comparison` is None where there is none. Verdicts
    are corrected over all comparisons (Holm). Raises QuantkitError where a folder holds no results."""
    if len(folders) < 2:
        raise QuantkitError(
            "one run cannot be compared", "give the baseline's folder first, then others"
        )
    check_margin(margin)
    read = [read_run(folder) for folder in folders]
    models = [run.name for run in read]
    found: dict[tuple[int, str], Comparison | None] = {}
    runs: list[JsonObject] = []
    for folder, run in zip(folders, read):
        tasks = [task for task in run.samples if run.scores(task)]
        notes = list[str]()
        for task in tasks if runs else ():
            if fault := run.fault(task) or read[0].fault(task):
                notes.append(fault)
                continue
            found[len(runs), task], said = run.compared(read[0], task, margin=margin, seed=seed)
            notes += said
        # The folder where two runs have the same model.
        name = run.name if models.count(run.name) == 1 else f"{run.name} ({folder})"
        results = {task: _figures(run.scores(task), run.samples[task]) for task in tasks}
        runs.append({"run": name, "folder": str(folder), "results": results, "notes": notes})
    for (number, task), comparison in holm_corrected(found).items():
        runs[number]["results"][task]["comparison"] = comparison.to_json()
    return {"baseline": runs[0]["run"], "margin": margin, "runs": runs}


def _figures(table: Table, samples: Rows) -> JsonObject:
    rows = [row for rows in samples.values() for row in rows]
    return figures(table.values()) | {
        "repeats": max(map(len, table.values())),
        "unfinished": fmean(row["reason"] == "unfinished" for row in rows),
        "tokens": fmean(row["completion_tokens"] for row in rows),
        "comparison": None,
    }


def write_page(out: Path, table: JsonObject) -> None:
    """Write comparison.html and comparison.json, of what `compare_runs` returns, to `out`."""
    make_folder(out)
    drawn: dict[str, dict[str, str]] = {}
    for task in dict.fromkeys(task for run in table["runs"] for task in run["results"]):
        shown = [
            (run["run"], run["results"][task]) for run in table["runs"] if task in run["results"]
        ]
        rows = [(_label(run), one["accuracy"], *one["interval"], True) for run, one in shown]
        drawn[task] = {"accuracy": bars_plot(rows, ACCURACY)}
        compared = [(_label(run), found) for run, one in shown if (found := one["comparison"])]
        bars = [(name, one["difference"], one["low"], one["high"], True) for name, one in compared]
        if bars:
            drawn[task]["differences"] = bars_plot(bars, DIFFERENCE, table["margin"])
    write_atomic(out / "comparison.html", render("comparison.html.j2", table=table, plots=drawn))
    write_atomic(out / "comparison.json", json.dumps(table, indent=1) + "\n")


def _label(name: str) -> str:
    """The name, shortened to fit a plot's axis."""
    return name if len(name) <= 40 else f"{name[:18]}...{name[-19:]}"
