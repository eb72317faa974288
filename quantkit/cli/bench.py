"""bench: how fast a model or a server answers."""

from contextlib import closing
from pathlib import Path
from typing import Annotated, Any

import typer

from quantkit import console
from quantkit.cli.options import AsJson, Backend, Cache, Device, Target, Tp
from quantkit.console import print_json


def bench(
    model: Target,
    input_len: Annotated[str, typer.Option(help="Prompt tokens, comma-separated.")] = "128,1024",
    concurrency: Annotated[str, typer.Option(help="Requests at a time, comma-separated.")] = "1,8",
    output_len: Annotated[int, typer.Option(min=1, help="Tokens of every reply.")] = 512,
    requests: Annotated[int, typer.Option(min=1, help="Measured requests per concurrent slot.")] = 2,
    num_prompts: Annotated[
        int | None, typer.Option(min=1, help="Measured requests of a cell in all, instead of --requests; 100 at a --request-rate.")
    ] = None,
    request_rate: Annotated[
        str | None,
        typer.Option(help="Requests/s that arrive by themselves (Poisson), comma-separated; --concurrency is the most at a time."),
    ] = None,
    goodput: Annotated[
        str | None, typer.Option(help="Limits in ms, such as ttft:200,tpot:30,e2el:5000: adds requests/s that meet them all.")
    ] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(help="Prompts instead of random ones: .jsonl, .txt, or .json like ShareGPT's; replies end where they end."),
    ] = None,
    warmup: Annotated[int, typer.Option(min=0, help="Requests per slot left out before each cell.")] = 1,
    seed: int = 0,
    api_key: Annotated[str | None, typer.Option(help="For a server.")] = None,
    served_model: Annotated[str | None, typer.Option(help="The server's name of the model; asked of it otherwise.")] = None,
    cache: Cache = None,
    tp: Tp = 1,
    device: Device = "auto",
    backend: Backend = "auto",
    out_dir: Annotated[Path | None, typer.Option("--out", help="Folder for bench.json and bench.html.")] = None,
    json_: AsJson = False,
) -> None:
    """Speed over a grid of input lengths and concurrencies: TTFT, TPOT, ITL, tokens/s, goodput, as vllm bench serve defines them."""
    from quantkit.checkpoint.target import check_folder
    from quantkit.evaluation.results.folder import local_models
    from quantkit.evaluation.results.hardware import describe_machine
    from quantkit.evaluation.results.published import published_speeds_of
    from quantkit.evaluation.run import is_url
    from quantkit.evaluation.speed.endpoint import EndpointTarget
    from quantkit.evaluation.speed.measure import SpeedRow, measure_grid
    from quantkit.evaluation.speed.targets import open_target
    from quantkit.evaluation.speed.workload import read_prompts
    from quantkit.hub import plain_name

    lengths, users = _integers("--input-len", input_len), _integers("--concurrency", concurrency)
    rates, limits = _rates(request_rate), _limits(goodput)
    texts = read_prompts(prompts) if prompts is not None else []
    longest = output_len + (max(lengths) if not texts else max(map(len, texts)) + 64)  # a token is a character at least
    if out_dir is not None:
        check_folder(out_dir, local_models([model]))
    target = open_target(
        model,
        max_batch=max(users),
        max_model_len=longest,
        device=device,
        backend=backend,
        cache=cache,
        tp=tp,
        api_key=api_key,
        model=served_model,
    )

    def show(row: SpeedRow) -> None:
        tpot = "-" if row.tpot_ms is None else f"{row.tpot_ms:.1f} ms"
        load = f"{row.concurrency} at a time" if row.offered_rate is None else f"{row.offered_rate:g} requests/s"
        console.tell(f"{'prompts' if texts else row.input_len}, {load}: TTFT {row.ttft_s:.3f} s, TPOT {tpot}")

    with closing(target):
        rows = measure_grid(
            target,
            lengths,
            users,
            output_len,
            rates=rates,
            prompts=texts,
            requests_per_slot=requests,
            requests=num_prompts or (100 if rates else None),
            warmup=warmup,
            seed=seed,
            limits=limits,
            on_row=show,
        )
    name = target.model if isinstance(target, EndpointTarget) else plain_name(model)
    machine = {"hardware": target.name} if is_url(model) else describe_machine(device)
    result: dict[str, Any] = {
        "target": target.name,
        "hardware": machine["hardware"],
        "machine": machine,
        "output_len": output_len,
        "goodput_limits_ms": limits,
    }
    result |= {"cache": cache} if cache is not None else {}
    result |= {"rows": [row.to_json() for row in rows], "published": published_speeds_of(name)}
    if out_dir:
        from quantkit.evaluation.speed.report import write_report

        write_report(out_dir, result)
    if json_:
        return print_json(result)
    console.facts("machine", machine.items())
    console.show_speed(result)
    console.show_published(result["published"])


def _rates(text: str | None) -> list[float]:
    try:
        values = [float(part) for part in text.split(",")] if text is not None else []
    except ValueError:
        values = [0.0]
    if any(not 0 < value < float("inf") for value in values):
        raise typer.BadParameter(f"{text!r} is not a list of rates above 0 such as 0.5,2", param_hint="--request-rate")
    return values


def _limits(text: str | None) -> dict[str, float]:
    from quantkit.evaluation.speed.measure import LIMITS

    found: dict[str, float] = {}
    for part in text.replace(",", " ").split() if text is not None else ():
        name, _, value = part.partition(":")
        try:
            found[name] = float(value)
        except ValueError:
            found[name] = -1.0
        if name not in LIMITS or not 0 < found[name] < float("inf"):
            raise typer.BadParameter(f"{part!r} is no limit such as ttft:200 ({', '.join(LIMITS)}, in ms)", param_hint="--goodput")
    return found


def _integers(option: str, text: str) -> list[int]:
    try:
        values = [int(part) for part in text.split(",")]
    except ValueError:
        values = []
    if not values or min(values) < 1:
        raise typer.BadParameter(f"{text!r} is not a list of positive integers such as 128,1024", param_hint=option)
    return values
