"""What the command line shows: lines, and Rich tables of results. cli/bars.py has its progress.
Used by cli/ alone.

Values come from files, servers and models. Nothing that is printed is read as markup, and no
control character reaches the terminal:
`_Console` sees to both for all that goes through it. Style is given with `style=`, never in the
text.
"""

import json
import os
import sys
from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from quantkit.common.result import JsonObject, Result, escape_text, finite, one_line

_PIPED = 100


class _Console(Console):
    """Prints text literally. In a file or a pipe tables have 100 columns, unless COLUMNS is
    set."""

    def __init__(self, *, stderr: bool = False) -> None:
        stream = sys.stderr if stderr else sys.stdout
        narrow = (stream is not None and stream.isatty()) or "COLUMNS" in os.environ
        super().__init__(
            stderr=stderr,
            markup=False,
            emoji=False,
            highlight=False,
            width=None if narrow else _PIPED,
        )

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(escape_text(segment.text), segment.style)

    def render_str(self, text: str, **options: Any) -> Text:
        return super().render_str(escape_text(text), **options)


out = _Console()
err = _Console(stderr=True)


def print_json(value: JsonObject) -> None:
    """One object."""
    print(json.dumps(finite(value)))


def facts(title: str, rows: Iterable[tuple[str, str]], on: Console = out) -> None:
    """A table of names and values."""
    table = _table("", "")
    table.show_header = False
    for row in rows:
        table.add_row(*row)
    _show(title, table, on)


def show(result: Result) -> None:
    facts(result.heading, result.facts())


def show_on_stderr(result: Result) -> None:
    """As `show`, on stderr, next to results on stdout."""
    facts(result.heading, result.facts(), err)


def _table(*columns: str) -> Table:
    """Cells that are too wide are folded, not cut."""
    table = Table()
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def _show(title: str, table: Table, on: Console = out) -> None:
    """A title may be wider than its table."""
    on.print(title, style="italic", soft_wrap=True)
    on.print(table)


def status(text: str) -> AbstractContextManager[object]:
    """A line with a spinner while the block runs."""
    return err.status(Text(escape_text(text)))


def notify(text: str) -> None:
    """A dim line on stderr."""
    err.print(text, style="dim", soft_wrap=True)


def print_error(problem: str, remedy: str, *, title: str = "error: ", as_json: bool) -> None:
    """The problem and its remedy: a line on stderr, and with as_json an object on stdout."""
    err.print(
        Text(title, style="bold red")
        + Text(one_line(f"{problem}; {remedy}" if remedy else problem)),
        soft_wrap=True,
    )
    if as_json:
        print_json({"error": {"message": problem, "remedy": remedy}})


def show_diagnosis(model: str, about: JsonObject) -> None:
    """The verdict in one line, then what was found, most harmful first."""
    colours = {"good": "bold green", "doubtful": "bold yellow", "bad": "bold red"}
    counted = [f["severity"] for f in about["findings"]]
    summary = ", ".join(
        f"{counted.count(kind)} {kind}{'s' * (counted.count(kind) > 1)}"
        for kind in ("error", "warning", "note")
        if kind in counted
    )
    out.print(
        Text(about["verdict"], style=colours[about["verdict"]])
        + Text(f": {model}, {summary or 'nothing found'}"),
        soft_wrap=True,
    )
    if not about["findings"]:
        for line in about["checked"]:
            out.print(f"  checked: {line}", style="dim", soft_wrap=True)
    for finding in about["findings"]:
        out.print(
            f"{finding['severity']}: {finding['name']} in {finding['where']}",
            style="bold",
            soft_wrap=True,
        )
        out.print(f"  {finding['evidence']}", soft_wrap=True)
        out.print(f"  {finding['remedy']}", style="dim", soft_wrap=True)


def show_scores(results: JsonObject) -> None:
    columns = ("task", "accuracy", "± stderr", "n x repeats", "unfinished", "no answer", "tokens")
    table = _table(*columns)
    for name, task in results["results"].items():
        if not task["n"]:
            table.add_row(name, "-", "", "0")
            continue
        stderr = "-" if task["stderr"] is None else f"{100 * task['stderr']:.2f}"
        low, high = (100 * share for share in task["no_answer_interval"])
        unanswered = f"{100 * task['no_answer']:.1f} % ({low:.1f} to {high:.1f})"
        count = f"{task['n']} x {task['repeats']}"
        table.add_row(
            name,
            f"{100 * task['accuracy']:.2f} %",
            stderr,
            count,
            f"{100 * task['unfinished']:.1f} %",
            unanswered,
            f"{task['tokens']['mean']:.0f}",
        )
    _show(f"{results['model']}, {results['hardware']}", table)
    for name, task in results["results"].items():
        if task.get("comparison"):
            out.print(
                f"{name} against {results['baseline']}: {task['comparison']['sentence']}",
                soft_wrap=True,
            )
        for warning in task["warnings"]:
            err.print(Text(f"{name}: ", style="bold yellow") + Text(warning), soft_wrap=True)
    if results["sandbox"]:
        notify(f"programs ran in sandbox level {results['sandbox']}")
    if results["out"]:
        notify(f"report: {results['out']}/report.html")


def show_needed(plan: JsonObject, margin: float) -> None:
    noise = "noise as the baseline's replies have it" if plan["measured"] else "noise at its most"
    title = (
        f"{plan['task']}: to detect a loss of {100 * margin:g} points at "
        f"{100 * plan['accuracy']:.1f} %, in 4 runs of 5; {noise}"
    )
    table = _table("repeats of both", "problems to say held", "problems to say lost")
    for row in plan["rows"]:
        table.add_row(str(row["repeats"]), f"{row['held']:,}", f"{row['lost']:,}")
    _show(title, table)
    if plan["enough"] is None:
        text = (
            f"its {plan['problems']} problems cannot say held at this margin, with any number "
            "of repeats"
        )
    else:
        text = f"its {plan['problems']} problems can say held with --repeats {plan['enough']}"
    out.print(f"{text}\n{plan['sampled']}", soft_wrap=True)


def show_comparison(table: JsonObject) -> None:
    rows = _table("run", "task", "accuracy", "95 % interval", "n x repeats")
    for run in table["runs"]:
        for task, figures in run["results"].items():
            low, high = figures["interval"]
            count = f"{figures['n']} x {figures['repeats']}"
            rows.add_row(
                run["run"],
                task,
                f"{100 * figures['accuracy']:.2f} %",
                f"{100 * low:.1f} to {100 * high:.1f}",
                count,
            )
    _show(f"baseline {table['baseline']}", rows)
    for run in table["runs"]:
        for task, figures in run["results"].items():
            if figures["comparison"]:
                out.print(
                    f"{run['run']}, {task}: {figures['comparison']['sentence']}", soft_wrap=True
                )
        for note in run["notes"]:
            err.print(Text(f"{run['run']}: ", style="bold yellow") + Text(note), soft_wrap=True)


def show_positions(ranges: list[JsonObject]) -> None:
    """KL, agreement and accuracy along a text."""
    table = _table("tokens", "documents", "KL, nats", "same likeliest", "accuracy", "baseline's")
    for one in ranges:
        spread = "" if one["kl_stderr"] is None else f" ± {one['kl_stderr']:.1e}"
        shares = (one["top1_agree"], one["accuracy"], one["baseline_accuracy"])
        table.add_row(
            f"{one['first']:,} to {one['last']:,}",
            f"{one['documents']:,}",
            f"{one['kl']:.3e}{spread}",
            *("-" if share is None else f"{share:.2%}" for share in shares),
        )
    _show("along the text", table)


def show_speed(result: JsonObject) -> None:
    columns = [
        "input",
        "at a time",
        "TTFT s",
        "TPOT ms",
        "ITL ms",
        "tok/s",
        "system tok/s",
        "req/s",
    ]
    columns += ["latency s", "failed"]
    table = _table(*columns, *(["goodput /s"] if result["goodput_limits_ms"] else []))
    for row in result["rows"]:
        tpot, itl, tps = (
            "-" if row[key] is None else f"{row[key]:.1f}" for key in ("tpot_ms", "itl_ms", "tps")
        )
        load = (
            str(row["concurrency"]) if row["offered_rate"] is None else f"{row['offered_rate']:g}/s"
        )
        cells = [
            f"{row['ttft_s']:.3f}",
            tpot,
            itl,
            tps,
            f"{row['system_tps']:.1f}",
            f"{row['request_rate']:.2f}",
            f"{row['latency_s']:.2f}",
        ]
        good = [] if row["goodput"] is None else [f"{row['goodput']:.2f}"]
        table.add_row(str(row["input_len"] or "prompts"), load, *cells, str(row["failed"]), *good)
    _show(result["target"], table)
    if uncounted := sum(row["uncounted"] for row in result["rows"]):
        notify(
            f"the server gave no token count for {uncounted} replies: each of their pieces "
            "counts as one, though it may hold several"
        )
    if short := sorted(
        {name.rpartition("_p")[2] for row in result["rows"] for name in row["left_out"]}, key=int
    ):
        notify(
            "percentiles left out for lack of requests: "
            f"{', '.join(f'p{p} takes {-(-100 // (100 - int(p)))}' for p in short)}"
        )


def show_published(tables: list[JsonObject]) -> None:
    """Published figures of other machines, each table with its source."""
    for published in tables:
        columns = list(dict.fromkeys(name for row in published["rows"] for name in row))
        title = (
            f"published: {published['model']} {published['scheme']} on "
            f"{published['hardware']} ({published['source']})"
        )
        table = _table(*columns)
        for row in published["rows"]:
            table.add_row(*(f"{row[name]:g}" if name in row else "-" for name in columns))
        _show(title, table)


def show_kernels(device: str, rows: list[JsonObject]) -> None:
    """A row per operator, then what each unusable backend lacks."""
    table, lacking = (
        _table("operator", "served by", "usable too", "limits"),
        dict[tuple[str, str], list[str]](),
    )
    operators = list(dict.fromkeys(row["operator"] for row in rows))
    for operator in operators:
        of_operator = [row for row in rows if row["operator"] == operator]
        serves = next(row for row in of_operator if row["taken"])
        others = [row["backend"] for row in of_operator if row["usable"] and not row["taken"]]
        table.add_row(operator, serves["backend"], " ".join(others), serves["reason"])
        for row in of_operator:
            if not row["usable"]:
                lacking.setdefault((row["backend"], row["reason"]), []).append(operator)
    _show(f"on {device}", table)
    unusable = _table("backend", "does not serve", "because")
    for (backend, reason), unserved in lacking.items():
        rest = [operator for operator in operators if operator not in unserved]
        few = (
            "any operator"
            if not rest
            else f"any but {' '.join(rest)}"
            if len(rest) < len(unserved)
            else " ".join(unserved)
        )
        unusable.add_row(backend, few, reason)
    _show("not usable here", unusable)


def show_measurement(row: JsonObject) -> None:
    speed = (
        f"{row['microseconds']:10.1f} us {row['gigabytes_per_second']:8.1f} GB/s "
        f"{row['fraction']:6.1%} of bandwidth"
    )
    line = (
        f"{row['operator']:14} {row['backend']:10} {row['case']:28} error {row['error']:.1e} "
        f"{speed} "
    )
    verdict = Text("ok") if row["ok"] else Text("WRONG", style="bold red")
    out.print(Text(line) + verdict, soft_wrap=True)  # one operator a line


def _fit_text(fit: JsonObject) -> str:
    """What the fullest device of a role holds. fit: a `Fit` as a dictionary."""
    weights, reserve, usable = (
        f"{fit[name] / 2**30:.3g}" for name in ("weight_bytes", "reserve_bytes", "usable_bytes")
    )
    room = (
        f"{fit['tokens']:,} tokens of cache"
        if fit["tokens"] >= fit["context"]
        else f"not one request of {fit['context']:,} tokens"
    )
    return (
        f"the fullest card holds {weights} GiB of weights and has room for {room}; of its "
        f"{usable} GiB {reserve} stay free"
    )


def show_deployment(plan: JsonObject, scripts: list[str]) -> None:
    err.print(
        f"{plan['engine']} on {plan['device']}, {plan['layout']}: {plan['summary']}", soft_wrap=True
    )
    for role, fit in plan["memory"].items():
        err.print(f"{role}: {_fit_text(fit)}", soft_wrap=True)
    err.print(
        "; ".join(f"{what}: {text}" for what, text in plan["evidence"].items()), soft_wrap=True
    )
    for note in plan["notes"]:
        notify(note)
    for problem in plan["problems"]:
        err.print(
            f"{problem['severity']}: {problem['problem']}; {problem['remedy']}", soft_wrap=True
        )
    for script in scripts:
        out.print(script, soft_wrap=True)
