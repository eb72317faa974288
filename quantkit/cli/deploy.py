"""Serving with other engines: deploy, place, proxy."""

from pathlib import Path
from typing import Annotated, Any

import typer

from quantkit.checkpoint.hub import model_basename
from quantkit.cli import console
from quantkit.cli.console import err, print_json
from quantkit.cli.options import AsJson, Host, Model, Port
from quantkit.common.errors import QuantkitError
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

    The exit code is 1 if the engine cannot load it.
    """
    from quantkit.checkpoint.remote import open_headers
    from quantkit.deploy.launch import deploy as plan
    from quantkit.engines.layouts import find_topology
    from quantkit.planning.clusters import compare_checkpoint
    from quantkit.planning.devices import read_devices

    given = None if options.devices is None else read_devices(options.devices)
    checkpoint, layout = open_headers(model), options.layout
    machine: dict[str, Any] = {"boxes": options.boxes}
    if given is not None:
        machine |= {"devices": given.count, "device": given.device}
    planned = plan(
        checkpoint,
        engine,
        layout=layout,
        context=options.context,
        hosts=[host.strip() for host in options.hosts.split(",")] if options.hosts else None,
        nic=options.nic,
        memory_gib=(given.memory_bytes / 2**30 or None) if given is not None else None,
        draft_length=options.draft_length,
        name=model_basename(model),
        **machine,
    )
    topology = find_topology(engine, name=layout, **machine)
    result = planned.as_dict() | {
        "decoding": compare_checkpoint(checkpoint, topology, planned.memory)
    }
    if json_:
        print_json(result)
    else:
        console.show_deployment(result, [launch.script() for launch in planned.launches])
    if planned.refusal is not None:
        console.print_error(planned.refusal.problem, planned.refusal.remedy, as_json=False)
        raise typer.Exit(1)


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


def proxy(
    prefill: Annotated[
        str,
        typer.Option(help="URLs of the prefill servers, comma-separated: http://10.0.0.1:8100."),
    ],
    decode: Annotated[str, typer.Option(help="URLs of the decode servers, comma-separated.")],
    host: Host = "127.0.0.1",
    port: Port = 8000,
) -> None:
    """Send each request to a prefill server, then to a decode server that takes over its cache, as
    vLLM's do with a KV connector."""
    import uvicorn

    from quantkit.common.bind import bind, url_address
    from quantkit.deploy.proxy import proxy as in_front_of
    from quantkit.deploy.relay import is_address
    from quantkit.executor.server.serve import HttpServer

    servers = [[url.strip() for url in urls.split(",")] for urls in (prefill, decode)]
    for url in (url for urls in servers for url in urls):
        if not is_address(url):
            raise QuantkitError(
                f"{url!r} is not the URL of a server", "give one such as http://10.0.0.1:8100"
            )
        if url.rstrip("/").endswith("/v1"):
            raise QuantkitError(
                f"{url} is the base of a server's API",
                f"give {url.rstrip('/').removesuffix('/v1')}",
            )
    with bind(host, port) as sockets:
        first, second = map(len, servers)
        err.print(
            f"proxy for {first} prefill and {second} decode servers on "
            f"http://{url_address(host, port)}/v1",
            soft_wrap=True,
        )
        HttpServer(uvicorn.Config(in_front_of(*servers), log_level="warning")).run(sockets)
