"""An evaluation: tasks -> prompts -> replies -> grades -> scores -> files.

Tasks, data, protocol, consent to run code and the baseline are checked before the model is loaded.
"""

from collections.abc import Container
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean

from quantkit.checkpoint.hub import find_model
from quantkit.common.atomic_write import check_writable
from quantkit.common.devices import describe_hardware
from quantkit.common.errors import QuantkitError, UsageError
from quantkit.evaluation import sandbox
from quantkit.evaluation.generation import (
    EvaluationProgress,
    Notice,
    Report,
    TaskRun,
    prepare,
    run_task,
    silent,
)
from quantkit.evaluation.generators.generator import Generator, reject_cache_option
from quantkit.evaluation.generators.openai_server import is_url
from quantkit.evaluation.options import EvaluateOptions, GradingOptions
from quantkit.evaluation.planning import forecast
from quantkit.evaluation.results.baseline import Baseline, compare_results, read_baseline
from quantkit.evaluation.results.report import write_results
from quantkit.evaluation.results.task_results import EvalResults, TaskResult
from quantkit.evaluation.statistics.comparison import check_margin
from quantkit.evaluation.statistics.sampling import PILOT, STAGES, repeats_of_stage
from quantkit.executor.options import EngineOptions

__all__ = ["EvaluationProgress", "prepare", "run_evaluation", "run_task"]


def run_evaluation(
    model: str,
    tasks: list[str],
    options: EvaluateOptions = EvaluateOptions(),
    *,
    progress: Report | None = None,
    notice: Notice = silent,
) -> EvalResults:
    """Score `model` (a directory, a built-in name, a hub id, or the URL of an OpenAI-compatible
    server) on `tasks`.

    Without a protocol, `_default_protocol` chooses one. A baseline adds a paired comparison; it is
    loaded with the model's own 16-bit cache. notice: takes lines about the protocol, the sandbox
    and reused replies. Results with `faults` have no verdict. Raises QuantkitError for anything
    that cannot run, before anything long starts.
    """
    _check(tasks, options)
    protocol, out, baseline = options.protocol, options.out, options.baseline
    protocol = protocol or _default_protocol(model, notice)
    works = [
        prepare(
            name,
            protocol,
            options.data_dir,
            options.limit,
            options.repeats,
            options.generation,
            options.seed,
        )
        for name in tasks
    ]
    check_consent(works, options, notice)
    baseline = None if baseline is None else str(baseline)
    reference = read_baseline(baseline) if baseline is not None else None
    run = _Run(options, progress, notice)
    run.check(model)
    check_countable(model, options.count_experts)
    base = replace(run, options=replace(options, cache=None, count_experts=None))
    if reference is None and baseline is not None:
        base.check(baseline)
    if baseline is not None:
        for work in works:
            if work.setting.generation.temperature > 0:
                notice(forecast(work, options, reference))
    if options.sequential:
        results, reference = _in_stages(run, base, works, (model, str(baseline)), reference)
    else:
        if reference is None and baseline is not None:
            reference = Baseline.from_results(
                base.evaluate(baseline, works, out / "baseline" if out else None)
            )
        results = run.evaluate(model, works, out)
        if reference is not None:
            results = compare_results(results, reference, options.margin, options.seed)
    if out is not None:
        write_results(results, reference, options.format, notice)
    return results


def _check(tasks: list[str], options: EvaluateOptions) -> None:
    if not any(tasks):
        raise QuantkitError("no task given", "name one with --tasks")
    if not all(tasks):
        raise QuantkitError(f"a name is empty in --tasks {','.join(tasks)}", "leave out the comma")
    if len(set(tasks)) < len(tasks):
        raise QuantkitError(f"a task is named twice in {', '.join(tasks)}", "name each once")
    for name, value in (("limit", options.limit), ("repeats", options.repeats)):
        if value is not None and value < 1:
            raise QuantkitError(f"--{name} is {value}", "give 1 or more")
    check_margin(options.margin)
    check_export(options.format, options.out)
    if options.sequential and (options.baseline is None or options.out is None):
        raise QuantkitError("--sequential compares, and grows a run", "give --baseline and --out")


def check_export(export: str | None, out: Path | None) -> None:
    if export not in (None, "evalscope"):
        raise UsageError(f"format {export!r} is not known", "use --format evalscope")
    if export is not None and out is None:
        raise QuantkitError("an export needs a folder", "give --out")


def check_consent(works: list[TaskRun], options: GradingOptions, notice: Notice) -> None:
    """Refuse to run the model's programs without consent or without isolation, and a task that a
    model judges without one; pass the kind of isolation to `notice`."""
    judged = [work.setting.task.name for work in works if work.grader.judged]
    if judged and options.judge is None:
        raise QuantkitError(
            f"{', '.join(judged)} is judged by a model", "name its server with --judge"
        )
    if options.judge is not None and not judged:
        raise QuantkitError("none of these tasks is judged by a model", "leave --judge out")
    names = [work.setting.task.name for work in works if work.grader.runs_code]
    if not names:
        return
    if not options.allow_code_exec:
        raise QuantkitError(
            f"{', '.join(names)} runs programs that the model wrote",
            "allow it with --allow-code-exec",
        )
    found = sandbox.find_level()
    if found.level == "rlimits" and not options.allow_weak_sandbox:
        raise QuantkitError(
            f"programs cannot be isolated on this machine ({found.reason})",
            "allow user namespaces (docs/evaluation.md), or, in a virtual machine that may be "
            "lost, give --allow-weak-sandbox",
        )
    notice(str(found))


def check_countable(model: str, file: Path | None) -> None:
    """Refuse to count the experts of a server, or a file that cannot be written."""
    if file is None:
        return
    if is_url(model):
        raise QuantkitError(
            f"the experts of {model}, a server, cannot be counted here",
            "give --count-experts to the quantkit serve that runs the model",
        )
    check_writable(file, "--count-experts")


def _default_protocol(model: str, notice: Notice) -> str:
    """r1 for an endpoint and for a model whose chat template opens <think>, lm-eval for one that
    has no chat template, else evalscope."""
    if is_url(model):
        chosen, reason = "r1", "it is an endpoint"
    else:
        from quantkit.evaluation.generators.local import template_reasons

        chosen, reason = {
            None: ("lm-eval", "no chat template"),
            True: ("r1", "its chat template opens <think>"),
            False: ("evalscope", "its chat template does not open <think>"),
        }[template_reasons(find_model(model))]
    notice(f"protocol {chosen} for {model}: {reason}; --protocol chooses another")
    return chosen


@dataclass(frozen=True)
class _Run:
    """Runs a model, the candidate or the baseline, on prepared tasks."""

    options: EvaluateOptions
    progress: Report | None
    notice: Notice

    def evaluate(self, model: str, works: list[TaskRun], out: Path | None) -> EvalResults:
        generator = self._open(model)
        if is_url(model) and (fields := self.options.request_fields):
            works = [replace(work, facts=work.facts | {"request": fields}) for work in works]
        context = getattr(generator, "context", None)
        for work in works:
            limit = work.setting.generation.max_tokens
            if context is not None and limit is not None and limit >= context:
                self.notice(
                    f"{work.setting.task.name}: the server's context is {context} tokens, prompt and "
                    f"reply: replies get what the prompt leaves of it, not {limit}"
                )
        try:
            tasks = {
                work.setting.task.name: run_task(
                    generator,
                    work,
                    out,
                    self.progress,
                    notice=self.notice,
                    trust_kept=self.options.trust_kept,
                    options=self.options,
                )
                for work in works
            }
            for name, task in tasks.items():
                if task.speed is not None:
                    shown = ", ".join(f"{key} {value:.3g}" for key, value in task.speed.items())
                    self.notice(f"{name}: {shown}")
        finally:
            generator.close()
        where = (
            "not known (an endpoint)" if is_url(model) else describe_hardware(self.options.device)
        )
        return EvalResults(
            generator.name,
            generator.identity,
            tasks,
            where,
            sandbox_level(works),
            out=out,
        )

    def check(self, model: str) -> None:
        """Refuse a model that does not exist, or options that a server does not have, before
        anything is loaded."""
        if is_url(model):
            reject_cache_option(model, self.options.cache)
            self._endpoint(model).close()
        else:
            find_model(model)

    def _endpoint(self, url: str) -> Generator:
        from quantkit.evaluation.generators.endpoint import Endpoint

        options = self.options
        return Endpoint(
            url,
            model=options.served_model,
            revision=options.model_revision,
            api_key=options.api_key,
            concurrency=options.concurrency,
            timeout_s=options.timeout,
            retries=options.retries,
            fields=options.request_fields,
        )

    def _open(self, model: str) -> Generator:
        if is_url(model):
            return self._endpoint(model)
        from quantkit.evaluation.generators.local import Local

        options = self.options
        name = options.served_model or (
            Path(model).resolve().name if Path(model).is_dir() else model
        )
        engine = EngineOptions(
            find_model(model),
            device=options.device,
            backend=options.backend,
            cache=options.cache,
            max_batch=options.concurrency,
        )
        made = Local(engine, name=name, count_experts=options.count_experts)
        if made.engine.loaded.warning:
            self.notice(made.engine.loaded.warning)
        return made


def _in_stages(
    run: _Run,
    base: _Run,
    works: list[TaskRun],
    models: tuple[str, str],
    stored: Baseline | None,
) -> tuple[EvalResults, Baseline]:
    """The model and its baseline in the stages of statistics/sampling.py, each task until its
    verdict is known or out of reach. A stored baseline is complete. Every stage is a run that
    grows."""
    options, out = run.options, run.options.out
    assert out is not None
    theirs, ours, bases = stored, None, works
    finished: dict[str, TaskResult] = {}
    for stage in range(len(STAGES)):
        if stored is None:
            bases = [_grown(work, ours, stage, finished) for work in bases]
            theirs = Baseline.from_results(base.evaluate(models[1], bases, out / "baseline"))
        assert theirs is not None
        works = [_grown(w, theirs, stage, finished, complete=stored is not None) for w in works]
        results = run.evaluate(models[0], works, out)
        results = compare_results(results, theirs, options.margin, options.seed, stage)
        results = replace(results, tasks=results.tasks | finished)
        ours = Baseline.from_results(results)
        for name, task in results.tasks.items():
            found = task.comparison.sampled if task.comparison is not None else None
            if found is None or found.verdict != "cannot tell" or found.hopeless:
                finished[name] = task
        if len(finished) == len(works):
            break
    assert theirs is not None
    return results, theirs


def _grown(
    work: TaskRun,
    other: Baseline | None,
    stage: int,
    finished: Container[str],
    *,
    complete: bool = False,
) -> TaskRun:
    """The task with the repeats of this stage, by the replies of the other model."""
    name, counts = work.setting.task.name, dict.fromkeys((p.id for p in work.problems), PILOT)
    if name in finished:
        return work
    if other is not None and stage:
        scores = {p: row for p, row in other.scores(name).items() if p in counts}
        lengths = {
            p: fmean(row["completion_tokens"] for row in rows)
            for p, rows in other.samples[name].items()
        }
        repeats = work.setting.repeats
        grown = repeats_of_stage(scores, lengths, repeats, stage, complete=complete)
        before = work.counts or counts
        counts = {p: max(before[p], grown.get(p, 0)) for p in counts}
    return replace(work, counts=counts)


def sandbox_level(works: list[TaskRun]) -> str | None:
    """Isolation level of programs; None where no program runs."""
    return sandbox.active_level() if any(work.grader.runs_code for work in works) else None
