"""eval --plan: how many problems and repeats a verdict takes, before anything is asked."""

from pathlib import Path

from quantkit.cli import console
from quantkit.cli.console import print_json


def show_plan(
    tasks: list[str],
    data_dir: Path | None,
    limit: int | None,
    protocol: str,
    baseline: str | None,
    accuracy: float | None,
    margin: float,
    json_: bool,
) -> None:
    """Print the plan of every task."""
    from quantkit.evaluation.planning import plan_evaluation

    plans = plan_evaluation(
        tasks,
        data_dir=data_dir,
        limit=limit,
        protocol=protocol,
        baseline=baseline,
        accuracy=accuracy,
        margin=margin,
    )
    if json_:
        return print_json({"margin": margin, "plans": [plan.to_json() for plan in plans]})
    for plan in plans:
        console.show_needed(plan.to_json(), margin)
