"""One address in front of servers for prefill and servers for decode: proxy."""

from typing import Annotated

import typer

from quantkit.cli.console import err
from quantkit.cli.options import Host, Port
from quantkit.common.errors import QuantkitError


def proxy(
    prefill: Annotated[
        str,
        typer.Option(
            help="Addresses of the servers for prefill, comma-separated: http://10.0.0.1:8100."
        ),
    ],
    decode: Annotated[
        str, typer.Option(help="Addresses of the servers for decode, comma-separated.")
    ],
    host: Host = "127.0.0.1",
    port: Port = 8000,
) -> None:
    """Send requests to a server for prefill, then to one for decode that takes the cache over:
    vLLM's with a KV connector."""
    import uvicorn

    from quantkit.common.bind import bind, url_address
    from quantkit.deploy.proxy import proxy as in_front_of
    from quantkit.deploy.relay import is_address
    from quantkit.executor.server.serve import HttpServer

    servers = [[url.strip() for url in urls.split(",")] for urls in (prefill, decode)]
    for url in (url for urls in servers for url in urls):
        if not is_address(url):
            raise QuantkitError(
                f"{url!r} is no address of a server", "give one such as http://10.0.0.1:8100"
            )
        if url.rstrip("/").endswith("/v1"):
            raise QuantkitError(
                f"{url} is where the API of a server begins",
                f"give {url.rstrip('/').removesuffix('/v1')}",
            )
    with bind(host, port) as sockets:
        first, second = map(len, servers)
        err.print(
            f"in front of {first} for prefill and {second} for decode on "
            f"http://{url_address(host, port)}/v1",
            soft_wrap=True,
        )
        HttpServer(uvicorn.Config(in_front_of(*servers), log_level="warning")).run(sockets)
