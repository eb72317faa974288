"""inspect: what is in a checkpoint; check: what is wrong with it; kernels: what this machine
runs."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from quantkit.checkpoint.hub import find_local
from quantkit.cli import bars, console
from quantkit.cli.console import print_json
from quantkit.cli.options import AsJson, Model
from quantkit.common.errors import QuantkitError
from quantkit.executor.options import EngineOptions
from quantkit.quantization.options import names_of_engines

_GRIDS, _SIDE = ("int4-asym-128", "int8", "fp4"), 2048
"""The weight that times the reference backend: its grids, and rows and columns."""


def inspect(
    model: Model,
    engine: Annotated[
        str | None,
        typer.Option(
            help="Also say whether vllm, sglang, vllm-ascend, omni-infer or chitu loads it.",
            autocompletion=names_of_engines,
        ),
    ] = None,
    json_: AsJson = False,
) -> None:
    """What is in a checkpoint: format, scheme, tensors, bytes, what is missing or unknown, and
    whether an engine loads it. Exits 1 if that engine does not."""
    from quantkit import api

    about = api.inspect(model, engine=engine)
    if json_:
        print_json(about.to_json())
    else:
        console.show(about)
    refused = any(problem.severity == "error" for problem in about.problems or ())
    raise typer.Exit(1 if refused else 0)


def check(
    model: Model,
    source: Annotated[
        str | None,
        typer.Option(help="The source model, to compare with."),
    ] = None,
    engine: Annotated[
        str | None,
        typer.Option(
            help="Also report what prevents vllm, sglang, vllm-ascend, omni-infer or chitu from "
            "loading it.",
            autocompletion=names_of_engines,
        ),
    ] = None,
    depth: Annotated[
        str,
        typer.Option(
            help="headers, tensors or behaviour. By default tensors, for a hub model headers, with "
            "--text behaviour."
        ),
    ] = "auto",
    text: Annotated[
        Path | None,
        typer.Option(
            help="Text that both models process, .txt or .jsonl; quantkit's own with --depth "
            "behaviour."
        ),
    ] = None,
    report: Annotated[Path | None, typer.Option(help="Write the findings as an HTML page.")] = None,
    repair: Annotated[
        Path | None,
        typer.Option(
            metavar="OUT",
            help="Write a copy with the unambiguous faults fixed; the rest is the same bit for bit.",
        ),
    ] = None,
    json_: AsJson = False,
) -> None:
    """What is wrong with a checkpoint: files, names, codes, scales, MTP layer, tokenizer. Exits 0
    if good, 1 if doubtful, 2 if bad."""
    from quantkit.common.atomic_write import check_writable, make_folder
    from quantkit.diagnosis import write_report
    from quantkit.diagnosis.diagnose import DEPTHS, diagnose
    from quantkit.diagnosis.repair import check_new
    from quantkit.diagnosis.repair import repair as write_repaired

    if depth not in ("auto", *DEPTHS):
        raise typer.BadParameter(f"{depth!r} is none of {', '.join(DEPTHS)}", param_hint="--depth")
    if text is not None and depth not in ("auto", "behaviour"):
        raise typer.BadParameter("it is computed with --depth behaviour alone", param_hint="--text")
    if repair is not None:
        check_new(repair)
    if report is not None:
        make_folder(report.parent)
        check_writable(report, "--report")
    by_itself = (
        "behaviour" if text is not None else "headers" if find_local(model) is None else "tensors"
    )
    chosen: Any = by_itself if depth == "auto" else depth
    with bars.bytes_bar() as bar:
        row = bar.add_task("tensors", total=None, note="", visible=False)

        def show(done: int, total: int) -> None:
            bar.update(row, completed=done, total=total, visible=True)

        diagnosis = diagnose(
            model,
            source=source,
            engine=engine,
            depth=chosen,
            text=text,
            notify=console.notify,
            on_bytes=show,
        )
    about = diagnosis.to_json() | {"checked": diagnosis.checked}
    if not json_:
        console.show_diagnosis(model, about)
    if repair is not None:
        about |= {
            "repaired": {
                "out": str(repair),
                "changes": write_repaired(diagnosis, repair, source, engine),
            }
        }
    if report is not None:
        write_report(report, model, about)
    if json_:
        console.print_json(about)
    else:
        for change in about.get("repaired", {}).get("changes", []):
            console.notify(f"repaired: {change}")
    raise typer.Exit(diagnosis.findings.exit_code)


def kernels(
    *,
    engine: Annotated[EngineOptions, ("device",)],
    backend: Annotated[
        str, typer.Option(help="Show what serves each operator with this backend.")
    ] = "auto",
    check: Annotated[
        bool,
        typer.Option(
            help="Run every operator at R1 shapes against the reference: error, time, bandwidth."
        ),
    ] = False,
    tune: Annotated[
        bool,
        typer.Option(
            help="Measure plans of the Triton kernels on this card and keep the best: some minutes."
        ),
    ] = False,
    model: Annotated[
        str | None,
        typer.Option(
            help="With --tune: the model whose products are measured, in place of R1's and "
            "Qwen3-8B's quantized ones."
        ),
    ] = None,
    tp: Annotated[int, typer.Option(min=1, help="With --model: ranks that share it.")] = 1,
    json_: AsJson = False,
) -> None:
    """Operators and backends: which are usable here and why others are not; with --check their
    error and speed."""
    import quantkit_kernels

    from quantkit.common.devices import find_device

    target = find_device(engine.device)
    if tune and check:
        raise QuantkitError(
            "--tune and --check are two measurements", "give one of them, then the other"
        )
    if (tune or check) and backend != "auto":
        raise QuantkitError(
            "--backend is for the table; --check runs every backend that is usable, --tune Triton's",
            "leave --backend out",
        )
    if model is not None and not tune:
        raise QuantkitError("--model is for --tune", "give both, or leave --model out")
    if tp > 1 and model is None:
        raise QuantkitError("--tp is for --model", "give both, or leave --tp out")
    if tune:
        return _tune(target, json_, model, tp)
    if not check:
        try:
            rows = [vars(row) for row in quantkit_kernels.table(target, backend)]
        except ValueError as refusal:
            raise QuantkitError(str(refusal), "choose one of these") from refusal
        notes = _notes(target, rows)
        if json_:
            return print_json({"device": str(target), "rows": rows} | notes)
        console.show_kernels(str(target), rows)
        own = [row for row in rows if row["backend"] == backend]
        if own and not any(row["usable"] for row in own):
            console.notify(
                f"{backend} runs nothing on {target}: {own[0]['reason']}; the table is that of auto"
            )
        for line in notes["slow"]:
            console.notify(line)
        return (
            console.notify(f"plans of the Triton kernels: {notes['plans']}")
            if notes["plans"]
            else None
        )
    from quantkit_kernels.self_check import check as measure

    from quantkit.common.devices import describe_machine
    from quantkit.evaluation.results.published import published_speeds

    machine = describe_machine(engine.device)
    published = published_speeds() if target.type == "npu" else []
    if not json_:
        console.facts("machine", machine.items())
    measured = []
    for one in measure(target):
        measured.append(asdict(one) | {"ok": one.ok})
        if json_:  # a run that is cut off leaves what it measured
            console.notify(f"{one.operator} on {one.backend}, {one.case}: error {one.error:.2e}")
        else:
            console.show_measurement(measured[-1])
    wrong = ", ".join(f"{row['operator']} on {row['backend']}" for row in measured if not row["ok"])
    fault = QuantkitError(
        f"results differ from the reference: {wrong}", "use --backend reference and report this"
    )
    if json_:
        error = {"error": {"message": fault.problem, "remedy": fault.remedy}} if wrong else {}
        print_json(
            {"device": str(target), "machine": machine, "rows": measured, "published": published}
            | error
        )
        raise typer.Exit(1 if wrong else 0)
    console.show_published(published)
    if wrong:
        raise fault


def _notes(device: Any, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """How slow the reference is for the quantized linears that it serves, and where the plans of
    the Triton kernels come from."""
    import torch
    from quantkit_kernels.samples import random_weight
    from quantkit_kernels.triton.cards import architecture, describe_plans

    from quantkit.executor.weights.fallback_warning import slowness

    served = {row["operator"]: row["backend"] for row in rows if row["taken"]}
    slow = []
    for grid in _GRIDS:
        operator = f"linear_{grid.partition('-')[0]}"
        if served[operator] == "reference":
            weight = random_weight(grid, _SIDE, _SIDE, torch.Generator(device))
            slow.append(slowness(operator, weight, device, torch.bfloat16))
    on_gpu = device.type == "cuda" and any(
        row["backend"] == "triton" and row["usable"] for row in rows
    )
    return {"slow": slow, "plans": describe_plans(architecture(device)) if on_gpu else ""}


def _tune(device: Any, json_: bool, model: str | None, tp: int) -> None:
    from quantkit_kernels.backends import why_unusable
    from quantkit_kernels.sizes import MEASURED
    from quantkit_kernels.triton.cards import NoTable, architecture, own_table
    from quantkit_kernels.triton.tune import write_table

    reason = (
        "it is a CPU" if device.type == "cpu" else why_unusable("linear_int4", "triton", device)
    )
    if reason is not None:
        raise QuantkitError(
            f"plans of the Triton kernels cannot be measured on {device}: {reason}",
            "tune on a machine with a GPU",
        )
    wanted = MEASURED
    if model is not None:
        from quantkit.checkpoint.hub import find_model
        from quantkit.checkpoint.reader import Checkpoint
        from quantkit.executor.weights.tp_shares import products

        wanted = products(Checkpoint.open(find_model(model)), tp)
        console.notify(
            f"{len(wanted.linears)} sizes of linears and {len(wanted.experts)} of experts"
        )
    path = own_table(architecture(device))
    console.notify(f"plans are kept in {path}, those of a weight as soon as it is measured")
    try:
        for line in write_table(device, path, wanted):
            console.notify(line)
    except NoTable as fault:
        raise QuantkitError(
            str(fault),
            "delete what is in the way, or set XDG_CACHE_HOME to a folder that can be written",
        ) from fault
    if json_:
        return print_json(
            {"device": str(device), "architecture": architecture(device), "table": str(path)}
        )
    console.notify(
        f"a copy of {path}, sent to quantkit, becomes the table of {architecture(device)}"
    )
