"""The command line: one thin function a command, a file a theme, and the only place that prints results.

Everything heavy is imported inside the command that needs it, so that `quantkit --help` answers at once. Results go to stdout
(with --json one JSON object and nothing else), progress to stderr. Exit 0 on success, 1 with one line saying what is wrong and
what to do, 2 on bad usage.
"""

import sys
from collections.abc import Callable

import typer

from quantkit.cli import evaluate, inspect, quantize, run
from quantkit.console import err
from quantkit.errors import QuantkitError

app = typer.Typer(
    help="Quantize DeepSeek-R1 class models, run them on one box, and show that accuracy held.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    epilog="Any command takes --debug for the traceback of a failure.",
)
COMMANDS: tuple[tuple[str, Callable[..., None]], ...] = (
    ("quantize", quantize.quantize),
    ("plan", quantize.plan),
    ("convert", quantize.convert),
    ("inspect", inspect.inspect),
    ("run", run.run),
    ("eval", evaluate.evaluate),
    ("ppl", evaluate.ppl),
    ("bench", evaluate.bench),
    ("serve", run.serve),
    ("kernels", inspect.kernels),
    ("deploy", run.deploy),
)
for name, command in COMMANDS:
    app.command(name)(command)


def main() -> None:
    """Entry point: faults become one line on stderr and exit code 1."""
    debug = "--debug" in sys.argv
    if debug:
        sys.argv.remove("--debug")
    try:
        app()
    except QuantkitError as error:
        if debug:
            raise
        err.print(f"[bold red]error:[/bold red] {error}", highlight=False, soft_wrap=True)
    except Exception as error:
        if debug:
            raise
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        err.print(f"[bold red]error:[/bold red] {reason}; run again with --debug for the traceback", highlight=False, soft_wrap=True)
    else:
        return
    raise SystemExit(1)
