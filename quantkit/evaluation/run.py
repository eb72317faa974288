"""The straight line of an evaluation: tasks -> prompts -> replies -> grades -> figures -> files.

Everything that can be refused is refused before the model is loaded: tasks, data, protocol, consent
to run code, the baseline.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quantkit import __version__
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
from quantkit.evaluation.openai_server import is_url
from quantkit.evaluation.results.baseline import Baseline, compare_results, read_baseline
from quantkit.evaluation.results.report import write_results
from quantkit.evaluation.results.task_results import EvalResults
from quantkit.evaluation.statistics.comparison import MARGIN

__all__ = ["EvaluationProgress", "prepare", "run_evaluation", "run_task"]

TIMEOUT_S, RETRIES = 600.0, 5


def run_evaluation(
    model: str,
    tasks: list[str],
    *,
    data_dir: Path | None = None,
    limit: int | None = None,
    repeats: int | None = None,
    protocol: str | None = None,
    baseline: str | None = None,
    out: Path | None = None,
    seed: int = 0,
    allow_code_exec: bool = False,
    allow_weak_sandbox: bool = False,
    concurrency: int = 32,
    generation: dict[str, Any] | None = None,
    margin: float = MARGIN,
    model_name: str | None = None,
    api_key: str | None = None,
    device: str = "auto",
    backend: str = "auto",
    cache: str | None = None,
    export: str | None = None,
    count_experts: Path | None = None,
    timeout_s: float = TIMEOUT_S,
    retries: int = RETRIES,
    model_revision: str | None = None,
    trust_kept: bool = False,
    progress: Report | None = None,
    notice: Notice = silent,
) -> EvalResults:
    """Score `model` (a directory, a built-in name, a hub id, or the URL of an OpenAI-compatible
    server) on `tasks`.

    protocol None: chosen by `_default_protocol`, which reports it.
    generation: sampling parameters to replace (temperature, top_p, max_tokens). limit: so many
    problems of each task, of all subjects.
    baseline: another model, or the `out` folder of an earlier run; adds a paired comparison at
    `margin` (0.01: one point).
    out: where samples.jsonl, results.json, report.html go and from where an interrupted run
    resumes; None keeps everything in memory.
    allow_weak_sandbox: run programs where only limits hold them. notice: receives the protocol, how
    programs are held, what is reused.
    cache: of `model` where it is loaded here, int8 or fp8 for 8 bits; a baseline that is loaded
    here has the model's 16.
    export: "evalscope" also writes its report schema below out. count_experts: a file for what the
    model's experts were asked by the replies that were generated now; of a model in this process.
    concurrency: requests in flight, or prompts in a batch.
    Of a server: timeout_s, the longest wait for an event; retries, further tries of a request;
    model_revision, what it serves, where it does not say so itself; trust_kept, reuse replies in
    `out` without asking whether it is still the model that gave them. Results with `faults` carry
    no verdict. Raises QuantkitError for anything that cannot run, before anything long starts.
    """
    _check(tasks, limit, repeats, margin, export, out)
    protocol = protocol or _default_protocol(model, notice)
    works = [prepare(name, protocol, data_dir, limit, repeats, generation, seed) for name in tasks]
    check_consent(works, allow_code_exec, allow_weak_sandbox, notice)
    reference = read_baseline(baseline) if baseline is not None else None
    ask = _Asking(
        concurrency,
        _Server(model_name, model_revision, api_key, timeout_s, retries),
        trust_kept,
        device,
        backend,
        progress,
        notice,
    )
    ask.check(model, cache)
    check_countable(model, count_experts)
    if reference is None and baseline is not None:
        ask.check(baseline)
        reference = Baseline.from_results(
            ask.run(baseline, works, out / "baseline" if out else None)
        )
    results = ask.run(model, works, out, cache, count_experts)
    if reference is not None:
        results = compare_results(results, reference, margin, seed)
    if out is not None:
        write_results(results, reference, export)
    return results


def _check(
    tasks: list[str],
    limit: int | None,
    repeats: int | None,
    margin: float,
    export: str | None,
    out: Path | None,
) -> None:
    if not any(tasks):
        raise QuantkitError("no task given", "name one with --tasks")
    if not all(tasks):
        raise QuantkitError(f"a name is empty in --tasks {','.join(tasks)}", "leave out the comma")
    if len(set(tasks)) < len(tasks):
        raise QuantkitError(f"a task is named twice in {', '.join(tasks)}", "name each once")
    for name, value in (("limit", limit), ("repeats", repeats)):
        if value is not None and value < 1:
            raise QuantkitError(f"--{name} is {value}", "give 1 or more")
    if not 0 < margin < 1:
        raise QuantkitError(
            f"--margin is {margin}", "give a share between 0 and 1; 0.01 is one point"
        )
    check_export(export, out)


def check_export(export: str | None, out: Path | None) -> None:
    if export not in (None, "evalscope"):
        raise UsageError(f"format {export!r} is not known", "use --format evalscope")
    if export is not None and out is None:
        raise QuantkitError("an export needs a folder", "give --out")


def check_consent(
    works: list[TaskRun], allow_code_exec: bool, allow_weak_sandbox: bool, notice: Notice
) -> None:
    """Refuse to run the model's programs without a yes, and without walls; report to `notice` how
    they are held."""
    names = [work.setting.task.name for work in works if work.grader.runs_code]
    if not names:
        return
    if not allow_code_exec:
        raise QuantkitError(
            f"{', '.join(names)} runs programs that the model wrote",
            "allow it with --allow-code-exec",
        )
    found = sandbox.find_level()
    if found.level == "rlimits" and not allow_weak_sandbox:
        raise QuantkitError(
            f"programs cannot be isolated on this machine ({found.reason})",
            "allow user namespaces (docs/evaluation.md), or, in a virtual machine that may be "
            "lost, give --allow-weak-sandbox",
        )
    notice(str(found))


def check_countable(model: str, file: Path | None) -> None:
    """`file` None: nothing is counted. Refuse to count the experts of a server, or into a file that
    cannot be written."""
    if file is None:
        return
    if is_url(model):
        raise QuantkitError(
            f"the experts of {model} are asked elsewhere",
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

        reasons = template_reasons(find_model(model))
        chosen = "lm-eval" if reasons is None else "r1" if reasons else "evalscope"
        reason = (
            "no chat template"
            if reasons is None
            else f"its chat template {'opens' if reasons else 'does not open'} <think>"
        )
    notice(f"protocol {chosen} for {model}: {reason}; --protocol takes another")
    return chosen


@dataclass(frozen=True)
class _Server:
    """How to speak with servers, shared by candidate and baseline."""

    model: str | None
    revision: str | None
    api_key: str | None
    timeout_s: float
    retries: int


@dataclass(frozen=True)
class _Asking:
    """How to reach models, shared by candidate and baseline."""

    concurrency: int
    server: _Server
    trust_kept: bool
    device: str
    backend: str
    progress: Report | None
    notice: Notice

    def run(
        self,
        model: str,
        works: list[TaskRun],
        out: Path | None,
        cache: str | None = None,
        count_experts: Path | None = None,
    ) -> EvalResults:
        generator = self._open(model, cache, count_experts)
        try:
            tasks = {
                work.setting.task.name: run_task(
                    generator,
                    work,
                    out,
                    self.progress,
                    notice=self.notice,
                    trust_kept=self.trust_kept,
                )
                for work in works
            }
        finally:
            generator.close()
        where = "not known (an endpoint)" if is_url(model) else describe_hardware(self.device)
        return EvalResults(
            generator.name,
            generator.identity,
            tasks,
            where,
            sandbox_level(works),
            None,
            __version__,
            out,
        )

    def check(self, model: str, cache: str | None = None) -> None:
        """Refuse a model that is not there, or a server with another cache, without loading one
        that is."""
        if is_url(model):
            reject_cache_option(model, cache)
            self._endpoint(model).close()
        else:
            find_model(model)

    def _endpoint(self, url: str) -> Generator:
        from quantkit.evaluation.generators.endpoint import Endpoint

        about = self.server
        return Endpoint(
            url,
            model=about.model,
            revision=about.revision,
            api_key=about.api_key,
            concurrency=self.concurrency,
            timeout_s=about.timeout_s,
            retries=about.retries,
        )

    def _open(self, model: str, cache: str | None, count_experts: Path | None) -> Generator:
        if is_url(model):
            return self._endpoint(model)
        from quantkit.evaluation.generators.local import Local

        name = self.server.model or (Path(model).resolve().name if Path(model).is_dir() else model)
        options: dict[str, Any] = {
            "concurrency": self.concurrency,
            "device": self.device,
            "backend": self.backend,
            "cache": cache,
        }
        made = Local(find_model(model), name=name, count_experts=count_experts, **options)
        if made.engine.loaded.warning:
            self.notice(made.engine.loaded.warning)
        return made


def sandbox_level(works: list[TaskRun]) -> str | None:
    """How programs are held, None where none runs."""
    return sandbox.active_level() if any(work.grader.runs_code for work in works) else None
