"""What the command line shows: Rich tables of results, progress bars with an estimate. Used by cli/ alone."""

import json
import os
import sys
from collections.abc import Callable, Hashable, Iterable
from typing import Any

from rich.console import Console
from rich.table import Table

# Rich folds at 80 columns where there is no terminal; a table in a file or a pipe is printed in full width.
out = Console(width=None if sys.stdout.isatty() or "COLUMNS" in os.environ else 1000)
err = Console(stderr=True)


def print_json(value: dict[str, Any]) -> None:
    print(json.dumps(value))


def facts(title: str, rows: Iterable[tuple[str, str]]) -> None:
    """A table of names and values."""
    table = Table(show_header=False, title=title)
    for row in rows:
        table.add_row(*row)
    out.print(table)


def size(count: float) -> str:
    """Bytes for people, in decimal units."""
    for unit, scale in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6)):
        if count >= scale:
            return f"{count / scale:.2f} {unit}"
    return f"{count / 1e3:.1f} kB"


def samples_bar() -> Any:
    """Progress over counted things, on stderr; the field `note` is free text at the end of a row."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    return Progress(*columns, TextColumn("{task.fields[note]}"), console=err)


def bytes_bar() -> Any:
    """Progress over bytes, on stderr; the field `note` is free text at the end of a row."""
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    return Progress(*columns, TextColumn("{task.fields[note]}"), console=err)


def counts(bar: Any) -> Callable[..., None]:
    """Shows counted things on a `samples_bar`, each in a row that appears when it is first counted."""
    rows: dict[Hashable, Any] = {}

    def show(key: Hashable, text: str, done: int, total: int | None, note: str = "") -> None:
        if key not in rows:
            rows[key] = bar.add_task(text, total=total, note="")
        bar.update(rows[key], completed=done, note=note)

    return show


def listener(bar: Any) -> Callable[[Any], None]:
    """Shows the events of a quantization or conversion on a `bytes_bar`."""
    from quantkit.calibrate.events import Event, Note

    row = bar.add_task("checking", total=None, note="")

    def show(event: Event) -> None:
        if isinstance(event, Note):
            bar.console.print(f"[dim]{event.text}[/dim]", highlight=False)
            return
        note = f"{event.unit}  error {event.error:.2e}  {event.memory / 2**30:.1f} GiB"
        bar.update(row, description=event.phase, completed=event.done_bytes, total=event.total_bytes, note=note)

    return show


def show_inspection(about: dict[str, Any]) -> None:
    rows = []
    for key in (
        "architecture",
        "format",
        "variant",
        "scheme",
        "tensors",
        "quantized_linears",
        "shards",
        "bytes",
        "parameters",
        "mtp_layers",
    ):
        value = about.get(key)
        text = "-" if value is None else size(value) if key == "bytes" else f"{value:,}" if isinstance(value, int) else str(value)
        rows.append((key.replace("_", " "), text))
    rows += [(f"  left as {name}", f"{count:,} linears") for name, count in about["left_as"].items()]
    for key in ("bytes_by_part", "bytes_by_dtype"):
        rows += [(f"  {name}", size(count)) for name, count in about.get(key, {}).items()]
    for key in ("missing", "unknown"):
        names = about[key]
        rows.append((key, "not checked: architecture not known" if names is None else f"{len(names)} {', '.join(names[:3])}".strip()))
    facts(about["path"], rows)


def show_plan(about: dict[str, Any]) -> None:
    placed, host = about["devices"], about["host_peak"]
    rows = [
        ("output", f"{size(about['output_bytes'])} ({about['format']}), without MTP {size(about['output_bytes_without_mtp'])}"),
        *((f"  {part}", size(count)) for part, count in about["output_bytes_by_part"].items()),
        ("fits", "yes" if about["fits"] else "NO"),
        (f"  {placed['count']} devices of {size(placed['memory_bytes'])}", f"{size(placed['weight_bytes'])} of weights each"),
        ("  room for the cache", f"{size(placed['cache_bytes'])} each, {placed['cache_tokens']:,} tokens"),
        ("  assuming", placed["assumption"]),
        ("host memory, peak", f"{size(about['host_peak_bytes'])} (at {host['where']})"),
        ("disk", f"{size(about['disk_bytes'])} needed, {size(about['disk_free_bytes'])} free here"),
        *((f"time on {one['device']}", f"{one['seconds'] / 60:.1f} min, assuming {one['assumption']}") for one in about["time"]),
    ]
    facts(f"{about['model']} as {about['scheme']}", rows)


def show_prediction(predicted: dict[str, Any]) -> None:
    levels = [one["level"] for one in predicted["predictions"][0]]
    what = f"{predicted['scheme']} on {predicted['devices']} x {predicted['hardware']}, context {predicted['context']}"
    title = f"TPOT in ms, {what}: predicted, never measured"
    table = Table("concurrency", *levels, title=title)
    for ladder in predicted["predictions"]:
        table.add_row(str(ladder[0]["batch"]), *(f"{one['tpot_ms']:.1f}" for one in ladder))
    out.print(table)
    for one in predicted["predictions"][0]:
        parts = ", ".join(f"{name} {ms:.1f}" for name, ms in one["parts"].items() if ms >= 0.05)
        note = f"{one['num_launches']} launches, {one['num_collectives']} collectives"
        level = f"{one['level']}: {one['summary']}; at concurrency {one['batch']}: {parts} ms; {note}"
        err.print(f"[dim]{level}[/dim]", highlight=False, soft_wrap=True)
    for ladder, between in ((predicted["predictions"][at], predicted["steps"][at]) for at in (0, -1)):
        for one in between:
            added = ", ".join(f"{part} {ms:+.1f}" for part, ms in one["adds_ms"].items())
            step = f"concurrency {ladder[0]['batch']}, {one['from']} to {one['to']}"
            err.print(f"[dim]{step}: {added} ms[/dim]", highlight=False, soft_wrap=True)
    for assumption in predicted["assumptions"]:
        err.print(f"[dim]assumed: {assumption}[/dim]", highlight=False, soft_wrap=True)


def show_conversion(about: dict[str, Any]) -> None:
    rows = [
        ("written to", f"{about['out']} ({about['format']}, from {about['source_format']})"),
        ("size", f"{size(about['output_bytes'])}, from {size(about['source_bytes'])}"),
        ("time", f"{about['seconds']:.1f} s"),
        ("peak memory", size(about["peak_memory"])),
        ("exact", "yes, every value" if about["exact"] else "no"),
    ]
    for what, change in about["changes"].items():
        rows.append((f"  {what}", f"{change['weights']:,} weights, largest relative difference {change['max_relative_error']:.1e}"))
    facts("converted", rows)


def show_problems(engine: str, problems: list[dict[str, str]]) -> None:
    if not problems:
        out.print(f"{engine} loads it", highlight=False)
    for problem in problems:
        out.print(f"{engine}, {problem['severity']}: {problem['problem']}; {problem['remedy']}", highlight=False, soft_wrap=True)


def show_scores(results: dict[str, Any]) -> None:
    columns = ("task", "accuracy", "± stderr", "n x repeats", "unfinished", "no answer", "tokens")
    table = Table(*columns, title=f"{results['model']}, {results['hardware']}")
    for name, task in results["results"].items():
        if not task["n"]:
            table.add_row(name, "-", "", "0")
            continue
        stderr = "-" if task["stderr"] is None else f"{100 * task['stderr']:.2f}"
        shares = (f"{100 * task[key]:.1f} %" for key in ("unfinished", "no_answer"))
        count = f"{task['n']} x {task['repeats']}"
        table.add_row(name, f"{100 * task['accuracy']:.2f} %", stderr, count, *shares, f"{task['tokens']['mean']:.0f}")
    out.print(table)
    for name, task in results["results"].items():
        if task.get("comparison"):
            out.print(f"{name} against {results['baseline']}: {task['comparison']['sentence']}", highlight=False, soft_wrap=True)
        for warning in task["warnings"]:
            err.print(f"[bold yellow]{name}:[/bold yellow] {warning}", highlight=False)
    if results["sandbox"]:
        err.print(f"[dim]programs ran in sandbox level {results['sandbox']}[/dim]")
    if results["out"]:
        err.print(f"[dim]report: {results['out']}/report.html[/dim]")


def show_quality(model: str, quality: dict[str, Any]) -> None:
    rows = [("perplexity", f"{quality['ppl']:.4f}"), ("tokens", f"{quality['tokens']:,} in {quality['documents']} documents")]
    if "kl" in quality:
        rows += [
            ("baseline's perplexity", f"{quality['baseline_ppl']:.4f}"),
            ("KL from the baseline", f"{quality['kl']:.3e} ± {quality.get('kl_stderr', float('nan')):.1e} nats a token"),
            ("same likeliest token", f"{quality['top1_agree']:.2%}"),
        ]
    if "expert_agree" in quality:
        rows.append(("same experts", f"{quality['expert_agree']:.2%}"))
    rows += [(f"  error after layer {number}", f"{error:.2e}") for number, error in enumerate(quality.get("layer_errors", []))]
    facts(model, rows)


def show_speed(result: dict[str, Any]) -> None:
    table = Table("input", "concurrency", "TTFT s", "TPOT ms", "tokens/s", "system tokens/s", "latency s", "failed", title=result["target"])
    for row in result["rows"]:
        tpot, tps = ("-" if row[key] is None else f"{row[key]:.1f}" for key in ("tpot_ms", "tps"))
        cells = (f"{row['ttft_s']:.3f}", tpot, tps, f"{row['system_tps']:.1f}", f"{row['latency_s']:.2f}", str(row["failed"]))
        table.add_row(str(row["input_len"]), str(row["concurrency"]), *cells)
    out.print(table)


def show_published(tables: list[dict[str, Any]]) -> None:
    """Others' figures, under what they are of: never this machine's."""
    for published in tables:
        columns = list(dict.fromkeys(name for row in published["rows"] for name in row))
        title = f"published: {published['model']} {published['scheme']} on {published['hardware']} ({published['source']})"
        table = Table(*columns, title=title)
        for row in published["rows"]:
            table.add_row(*(f"{row[name]:g}" if name in row else "-" for name in columns))
        out.print(table)


def show_kernels(device: str, rows: list[dict[str, Any]]) -> None:
    table = Table("operator", "backend", "usable", "reason", title=f"on {device}")
    for row in rows:
        table.add_row(row["operator"], row["backend"], "yes" if row["usable"] else "no", row["reason"])
    out.print(table)


def show_measurement(row: dict[str, Any]) -> None:
    speed = f"{row['microseconds']:10.1f} us {row['gigabytes_per_second']:8.1f} GB/s {row['fraction']:6.1%} of bandwidth"
    verdict = "ok" if row["ok"] else "[bold red]WRONG[/bold red]"
    line = f"{row['operator']:14} {row['backend']:10} {row['case']:28} error {row['error']:.1e} {speed} {verdict}"
    out.print(line, highlight=False, soft_wrap=True)  # one operator a line, in a pipe too


def show_deployment(plan: dict[str, Any], scripts: list[str]) -> None:
    err.print(f"{plan['engine']} on {plan['device']}, {plan['layout']}: {plan['summary']}", highlight=False)
    for role, fit in plan["memory"].items():
        err.print(f"{role}: {json.dumps(fit)}", highlight=False, soft_wrap=True)
    for note in plan["notes"]:
        err.print(f"[dim]{note}[/dim]", highlight=False)
    for problem in plan["problems"]:
        err.print(f"{problem['severity']}: {problem['problem']}; {problem['remedy']}", highlight=False, soft_wrap=True)
    for script in scripts:
        out.print(script, markup=False, highlight=False, soft_wrap=True)
