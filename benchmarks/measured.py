"""Measured tables as data: benchmarks/results/*.json, one file a table.

A file holds `title`, `machine`, `commit`, `date` (of the commit), `command`, `columns` (name, and
unit where there is one), `rows`, and `notes`: what was run where. `commit` and `command` are null
where there is none. Numbers are shown as they are written, to the last zero.
"""

import json
from dataclasses import dataclass
from decimal import Decimal
from functools import cache
from pathlib import Path

RESULTS = Path(__file__).parent / "results"
Cell = str | int | Decimal | None


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
        """What stands above a column: its name and unit."""
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
