"""Making checkpoints: quantize, plan, convert."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from quantkit.cli import bars, console
from quantkit.cli.console import print_json
from quantkit.cli.options import (
    AsJson,
    Bits,
    Cache,
    Device,
    Dp,
    DraftHeld,
    EngineName,
    FormatName,
    GroupSize,
    Keep,
    MaybeScheme,
    Model,
    Preset,
    Prune,
    ReadWeight,
    Sensed,
    Size,
    format_names,
)
from quantkit.cli.stopping import stoppable

if TYPE_CHECKING:
    from quantkit.quantization.mixed_precision import Mixture


def quantize(
    model: Model,
    scheme: MaybeScheme = None,
    out_dir: Annotated[
        Path | None, typer.Option("--out", help="Output directory; MODEL-SCHEME otherwise.")
    ] = None,
    format_: FormatName = "auto",
    engine: EngineName = None,
    keep: Keep = None,
    preset: Preset = None,
    bits: Bits = None,
    size: Size = None,
    read_weight: ReadWeight = 0.0,
    sensitivities: Sensed = None,
    recipe: Annotated[
        str | None, typer.Option(help="A YAML file; the scheme's own recipe otherwise.")
    ] = None,
    calibration: Annotated[
        str | None,
        typer.Option(
            help="A .txt, .jsonl, .json, .csv or .parquet file, or a `datasets` id; quantkit's own "
            "text otherwise."
        ),
    ] = None,
    samples: Annotated[int | None, typer.Option(min=1, help="Calibration sequences.")] = None,
    seq_len: Annotated[
        int | None, typer.Option(min=8, help="Tokens of a calibration sequence.")
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option(help="By which calibration documents are drawn; the recipe's otherwise."),
    ] = None,
    group_size: GroupSize = None,
    prune: Prune = None,
    device: Device = "auto",
    memory: Annotated[
        str | None,
        typer.Option(
            help="Host memory to keep under, such as 16GiB; refused at the start if it cannot."
        ),
    ] = None,
    overwrite: Annotated[
        bool,
        typer.Option(
            help="Replace the output directory, if it holds nothing but what quantkit wrote."
        ),
    ] = False,
    json_: AsJson = False,
) -> None:
    """Quantize a checkpoint. A run that was stopped goes on when the same command is given
    again."""
    from quantkit import api
    from quantkit.quantization.mixed_precision import read_mixture

    mixture = read_mixture(keep=keep, preset=preset, bits=bits, size=size, read_weight=read_weight)
    _check_named(scheme, recipe, mixture)
    with stoppable(), bars.bytes_bar() as bar:
        report = api.quantize(
            model,
            out_dir,
            scheme,
            format=format_,
            engine=engine,
            mixture=mixture,
            sensitivities=sensitivities,
            recipe=recipe,
            calibration=calibration,
            samples=samples,
            seq_len=seq_len,
            seed=seed,
            group_size=group_size,
            prune=prune,
            device=device,
            memory=memory,
            overwrite=overwrite,
            on_event=bars.listener(bar, "quantizing"),
        )
    if os.environ.get("RANK", "0") != "0":
        return
    if report.done_already:
        console.tell(f"done already: {report.out}")
    if json_:
        return print_json(report.to_json())
    console.show(report)


def _check_named(scheme: str | None, recipe: str | None, mixture: "Mixture") -> None:
    """Raises BadParameter where nothing says on which grid linears are to be."""
    if scheme is None and recipe is None and not mixture.words():
        raise typer.BadParameter(
            "give one, or --recipe, --preset, --bits or --size", param_hint="--scheme"
        )


def plan(
    model: Model,
    scheme: MaybeScheme = None,
    devices: Annotated[
        str | None,
        typer.Option(
            help="8x64GiB, as without, 8xH100, or 8x910B1 for predicted decoding times as well; 8 "
            "is of 64 GiB each."
        ),
    ] = None,
    format_: FormatName = "auto",
    engine: EngineName = None,
    keep: Keep = None,
    preset: Preset = None,
    bits: Bits = None,
    size: Size = None,
    read_weight: ReadWeight = 0.0,
    sensitivities: Sensed = None,
    recipe: Annotated[str | None, typer.Option(help="As for quantize.")] = None,
    samples: Annotated[int | None, typer.Option(min=1, help="Calibration sequences.")] = None,
    seq_len: Annotated[
        int | None, typer.Option(min=8, help="Tokens of a calibration sequence.")
    ] = None,
    context: Annotated[
        int, typer.Option(min=1, help="Tokens of the longest request to serve.")
    ] = 4096,
    group_size: GroupSize = None,
    redundant: Annotated[
        int, typer.Option(min=0, help="Copies of routed experts in a layer, as for place.")
    ] = 0,
    cache: Cache = None,
    dp: Dp = 1,
    draft: DraftHeld = None,
    layout: Annotated[
        str | None,
        typer.Option(
            help="A layout of --engine, such as four-boxes, as for deploy; --devices are of one "
            "machine then."
        ),
    ] = None,
    prune: Prune = None,
    json_: AsJson = False,
) -> None:
    """Memory, disk, time and fit of a quantization, from config.json and headers alone; downloads
    no weight of a hub model."""
    from quantkit import api
    from quantkit.quantization.mixed_precision import read_mixture

    mixture = read_mixture(keep=keep, preset=preset, bits=bits, size=size, read_weight=read_weight)
    _check_named(scheme, recipe, mixture)
    about = api.plan(
        model,
        scheme,
        format=format_,
        engine=engine,
        mixture=mixture,
        sensitivities=sensitivities,
        recipe=recipe,
        devices=devices,
        samples=samples,
        seq_len=seq_len,
        group_size=group_size,
        prune=prune,
        context=context,
        redundant=redundant,
        cache=cache,
        dp=dp,
        draft=draft,
        layout=layout,
    )
    if json_:
        return print_json(about.to_json())
    console.show(about)
    if about.cost_model is not None:
        console.show_prediction(about.cost_model)
        console.show_published(about.cost_model["published"])
    for rate in about.layout.decoding if about.layout else ():
        console.show_decoding(rate)


def convert(
    source: Annotated[str, typer.Argument(metavar="SRC", help="A model, quantized or not.")],
    target: Annotated[Path, typer.Argument(metavar="DST", help="Directory to write.")],
    format_: Annotated[
        str | None,
        typer.Option(
            "--format",
            help="awq, compressed-tensors, modelopt or modelslim.",
            autocompletion=format_names,
        ),
    ] = None,
    dtype: Annotated[
        str | None, typer.Option(help="bf16, fp16 or fp32 (or bfloat16 and so on): plain weights.")
    ] = None,
    overwrite: Annotated[
        bool, typer.Option(help="Replace DST, if it holds nothing but what quantkit wrote.")
    ] = False,
    json_: AsJson = False,
) -> None:
    """Convert between formats without recalibration, or to plain weights; says what was lost.
    Resumes as quantize does."""
    from quantkit import api

    if (format_ is None) == (dtype is None):
        raise typer.BadParameter(
            "give this, or --dtype bf16 for plain weights, and not both", param_hint="--format"
        )
    with stoppable(), bars.bytes_bar() as bar:
        listen = bars.listener(bar, "converting")
        report = api.convert(
            source, target, format=format_, dtype=dtype, overwrite=overwrite, on_event=listen
        )
    if report.done_already:
        console.tell(f"done already: {report.out}")
    if json_:
        return print_json(report.to_json())
    console.show(report)
