"""go: plan, choose, ask, quantize, measure, score, and print the launch."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from quantkit.checkpoint.hub import model_basename
from quantkit.cli import bars, console
from quantkit.cli.command import stoppable
from quantkit.cli.options import AsJson, Model
from quantkit.common.errors import QuantkitError
from quantkit.guide.options import GoOptions

if TYPE_CHECKING:
    from quantkit.guide.job import GoRequest, Listeners
    from quantkit.guide.proposal import Proposal

_TITLES = {
    "download": "model",
    "quantize": "quantizing",
    "measure": "measuring against the source",
    "score": "scoring",
    "launch": "launch",
}


def go(
    model: Model,
    *,
    options: GoOptions,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show the proposal, and do nothing.")
    ] = False,
    json_: AsJson = False,
) -> None:
    """From a model to its launch: choose scheme and engine for your devices, quantize, measure.
    Resumes when stopped and given again."""
    if options.tasks and not options.score:
        raise typer.BadParameter("it is only for --score", param_hint="--tasks")
    out = options.out or Path(f"{model_basename(model)}-go")
    if not dry_run and not (out / "go.json").exists():
        _check_terminal(yes)
    with console.status("reading the machine"):
        from quantkit.evaluation.results.folder import results_folder
        from quantkit.guide.job import GoRequest, GuidedJob
        from quantkit.guide.record import Agreed, Record
        from quantkit.planning.devices import find_devices

        request = GoRequest(model, out, find_devices(options.devices), options)
    if dry_run:
        proposal = _proposal(request)
        return console.print_json(proposal.to_json()) if json_ else console.show(proposal)

    def stored() -> str:
        return f"finished steps are stored in {out}" if (out / "go.json").exists() else ""

    with stoppable(stored), results_folder(out, model):
        record = Record(out, request.record())
        choice, expected = record.choice, None
        if choice is None:
            _check_terminal(yes)
            proposal = _proposal(request)
            console.show_on_stderr(proposal)
            if not yes and not _confirmed():
                return console.notify(
                    "not begun; --scheme, --engine or other --devices make another proposal"
                )
            chosen, expected = proposal.chosen, proposal.seconds
            choice = Agreed(chosen.scheme, chosen.engine, chosen.devices)
            record.agree(choice)
        else:
            console.notify(f"resuming in {out}: {choice.scheme} for {choice.engine}, as agreed")
        with bars.samples_bar() as counted, bars.bytes_bar() as units:
            outcome = GuidedJob(request, choice, record, _listeners(counted, units, expected)).run()
    if json_:
        return console.print_json(outcome.to_json())
    console.show(outcome)
    for script in outcome.launch:
        console.out.print(script, soft_wrap=True)


def _check_terminal(yes: bool) -> None:
    if not yes and not sys.stdin.isatty():
        raise QuantkitError(
            "quantkit go asks before it begins, and there is no terminal to ask on",
            "give --yes, or --dry-run for the proposal alone",
        )


def _proposal(request: "GoRequest") -> "Proposal":
    from quantkit.guide.proposal import propose

    with console.status(f"reading the headers of {request.model}"):
        return propose(request)


def _listeners(counted: "bars.Bars", units: "bars.Bars", expected: float | None) -> "Listeners":
    from quantkit.guide.job import Listeners

    counts = bars.counts(counted)

    def step(name: str, text: str) -> None:
        console.notify(f"{_TITLES[name]}: {text}" if text else _TITLES[name])

    return Listeners(
        step=step,
        units=bars.listener(units, "quantizing", expected),
        text=lambda p: counts(("text", p.stage), f"tokens through the {p.stage}", p.done, p.total),
        replies=lambda p: counts(
            (p.model, p.task, p.stage), f"{p.task} {p.stage}, {p.model}", p.done, p.total
        ),
        notice=console.notify,
    )


def _confirmed() -> bool:
    console.err.print("Begin? [y/N] ", end="")
    try:
        return input().strip().lower() in ("y", "yes")
    except EOFError:
        return False
