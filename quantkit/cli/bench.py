"""bench: the speed of a model or a server."""

from contextlib import closing
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from quantkit.cli import console
from quantkit.cli.console import print_json
from quantkit.cli.options import AsJson, Target
from quantkit.common.result import JsonObject
from quantkit.evaluation.options import BenchOptions
from quantkit.executor.options import EngineOptions

if TYPE_CHECKING:
    from quantkit.evaluation.speed.measure import SpeedRow
    from quantkit.evaluation.speed.measure import Target as SpeedTarget


def bench(
    model: Target,
    *,
    options: BenchOptions,
    engine: Annotated[EngineOptions, ("tp", "dp", "cache", "device", "backend")],
    json_: AsJson = False,
) -> None:
    """Speed over a grid of input lengths and concurrencies: TTFT, TPOT, ITL, tokens/s, goodput, as
    vllm bench serve defines them."""
    from quantkit.checkpoint.output_dir import check_results_folder
    from quantkit.common.atomic_write import check_writable, make_folder
    from quantkit.evaluation.results.folder import local_models
    from quantkit.evaluation.speed.measure import measure_grid, read_prompts
    from quantkit.evaluation.speed.targets import open_target

    lengths = _integers("--input-len", options.input_len)
    concurrencies = _integers("--concurrency", options.concurrency)
    rates, limits = _rates(options.request_rate), _limits(options.goodput)
    texts = read_prompts(options.prompts) if options.prompts is not None else []
    if options.out is not None:
        check_results_folder(options.out, local_models([model]))
        make_folder(options.out)
        check_writable(options.out / "bench.json", "--out")
    target = open_target(
        model,
        replace(engine, max_batch=max(concurrencies)),
        input_len=max(lengths),
        output_len=options.output_len,
        prompts=texts,
        api_key=options.api_key,
        served_model=options.served_model,
    )
    with closing(target):
        rows = measure_grid(
            target,
            lengths,
            concurrencies,
            options.output_len,
            rates=rates,
            prompts=texts,
            requests=options.requests,
            num_prompts=options.num_prompts or (100 if rates else None),
            warmup=options.warmup,
            seed=options.seed,
            limits=limits,
            on_row=partial(_show_row, bool(texts)),
        )
    result = _result(model, target, engine, options.output_len, limits, rows)
    if options.out is not None:
        from quantkit.evaluation.speed.measure import write_report

        write_report(options.out, result)
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
    console.notify(
        f"{'prompts' if from_file else row.input_len}, {load}: TTFT {row.ttft_s:.3f} s, TPOT {tpot}"
    )


def _result(
    model: str,
    target: "SpeedTarget",
    engine: EngineOptions,
    output_len: int,
    limits: dict[str, float],
    rows: list["SpeedRow"],
) -> JsonObject:
    """bench.json: the machine, the workload, every cell, and published figures of this model."""
    from quantkit.checkpoint.hub import model_basename
    from quantkit.common.devices import describe_machine
    from quantkit.evaluation.generators.openai_server import is_url
    from quantkit.evaluation.results.published import published_speeds_for
    from quantkit.evaluation.speed.targets import EndpointTarget

    name = target.model if isinstance(target, EndpointTarget) else model_basename(model)
    machine = {"hardware": target.name} if is_url(model) else describe_machine(engine.device)
    about: JsonObject = {
        "target": target.name,
        "hardware": machine["hardware"],
        "machine": machine,
    }
    about |= {"output_len": output_len, "goodput_limits_ms": limits}
    if engine.cache is not None:
        about["cache"] = engine.cache
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
                f"{part!r} is not a limit such as ttft:200 ({', '.join(LIMITS)}, in ms)",
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
