"""eval: scores of a model's answers."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from quantkit.cli import bars, console
from quantkit.cli.console import print_json
from quantkit.cli.options import (
    AsJson,
    Backend,
    Cache,
    CountExperts,
    Device,
    Key,
    Seed,
    ServedName,
    Target,
)
from quantkit.cli.stopping import stoppable

if TYPE_CHECKING:
    from quantkit.evaluation.results.task_results import EvalResults


Tasks = Annotated[
    str,
    typer.Option(
        help="Comma-separated names of eval/tasks (tiny-math, gsm8k, aime24, mmlu_pro, ...), or a "
        "YAML."
    ),
]
DataDir = Annotated[Path | None, typer.Option(help="Folder with the tasks' data files.")]
Limit = Annotated[
    int | None, typer.Option(min=1, help="So many problems of each task, of all its subjects.")
]
Repeats = Annotated[
    int | None, typer.Option(min=1, help="Replies per problem; the task's own number otherwise.")
]
Protocol = Annotated[str | None, typer.Option(help="r1, r1-0528, report, evalscope or lm-eval.")]
Baseline = Annotated[
    str | None,
    typer.Option(help="A model, or the --out folder of an earlier run, to compare with."),
]
Out = Annotated[
    Path | None,
    typer.Option(
        "--out",
        help="Folder for results, samples and the report; an interrupted run resumes there.",
    ),
]
MaxTokens = Annotated[
    int | None, typer.Option(min=1, help="Longest reply, tokens; the protocol's otherwise.")
]
Temperature = Annotated[
    float | None, typer.Option(min=0, help="0 is greedy; the protocol's otherwise.")
]
MaybeTopP = Annotated[
    float | None, typer.Option(min=0, max=1, help="As for run; the protocol's otherwise.")
]
Margin = Annotated[float, typer.Option(help="Loss that counts as lost, as a share.")]
Concurrency = Annotated[int, typer.Option(min=1, help="Requests in flight, or prompts in a batch.")]
RunCode = Annotated[bool, typer.Option(help="Run programs the model wrote, in the sandbox.")]
RunWeakly = Annotated[bool, typer.Option(help="Run them even where only limits hold them.")]
Revision = Annotated[
    str | None,
    typer.Option(help="What the server runs, if it does not say so: a revision, a hash."),
]
Timeout = Annotated[
    float,
    typer.Option(min=0.1, help="Longest wait for the next piece of a server's reply, seconds."),
]
Retries = Annotated[
    int, typer.Option(min=0, help="Further tries of a request that failed in passing.")
]
TrustKept = Annotated[
    bool, typer.Option(help="Reuse kept replies without asking whether it is still the same model.")
]
AsPlan = Annotated[
    bool,
    typer.Option(
        "--plan", help="Ask nobody: how many problems and repeats would tell a loss of --margin."
    ),
]
Expected = Annotated[
    float | None,
    typer.Option(
        min=0, max=1, help="For --plan: the accuracy expected; taken from --baseline otherwise."
    ),
]
Export = Annotated[
    str | None, typer.Option("--format", help="Also write the results as: evalscope.")
]


def evaluate(
    model: Target,
    tasks: Tasks,
    data_dir: DataDir = None,
    limit: Limit = None,
    repeats: Repeats = None,
    protocol: Protocol = None,
    baseline: Baseline = None,
    out_dir: Out = None,
    max_tokens: MaxTokens = None,
    temperature: Temperature = None,
    top_p: MaybeTopP = None,
    margin: Margin = 0.01,
    seed: Seed = 0,
    concurrency: Concurrency = 64,
    allow_code_exec: RunCode = False,
    allow_weak_sandbox: RunWeakly = False,
    served_model: ServedName = None,
    api_key: Key = None,
    model_revision: Revision = None,
    timeout: Timeout = 600.0,
    retries: Retries = 5,
    trust_kept: TrustKept = False,
    plan: AsPlan = False,
    accuracy: Expected = None,
    export: Export = None,
    count_experts: CountExperts = None,
    cache: Cache = None,
    device: Device = "auto",
    backend: Backend = "auto",
    json_: AsJson = False,
) -> None:
    """Score a model on tasks, with error bars, and say whether accuracy held against a baseline."""
    names = [name.strip() for name in tasks.split(",")]
    if plan:
        from quantkit.cli.plan_evaluation import show_plan

        return show_plan(
            names, data_dir, limit, protocol or "r1", baseline, accuracy, margin, json_
        )
    if accuracy is not None:
        raise typer.BadParameter("it is expected for --plan alone", param_hint="--accuracy")
    sampling = (("max_tokens", max_tokens), ("temperature", temperature), ("top_p", top_p))
    options: dict[str, Any] = {
        "data_dir": data_dir,
        "limit": limit,
        "repeats": repeats,
        "protocol": protocol,
        "baseline": baseline,
    }
    options |= {
        "out": out_dir,
        "generation": {name: value for name, value in sampling if value is not None},
        "margin": margin,
    }
    options |= {
        "seed": seed,
        "concurrency": concurrency,
        "device": device,
        "backend": backend,
        "cache": cache,
        "export": export,
    }
    options |= {
        "allow_code_exec": allow_code_exec,
        "allow_weak_sandbox": allow_weak_sandbox,
        "count_experts": count_experts,
    }
    options |= {
        "model_name": served_model,
        "api_key": api_key,
        "model_revision": model_revision,
        "trust_kept": trust_kept,
    }
    results = _run(model, names, out_dir, options | {"timeout_s": timeout, "retries": retries})
    show_results(results.to_json(), json_)


def _run(
    model: str, names: list[str], out_dir: Path | None, options: dict[str, Any]
) -> "EvalResults":
    """The evaluation, with its progress shown, and what is kept told where it is stopped."""
    from quantkit.evaluation.results.folder import results_folder
    from quantkit.evaluation.run import EvaluationProgress, run_evaluation

    done = ""

    def kept() -> str:
        return f"{done or 'no reply has come'}, kept in {out_dir}" if out_dir else ""

    with (
        stoppable(kept),
        results_folder(out_dir, model, options["baseline"]),
        bars.samples_bar() as bar,
    ):
        counts = bars.counts(bar)

        def show(p: EvaluationProgress) -> None:
            nonlocal done
            if p.stage == "generate":
                done = f"{p.done} of {p.total} replies of {p.model} to {p.task} are there"
            speed = f"{p.tokens / p.seconds:.0f} tokens/s" if p.seconds and p.tokens else ""
            counts((p.model, p.task, p.stage), f"{p.task} {p.stage}", p.done, p.total, speed)

        return run_evaluation(model, names, progress=show, notice=console.tell, **options)


def show_results(results: dict[str, Any], json_: bool) -> None:
    """Print them; exit 1 where too many samples failed for a verdict."""
    if json_:
        print_json(results)
    else:
        console.show_scores(results)
    for fault in results["faults"]:
        console.tell(f"error: {fault}; run again: only what failed is asked")
    if results["faults"]:
        raise typer.Exit(1)
