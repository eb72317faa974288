"""What a run leaves in its folder: samples, prompts, the page, an export if one was asked for, and
results.json last."""

import json
from typing import Any

from quantkit.common.atomic_write import write_atomic
from quantkit.evaluation.results.evalscope_format import write_reports
from quantkit.evaluation.results.figures import EvalResults
from quantkit.evaluation.results.report import write_report
from quantkit.evaluation.results.store import write_samples
from quantkit.evaluation.statistics.baseline import Baseline
from quantkit.evaluation.tasks.prompts import prompt_parts


def write_results(
    results: EvalResults, reference: Baseline | None, export: str | None = None
) -> None:
    """results.out must be a folder. export: "evalscope" or None."""
    assert results.out is not None
    write_samples(results.out / "samples.jsonl", results.samples())
    write_samples(results.out / "prompts.jsonl", _prompts(results))
    write_report(results.out / "report.html", results, reference)
    if export == "evalscope":
        write_reports(results.out / "evalscope", results)
    write_atomic(results.out / "results.json", json.dumps(results.to_json(), indent=2) + "\n")


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
