"""Progress on stderr with an estimate of the time left: rows in a terminal, otherwise a line now
and then."""

import sys
from collections.abc import Callable, Hashable
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)
from rich.table import Column
from rich.text import Text

from quantkit.cli.console import err, notify
from quantkit.common.progress import Event, Note, ProgressLine, TimeLeft
from quantkit.common.result import escape_text
from quantkit.common.sizes import format_duration


class _LeftColumn(ProgressColumn):
    """The estimate of `TimeLeft`."""

    def render(self, task: Task) -> Text:
        seconds = task.fields["left"].seconds
        return Text(
            "" if task.finished else "" if seconds is None else f"{format_duration(seconds)} left",
            style="progress.remaining",
        )


class Bars(Progress):
    """Rows of progress. The display starts with the first row: a refused run shows nothing. Without
    a terminal they are lines, for long work only."""

    def __init__(self, *columns: ProgressColumn, console: Console) -> None:
        super().__init__(*columns, console=console)
        self._lines: dict[TaskID, ProgressLine] = {}

    def __enter__(self) -> "Bars":
        return self

    def row(self, text: str, total: float | None, expected: float | None = None) -> TaskID:
        """expected: total seconds, if known."""
        if self.console.is_terminal:
            self.start()
        task = self.add_task(text, total=total, note="", left=TimeLeft(expected))
        if not self.console.is_terminal:
            self._lines[task] = ProgressLine(
                escape_text(text), expected=expected, stream=sys.stderr
            )
        return task

    def put(
        self,
        row: TaskID,
        done: float,
        share: float,
        note: str = "",
        *,
        text: str | None = None,
        found: bool = False,
    ) -> None:
        """share: of the work, 0 to 1, from which the time left is estimated; found: this part was
        done by an earlier run."""
        if row in self._lines:
            self._lines[row].show(share, escape_text(note), found=found)
            if share >= 1:
                self._lines.pop(row).__exit__(None, None, None)
            return
        self._tasks[row].fields["left"].at(share, found=found)
        self.update(row, completed=done, note=note, description=text)

    def stop(self) -> None:
        for meter in self._lines.values():
            meter.__exit__(None, None, None)
        self._lines.clear()
        if self.live.is_started:
            super().stop()


def samples_bar() -> Bars:
    """Progress over counted things, on stderr."""
    return _bar(MofNCompleteColumn())


def bytes_bar() -> Bars:
    """Progress over bytes, on stderr."""
    return _bar(DownloadColumn())


class _NoteColumn(ProgressColumn):
    """One line, cut where the terminal ends; it gives way to the other columns."""

    def __init__(self) -> None:
        super().__init__(Column(no_wrap=False))

    def render(self, task: Task) -> Text:
        return Text(escape_text(task.fields["note"]), no_wrap=True, overflow="ellipsis")


def _bar(amount: ProgressColumn) -> Bars:
    name, bar = TextColumn("{task.description}", markup=False), BarColumn(10)
    columns = [name, bar, amount, TimeElapsedColumn(), _LeftColumn()]
    for one in columns:
        one._table_column = Column(no_wrap=True)
    return Bars(*columns, _NoteColumn(), console=err)


def counts(bars: Bars) -> Callable[..., None]:
    """A function that shows counts on a `samples_bar`, one row per key."""
    rows: dict[Hashable, TaskID] = {}

    def show(
        key: Hashable,
        text: str,
        done: int,
        total: int,
        note: str = "",
        share: float | None = None,
    ) -> None:
        if key not in rows:
            rows[key] = bars.row(text, total)
        bars.put(rows[key], done, done / max(total, 1) if share is None else share, note)

    return show


def listener(bars: Bars, name: str, expected: float | None = None) -> Callable[[Any], None]:
    """A listener that shows the events of a quantization or conversion on a `bytes_bar`. expected:
    total seconds, if known."""
    row: TaskID | None = None

    def show(event: Event) -> None:
        nonlocal row
        if isinstance(event, Note):
            notify(event.text)
            return
        if row is None:
            row = bars.row(name, event.total_bytes, event.expected or expected)
        note = f"{event.memory / 2**30:.1f} GiB memory, {event.unit}, error {event.error:.1e}"
        bars.put(row, event.done_bytes, event.share, note, text=event.phase, found=event.found)

    return show
