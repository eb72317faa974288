"""The command line: one thin function a command, and the only place that prints results.

Everything heavy is imported inside the command that needs it, so that `quantkit --help` answers at once. Results go to stdout
(with --json one JSON object and nothing else), progress to stderr. Exit 0 on success, 1 with one line saying what is wrong and
what to do, 2 on bad usage.
"""

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from quantkit.assets import find_model
from quantkit.errors import QuantkitError

app = typer.Typer(
    help="Quantize DeepSeek-R1 class models, run them on one box, and show that accuracy held.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    epilog="Any command takes --debug for the traceback of a failure.",
)
out = Console()
err = Console(stderr=True)

Model = Annotated[str, typer.Argument(metavar="MODEL", help="A directory, tiny-r1 (built in), or a hub id.")]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda or npu.")]
Backend = Annotated[str, typer.Option(help="Kernel backend; see `quantkit kernels`.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]


@app.command()
def quantize(
    model: Model,
    scheme: Annotated[str, typer.Option(help="awq-w4a16, fp4-w4a16, int8-a8w8c16 or rtn-w4a16.")],
    out_dir: Annotated[Path | None, typer.Option("--out", help="Output directory; MODEL-SCHEME otherwise.")] = None,
    format_: Annotated[str, typer.Option("--format", help="auto, awq, compressed-tensors, modelopt or modelslim.")] = "auto",
    recipe: Annotated[str | None, typer.Option(help="A YAML file; the scheme's own recipe otherwise.")] = None,
    calibration: Annotated[
        str | None, typer.Option(help="FILE.txt, FILE.jsonl or a `datasets` id; the model's own where it ships one.")
    ] = None,
    samples: Annotated[int | None, typer.Option(min=1, help="Calibration sequences.")] = None,
    seq_len: Annotated[int | None, typer.Option(min=8, help="Tokens of a calibration sequence.")] = None,
    seed: Annotated[int | None, typer.Option()] = None,
    device: Device = "auto",
    overwrite: Annotated[bool, typer.Option(help="Replace the output directory if it exists.")] = False,
    json_: AsJson = False,
) -> None:
    """Quantize a checkpoint. A run that was stopped goes on when the same command is given again."""
    from quantkit.calibrate.events import Event, Note
    from quantkit.quantize.run import quantize as run_quantize
    from quantkit.recipe import load_recipe
    from quantkit.schemes import find_scheme

    chosen, source = find_scheme(scheme), find_model(model)
    shipped = source / "calibration.jsonl"
    given = {"calibration": calibration, "samples": samples, "seq_len": seq_len, "seed": seed}
    settings = load_recipe(recipe or scheme).model_copy(update={key: value for key, value in given.items() if value is not None})
    if settings.calibration is None and shipped.exists():
        settings = settings.model_copy(update={"calibration": str(shipped)})
    with _bytes_bar() as bar:
        row = bar.add_task("checking", total=None, note="")

        def show(event: Event) -> None:
            if isinstance(event, Note):
                bar.console.print(f"[dim]{event.text}[/dim]", highlight=False)
                return
            note = f"{event.unit}  error {event.error:.2e}  {event.memory / 2**30:.1f} GiB"
            bar.update(row, description=event.phase, completed=event.done_bytes, total=event.total_bytes, note=note)

        target = out_dir or Path(f"{source.name}-{scheme}")
        report = run_quantize(source, target, chosen, format_, settings, device=device, overwrite=overwrite, on_event=show)
    about = {
        "out": str(report.out),
        "scheme": report.scheme,
        "format": report.format,
        "source_bytes": report.source_bytes,
        "output_bytes": report.output_bytes,
        "seconds": report.seconds,
        "peak_memory": report.peak_memory,
        "calibration_tokens": report.calibration_tokens,
        "mean_error": report.findings.mean_error,
    }
    if json_:
        return print_json(about)
    table = Table(show_header=False, title=f"{model} as {report.scheme}")
    table.add_row("written to", str(report.out))
    table.add_row("format", report.format)
    table.add_row("size", f"{megabytes(report.output_bytes)}, from {megabytes(report.source_bytes)}")
    table.add_row("time", f"{report.seconds:.1f} s")
    table.add_row("peak memory", megabytes(report.peak_memory))
    table.add_row("calibration", f"{report.calibration_tokens:,} tokens")
    table.add_row("mean output error", f"{report.findings.mean_error:.2e}")
    out.print(table)


@app.command()
def inspect(model: Model, json_: AsJson = False) -> None:
    """What is in a checkpoint: format, scheme, tensors, bytes, and what is missing or unknown."""
    from quantkit.checkpoint.reader import Checkpoint
    from quantkit.inspect import describe

    about = describe(Checkpoint.open(find_model(model)))
    if json_:
        return print_json(about)
    table = Table(show_header=False, title=about["path"])
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
        table.add_row(key.replace("_", " "), _readable(key, about.get(key)))
    for key in ("bytes_by_part", "bytes_by_dtype"):
        for name, size in about.get(key, {}).items():
            table.add_row(f"  {name}", megabytes(size))
    for key in ("missing", "unknown"):
        names = about.get(key)
        table.add_row(key, "not checked: architecture not known" if names is None else f"{len(names)} {', '.join(names[:3])}")
    out.print(table)


@app.command()
def run(
    model: Model,
    prompt: Annotated[str | None, typer.Option(help="One question; without it, a chat.")] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1)] = 512,
    temperature: Annotated[float, typer.Option(min=0, help="0 is greedy.")] = 0.0,
    top_p: Annotated[float, typer.Option(min=0, max=1)] = 1.0,
    seed: Annotated[int, typer.Option()] = 0,
    device: Device = "auto",
    backend: Backend = "auto",
    json_: AsJson = False,
) -> None:
    """Answer one prompt, or chat."""
    from quantkit.executor.engine import Engine
    from quantkit.executor.sampling import SamplingParams

    if json_ and prompt is None:
        raise QuantkitError("--json needs --prompt", "a chat cannot be one JSON object")
    path = find_model(model)
    with err.status(f"loading {model}"):
        engine = Engine.load(path, device=device, backend=backend, max_batch=1)
    params = SamplingParams(max_new_tokens=max_new_tokens, temperature=temperature, top_p=top_p, seed=seed)
    if prompt is not None:
        _answer(engine, [{"role": "user", "content": prompt}], params, json_)
        return
    err.print(f"{model} on {engine.loaded.device}. An empty line or Ctrl-D ends the chat.")
    messages: list[dict[str, str]] = []
    while question := _ask():
        messages.append({"role": "user", "content": question})
        text = _answer(engine, messages, params, False)
        messages.append({"role": "assistant", "content": text.rpartition("</think>")[2].strip()})


def _ask() -> str:
    try:
        return input("> ").strip()
    except EOFError:
        return ""


def _answer(engine: Any, messages: list[dict[str, str]], params: Any, json_: bool) -> str:
    """Stream one reply to the terminal, or print it whole as JSON; returns its text."""
    for delta in engine.stream(engine.tokenizer.encode_chat(messages), params):
        if not json_:
            out.print(delta.text, end="", markup=False, highlight=False, soft_wrap=True)
        completion = delta.completion or None
    assert completion is not None
    tokens, seconds = len(completion.token_ids), completion.timings.total_s
    if json_:
        print_json(
            {
                "text": completion.text,
                "tokens": tokens,
                "prompt_tokens": completion.prompt_tokens,
                "tokens_per_second": tokens / seconds,
                "finish_reason": completion.finish_reason,
            }
        )
    else:
        out.print()
        err.print(f"[dim]{tokens} tokens, {tokens / seconds:.0f} tokens/s, {completion.finish_reason}[/dim]")
    return str(completion.text)


@app.command("eval")
def evaluate(
    model: Annotated[str, typer.Argument(metavar="MODEL|URL", help="A model to run in this process, or an OpenAI-compatible server.")],
    tasks: Annotated[
        str, typer.Option(help="Comma-separated: tiny-math, gsm8k, aime24, aime25, humaneval, mmlu_pro, live_code_bench, or a YAML.")
    ],
    data_dir: Annotated[Path | None, typer.Option(help="Folder with the tasks' data files.")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Only the first problems of each task.")] = None,
    repeats: Annotated[int | None, typer.Option(min=1, help="Replies per problem; the task's own number otherwise.")] = None,
    protocol: Annotated[str | None, typer.Option(help="r1, evalscope or lm-eval.")] = None,
    baseline: Annotated[str | None, typer.Option(help="A model, or the --out folder of an earlier run, to compare with.")] = None,
    out_dir: Annotated[
        Path | None, typer.Option("--out", help="Folder for results, samples and the report; an interrupted run resumes there.")
    ] = None,
    max_tokens: Annotated[int | None, typer.Option(min=1)] = None,
    temperature: Annotated[float | None, typer.Option(min=0)] = None,
    top_p: Annotated[float | None, typer.Option(min=0, max=1)] = None,
    margin: Annotated[float, typer.Option(help="Loss that counts as lost, as a share.")] = 0.01,
    seed: int = 0,
    concurrency: Annotated[int, typer.Option(min=1, help="Requests in flight, or prompts in a batch.")] = 64,
    allow_code_exec: Annotated[bool, typer.Option(help="Run programs the model wrote, in the sandbox.")] = False,
    served_model: Annotated[str | None, typer.Option(help="The server's name of the model; asked of it otherwise.")] = None,
    api_key: Annotated[str | None, typer.Option(help="For a server.")] = None,
    export: Annotated[str | None, typer.Option("--format", help="Also write the results as: evalscope.")] = None,
    device: Device = "auto",
    backend: Backend = "auto",
    json_: AsJson = False,
) -> None:
    """Score a model on tasks, with error bars, and say whether accuracy held against a baseline."""
    from quantkit.evaluate.run import Progress, run_evaluation

    with _bar() as bar:
        rows: dict[tuple[str, str, str], Any] = {}

        def show(p: Progress) -> None:
            key = (p.model, p.task, p.stage)
            if key not in rows:
                rows[key] = bar.add_task(f"{p.task} {p.stage}", total=p.total, note="")
            speed = f"{p.tokens / p.seconds:.0f} tokens/s" if p.seconds and p.tokens else ""
            bar.update(rows[key], completed=p.done, note=speed)

        results = run_evaluation(
            model,
            [name.strip() for name in tasks.split(",")],
            data_dir=data_dir,
            limit=limit,
            repeats=repeats,
            protocol=protocol,
            baseline=baseline,
            out=out_dir,
            seed=seed,
            allow_code_exec=allow_code_exec,
            concurrency=concurrency,
            generation={k: v for k, v in (("max_tokens", max_tokens), ("temperature", temperature), ("top_p", top_p)) if v is not None},
            margin=margin,
            model_name=served_model,
            api_key=api_key,
            device=device,
            backend=backend,
            export=export,
            progress=show,
        )
    if json_:
        return print_json(results.to_json())
    _show_scores(results.to_json())


def _show_scores(results: dict[str, Any]) -> None:
    table = Table(
        "task",
        "accuracy",
        "± stderr",
        "n x repeats",
        "unfinished",
        "no answer",
        "tokens",
        title=f"{results['model']}, {results['hardware']}",
    )
    for name, task in results["results"].items():
        if not task["n"]:
            table.add_row(name, "-", "", "0")
            continue
        stderr = "-" if task["stderr"] is None else f"{100 * task['stderr']:.2f}"
        shares = (f"{100 * task[key]:.1f} %" for key in ("unfinished", "no_answer"))
        table.add_row(
            name, f"{100 * task['accuracy']:.2f} %", stderr, f"{task['n']} x {task['repeats']}", *shares, f"{task['tokens']['mean']:.0f}"
        )
    out.print(table)
    for name, task in results["results"].items():
        if task.get("comparison"):
            out.print(f"{name} against {results['baseline']}: {task['comparison']['verdict']}", highlight=False)
        for warning in task["warnings"]:
            err.print(f"[bold yellow]{name}:[/bold yellow] {warning}", highlight=False)
    if results["out"]:
        err.print(f"[dim]report: {results['out']}/report.html[/dim]")


def _bar() -> Any:
    """Progress with an estimate, on stderr; `note` is free text at the end of a row."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}"),
        console=err,
    )


def _bytes_bar() -> Any:
    """As `_bar`, counting bytes."""
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    return Progress(*columns, TextColumn("{task.fields[note]}"), console=err)


@app.command()
def bench(
    model: Annotated[str, typer.Argument(metavar="MODEL|URL", help="A model to run in this process, or an OpenAI-compatible server.")],
    input_len: Annotated[str, typer.Option(help="Prompt tokens, comma-separated.")] = "128,1024",
    concurrency: Annotated[str, typer.Option(help="Requests at a time, comma-separated.")] = "1,8",
    output_len: Annotated[int, typer.Option(min=1, help="Tokens of every reply.")] = 512,
    requests: Annotated[int, typer.Option(min=1, help="Measured requests per concurrent slot.")] = 2,
    warmup: Annotated[int, typer.Option(min=0, help="Requests per slot left out before each cell.")] = 1,
    seed: int = 0,
    api_key: Annotated[str | None, typer.Option(help="For a server.")] = None,
    served_model: Annotated[str | None, typer.Option(help="The server's name of the model; asked of it otherwise.")] = None,
    device: Device = "auto",
    backend: Backend = "auto",
    out_dir: Annotated[Path | None, typer.Option("--out", help="Folder for bench.json and bench.html.")] = None,
    json_: AsJson = False,
) -> None:
    """Speed over a grid of input lengths and concurrencies: TTFT, TPOT, tokens/s, latency, as evalscope perf defines them."""
    from quantkit.evaluate.speed.measure import Row, measure_grid
    from quantkit.evaluate.speed.targets import open_target

    lengths, users = _integers("--input-len", input_len), _integers("--concurrency", concurrency)
    longest = max(lengths) + output_len
    target = open_target(
        model, max_batch=max(users), max_model_len=longest, device=device, backend=backend, api_key=api_key, model=served_model
    )
    table = Table("input", "concurrency", "TTFT s", "TPOT ms", "tokens/s", "system tokens/s", "latency s", "failed", title=target.name)

    def show(row: Row) -> None:
        tpot = ("-", "-") if row.tpot_ms is None or row.tps is None else (f"{row.tpot_ms:.1f}", f"{row.tps:.1f}")
        cells = (f"{row.ttft_s:.3f}", *tpot, f"{row.system_tps:.1f}", f"{row.latency_s:.2f}", str(row.failed))
        table.add_row(str(row.input_len), str(row.concurrency), *cells)
        err.print(f"[dim]{row.input_len} x {row.concurrency}: TTFT {cells[0]} s, TPOT {tpot[0]} ms[/dim]")

    rows = measure_grid(target, lengths, users, output_len, requests_per_slot=requests, warmup=warmup, seed=seed, on_row=show)
    result = {"target": target.name, "output_len": output_len, "rows": [row.to_json() for row in rows]}
    if out_dir:
        from quantkit.evaluate.speed.report import write_report

        write_report(out_dir, result)
    if json_:
        return print_json(result)
    out.print(table)


def _integers(option: str, text: str) -> list[int]:
    try:
        values = [int(part) for part in text.split(",")]
    except ValueError:
        values = []
    if not values or min(values) < 1:
        raise typer.BadParameter(f"{text!r} is not a list of positive integers such as 128,1024", param_hint=option)
    return values


@app.command()
def kernels(device: Device = "auto", json_: AsJson = False) -> None:
    """Operators and backends: which are usable here, and why the others are not."""
    import quantkit_kernels

    from quantkit.executor.devices import find_device

    rows = quantkit_kernels.table(find_device(device))
    if json_:
        return print_json({"device": str(find_device(device)), "rows": [vars(row) for row in rows]})
    table = Table("operator", "backend", "usable", "reason", title=f"on {find_device(device)}")
    for row in rows:
        table.add_row(row.operator, row.backend, "yes" if row.usable else "no", row.reason)
    out.print(table)


def print_json(value: dict[str, Any]) -> None:
    print(json.dumps(value))


def megabytes(size: float) -> str:
    for unit, scale in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6)):
        if size >= scale:
            return f"{size / scale:.2f} {unit}"
    return f"{size / 1e3:.1f} kB"


def _readable(key: str, value: Any) -> str:
    if value is None:
        return "-"
    return megabytes(value) if key == "bytes" else f"{value:,}" if isinstance(value, int) else str(value)


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
