"""Options of `quantkit serve` beyond those of the engine."""

from dataclasses import dataclass
from pathlib import Path

from quantkit.common.errors import UsageError
from quantkit.common.options import option
from quantkit.executor.server.tools.formats import NAMES


@dataclass(frozen=True)
class ServerOptions:
    """grace_s: seconds that running requests get after SIGINT or SIGTERM."""

    host: str = option(
        "127.0.0.1", "Address to listen on; 0.0.0.0 is every address of the machine."
    )
    port: int = option(8000, "Port to listen on.", min=1, max=65535)
    api_key: str | None = option(None, "Require this key from clients.", envvar="QUANTKIT_API_KEY")
    max_queue: int = option(256, "Requests that may wait.", min=0)
    max_input: int | None = option(None, "Longest prompt, tokens.", min=1)
    max_output: int | None = option(None, "Longest answer, tokens.", min=1)
    served_name: str | None = option(None, "Name that clients use; MODEL by default.")
    tool_parser: str = option(
        "auto", f"Format of tool calls: auto (that of the chat template), {', '.join(NAMES)}."
    )
    chat_template: Path | None = option(None, "A chat template, instead of the model's own.")
    log_requests: bool = option(
        False, "Print a line on stderr for every request.", "--log-requests"
    )
    grace_s: int = 30

    def __post_init__(self) -> None:
        key = self.api_key
        if key is not None and not (
            key and key.isascii() and key.isprintable() and key == key.strip()
        ):
            raise UsageError(
                "the API key is nothing that a client can send",
                "use printable ASCII without spaces at its ends",
            )
