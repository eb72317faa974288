"""The command line: one thin function per command, and the only place that prints results.

Everything heavy is imported inside the command that needs it, so that `quantkit --help` answers at
once. Results go to stdout (with --json one JSON object and nothing else), progress to stderr. Exit
0 on success, 1 with one line saying what is wrong and what to do, 2 on bad usage, 130 and 143 where
Ctrl-C or SIGTERM ended it.
"""

import io
import os
import sys
import warnings
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer

from quantkit import __version__
from quantkit.cli import bench, deploy, evaluate, go, inspect, quantize, run
from quantkit.cli.command import Command, Stopped
from quantkit.cli.console import notify, print_error
from quantkit.cli.examples import epilog
from quantkit.cli.options import flat
from quantkit.common.errors import QuantkitError, UsageError
from quantkit.common.model_files import FOLLOW_LINKS

_UsageError: type[Exception] = typer.BadParameter.__bases__[
    0
]  # click's, or typer's own copy of it, as the version has it
_INTERRUPTED = 130

app = typer.Typer(
    help="Quantize DeepSeek-R1 class models, run them on one box, and show that accuracy held.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["--help", "-h"]},
    pretty_exceptions_enable=False,
    epilog="Any command takes --debug for the traceback of a failure, and --follow-links for a model "
    "whose files are links to another folder.",
)
COMMANDS: tuple[tuple[str, Callable[..., None]], ...] = (
    ("go", go.go),
    ("quantize", quantize.quantize),
    ("plan", quantize.plan),
    ("convert", quantize.convert),
    ("inspect", inspect.inspect),
    ("check", inspect.check),
    ("run", run.run),
    ("eval", evaluate.evaluate),
    ("ppl", evaluate.ppl),
    ("regrade", evaluate.regrade),
    ("compare", evaluate.compare),
    ("bench", bench.bench),
    ("needle", evaluate.needle),
    ("serve", run.serve),
    ("playground", run.playground),
    ("kernels", inspect.kernels),
    ("deploy", deploy.deploy),
    ("place", deploy.place),
)
for name, command in COMMANDS:
    app.command(name, cls=Command, epilog=epilog(name))(flat(command))


def _show_version(given: bool) -> None:
    if given:
        print(f"quantkit {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", is_eager=True, callback=_show_version, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    pass


def main() -> None:
    """Entry point: a fault is one line on stderr, with --json also an object on stdout, and exit
    code 1, or 2 for bad usage."""
    debug = "--debug" in sys.argv
    if debug:
        sys.argv.remove("--debug")
    if "--follow-links" in sys.argv:
        sys.argv.remove("--follow-links")
        os.environ[FOLLOW_LINKS] = "1"
    _open_streams()
    warnings.showwarning = partial(_show_warning, debug)
    try:
        code = _run(debug, "--json" in sys.argv)
        sys.stdout.flush()
    except OSError as error:  # the reader of our results closed the pipe, or the disk is full
        if debug and not isinstance(error, BrokenPipeError):
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 1
    raise SystemExit(code)


def _show_warning(debug: bool, message: object, _: object, filename: str, *__: object) -> None:
    """Show a warning of quantkit's own code. What libraries warn of, such as an overflow in a
    damaged file's values, names nothing that a user gave; --debug shows it."""
    packages = [find_spec(name) for name in ("quantkit", "quantkit_kernels")]
    folders = [Path(one.origin).parent for one in packages if one is not None and one.origin]
    if debug or any(Path(filename).is_relative_to(one) for one in folders):
        notify(f"warning: {message}")


def _open_streams() -> None:
    """Open /dev/null for a standard stream that the parent closed; otherwise the next opened file
    would get its number. Let any character be printed."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest free number, which is this one
        if getattr(sys, name) is None:
            mode = "w" if number else "r"
            setattr(sys, name, os.fdopen(number, mode, encoding="utf-8", closefd=False))
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a terminal may lack a character


def _run(debug: bool, as_json: bool) -> int:
    """Run the command; returns the exit code."""
    try:
        _check_folder()
        code = app(prog_name="quantkit", standalone_mode=False)
        if code == _INTERRUPTED:
            print_error("interrupted", "", title="", as_json=as_json)
        sys.stdout.flush()
        return code if isinstance(code, int) else 0
    except Stopped as stopped:
        print_error(*stopped.message(), title="", as_json=as_json)
        return stopped.exit_code
    except _UsageError as error:
        return _print_usage_error(error, as_json)
    except BrokenPipeError:
        raise
    except Exception as error:
        if debug:
            raise
        problem, remedy = _problem_and_remedy(error)
        print_error(problem, remedy, as_json=as_json)
        return 2 if isinstance(error, UsageError) else 1


def _check_folder() -> None:
    """Raises QuantkitError if the working directory was removed: libraries then fail with unclear
    errors."""
    try:
        os.getcwd()
    except FileNotFoundError as error:
        raise QuantkitError("the working folder was removed", "cd to one that is there") from error


def _problem_and_remedy(error: Exception) -> tuple[str, str]:
    if isinstance(error, QuantkitError):
        return error.problem, error.remedy
    if isinstance(error, OSError) and error.strerror:
        return (
            f"{error.filename or 'the output'}: {error.strerror}",
            "fix that and run the same command again; --debug shows where",
        )
    reason = f"{type(error).__name__}: {error}".splitlines()[0]
    return reason, "run again with --debug for the traceback"


def _print_usage_error(error: Any, as_json: bool) -> int:
    if len(sys.argv) == 1:
        error.show()  # the help
    else:
        problem = error.format_message().rstrip(".")
        remedy = f"see {error.ctx.command_path if error.ctx else 'quantkit'} --help"
        if "unexpected extra argument" in problem and _writes_output(error.ctx):
            remedy = f"give the output with --out, or {remedy}"
        print_error(problem, remedy, as_json=as_json)
    return int(error.exit_code)


def _writes_output(context: Any) -> bool:
    """Whether the command has --out."""
    return context is not None and any("--out" in one.opts for one in context.command.params)
