"""Spreading routed experts over devices: place."""

from pathlib import Path
from typing import Annotated

import typer

from quantkit.cli import console
from quantkit.cli.options import AsJson, Model


def place(
    model: Model,
    counts: Annotated[
        Path,
        typer.Option(
            help="What the experts were asked: expert_counts.json of quantize, or a "
            "--count-experts FILE."
        ),
    ],
    devices: Annotated[
        str,
        typer.Option(
            help="Their number, or with the memory in which copies must fit: 32, 32x64GiB."
        ),
    ],
    engine: Annotated[
        str,
        typer.Option(
            help="vllm, sglang, vllm-ascend or omni-infer.",
            autocompletion=lambda: ["vllm", "sglang", "vllm-ascend", "omni-infer"],
        ),
    ],
    redundant: Annotated[
        int, typer.Option(min=0, help="Copies of busy experts in a layer, over all devices.")
    ] = 0,
    held_out: Annotated[
        Path | None, typer.Option(help="Counts of another text, to judge the placement by.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="The file; expert-placement-ENGINE here otherwise.")
    ] = None,
    json_: AsJson = False,
) -> None:
    """Put routed experts, and copies of the busiest, on devices so that all have the same to do;
    writes the file an engine reads."""
    from quantkit.planning.devices import read_number
    from quantkit.planning.expert_placement import place as run_place

    placed = run_place(
        model,
        counts,
        read_number(devices),
        engine=engine,
        redundant=redundant,
        held_out=held_out,
        out=out,
    )
    if json_:
        return console.print_json(placed.to_json())
    console.show(placed)
