"""The whole job from one command: plan, choose, ask, quantize, measure, score, and print the
launch."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from quantkit.checkpoint.hub import model_basename
from quantkit.cli import bars, console
from quantkit.cli.options import AsJson, EngineName, Model, scheme_names
from quantkit.cli.stopping import stoppable
from quantkit.common.errors import QuantkitError

if TYPE_CHECKING:
    from quantkit.guide.job import GoRequest, Listeners
    from quantkit.guide.proposal import Proposal

_TITLES = {
    "download": "model",
    "quantize": "quantizing",
    "measure": "measuring beside the source",
    "score": "scoring",
    "launch": "launch",
}


def go(
    model: Model,
    devices: Annotated[
        str | None,
        typer.Option(
            help="What shall serve it: 8x64GiB, 8xH100, 8x910B1 or cpu; what this machine has "
            "otherwise."
        ),
    ] = None,
    out_dir: Annotated[
        Path | None,
        typer.Option("--out", help="Folder for all that comes of it; MODEL-go otherwise."),
    ] = None,
    scheme: Annotated[
        str | None,
        typer.Option(
            help="This one, where the choice is not to be quantkit's.", autocompletion=scheme_names
        ),
    ] = None,
    engine: EngineName = None,
    calibration: Annotated[str | None, typer.Option(help="As for quantize.")] = None,
    samples: Annotated[int | None, typer.Option(min=1, help="Calibration sequences.")] = None,
    seq_len: Annotated[
        int | None, typer.Option(min=8, help="Tokens of a calibration sequence.")
    ] = None,
    context: Annotated[
        int, typer.Option(min=1, help="Tokens of the longest request to serve.")
    ] = 4096,
    score: Annotated[
        bool, typer.Option("--score", help="Also score tasks beside the source.")
    ] = False,
    tasks: Annotated[
        str, typer.Option(help="For --score, comma-separated: as for eval.")
    ] = "tiny-math",
    limit: Annotated[
        int, typer.Option(min=1, help="For --score: the first problems of each task.")
    ] = 50,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    json_: AsJson = False,
) -> None:
    """From a model to its launch: choose scheme and engine for your devices, quantize, measure.
    Stopped, it goes on when given again."""
    out = out_dir or Path(f"{model_basename(model)}-go")
    if not yes and not sys.stdin.isatty() and not (out / "go.json").exists():
        raise QuantkitError(
            "quantkit go asks before it begins, and there is no terminal to ask on", "give --yes"
        )
    with console.status("looking at the machine"):
        from quantkit.guide.job import GoRequest, GuidedJob
        from quantkit.guide.record import Agreed, Record
        from quantkit.planning.boxes import read_box

        box = read_box(devices)
    from quantkit.evaluation.results.folder import results_folder

    named = tuple(name.strip() for name in tasks.split(",")) if score else ()
    request = GoRequest(model, out, box, context, calibration, samples, seq_len, named, limit)

    def kept() -> str:
        return f"what is done is kept in {out}" if (out / "go.json").exists() else ""

    with stoppable(kept), results_folder(out, model):
        record = Record(out, request.asked(scheme, engine))
        choice, expected = record.choice, None
        if choice is None:
            proposal = _agreed(request, scheme, engine, yes=yes)
            choice, expected = (
                Agreed(proposal.chosen.scheme, proposal.chosen.engine, proposal.chosen.devices),
                proposal.seconds,
            )
            record.agree(choice)
        else:
            console.tell(f"going on in {out}: {choice.scheme} for {choice.engine}, as agreed")
        with bars.samples_bar() as counted, bars.bytes_bar() as units:
            outcome = GuidedJob(request, choice, record, _listeners(counted, units, expected)).run()
    if json_:
        return console.print_json(outcome.to_json())
    console.show(outcome)
    for script in outcome.launch:
        console.out.print(script, soft_wrap=True)


def _agreed(
    request: "GoRequest", scheme: str | None, engine: str | None, *, yes: bool
) -> "Proposal":
    """The proposal, shown and agreed to."""
    from quantkit.guide.propose import propose

    if not yes and not sys.stdin.isatty():
        raise QuantkitError(
            "quantkit go asks before it begins, and there is no terminal to ask on", "give --yes"
        )
    with console.status(f"reading the headers of {request.model}"):
        proposal = propose(request, scheme=scheme, engine=engine)
    console.show_aside(proposal)
    if not yes and not _confirmed():
        raise QuantkitError(
            "not begun", "give --scheme, --engine or other --devices for another choice"
        )
    return proposal


def _listeners(counted: "bars.Bars", units: "bars.Bars", expected: float | None) -> "Listeners":
    from quantkit.guide.job import Listeners

    counts = bars.counts(counted)

    def step(name: str, text: str) -> None:
        console.tell(f"{_TITLES[name]}: {text}" if text else _TITLES[name])

    return Listeners(
        step=step,
        units=bars.listener(units, "quantizing", expected),
        text=lambda p: counts(("text", p.stage), f"tokens through the {p.stage}", p.done, p.total),
        replies=lambda p: counts(
            (p.model, p.task, p.stage), f"{p.task} {p.stage}, {p.model}", p.done, p.total
        ),
        notice=console.tell,
    )


def _confirmed() -> bool:
    console.err.print("Begin? [y/N] ", end="")
    try:
        return input().strip().lower() in ("y", "yes")
    except EOFError:
        return False
