"""Export in evalscope's report schema (version 2), one JSON per task, for dashboards that read its
folders.

Layout: OUT/reports/MODEL/TASK.json. The schema has no field for an interval; those are in
results.json only.
"""

import json
import re
from pathlib import Path
from typing import Any

from quantkit.common.atomic_write import make_folder, write_atomic
from quantkit.evaluation.results.task_results import EvalResults, TaskResult
from quantkit.evaluation.statistics.estimates import pass_at_k

_LONGEST_NAME = 60  # characters; at most 240 bytes of the 255 that a name may have


def write_reports(out: Path, results: EvalResults) -> list[Path]:
    """Write every task's report; returns the files."""
    # evalscope's name of the folder; a server may give a name that is no name of a folder.
    name = re.sub(r"[\x00-\x1f/]", "__", results.model)[:_LONGEST_NAME]
    folder = out / "reports" / (name if name.strip(".") else "model")
    make_folder(folder)
    files = []
    for name, task in results.tasks.items():
        files.append(folder / f"{name.replace('-', '_')}.json")
        write_atomic(
            files[-1], json.dumps(report(results.model, task), indent=4, ensure_ascii=False) + "\n"
        )
    return files


def report(model: str, task: TaskResult) -> dict[str, Any]:
    """One task as evalscope's Report. As there, `num` counts samples and scores are rounded to
    four digits."""
    about = task.setting.task
    dataset = about.name.replace("-", "_")
    groups: dict[str, list[bool]] = {}
    for sample in task.graded:
        groups.setdefault(sample.problem.group or "default", []).append(sample.grade.correct)
    subsets = {
        name: (sum(values) / len(values), len(values)) for name, values in sorted(groups.items())
    }
    metrics = [_metric(("accuracy", "mean", {}), "quality.accuracy.ratio", "Accuracy", subsets)]
    repeats = task.setting.repeats
    if repeats > 1:
        best = pass_at_k(list(task.table().values()), repeats)
        one = {"default": (best, len(task.graded))}
        metrics.append(
            _metric(
                ("accuracy", "pass_at_k", {"k": repeats}), "quality.pass_at_k.ratio", "Pass@k", one
            )
        )
    return {
        "schema_version": 2,
        "name": f"{model}@{dataset}",
        "dataset_name": dataset,
        "dataset_pretty_name": about.title,
        "dataset_description": about.summary,
        "model_name": model,
        "metrics": metrics,
        "analysis": "N/A",
        "perf_metrics": None,
        "primary_metric_identity": metrics[0]["identity"],
        "primary_metric_unavailable_reason": None,
        "judge_summary": None,
        "execution_summary": {
            "requested": task.planned,
            "succeeded": len(task.graded),
            "errored": task.errors,
            "incomplete": task.errors > 0,
            "subsets": {},
        },
        "num": len(task.graded),
    }


def _metric(
    identity: tuple[str, str, dict[str, int]],
    semantic: str,
    label: str,
    subsets: dict[str, tuple[float, int]],
) -> dict[str, Any]:
    total = sum(count for _, count in subsets.values())
    micro = (
        round(sum(score * count for score, count in subsets.values()) / total, 4) if total else 0.0
    )
    macro = round(sum(score for score, _ in subsets.values()) / len(subsets), 4) if subsets else 0.0
    rows = [
        {
            "name": name,
            "score": round(score, 4),
            "num": count,
            "metadata": None,
            "is_aggregate": False,
        }
        for name, (score, count) in subsets.items()
    ]
    name, aggregation, dimensions = identity
    return {
        "identity": {"name": name, "aggregation": aggregation, "dimensions": dimensions},
        "legacy_name": None,
        "num": total,
        "score": micro,
        "macro_score": macro,
        "categories": [
            {
                "name": ["default"],
                "num": total,
                "score": micro,
                "macro_score": macro,
                "subsets": rows,
            }
        ],
        "semantics": {
            "semantic_id": semantic,
            "metric_name": label,
            "display_name": None,
            "kind": "quality",
            "direction": "higher_is_better",
            "raw_unit": None,
            "value_range": {"min": 0.0, "max": 1.0},
            "display_kind": "percent",
            "display_multiplier": 100.0,
            "display_unit": "%",
            "display_precision": 1,
        },
    }
