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
from quantkit.evaluation.results.pages import render
from quantkit.evaluation.results.task_results import EvalResults, TaskResult, grouped
from quantkit.evaluation.statistics.estimates import pass_at_k

_LONGEST_NAME = 60  # characters; at most 240 bytes of the 255 that a name may have


def write_reports(out: Path, results: EvalResults) -> None:
    # evalscope's name of the folder; a server may give a name that is no name of a folder.
    name = re.sub(r"[\x00-\x1f/]", "__", results.model)[:_LONGEST_NAME]
    folder = out / "reports" / (name if name.strip(".") else "model")
    make_folder(folder)
    for name, task in results.tasks.items():
        text = json.dumps(report(results.model, task), indent=4, ensure_ascii=False)
        write_atomic(folder / f"{name.replace('-', '_')}.json", text + "\n")


def report(model: str, task: TaskResult) -> dict[str, Any]:
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
    found: dict[str, Any] = json.loads(page)
    return found


def _subset(name: str, points: float, num: int) -> dict[str, Any]:
    return {"name": name, "points": points, "num": num, "score": points / num}
