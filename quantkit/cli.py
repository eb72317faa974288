"""The command line: one thin function a command, and the only place that prints results.

Everything heavy is imported inside the command that needs it, so that `quantkit --help` answers at once. Results go to stdout
(with --json one JSON object and nothing else), progress to stderr. Exit 0 on success, 1 with one line saying what is wrong and
what to do, 2 on bad usage.
"""

import os
import sys
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from quantkit import console
from quantkit.assets import find_model
from quantkit.console import err, out, print_json
from quantkit.errors import QuantkitError

app = typer.Typer(
    help="Quantize DeepSeek-R1 class models, run them on one box, and show that accuracy held.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    epilog="Any command takes --debug for the traceback of a failure.",
)
Model = Annotated[str, typer.Argument(metavar="MODEL", help="A directory, tiny-r1 (built in), or a hub id.")]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda or npu.")]
Backend = Annotated[str, typer.Option(help="Kernel backend; see `quantkit kernels`.")]
Drafts = Annotated[int, typer.Option(min=0, help="Tokens a step that the model's MTP layer guesses; the answers stay the same.")]
Tp = Annotated[int, typer.Option(min=1, help="Ranks that share the model, one per device; all are started here.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]


@app.command()
def quantize(
    model: Model,
    scheme: Annotated[str, typer.Option(help="awq-w4a16, fp4-w4a16, int8-a8w8c16 or rtn-w4a16.")],
    out_dir: Annotated[Path | None, typer.Option("--out", help="Output directory; MODEL-SCHEME otherwise.")] = None,
    format_: Annotated[str, typer.Option("--format", help="auto, awq, compressed-tensors, modelopt or modelslim.")] = "auto",
    engine: Annotated[str | None, typer.Option(help="Write what vllm, sglang, vllm-ascend, omni-infer or chitu loads, or refuse.")] = None,
    recipe: Annotated[str | None, typer.Option(help="A YAML file; the scheme's own recipe otherwise.")] = None,
    calibration: Annotated[
        str | None, typer.Option(help="FILE.txt, FILE.jsonl or a `datasets` id; the model's own where it ships one.")
    ] = None,
    samples: Annotated[int | None, typer.Option(min=1, help="Calibration sequences.")] = None,
    seq_len: Annotated[int | None, typer.Option(min=8, help="Tokens of a calibration sequence.")] = None,
    seed: Annotated[int | None, typer.Option()] = None,
    device: Device = "auto",
    memory: Annotated[str | None, typer.Option(help="Host memory to keep under, such as 16GiB; refused at the start if it cannot.")] = None,
    overwrite: Annotated[bool, typer.Option(help="Replace the output directory if it exists.")] = False,
    json_: AsJson = False,
) -> None:
    """Quantize a checkpoint. A run that was stopped goes on when the same command is given again."""
    from quantkit.quantize.memory import parse_bytes
    from quantkit.quantize.run import quantize as run_quantize
    from quantkit.recipe import load_recipe
    from quantkit.schemes import find_scheme

    chosen, source = find_scheme(scheme), find_model(model)
    shipped = source / "calibration.jsonl"
    given = {"calibration": calibration, "samples": samples, "seq_len": seq_len, "seed": seed}
    settings = load_recipe(recipe or scheme).model_copy(update={key: value for key, value in given.items() if value is not None})
    if settings.calibration is None and shipped.exists():
        settings = settings.model_copy(update={"calibration": str(shipped)})
    with console.bytes_bar() as bar:
        target = out_dir or Path(f"{source.name}-{scheme}")
        report = run_quantize(
            source,
            target,
            chosen,
            format_,
            settings,
            engine=engine,
            device=device,
            memory=parse_bytes(memory) if memory else None,
            overwrite=overwrite,
            on_event=console.listener(bar),
        )
    if os.environ.get("RANK", "0") != "0":
        return
    about = {key: value for key, value in vars(report).items() if key != "findings"} | {"mean_error": report.findings.mean_error}
    if json_:
        return print_json(about | {"out": str(report.out)})
    console.facts(
        f"{model} as {report.scheme}",
        [
            ("written to", f"{report.out} ({report.format})"),
            ("size", f"{console.size(report.output_bytes)}, from {console.size(report.source_bytes)}"),
            ("time", f"{report.seconds:.1f} s"),
            ("peak memory", f"{console.size(report.peak_memory)}, planned {console.size(report.planned_memory)}"),
            ("calibration", f"{report.calibration_tokens:,} tokens"),
            ("mean output error", f"{report.findings.mean_error:.2e}"),
            ("report", str(report.out / "report.html")),
        ],
    )


@app.command()
def plan(
    model: Model,
    scheme: Annotated[str, typer.Option(help="awq-w4a16, fp4-w4a16, int8-a8w8c16 or rtn-w4a16.")],
    devices: Annotated[str, typer.Option(help="8x64GiB, or 8x910B1 for predicted decoding times as well.")] = "8x64GiB",
    format_: Annotated[str, typer.Option("--format", help="As for quantize.")] = "auto",
    samples: Annotated[int, typer.Option(min=1, help="Calibration sequences.")] = 128,
    seq_len: Annotated[int, typer.Option(min=8, help="Tokens of a calibration sequence.")] = 512,
    context: Annotated[int, typer.Option(min=1, help="Tokens of the longest request to serve.")] = 4096,
    json_: AsJson = False,
) -> None:
    """Memory, disk, time and fit of a quantization, from config.json and headers alone."""
    from quantkit.plan import plan as make_plan
    from quantkit.schemes import find_scheme

    chosen, path = find_scheme(scheme), find_model(model)
    count, _, kind = devices.partition("x")
    predicted: dict[str, Any] = {}
    if count.isdigit() and not kind.endswith("GiB"):
        from quantkit.checkpoint.reader import Checkpoint
        from quantkit.costmodel import load_hardware, predict

        hardware = load_hardware(kind)
        batches = (1, 2, 4, 8, 16, 32)
        predicted = predict(Checkpoint.open(path).config, chosen, hardware, devices=int(count), batches=batches, context=min(context, 640))
        devices = f"{count}x{hardware.memory_gb:.0f}GiB"
    about = make_plan(path, chosen, format_, devices=devices, samples=samples, seq_len=seq_len, context=context)
    if json_:
        return print_json(about | ({"cost_model": predicted} if predicted else {}))
    console.show_plan(about)
    if predicted:
        console.show_prediction(predicted)


@app.command()
def convert(
    source: Annotated[str, typer.Argument(metavar="SRC", help="A model, quantized or not.")],
    target: Annotated[Path, typer.Argument(metavar="DST", help="Directory to write.")],
    format_: Annotated[str | None, typer.Option("--format", help="awq, compressed-tensors, modelopt or modelslim.")] = None,
    dtype: Annotated[str | None, typer.Option(help="bf16, fp16 or fp32: plain weights.")] = None,
    overwrite: Annotated[bool, typer.Option(help="Replace DST if it exists.")] = False,
    json_: AsJson = False,
) -> None:
    """Convert between formats without recalibration, or to plain weights; says what was lost. Resumes as quantize does."""
    from quantkit.convert import convert as run_convert

    with console.bytes_bar() as bar:
        report = run_convert(find_model(source), target, format=format_, dtype=dtype, overwrite=overwrite, on_event=console.listener(bar))
    about = asdict(report) | {"out": str(report.out), "exact": report.exact}
    if json_:
        return print_json(about)
    console.show_conversion(about)


@app.command()
def inspect(
    model: Model,
    engine: Annotated[str | None, typer.Option(help="Also say whether vllm, sglang, vllm-ascend, omni-infer or chitu loads it.")] = None,
    json_: AsJson = False,
) -> None:
    """What is in a checkpoint: format, scheme, tensors, bytes, what is missing or unknown, and whether an engine loads it."""
    from quantkit.checkpoint.reader import Checkpoint
    from quantkit.inspect import describe

    checkpoint = Checkpoint.open(find_model(model))
    about = describe(checkpoint)
    if engine is not None:
        from quantkit.engines import check_checkpoint

        about["engine"] = engine
        about["problems"] = [asdict(problem) for problem in check_checkpoint(engine, checkpoint)]
    if json_:
        return print_json(about)
    console.show_inspection(about)
    if engine is not None:
        console.show_problems(engine, about["problems"])


@app.command()
def run(
    model: Model,
    prompt: Annotated[str | None, typer.Option(help="One question; without it, a chat.")] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1)] = 512,
    temperature: Annotated[float, typer.Option(min=0, help="0 is greedy.")] = 0.0,
    top_p: Annotated[float, typer.Option(min=0, max=1)] = 1.0,
    seed: int = 0,
    drafts: Drafts = 0,
    tp: Tp = 1,
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
        engine = Engine.load(path, device=device, backend=backend, max_batch=1, num_drafts=drafts, tp=tp)
    params = SamplingParams(max_new_tokens=max_new_tokens, temperature=temperature, top_p=top_p, seed=seed)
    with closing(engine):
        if prompt is not None:
            _answer(engine, [{"role": "user", "content": prompt}], params, json_)
            return
        err.print(f"{model} on {engine.loaded.device}. An empty line or Ctrl-D ends the chat.")
        _chat(engine, params)


def _chat(engine: Any, params: Any) -> None:
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

    with console.samples_bar() as bar:
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
    console.show_scores(results.to_json())


@app.command()
def ppl(
    model: Model,
    text: Annotated[Path, typer.Option(help="A .txt, or a .jsonl of {'text': ...}: one document a line.")],
    baseline: Annotated[str | None, typer.Option(help="The model it was made from: adds KL, agreement and error per layer.")] = None,
    seq_len: Annotated[int, typer.Option(min=2, help="Longest document, tokens; longer ones are cut into pieces.")] = 2048,
    limit: Annotated[int | None, typer.Option(min=1, help="Only the first documents.")] = None,
    device: Device = "auto",
    backend: Backend = "auto",
    json_: AsJson = False,
) -> None:
    """Perplexity of a text; with a baseline also the distance from it, token by token and layer by layer."""
    from quantkit.evaluate.perplexity import measure

    with console.samples_bar() as bar:
        rows: dict[str, Any] = {}

        def show(p: Any) -> None:
            if p.stage not in rows:
                rows[p.stage] = bar.add_task(f"tokens through the {p.stage}", total=p.total, note="")
            bar.update(rows[p.stage], completed=p.done)

        quality = measure(model, text, baseline=baseline, seq_len=seq_len, limit=limit, device=device, backend=backend, progress=show)
    if json_:
        return print_json(quality.to_json())
    console.show_quality(model, quality.to_json())


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
    tp: Tp = 1,
    device: Device = "auto",
    backend: Backend = "auto",
    out_dir: Annotated[Path | None, typer.Option("--out", help="Folder for bench.json and bench.html.")] = None,
    json_: AsJson = False,
) -> None:
    """Speed over a grid of input lengths and concurrencies: TTFT, TPOT, tokens/s, latency, as evalscope perf defines them."""
    from quantkit.evaluate.hardware import describe_hardware
    from quantkit.evaluate.run import is_url
    from quantkit.evaluate.speed.measure import Row, measure_grid
    from quantkit.evaluate.speed.targets import open_target

    lengths, users = _integers("--input-len", input_len), _integers("--concurrency", concurrency)
    longest = max(lengths) + output_len
    target = open_target(
        model, max_batch=max(users), max_model_len=longest, device=device, backend=backend, tp=tp, api_key=api_key, model=served_model
    )

    def show(row: Row) -> None:
        tpot = "-" if row.tpot_ms is None else f"{row.tpot_ms:.1f} ms"
        err.print(f"[dim]{row.input_len} x {row.concurrency}: TTFT {row.ttft_s:.3f} s, TPOT {tpot}[/dim]")

    with closing(target):
        rows = measure_grid(target, lengths, users, output_len, requests_per_slot=requests, warmup=warmup, seed=seed, on_row=show)
    hardware = target.name if is_url(model) else describe_hardware(device)
    result = {"target": target.name, "hardware": hardware, "output_len": output_len, "rows": [row.to_json() for row in rows]}
    if out_dir:
        from quantkit.evaluate.speed.report import write_report

        write_report(out_dir, result)
    if json_:
        return print_json(result)
    console.show_speed(result)


def _integers(option: str, text: str) -> list[int]:
    try:
        values = [int(part) for part in text.split(",")]
    except ValueError:
        values = []
    if not values or min(values) < 1:
        raise typer.BadParameter(f"{text!r} is not a list of positive integers such as 128,1024", param_hint=option)
    return values


@app.command()
def serve(
    model: Model,
    host: str = "127.0.0.1",
    port: int = 8000,
    api_key: Annotated[str | None, typer.Option(envvar="QUANTKIT_API_KEY", help="Ask for this key.")] = None,
    max_batch: Annotated[int, typer.Option(min=1, help="Requests computed together.")] = 64,
    max_model_len: Annotated[int | None, typer.Option(min=1, help="Longest prompt plus answer.")] = None,
    max_queue: Annotated[int, typer.Option(min=0, help="Requests that may wait.")] = 256,
    max_input: Annotated[int | None, typer.Option(min=1, help="Longest prompt, tokens.")] = None,
    max_output: Annotated[int | None, typer.Option(min=1, help="Longest answer, tokens.")] = None,
    served_name: Annotated[str | None, typer.Option(help="Name that clients use; MODEL otherwise.")] = None,
    drafts: Drafts = 0,
    tp: Tp = 1,
    device: Device = "auto",
    backend: Backend = "auto",
) -> None:
    """Serve an OpenAI-compatible API: chat and completions, streaming, metrics."""
    from quantkit.executor.engine import Engine
    from quantkit.executor.server.app import Limits
    from quantkit.executor.server.serve import ServeOptions
    from quantkit.executor.server.serve import serve as run_server

    path = find_model(model)
    with err.status(f"loading {model}"):
        engine = Engine.load(
            path, device=device, backend=backend, max_batch=max_batch, max_model_len=max_model_len, num_drafts=drafts, tp=tp
        )
    err.print(f"serving {model} on http://{host}:{port}/v1", highlight=False)
    options = ServeOptions(host, port, api_key, max_queue, limits=Limits(max_input=max_input, max_output=max_output))
    with closing(engine):
        run_server(engine, served_name or path.name, options)


@app.command()
def kernels(
    device: Device = "auto",
    check: Annotated[bool, typer.Option(help="Run every operator at R1 shapes against the reference: error, time, bandwidth.")] = False,
    json_: AsJson = False,
) -> None:
    """Operators and backends: which are usable here and why the others are not, or with --check how right and how fast they are."""
    import quantkit_kernels

    from quantkit.executor.devices import find_device

    target = find_device(device)
    if not check:
        rows = [vars(row) for row in quantkit_kernels.table(target)]
        return print_json({"device": str(target), "rows": rows}) if json_ else console.show_kernels(str(target), rows)
    from quantkit_kernels.check import check as measure

    measured = []
    for one in measure(target):
        measured.append(asdict(one) | {"ok": one.ok})
        if not json_:
            console.show_measurement(measured[-1])
    if json_:
        print_json({"device": str(target), "rows": measured})
    wrong = ", ".join(f"{row['operator']} on {row['backend']}" for row in measured if not row["ok"])
    if wrong:
        raise QuantkitError(f"results differ from the reference: {wrong}", "use --backend reference and report this")


@app.command()
def deploy(
    model: Model,
    engine: Annotated[str, typer.Option(help="vllm, sglang, vllm-ascend or omni-infer.")],
    boxes: Annotated[int, typer.Option(min=1, help="Machines of 8 devices.")] = 1,
    layout: Annotated[str | None, typer.Option(help="A layout by name, such as one with prefill and decode apart.")] = None,
    context: Annotated[int, typer.Option(min=1, help="Tokens of the longest request.")] = 16384,
    hosts: Annotated[str | None, typer.Option(help="Addresses of the boxes, comma-separated.")] = None,
    json_: AsJson = False,
) -> None:
    """Print the exact commands that serve a checkpoint with another engine, on one box or many, and whether it fits."""
    from quantkit.deploy.launch import deploy as plan

    planned = plan(find_model(model), engine, boxes=boxes, layout=layout, context=context, hosts=hosts.split(",") if hosts else None)
    if json_:
        return print_json(planned.as_dict())
    console.show_deployment(planned.as_dict(), [launch.script() for launch in planned.launches])


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
