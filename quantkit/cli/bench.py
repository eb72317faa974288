"""bench: how fast a model or a server answers."""

from contextlib import closing
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from quantkit.cli import console
from quantkit.cli.console import print_json
from quantkit.cli.options import (
    AsJson,
    Backend,
    Cache,
    Device,
    Dp,
    Key,
    Seed,
    ServedName,
    Target,
    Tp,
)

if TYPE_CHECKING:
    from quantkit.evaluation.speed.measure import SpeedRow
    from quantkit.evaluation.speed.measure import Target as SpeedTarget


Lengths = Annotated[str, typer.Option(help="Prompt tokens, comma-separated.")]
Users = Annotated[str, typer.Option(help="Requests at a time, comma-separated.")]
OutputLength = Annotated[int, typer.Option(min=1, help="Tokens of every reply.")]
PerSlot = Annotated[int, typer.Option(min=1, help="Measured requests per concurrent slot.")]
InAll = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Measured requests of a cell in all, instead of --requests; 100 at a --request-rate.",
    ),
]
Rates = Annotated[
    str | None,
    typer.Option(
        help="Requests/s that arrive by themselves (Poisson), comma-separated; --concurrency is "
        "the most at a time."
    ),
]
Goodput = Annotated[
    str | None,
    typer.Option(
        help="Limits in ms, such as ttft:200,tpot:30,e2el:5000: adds requests/s that meet them all."
    ),
]
Prompts = Annotated[
    Path | None,
    typer.Option(
        help="Prompts instead of random ones: .jsonl, .txt, or .json like ShareGPT's; replies end "
        "where they end."
    ),
]
Warmup = Annotated[int, typer.Option(min=0, help="Requests per slot left out before each cell.")]
Out = Annotated[Path | None, typer.Option("--out", help="Folder for bench.json and bench.html.")]


def bench(
    model: Target,
    input_len: Lengths = "128,1024",
    concurrency: Users = "1,8",
    output_len: OutputLength = 512,
    requests: PerSlot = 2,
    num_prompts: InAll = None,
    request_rate: Rates = None,
    goodput: Goodput = None,
    prompts: Prompts = None,
    warmup: Warmup = 1,
    seed: Seed = 0,
    api_key: Key = None,
    served_model: ServedName = None,
    cache: Cache = None,
    tp: Tp = 1,
    dp: Dp = 1,
    device: Device = "auto",
    backend: Backend = "auto",
    out_dir: Out = None,
    json_: AsJson = False,
) -> None:
    """Speed over a grid of input lengths and concurrencies: TTFT, TPOT, ITL, tokens/s, goodput, as
    vllm bench serve defines them."""
    from quantkit.checkpoint.output_dir import check_results_folder
    from quantkit.common.atomic_write import check_writable, make_folder
    from quantkit.evaluation.results.folder import local_models
    from quantkit.evaluation.speed.engine import open_target
    from quantkit.evaluation.speed.measure import measure_grid, read_prompts

    lengths, users = _integers("--input-len", input_len), _integers("--concurrency", concurrency)
    rates, limits = _rates(request_rate), _limits(goodput)
    texts = read_prompts(prompts) if prompts is not None else []
    if out_dir is not None:
        check_results_folder(out_dir, local_models([model]))
        make_folder(out_dir)
        check_writable(out_dir / "bench.json", "--out")
    place: dict[str, Any] = {
        "device": device,
        "backend": backend,
        "cache": cache,
        "tp": tp,
        "dp": dp,
    }
    place |= {"api_key": api_key, "model": served_model}
    target = open_target(
        model,
        max_batch=max(users),
        input_len=max(lengths),
        output_len=output_len,
        prompts=texts,
        **place,
    )
    load: dict[str, Any] = {
        "rates": rates,
        "prompts": texts,
        "requests_per_slot": requests,
        "warmup": warmup,
        "seed": seed,
    }
    load |= {"requests": num_prompts or (100 if rates else None), "limits": limits}
    with closing(target):
        rows = measure_grid(
            target, lengths, users, output_len, on_row=partial(_show_row, bool(texts)), **load
        )
    result = _result(model, target, device, output_len, limits, cache, rows)
    if out_dir:
        from quantkit.evaluation.speed.report import write_report

        write_report(out_dir, result)
    if json_:
        return print_json(result)
    console.facts("machine", result["machine"].items())
    console.show_speed(result)
    console.show_published(result["published"])


def _show_row(from_file: bool, row: "SpeedRow") -> None:
    tpot = "-" if row.tpot_ms is None else f"{row.tpot_ms:.1f} ms"
    load = (
        f"{row.concurrency} at a time"
        if row.offered_rate is None
        else f"{row.offered_rate:g} requests/s"
    )
    console.tell(
        f"{'prompts' if from_file else row.input_len}, {load}: TTFT {row.ttft_s:.3f} s, TPOT {tpot}"
    )


def _result(
    model: str,
    target: "SpeedTarget",
    device: str,
    output_len: int,
    limits: dict[str, float],
    cache: str | None,
    rows: list["SpeedRow"],
) -> dict[str, Any]:
    """bench.json: where it ran, what was asked, every cell, and what others published of this
    model."""
    from quantkit.checkpoint.hub import model_basename
    from quantkit.common.devices import describe_machine
    from quantkit.evaluation.openai_server import is_url
    from quantkit.evaluation.results.published import published_speeds_for
    from quantkit.evaluation.speed.endpoint import EndpointTarget

    name = target.model if isinstance(target, EndpointTarget) else model_basename(model)
    machine = {"hardware": target.name} if is_url(model) else describe_machine(device)
    about: dict[str, Any] = {
        "target": target.name,
        "hardware": machine["hardware"],
        "machine": machine,
    }
    about |= {"output_len": output_len, "goodput_limits_ms": limits} | (
        {"cache": cache} if cache is not None else {}
    )
    return about | {
        "rows": [row.to_json() for row in rows],
        "published": published_speeds_for(name),
    }


def _rates(text: str | None) -> list[float]:
    try:
        values = [float(part) for part in text.split(",")] if text is not None else []
    except ValueError:
        values = [0.0]
    if any(not 0 < value < float("inf") for value in values):
        raise typer.BadParameter(
            f"{text!r} is not a list of rates above 0 such as 0.5,2", param_hint="--request-rate"
        )
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
            raise typer.BadParameter(
                f"{part!r} is no limit such as ttft:200 ({', '.join(LIMITS)}, in ms)",
                param_hint="--goodput",
            )
    return found


def _integers(option: str, text: str) -> list[int]:
    try:
        values = [int(part) for part in text.split(",")]
    except ValueError:
        values = []
    if not values or min(values) < 1:
        raise typer.BadParameter(
            f"{text!r} is not a list of positive integers such as 128,1024", param_hint=option
        )
    return values
