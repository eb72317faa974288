"""Serving with other engines: deploy and place."""

from pathlib import Path
from typing import Annotated, Any

import typer

from quantkit.checkpoint.hub import model_basename
from quantkit.cli import console
from quantkit.cli.console import print_json
from quantkit.cli.options import AsJson, Model
from quantkit.deploy.options import DeployOptions
from quantkit.quantization.options import names_of_engines


def deploy(
    model: Model,
    *,
    engine: Annotated[
        str,
        typer.Option(
            help="vllm, sglang, vllm-ascend or omni-infer.", autocompletion=names_of_engines
        ),
    ],
    options: DeployOptions,
    json_: AsJson = False,
) -> None:
    """Print the exact commands that serve a checkpoint with another engine, on one box or many, and
    whether it fits.

    Where it cannot be served so, nothing is printed but the reason, and the exit code is 1.
    """
    from quantkit.checkpoint.reader import open_headers
    from quantkit.deploy.formats import find_format
    from quantkit.deploy.launch import Network
    from quantkit.deploy.launch import deploy as plan
    from quantkit.planning.devices import read_devices

    format = find_format(options.format, hosts=options.hosts is not None)
    given = None if options.devices is None else read_devices(options.devices)
    checkpoint, layout = open_headers(model), options.layout
    machine: dict[str, Any] = {"boxes": options.boxes}
    if given is not None:
        machine |= {"devices": given.count, "device": given.device}
    hosts = [host.strip() for host in options.hosts.split(",")] if options.hosts else None
    planned = plan(
        checkpoint,
        engine,
        layout=layout,
        context=options.context,
        network=Network(hosts, options.nic, format.scheduled),
        memory_gib=(given.memory_bytes / 2**30 or None) if given is not None else None,
        draft_length=options.draft_length,
        name=model_basename(model),
        **machine,
    )
    if planned.refusal is not None:
        raise planned.refusal
    result = planned.as_dict()
    files = format.write(planned)
    if json_:
        print_json(result)
    else:
        result["notes"] = [*result["notes"], *([format.note] if format.note else [])]
        console.show_deployment(result, files)


def place(
    model: Model,
    counts: Annotated[
        Path,
        typer.Option(
            help="Tokens routed to each expert: expert_counts.json of quantize, or a "
            "--count-experts FILE."
        ),
    ],
    devices: Annotated[
        str,
        typer.Option(
            help="Their number, or with the memory that copies must fit in: 32, 32x64GiB."
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
        int,
        typer.Option(min=0, help="Redundant copies of busy experts per layer, over all devices."),
    ] = 0,
    held_out: Annotated[
        Path | None, typer.Option(help="Counts of another text, to judge the placement by.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="The file to write; expert-placement-ENGINE by default.")
    ] = None,
    json_: AsJson = False,
) -> None:
    """Balance routed experts, and redundant copies of the busiest, over devices; writes the file an
    engine reads."""
    from quantkit.planning.devices import read_devices
    from quantkit.planning.expert_placement import place as run_place

    found = read_devices(devices)
    placed = run_place(
        model,
        counts,
        found if found.memory_bytes else found.count,
        engine=engine,
        redundant=redundant,
        held_out=held_out,
        out=out,
    )
    if json_:
        return console.print_json(placed.to_json())
    console.show(placed)
