"""The command line of a benchmark: options, a run that returns what it found, and `--out` for it as
JSON."""

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

Measure = Callable[[argparse.Namespace], dict[str, Any]]


def numbers(text: str) -> list[int]:
    """The value of an option that takes several: 1,8,32."""
    return [int(one) for one in text.split(",") if one]


def parser(told: str | None) -> argparse.ArgumentParser:
    """told: the benchmark's own docstring, shown as it is by --help."""
    return argparse.ArgumentParser(
        description=told, formatter_class=argparse.RawDescriptionHelpFormatter
    )


def measured(run: Measure, options: argparse.ArgumentParser) -> None:
    """Run with the options given, and write the report where `--out` says so."""
    options.add_argument("--out", type=Path)
    given = options.parse_args()
    report = run(given)
    if given.out:
        given.out.write_text(json.dumps(report, indent=1))
