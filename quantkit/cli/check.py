"""Checkpoints that somebody else wrote: check says what is wrong with one."""

from pathlib import Path
from typing import Annotated, Any

import typer

from quantkit.checkpoint.hub import find_local
from quantkit.cli import bars, console
from quantkit.cli.options import AsJson, Model, names_of_engines


def check(
    model: Model,
    source: Annotated[
        str | None,
        typer.Option(help="The model it was made from: compares with it what can be compared."),
    ] = None,
    engine: Annotated[
        str | None,
        typer.Option(
            help="Also what keeps vllm, sglang, vllm-ascend, omni-infer or chitu from loading it.",
            autocompletion=names_of_engines,
        ),
    ] = None,
    depth: Annotated[
        str,
        typer.Option(
            help="headers, tensors or behaviour. Without: tensors, of a hub model headers, with "
            "--text behaviour."
        ),
    ] = "auto",
    text: Annotated[
        Path | None,
        typer.Option(
            help="What both models compute, .txt or .jsonl; quantkit's own with --depth behaviour."
        ),
    ] = None,
    report: Annotated[Path | None, typer.Option(help="Write the findings as an HTML page.")] = None,
    repair: Annotated[
        Path | None,
        typer.Option(
            metavar="OUT",
            help="Write a copy in which what has one cure is cured; the rest is the same to the "
            "bit.",
        ),
    ] = None,
    json_: AsJson = False,
) -> None:
    """What is wrong with a checkpoint: files, names, codes, scales, MTP layer, tokenizer. Exits 0
    if good, 1 if doubtful, 2 if bad."""
    from quantkit.common.atomic_write import check_writable, make_folder
    from quantkit.diagnosis.diagnose import DEPTHS, diagnose
    from quantkit.diagnosis.findings import write_report
    from quantkit.diagnosis.repair import check_new
    from quantkit.diagnosis.repair import repair as write_repaired

    if depth not in ("auto", *DEPTHS):
        raise typer.BadParameter(f"{depth!r} is none of {', '.join(DEPTHS)}", param_hint="--depth")
    if text is not None and depth not in ("auto", "behaviour"):
        raise typer.BadParameter("it is computed with --depth behaviour alone", param_hint="--text")
    if repair is not None:
        check_new(repair)
    if report is not None:
        make_folder(report.parent)
        check_writable(report, "--report")
    by_itself = (
        "behaviour" if text is not None else "headers" if find_local(model) is None else "tensors"
    )
    chosen: Any = by_itself if depth == "auto" else depth
    with bars.bytes_bar() as bar:
        row = bar.add_task("tensors", total=None, note="", visible=False)

        def show(done: int, total: int) -> None:
            bar.update(row, completed=done, total=total, visible=True)

        diagnosis = diagnose(
            model,
            source=source,
            engine=engine,
            depth=chosen,
            text=text,
            notify=console.tell,
            on_bytes=show,
        )
    about = diagnosis.to_json()
    if not json_:
        console.show_diagnosis(model, about)
    if repair is not None:
        about |= {
            "repaired": {
                "out": str(repair),
                "changes": write_repaired(diagnosis, repair, source, engine),
            }
        }
    if report is not None:
        write_report(report, model, about)
    if json_:
        console.print_json(about)
    else:
        for change in about.get("repaired", {}).get("changes", []):
            console.tell(f"repaired: {change}")
    raise typer.Exit(diagnosis.findings.exit_code)
