"""Checkpoints that somebody else wrote: check says what is wrong with one."""

from pathlib import Path
from typing import Annotated

import typer

from quantkit import console
from quantkit.cli.options import AsJson, Model, names_of_engines


def check(
    model: Model,
    source: Annotated[str | None, typer.Option(help="The model it was made from: compares with it what can be compared.")] = None,
    engine: Annotated[
        str | None,
        typer.Option(
            help="Also what keeps vllm, sglang, vllm-ascend, omni-infer or chitu from loading it.", autocompletion=names_of_engines
        ),
    ] = None,
    report: Annotated[Path | None, typer.Option(help="Write the findings as an HTML page.")] = None,
    json_: AsJson = False,
) -> None:
    """What is wrong with a checkpoint: files, names, quantization, MTP layer, tokenizer. Exits 0 if good, 1 if doubtful, 2 if bad."""
    from quantkit.diagnosis.diagnose import diagnose
    from quantkit.diagnosis.report import write_report

    diagnosis = diagnose(model, source=source, engine=engine, tell=console.tell)
    about = diagnosis.to_json()
    if report is not None:
        write_report(report, model, about)
    if json_:
        console.print_json(about)
    else:
        console.show_diagnosis(model, about)
    raise typer.Exit(diagnosis.findings.exit_code)
