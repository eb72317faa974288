"""compare: finished runs beside each other, without a model or a server."""

from pathlib import Path
from typing import Annotated

import typer

from quantkit.cli import console
from quantkit.cli.console import print_json
from quantkit.cli.options import AsJson, Seed


def compare(
    runs: Annotated[
        list[Path],
        typer.Argument(
            metavar="BASELINE RUN...", help="The --out folders of eval; the first is the baseline."
        ),
    ],
    margin: Annotated[float, typer.Option(help="Loss that counts as lost, as a share.")] = 0.01,
    seed: Seed = 0,
    out_dir: Annotated[
        Path | None, typer.Option("--out", help="Folder for comparison.html and comparison.json.")
    ] = None,
    json_: AsJson = False,
) -> None:
    """Compare finished evaluations, paired over the problems they share: held, lost, or cannot
    tell."""
    from quantkit.evaluation.results.baseline import compare_runs, write_page

    table = compare_runs(runs, margin=margin, seed=seed)
    if out_dir is not None:
        write_page(out_dir, table)
    if json_:
        return print_json(table.to_json())
    console.show_comparison(table.to_json())
    if out_dir is not None:
        console.tell(f"page: {out_dir}/comparison.html")
