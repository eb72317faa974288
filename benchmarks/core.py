"""What benchmarks share: the command line, what is said of a run, and measured tables as data.

Every run prints its machine, versions, commit and command first, and each figure with its spread;
with `--out` a report has the same, as JSON.

benchmarks/results/*.json has one file a table: `title`, `machine`, `commit`, `date` (of the
commit), `command`, `columns` (name, and unit where there is one), `rows`, and `notes`: what was run
where. `commit` and `command` are null where there is none. Numbers are shown as they are written,
to the last zero.
"""

import argparse
import json
import shlex
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from decimal import Decimal
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
PACKAGES = ("torch", "triton", "torch-npu", "transformers", "vllm", "llmcompressor", "auto-round")
"""Whose versions are reported, of those that are installed."""

Cell = str | int | Decimal | None
Report = dict[str, Any]
Measure = Callable[[argparse.Namespace], Report]


def numbers(text: str) -> list[int]:
    """The value of an option that takes several: 1,8,32."""
    return [int(one) for one in text.split(",") if one]


def words(text: str) -> list[str]:
    """The same of names; an empty word for none."""
    return [one for one in text.split(",") if one]


def parser(description: str | None) -> argparse.ArgumentParser:
    """description: the benchmark's own docstring, shown as it is by --help."""
    return argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )


def about(device: str = "cpu") -> Report:
    """Machine, versions, commit and command of this run. device: cpu, cuda or npu."""
    from quantkit.common.devices import describe_hardware

    versions = {"python": sys.version.partition(" ")[0]}
    for name in PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    git = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    try:
        found = subprocess.run(git, capture_output=True, text=True, check=False)
        commit = found.stdout.strip() or None
    except FileNotFoundError:
        commit = None
    return {
        "machine": describe_hardware(device),
        "versions": versions,
        "commit": commit,
        "command": shlex.join(sys.argv),
    }


def print_about(facts: Report) -> None:
    print("\n".join(f"{key}: {value}" for key, value in facts.items()), flush=True)


@dataclass(frozen=True)
class Spread:
    """Of repeated measurements of one thing, in one unit."""

    median: float
    least: float
    most: float
    runs: int

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        return cls(statistics.median(values), min(values), max(values), len(values))

    def times(self, factor: float) -> "Spread":
        """In another unit."""
        return Spread(self.median * factor, self.least * factor, self.most * factor, self.runs)

    def __repr__(self) -> str:
        return f"{self.median:.4g} ({self.least:.4g} to {self.most:.4g}, {self.runs} runs)"


def measured(run: Measure, options: argparse.ArgumentParser, device: str | None = None) -> None:
    """Run with the options given, and write the report where `--out` says so. device: of `about`;
    by default the one that `--device` names."""
    options.add_argument("--out", type=Path)
    given = options.parse_args()
    facts = about(device or getattr(given, "device", "cpu"))
    print_about(facts)
    report = facts | run(given)
    if given.out:
        given.out.write_text(json.dumps(report, indent=1, default=vars))


@dataclass(frozen=True)
class Measured:
    """One table. `columns`: unit by name, in order. A cell that is None was not measured."""

    title: str
    machine: str
    commit: str | None
    date: str
    command: str | None
    columns: dict[str, str]
    rows: tuple[tuple[Cell, ...], ...]
    notes: tuple[str, ...]

    def position(self, column: str) -> int:
        """Index of a column. Raises ValueError listing those there are."""
        if column not in self.columns:
            raise ValueError(
                f"{self.title}: no column {column!r}; it has {', '.join(self.columns)}"
            )
        return list(self.columns).index(column)

    def heading(self, column: str) -> str:
        """A column's name and unit."""
        return ", ".join(filter(None, (column, self.columns[column])))

    def value(self, column: str, **where: str | int) -> Cell:
        """The one cell of `column` in the row whose other columns have these values. Raises
        ValueError where there is not exactly one."""
        found = [
            row
            for row in self.rows
            if all(row[self.position(name)] == value for name, value in where.items())
        ]
        if len(found) != 1:
            raise ValueError(f"{self.title}: {len(found)} rows have {where}")
        return found[0][self.position(column)]


@cache
def read(name: str) -> Measured:
    """The table of results/NAME.json. Raises ValueError naming the file where there is none, a key
    is missing or unknown, or a row has another length."""
    path = RESULTS / f"{name}.json"
    if not path.exists():
        raise ValueError(f"{path} is not there")
    held = json.loads(path.read_text(), parse_float=Decimal)
    if set(held) != set(Measured.__dataclass_fields__):
        raise ValueError(
            f"{path}: keys are {', '.join(held)}; they must be "
            f"{', '.join(Measured.__dataclass_fields__)}"
        )
    columns = {column["name"]: column.get("unit", "") for column in held["columns"]}
    short = next((row for row in held["rows"] if len(row) != len(held["columns"])), None)
    if short is not None or len(columns) != len(held["columns"]):
        raise ValueError(f"{path}: {short or 'a column name'} does not fit the columns")
    return Measured(
        **{
            **held,
            "columns": columns,
            "rows": tuple(map(tuple, held["rows"])),
            "notes": tuple(held["notes"]),
        }
    )


def write(name: str, table: Report) -> None:
    """results/NAME.json with a line for each column, row and note."""
    text = json.dumps({key: value for key, value in table.items() if key not in _LISTS}, indent=1)
    text = text[:-2]
    for key in _LISTS:
        listed = ",\n".join(f"  {json.dumps(entry)}" for entry in table[key])
        text += f',\n "{key}": [\n{listed}\n ]' if listed else f',\n "{key}": []'
    (RESULTS / f"{name}.json").write_text(text + "\n}\n")


_LISTS = ("columns", "rows", "notes")
