"""The playground: one model or two in the browser."""

from typing import Annotated

import typer

from quantkit.checkpoint.hub import find_model
from quantkit.cli import console
from quantkit.cli.console import err
from quantkit.cli.options import Backend, Device, Model, Port


def playground(
    model: Model,
    other: Annotated[
        str | None, typer.Argument(metavar="OTHER", help="A second model, such as MODEL quantized.")
    ] = None,
    port: Port = 8001,
    context: Annotated[
        int, typer.Option(min=16, help="Tokens of a prompt and its answer, at most.")
    ] = 4096,
    device: Device = "auto",
    backend: Backend = "auto",
) -> None:
    """Ask in the browser: answers side by side, tokens coloured by the divergence, experts that
    changed."""
    from quantkit.common.bind import bind
    from quantkit.playground.app import HOST, serve
    from quantkit.playground.play import Playground

    models = [(name, find_model(name)) for name in (model, other) if name is not None]
    with bind(HOST, port) as sockets:
        with console.status(f"loading {' and '.join(name for name, _ in models)}"):
            opened = Playground.open(models, device=device, backend=backend, context=context)
        err.print(f"the playground is on http://{HOST}:{port}/ (Ctrl-C ends it)", soft_wrap=True)
        serve(opened, port, sockets)
