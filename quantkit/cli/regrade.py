"""regrade: grades of kept replies, made anew without a model or a server."""

from pathlib import Path
from typing import Annotated

import typer

from quantkit.cli import console
from quantkit.cli.evaluate import show_results
from quantkit.cli.options import AsJson


def regrade(
    out: Annotated[
        Path, typer.Argument(metavar="OUT", help="The --out folder of eval, finished or not.")
    ],
    data_dir: Annotated[
        Path | None, typer.Option(help="Folder with the tasks' data files, where it has moved.")
    ] = None,
    baseline: Annotated[
        Path | None, typer.Option(help="The --out folder of another run, to compare with.")
    ] = None,
    margin: Annotated[float, typer.Option(help="Loss that counts as lost, as a share.")] = 0.01,
    allow_code_exec: Annotated[
        bool, typer.Option(help="Run programs the model wrote, in the sandbox.")
    ] = False,
    allow_weak_sandbox: Annotated[
        bool, typer.Option(help="Run them even where only limits hold them.")
    ] = False,
    export: Annotated[
        str | None, typer.Option("--format", help="Also write the results as: evalscope.")
    ] = None,
    json_: AsJson = False,
) -> None:
    """Grade the replies kept in OUT again and write its results anew; nobody is asked."""
    from quantkit.evaluation.regrading import regrade as again
    from quantkit.evaluation.results.folder import results_folder

    with results_folder(out):
        results = again(
            out,
            data_dir=data_dir,
            baseline=baseline,
            margin=margin,
            allow_code_exec=allow_code_exec,
            allow_weak_sandbox=allow_weak_sandbox,
            export=export,
            notice=console.tell,
        )
    show_results(results.to_json(), json_)
