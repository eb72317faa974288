"""Measuring a model: eval scores answers, ppl distances, bench speed."""

from contextlib import closing
from pathlib import Path
from typing import Annotated, Any

import typer

from quantkit import console
from quantkit.cli.options import AsJson, Backend, Device, Model, Target, Tp
from quantkit.cli.stopping import stoppable
from quantkit.console import print_json


def evaluate(
    model: Target,
    tasks: Annotated[str, typer.Option(help="Comma-separated names of eval/tasks (tiny-math, gsm8k, aime24, mmlu_pro, ...), or a YAML.")],
    data_dir: Annotated[Path | None, typer.Option(help="Folder with the tasks' data files.")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="So many problems of each task, of all its subjects.")] = None,
    repeats: Annotated[int | None, typer.Option(min=1, help="Replies per problem; the task's own number otherwise.")] = None,
    protocol: Annotated[str | None, typer.Option(help="r1, r1-0528, report, evalscope or lm-eval.")] = None,
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
    allow_weak_sandbox: Annotated[bool, typer.Option(help="Run them even where only limits hold them.")] = False,
    served_model: Annotated[str | None, typer.Option(help="The server's name of the model; asked of it otherwise.")] = None,
    api_key: Annotated[str | None, typer.Option(help="For a server.")] = None,
    export: Annotated[str | None, typer.Option("--format", help="Also write the results as: evalscope.")] = None,
    device: Device = "auto",
    backend: Backend = "auto",
    json_: AsJson = False,
) -> None:
    """Score a model on tasks, with error bars, and say whether accuracy held against a baseline."""
    from quantkit.evaluation.results.folder import results_folder
    from quantkit.evaluation.run import EvaluationProgress, run_evaluation

    done = ""

    def kept() -> str:
        return f"{done or 'no reply has come'}, kept in {out_dir}" if out_dir else ""

    with stoppable(kept), results_folder(out_dir, model, baseline), console.samples_bar() as bar:
        counts = console.counts(bar)

        def show(p: EvaluationProgress) -> None:
            nonlocal done
            if p.stage == "generate":
                done = f"{p.done} of {p.total} replies of {p.model} to {p.task} are there"
            speed = f"{p.tokens / p.seconds:.0f} tokens/s" if p.seconds and p.tokens else ""
            counts((p.model, p.task, p.stage), f"{p.task} {p.stage}", p.done, p.total, speed)

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
            allow_weak_sandbox=allow_weak_sandbox,
            concurrency=concurrency,
            generation={k: v for k, v in (("max_tokens", max_tokens), ("temperature", temperature), ("top_p", top_p)) if v is not None},
            margin=margin,
            model_name=served_model,
            api_key=api_key,
            device=device,
            backend=backend,
            export=export,
            progress=show,
            notice=console.tell,
        )
    if json_:
        return print_json(results.to_json())
    console.show_scores(results.to_json())


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
    from quantkit.evaluation.distance.perplexity import measure

    with console.samples_bar() as bar:
        counts = console.counts(bar)

        def show(p: Any) -> None:
            counts(p.stage, f"tokens through the {p.stage}", p.done, p.total)

        quality = measure(model, text, baseline=baseline, seq_len=seq_len, limit=limit, device=device, backend=backend, progress=show)
    if json_:
        return print_json(quality.to_json())
    console.facts(model, quality.facts())


def bench(
    model: Target,
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
    from quantkit.checkpoint.target import check_folder
    from quantkit.evaluation.results.folder import local_models
    from quantkit.evaluation.results.hardware import describe_machine
    from quantkit.evaluation.results.published import published_speeds_of
    from quantkit.evaluation.run import is_url
    from quantkit.evaluation.speed.endpoint import EndpointTarget
    from quantkit.evaluation.speed.measure import SpeedRow, measure_grid
    from quantkit.evaluation.speed.targets import open_target
    from quantkit.hub import plain_name

    lengths, users = _integers("--input-len", input_len), _integers("--concurrency", concurrency)
    longest = max(lengths) + output_len
    if out_dir is not None:
        check_folder(out_dir, local_models([model]))
    target = open_target(
        model, max_batch=max(users), max_model_len=longest, device=device, backend=backend, tp=tp, api_key=api_key, model=served_model
    )

    def show(row: SpeedRow) -> None:
        tpot = "-" if row.tpot_ms is None else f"{row.tpot_ms:.1f} ms"
        console.tell(f"{row.input_len} x {row.concurrency}: TTFT {row.ttft_s:.3f} s, TPOT {tpot}")

    with closing(target):
        rows = measure_grid(target, lengths, users, output_len, requests_per_slot=requests, warmup=warmup, seed=seed, on_row=show)
    name = target.model if isinstance(target, EndpointTarget) else plain_name(model)
    machine = {"hardware": target.name} if is_url(model) else describe_machine(device)
    result: dict[str, Any] = {"target": target.name, "hardware": machine["hardware"], "machine": machine, "output_len": output_len}
    result |= {"rows": [row.to_json() for row in rows], "published": published_speeds_of(name)}
    if out_dir:
        from quantkit.evaluation.speed.report import write_report

        write_report(out_dir, result)
    if json_:
        return print_json(result)
    console.facts("machine", machine.items())
    console.show_speed(result)
    console.show_published(result["published"])


def _integers(option: str, text: str) -> list[int]:
    try:
        values = [int(part) for part in text.split(",")]
    except ValueError:
        values = []
    if not values or min(values) < 1:
        raise typer.BadParameter(f"{text!r} is not a list of positive integers such as 128,1024", param_hint=option)
    return values
