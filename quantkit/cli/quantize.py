"""Making checkpoints: quantize, plan, convert."""

import os
from pathlib import Path
from typing import Annotated, Any

import typer

from quantkit.cli import bars, console
from quantkit.cli.command import stoppable
from quantkit.cli.console import print_json
from quantkit.cli.options import AsJson, MaybeScheme, Model
from quantkit.planning.options import PlanOptions
from quantkit.quantization.options import QuantizeOptions, format_names


def quantize(
    model: Model,
    *,
    scheme: MaybeScheme = None,
    out: Annotated[
        Path | None, typer.Option(help="Output directory; MODEL-SCHEME by default.")
    ] = None,
    options: QuantizeOptions,
    json_: AsJson = False,
) -> None:
    """Quantize a checkpoint. A run that was stopped resumes when the same command is given
    again."""
    from quantkit import api

    with stoppable(), bars.bytes_bar() as bar:
        listen = bars.listener(bar, "quantizing")
        report = api.quantize(model, out, scheme, options=options, on_event=listen)
    if os.environ.get("RANK", "0") == "0":
        _show_report(report, json_)


def _show_report(report: Any, json_: bool) -> None:
    if report.done_already:
        console.notify(f"done already: {report.out}")
    if json_:
        return print_json(report.to_json())
    console.show(report)


def plan(
    model: Model, *, scheme: MaybeScheme = None, options: PlanOptions, json_: AsJson = False
) -> None:
    """Memory, disk, time and fit of a quantization, from config.json and headers alone; downloads
    no weight of a hub model."""
    from quantkit import api

    about = api.plan(model, scheme, options=options)
    if json_:
        return print_json(about.to_json())
    console.show(about)


def convert(
    source: Annotated[str, typer.Argument(metavar="SRC", help="A model, quantized or not.")],
    target: Annotated[Path, typer.Argument(metavar="DST", help="Directory to write.")],
    *,
    format_: Annotated[
        str | None,
        typer.Option(
            "--format",
            help="awq, compressed-tensors, modelopt or modelslim.",
            autocompletion=format_names,
        ),
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(help="bf16, fp16 or fp32 (or bfloat16 and so on): unquantized weights."),
    ] = None,
    overwrite: Annotated[
        bool, typer.Option(help="Replace DST if it holds nothing but what quantkit wrote.")
    ] = False,
    json_: AsJson = False,
) -> None:
    """Convert between formats without recalibration, or to unquantized weights; reports every
    difference. Resumes as quantize does."""
    from quantkit import api

    if (format_ is None) == (dtype is None):
        raise typer.BadParameter(
            "give one, or --dtype bf16 for unquantized weights"
            + (", not both" if format_ is not None else ""),
            param_hint="--format",
        )
    with stoppable(), bars.bytes_bar() as bar:
        listen = bars.listener(bar, "converting")
        report = api.convert(
            source, target, format=format_, dtype=dtype, overwrite=overwrite, on_event=listen
        )
    _show_report(report, json_)
