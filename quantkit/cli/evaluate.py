"""Measuring a model: eval scores answers, ppl distances."""

from pathlib import Path
from typing import Annotated, Any

import typer

from quantkit import console
from quantkit.cli.options import AsJson, Backend, Cache, CountExperts, Device, Model, Target
from quantkit.cli.stopping import stoppable
from quantkit.console import print_json
from quantkit.hub import find_model


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
    model_revision: Annotated[str | None, typer.Option(help="What the server runs, if it does not say so: a revision, a hash.")] = None,
    timeout: Annotated[float, typer.Option(min=0.1, help="Longest wait for the next piece of a server's reply, seconds.")] = 600.0,
    retries: Annotated[int, typer.Option(min=0, help="Further tries of a request that failed in passing.")] = 5,
    trust_kept: Annotated[bool, typer.Option(help="Reuse kept replies without asking whether it is still the same model.")] = False,
    plan: Annotated[bool, typer.Option("--plan", help="Ask nobody: how many problems and repeats would tell a loss of --margin.")] = False,
    accuracy: Annotated[
        float | None, typer.Option(min=0, max=1, help="For --plan: the accuracy expected; taken from --baseline otherwise.")
    ] = None,
    export: Annotated[str | None, typer.Option("--format", help="Also write the results as: evalscope.")] = None,
    count_experts: CountExperts = None,
    cache: Cache = None,
    device: Device = "auto",
    backend: Backend = "auto",
    json_: AsJson = False,
) -> None:
    """Score a model on tasks, with error bars, and say whether accuracy held against a baseline."""
    from quantkit.evaluation.results.folder import results_folder
    from quantkit.evaluation.run import EvaluationProgress, run_evaluation

    names = [name.strip() for name in tasks.split(",")]
    if plan:
        from quantkit.cli.plan_evaluation import show_plan

        return show_plan(names, data_dir, limit, protocol or "r1", baseline, accuracy, margin, json_)
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
            names,
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
            cache=cache,
            export=export,
            count_experts=count_experts,
            timeout_s=timeout,
            retries=retries,
            model_revision=model_revision,
            trust_kept=trust_kept,
            progress=show,
            notice=console.tell,
        )
    show_results(results.to_json(), json_)


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


def ppl(
    model: Model,
    text: Annotated[Path | None, typer.Option(help="A .txt, or a .jsonl of {'text': ...}: one document a line.")] = None,
    baseline: Annotated[str | None, typer.Option(help="The model it was made from: adds KL, agreement and error per layer.")] = None,
    seq_len: Annotated[int, typer.Option(min=2, help="Longest document, tokens; longer ones are cut into pieces.")] = 2048,
    stride: Annotated[
        int | None, typer.Option(min=1, help="Windows of --seq-len this far apart over whole documents; each scores what is new.")
    ] = None,
    sampled: Annotated[
        str | None, typer.Option(help="Instead of a text: a task on whose prompts the baseline samples reasoning, which both score.")
    ] = None,
    data_dir: Annotated[Path | None, typer.Option(help="Folder with that task's data files.")] = None,
    max_tokens: Annotated[int | None, typer.Option(min=1, help="Longest sampled reply.")] = None,
    seed: int = 0,
    limit: Annotated[int | None, typer.Option(min=1, help="Only the first documents, or problems.")] = None,
    count_experts: CountExperts = None,
    cache: Cache = None,
    device: Device = "auto",
    backend: Backend = "auto",
    json_: AsJson = False,
) -> None:
    """Perplexity of a text; with a baseline also the distance from it, token by token and layer by layer."""
    from quantkit.evaluation.distance.perplexity import measure
    from quantkit.executor.whole_engine import slow
    from quantkit.expert_counts import check_writable

    if count_experts is not None:
        check_writable(count_experts)
    told = slow(find_model(model))
    with console.samples_bar() as bar:
        counts = console.counts(bar)

        def show(p: Any) -> None:
            nonlocal told
            if told:
                console.tell(told)
                told = ""
            counts(p.stage, f"tokens through the {p.stage}", p.done, p.total)

        quality = measure(
            model,
            text,
            baseline=baseline,
            seq_len=seq_len,
            stride=stride,
            limit=limit,
            sampled=sampled,
            data_dir=data_dir,
            max_tokens=max_tokens,
            seed=seed,
            count_experts=count_experts is not None,
            device=device,
            backend=backend,
            cache=cache,
            progress=show,
        )
    if count_experts is not None and quality.expert_counts is not None:
        quality.expert_counts.write(count_experts)
    if json_:
        return print_json(quality.to_json())
    console.facts(model, quality.facts())
