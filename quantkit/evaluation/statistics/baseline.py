"""What a candidate is compared with: another run's samples, from memory or from its output
folder."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from quantkit.common.errors import QuantkitError
from quantkit.evaluation.results.figures import MOST_ERRORS, EvalResults
from quantkit.evaluation.results.store import read_samples
from quantkit.evaluation.tasks.problems import EXCLUDED


@dataclass(frozen=True)
class Baseline:
    """`scores`: task -> problem -> 0/1 per repeat; `samples`: task -> problem -> sample rows, for
    reading side by side."""

    name: str
    scores: dict[str, dict[str, list[float]]]
    samples: dict[str, dict[str, list[dict[str, Any]]]]
    facts: dict[str, dict[str, Any]]
    planned: dict[str, int] = field(
        default_factory=dict
    )  # samples by task, those that failed among them

    @classmethod
    def of(cls, results: EvalResults) -> "Baseline":
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
        """Samples with a grade."""
        return sum(map(len, self.scores.get(task, {}).values()))

    def fault(self, task: str) -> str | None:
        """Why no verdict can rest on it; None where one can."""
        lost = self.planned.get(task, 0) - self.graded(task)
        if lost <= MOST_ERRORS * self.planned.get(task, 0):
            return None
        return (
            f"{lost} of {self.planned[task]} samples of {task} failed with the baseline "
            f"{self.name}: no verdict"
        )

    def differs(self, task: str, facts: dict[str, Any]) -> list[str]:
        """Names of the facts besides model and seed that are not the same."""
        theirs = self.facts.get(task, {})
        return [
            name
            for name in facts
            if name not in ("model", "seed") and theirs.get(name) != facts[name]
        ]


def read_baseline(given: str) -> Baseline | None:
    """The run in folder (or results.json) `given`; None where it is a model to be run instead."""
    path = Path(given)
    folder = path.parent if path.name == "results.json" else path
    results, samples = folder / "results.json", folder / "samples.jsonl"
    if not results.is_file():
        if path.name == "results.json":
            raise QuantkitError(
                f"baseline {given} does not exist",
                "give a model, or the --out folder of an earlier run",
            )
        return None
    if not samples.is_file():
        raise QuantkitError(
            f"baseline {folder} has no samples.jsonl",
            "run it again: a comparison needs every sample",
        )
    try:
        found = json.loads(results.read_text())
        facts = {name: task.get("facts", {}) for name, task in found["results"].items()}
        return Baseline.from_rows(found["model"], read_samples(samples), facts)
    except (ValueError, KeyError, TypeError) as error:
        raise QuantkitError(
            f"baseline {folder} cannot be read ({type(error).__name__}: {error})",
            "give the --out folder of an evaluation",
        ) from error
