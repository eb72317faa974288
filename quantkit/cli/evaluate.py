"""Accuracy and distance: eval, regrade, compare, ppl, and needle, which makes a task's texts."""

import json
import math
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from quantkit.cli import bars, console
from quantkit.cli.command import stoppable
from quantkit.cli.console import print_json
from quantkit.cli.options import AsJson, Margin, Seed, Target
from quantkit.common.atomic_write import check_writable, make_folder, write_atomic
from quantkit.common.errors import QuantkitError
from quantkit.evaluation.options import EvaluateOptions, PerplexityOptions, RegradeOptions

if TYPE_CHECKING:
    from quantkit.evaluation.results.task_results import EvalResults


def evaluate(
    model: Target,
    *,
    tasks: Annotated[
        str,
        typer.Option(
            help="Comma-separated names from eval/tasks (tiny-math, gsm8k, aime24, mmlu_pro, ...), "
            "or a YAML file."
        ),
    ],
    options: EvaluateOptions,
    plan: Annotated[
        bool,
        typer.Option(
            "--plan",
            help="Run nothing: print how many problems and repeats would resolve a loss of "
            "--margin.",
        ),
    ] = False,
    accuracy: Annotated[
        float | None,
        typer.Option(
            min=0, max=1, help="For --plan: the expected accuracy; that of --baseline by default."
        ),
    ] = None,
    json_: AsJson = False,
) -> None:
    """Score a model on tasks, with error bars, and say whether accuracy held against a baseline."""
    names = [name.strip() for name in tasks.split(",")]
    if plan:
        return _show_plan(names, options, accuracy, json_)
    if accuracy is not None:
        raise typer.BadParameter("it is only for --plan", param_hint="--accuracy")
    _show_results(_evaluated(model, names, options).to_json(), json_)


def _show_plan(
    tasks: list[str], options: EvaluateOptions, accuracy: float | None, json_: bool
) -> None:
    """Problems and repeats that a verdict takes, for every task."""
    from quantkit.evaluation.planning import plan_evaluation

    plans = plan_evaluation(tasks, options, accuracy)
    if json_:
        return print_json({"margin": options.margin, "plans": [plan.to_json() for plan in plans]})
    for plan in plans:
        console.show_needed(plan.to_json(), options.margin)


def _evaluated(model: str, names: list[str], options: EvaluateOptions) -> "EvalResults":
    """Evaluate with progress; if stopped, say what is stored."""
    from quantkit.evaluation.results.folder import results_folder
    from quantkit.evaluation.run import EvaluationProgress, run_evaluation

    done, out = "", options.out
    baseline = None if options.baseline is None else str(options.baseline)

    def stored() -> str:
        return f"{done or 'no reply yet'}, stored in {out}" if out else ""

    with stoppable(stored), results_folder(out, model, baseline), bars.samples_bar() as bar:
        counts = bars.counts(bar)

        def show(p: EvaluationProgress) -> None:
            nonlocal done
            if p.stage == "generate":
                done = f"{p.done} of {p.total} replies of {p.model} to {p.task} are complete"
            speed = f"{p.tokens / p.seconds:.0f} tokens/s" if p.seconds and p.tokens else ""
            counts(
                (p.model, p.task, p.stage), f"{p.task} {p.stage}", p.done, p.total, speed, p.share
            )

        return run_evaluation(model, names, options, progress=show, notice=console.notify)


def _show_results(results: dict[str, Any], json_: bool) -> None:
    """Print them; exit 1 if too many samples failed for a verdict."""
    if json_:
        print_json(results)
    else:
        console.show_scores(results)
    for fault in results["faults"]:
        console.notify(f"error: {fault}; run again: only failed requests are repeated")
    if results["faults"]:
        raise typer.Exit(1)


def regrade(
    out: Annotated[
        Path, typer.Argument(metavar="OUT", help="The --out folder of eval, finished or not.")
    ],
    *,
    options: RegradeOptions,
    json_: AsJson = False,
) -> None:
    """Grade the replies stored in OUT again and rewrite its results; no model or server is used."""
    from quantkit.evaluation.regrading import regrade as grade_again
    from quantkit.evaluation.results.folder import results_folder

    with results_folder(out):
        results = grade_again(out, options, notice=console.notify)
    _show_results(results.to_json(), json_)


def compare(
    runs: Annotated[
        list[Path],
        typer.Argument(
            metavar="BASELINE RUN...", help="The --out folders of eval; the first is the baseline."
        ),
    ],
    *,
    margin: Margin = 0.01,
    seed: Seed = 0,
    out: Annotated[
        Path | None, typer.Option(help="Folder for comparison.html and comparison.json.")
    ] = None,
    json_: AsJson = False,
) -> None:
    """Compare finished evaluations, paired over the problems they share: held, lost or cannot
    tell."""
    from quantkit.evaluation.results.baseline import compare_runs, write_page

    table = compare_runs(runs, margin=margin, seed=seed)
    if out is not None:
        write_page(out, table)
    if json_:
        return print_json(table)
    console.show_comparison(table)
    if out is not None:
        console.notify(f"page: {out}/comparison.html")


def ppl(
    model: Target,
    *,
    text: Annotated[
        Path | None,
        typer.Option(
            help="A .txt, a .jsonl of {'text': ...}, one document a line, or the --out folder of "
            "eval, whose replies are scored."
        ),
    ] = None,
    options: PerplexityOptions,
    layers: Annotated[
        bool, typer.Option("--layers", help="Also the error after each layer.")
    ] = False,
    positions: Annotated[
        bool, typer.Option("--positions", help="Also KL, agreement and accuracy along the text.")
    ] = False,
    json_: AsJson = False,
) -> None:
    """Perplexity of a text; with a baseline also the distance from it, by token and by layer. One
    of the two may be a server."""
    from quantkit.checkpoint.hub import find_model
    from quantkit.evaluation.distance.perplexity import measure
    from quantkit.evaluation.generators.openai_server import is_url
    from quantkit.executor.hf_engine import slow

    if options.sampled is None:
        for flag, value in (("--data-dir", options.data_dir), ("--max-tokens", options.max_tokens)):
            if value is not None:
                raise typer.BadParameter("it is only for --sampled", param_hint=flag)
    if positions and options.baseline is None:
        raise typer.BadParameter("it is only with --baseline", param_hint="--positions")
    warned = is_url(model)
    with bars.samples_bar() as bar:
        counts = bars.counts(bar)

        def show(p: Any) -> None:
            nonlocal warned
            if not warned and (warning := slow(find_model(model))):
                console.notify(warning)
            warned = True
            counts(p.stage, f"tokens through the {p.stage}", p.done, p.total)

        quality = measure(model, text, options, progress=show)
    if json_:
        print_json(quality.to_json())
    else:
        console.facts(model, quality.facts())
        for row in quality.rows() if layers else ():
            console.out.print(f"layer {row['layer']:>3}  error {row['error']:.2e}")
        if positions and quality.positions:
            console.show_positions(quality.to_json()["positions"])
    if options.out is not None:
        console.notify(f"report: {options.out}/ppl.html")
    for name, perplexity in ((model, quality.ppl), (options.baseline, quality.baseline_ppl)):
        if perplexity is not None and math.isnan(perplexity):
            # --layers shows where it begins.
            console.print_error(
                f"the logits of {name} are NaN",
                "quantkit check names the damaged tensor",
                as_json=False,
            )
            raise typer.Exit(1)


def needle(
    tokenizer: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="A folder whose tokenizer.json counts the lengths, or tiny-r1.",
        ),
    ],
    *,
    out: Annotated[
        Path,
        typer.Option(
            help="The .jsonl to write; the task reads needle/test.jsonl below --data-dir."
        ),
    ],
    lengths: Annotated[
        str, typer.Option(help="Tokens of a prompt, comma-separated; 4k is 4096.")
    ] = "4k,8k,16k,32k,60k",
    kinds: Annotated[
        str, typer.Option(help="single, multikey, keys, comma-separated.")
    ] = "single,multikey,keys",
    count: Annotated[int, typer.Option(min=1, help="Problems of every length and kind.")] = 10,
    seed: Seed = 0,
) -> None:
    """Make long texts with hidden numbers, of 4K to 60K tokens and more, for eval's task
    `needle`."""
    from quantkit.checkpoint.hub import find_local
    from quantkit.evaluation.tasks.definitions import find_task
    from quantkit.evaluation.tasks.needle import KINDS, needle_rows
    from quantkit.tokenizer.chat import ChatTokenizer

    folder = find_local(tokenizer)
    if folder is None:
        raise QuantkitError(
            f"{tokenizer} is not a folder here",
            "give one with the model's tokenizer.json; no other file is needed",
        )
    chosen = [kind.strip() for kind in kinds.split(",")]
    if unknown := [kind for kind in chosen if kind not in KINDS]:
        raise typer.BadParameter(
            f"{unknown[0]!r} is none of {', '.join(KINDS)}", param_hint="--kinds"
        )
    make_folder(out.parent)
    check_writable(out, "--out")
    tokens = ChatTokenizer(folder)
    rows = list(
        needle_rows(
            lambda text: len(tokens.encode_rendered(text)), _lengths(lengths), chosen, count, seed
        )
    )
    write_atomic(out, "".join(json.dumps(row) + "\n" for row in rows))
    files = find_task("needle").data.files
    folder = next((one for file in files if (one := _data_dir(out, Path(file))) is not None), None)
    console.notify(
        f"{len(rows)} problems in {out}; "
        + (
            f"the task needle reads {' or '.join(files)} below --data-dir"
            if folder is None
            else shlex.join(
                ["quantkit", "eval", "MODEL", "--tasks", "needle", "--data-dir", str(folder)]
            )
        )
    )


def _data_dir(out: Path, file: Path) -> Path | None:
    """The folder below which `out` is `file`; None if it has another name."""
    whole, own = out.absolute(), file.parts
    return whole.parents[len(own) - 1] if whole.parts[-len(own) :] == own else None


def _lengths(text: str) -> list[int]:
    try:
        found = [
            int(part[:-1]) * 1024 if part.strip().lower().endswith("k") else int(part)
            for part in map(str.strip, text.split(","))
        ]
    except ValueError:
        found = []
    if not found or min(found) < 1:
        raise typer.BadParameter(
            f"{text!r} is not a list of lengths such as 4k,8k", param_hint="--lengths"
        )
    return found
