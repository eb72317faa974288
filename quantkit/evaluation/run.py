"""The straight line of an evaluation: tasks -> prompts -> replies -> grades -> figures -> files.

Everything that can be refused is refused before the model is loaded: tasks, data, protocol, consent to run code, the baseline.
"""

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from quantkit import __version__
from quantkit.devices import describe_hardware
from quantkit.errors import QuantkitError
from quantkit.evaluation import sandbox
from quantkit.evaluation.generators.generator import Generator, ModelReply
from quantkit.evaluation.grading import reasoning
from quantkit.evaluation.grading.graders import Grader, find_grader, grade
from quantkit.evaluation.grading.math_equal import MathJudge
from quantkit.evaluation.results import store
from quantkit.evaluation.results.figures import EvalResults, Sample, TaskResult
from quantkit.evaluation.statistics.baseline import Baseline, read_baseline
from quantkit.evaluation.statistics.comparison import MARGIN, compare
from quantkit.evaluation.tasks import data, prompts
from quantkit.evaluation.tasks.definitions import Setting, find_setting, find_task
from quantkit.evaluation.tasks.problems import Problem
from quantkit.hub import find_model

Stage = Literal["generate", "grade"]


@dataclass(frozen=True)
class EvaluationProgress:
    """`done` of `total` samples of a task are through `stage`; `tokens` were generated in `seconds`. `model` says whose turn it is."""

    model: str
    task: str
    stage: Stage
    done: int
    total: int
    tokens: int
    seconds: float


Report = Callable[[EvaluationProgress], None]


@dataclass(frozen=True)
class TaskRun:
    """One task, ready to be asked: settings, problems, shots, and the facts that a reply depends on besides the model."""

    setting: Setting
    grader: Grader
    problems: list[Problem]
    shots: list[prompts.Shot]
    origin: str
    facts: dict[str, Any]


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
    export: str | None = None,
    progress: Report | None = None,
    notice: Callable[[str], None] | None = None,
) -> EvalResults:
    """Score `model` (a directory, a built-in name, a hub id, or the URL of an OpenAI-compatible server) on `tasks`.

    protocol None: r1 for an endpoint and for a model whose chat template opens <think>, lm-eval for one that has no chat template, else
    evalscope; which one and why is a notice.
    generation: sampling parameters to replace (temperature, top_p, max_tokens). limit: so many problems of each task, of all subjects.
    baseline: another model, or the `out` folder of an earlier run; adds a paired comparison at `margin` (0.01: one point).
    out: where samples.jsonl, results.json, report.html go and from where an interrupted run resumes; None keeps everything in memory.
    allow_weak_sandbox: run programs where only limits hold them. notice: told the protocol, and how programs are held.
    export: "evalscope" also writes its report schema below out. concurrency: requests in flight, or prompts in a batch.
    Raises QuantkitError for anything that cannot run, before anything long starts.
    """
    _check(tasks, limit, repeats, margin, export, out)
    protocol = protocol or _default_protocol(model, notice or (lambda text: None))
    works = [prepare(name, protocol, data_dir, limit, repeats, generation, seed) for name in tasks]
    if any(work.grader.runs_code for work in works) and not allow_code_exec:
        names = ", ".join(work.setting.task.name for work in works if work.grader.runs_code)
        raise QuantkitError(f"{names} runs programs that the model wrote", "allow it with --allow-code-exec")
    if any(work.grader.runs_code for work in works):
        _find_sandbox(allow_weak_sandbox, notice or (lambda text: None))
    reference = read_baseline(baseline) if baseline is not None else None
    ask = _Asking(out, concurrency, model_name, api_key, device, backend, progress)
    ask.check(model)
    if reference is None and baseline is not None:
        ask.check(baseline)
        reference = Baseline.of(ask.run(baseline, works, out / "baseline" if out else None))
    results = ask.run(model, works, out)
    if reference is not None:
        results = _compared(results, reference, margin, seed)
    if out is not None:
        _write(results, reference, export)
    return results


def _check(tasks: list[str], limit: int | None, repeats: int | None, margin: float, export: str | None, out: Path | None) -> None:
    if not tasks:
        raise QuantkitError("no task given", "name one with --tasks")
    if len(set(tasks)) < len(tasks):
        raise QuantkitError(f"a task is named twice in {', '.join(tasks)}", "name each once")
    for name, value in (("limit", limit), ("repeats", repeats)):
        if value is not None and value < 1:
            raise QuantkitError(f"--{name} is {value}", "give 1 or more")
    if not 0 < margin < 1:
        raise QuantkitError(f"--margin is {margin}", "give a share between 0 and 1; 0.01 is one point")
    if export not in (None, "evalscope"):
        raise QuantkitError(f"format {export!r} is not known", "use --format evalscope")
    if export is not None and out is None:
        raise QuantkitError("an export needs a folder", "give --out")


def _find_sandbox(allow_weak: bool, notice: Callable[[str], None]) -> None:
    found = sandbox.find_level()
    if found.level == "rlimits" and not allow_weak:
        raise QuantkitError(
            f"programs cannot be isolated on this machine ({found.reason})",
            "allow user namespaces (docs/evaluation.md), or, in a virtual machine that may be lost, give --allow-weak-sandbox",
        )
    notice(str(found))


def is_url(model: str) -> bool:
    return model.startswith(("http://", "https://"))


def _default_protocol(model: str, notice: Callable[[str], None]) -> str:
    if is_url(model):
        chosen, reason = "r1", "it is an endpoint"
    else:
        from quantkit.evaluation.generators.local import template_reasons

        reasons = template_reasons(find_model(model))
        chosen = "lm-eval" if reasons is None else "r1" if reasons else "evalscope"
        reason = "no chat template" if reasons is None else f"its chat template {'opens' if reasons else 'does not open'} <think>"
    notice(f"protocol {chosen} for {model}: {reason}; --protocol takes another")
    return chosen


def prepare(
    name: str, protocol: str, data_dir: Path | None, limit: int | None, repeats: int | None, generation: dict[str, Any] | None, seed: int
) -> TaskRun:
    """Read a task and its data. `facts` are what the fingerprint covers besides the model."""
    task = find_task(name)
    setting = find_setting(task, protocol, repeats=repeats, overrides=generation)
    grader = find_grader(setting.grader)
    rows = data.read_rows(task.name, task.data, data_dir)
    problems = data.problems(setting, grader, rows.rows)
    shots: list[prompts.Shot] = []
    facts = {
        "task": task.name,
        "version": task.version,
        "protocol": protocol,
        "prompt": setting.prompt,
        "system": setting.system,
        "data": rows.sha256,
        "shots": None,
        "generation": asdict(setting.generation) | {"stop": list(setting.generation.stop)},
        "seed": seed,
    }
    if setting.shots:
        if task.shots is None:
            raise QuantkitError(f"{task.name} has no source of shots", "add `shots:` to the task")
        read = data.read_rows(f"{task.name}'s shots", task.shots, data_dir)
        shots = [data.map_fields(task, row, number) for number, row in enumerate(read.rows)]
        facts["shots"] = f"{setting.shots} of {read.sha256}"
    return TaskRun(setting, grader, data.spread(problems, limit), shots, rows.origin, facts)


@dataclass(frozen=True)
class _Asking:
    """How to reach models, shared by candidate and baseline."""

    out: Path | None
    concurrency: int
    model_name: str | None
    api_key: str | None
    device: str
    backend: str
    progress: Report | None

    def run(self, model: str, works: list[TaskRun], out: Path | None) -> EvalResults:
        generator = self._open(model)
        try:
            tasks = {work.setting.task.name: ask_and_grade(generator, work, out, self.progress) for work in works}
        finally:
            generator.close()
        runs_code = any(work.grader.runs_code for work in works)
        level = sandbox.active_level() if runs_code else None
        where = "not known (an endpoint)" if is_url(model) else describe_hardware(self.device)
        return EvalResults(generator.name, generator.identity, tasks, where, level, None, __version__, out)

    def check(self, model: str) -> None:
        """Refuse a model that is not there, without loading one that is."""
        if is_url(model):
            self._endpoint(model).close()
        else:
            find_model(model)

    def _endpoint(self, url: str) -> Generator:
        from quantkit.evaluation.generators.endpoint import Endpoint

        return Endpoint(url, model=self.model_name, api_key=self.api_key, concurrency=self.concurrency)

    def _open(self, model: str) -> Generator:
        if is_url(model):
            return self._endpoint(model)
        from quantkit.evaluation.generators.local import Local

        name = self.model_name or (Path(model).resolve().name if Path(model).is_dir() else model)
        return Local(find_model(model), name=name, concurrency=self.concurrency, device=self.device, backend=self.backend)


def ask_and_grade(generator: Generator, work: TaskRun, out: Path | None, progress: Report | None = None) -> TaskResult:
    """One task against one model. Replies that the journal in `out` already has are not asked again."""
    start = time.monotonic()
    setting = work.setting
    facts = work.facts | {"model": generator.identity}
    journal = store.ReplyJournal(out, setting.task.name, facts) if out is not None else None
    # Repeats go outermost: a run that is stopped early has asked every problem about equally often.
    keys = [(problem, repeat) for repeat in range(setting.repeats) for problem in work.problems]
    kept = journal.kept if journal else {}
    replies: dict[store.Key, ModelReply] = {(p.id, r): kept[p.id, r] for p, r in keys if (p.id, r) in kept}
    reused = len(replies)
    asked = [(problem, repeat) for problem, repeat in keys if (problem.id, repeat) not in replies]
    requests = [prompts.render(setting, p, work.shots, prompts.sample_seed(work.facts["seed"], p.id, r)) for p, r in asked]
    tokens = 0

    def tell(stage: Stage, done: int) -> None:
        if progress is not None:
            progress(EvaluationProgress(generator.name, setting.task.name, stage, done, len(keys), tokens, time.monotonic() - start))

    tell("generate", reused)
    if requests:
        for completion in generator.generate(requests, setting.generation):
            problem, repeat = asked[completion.index]
            replies[problem.id, repeat] = completion
            tokens += completion.completion_tokens
            if journal is not None:
                journal.add((problem.id, repeat), completion)
            tell("generate", len(replies))
    samples = _grade_all(work, keys, replies, lambda done: tell("grade", done))
    _refuse_if_all_failed(setting.task.name, samples)
    changed = journal.changed if journal is not None else []
    notes = [f"changed since the last run in this folder: {', '.join(changed)}; its replies are not reused"] if changed else []
    return TaskResult(setting, samples, len(keys), reused, time.monotonic() - start, facts, work.origin, notes, work.grader.votes)


def _grade_all(
    work: TaskRun, keys: list[tuple[Problem, int]], replies: dict[store.Key, ModelReply], tell: Callable[[int], None]
) -> list[Sample]:
    """Grades in the order of `keys`. Programs run beside each other; reading an answer takes no time worth a thread."""
    judge = MathJudge()
    thinking = work.setting.thinking or reasoning.thinks(replies.values())

    def one(key: tuple[Problem, int]) -> Sample:
        problem, repeat = key
        completion = replies[problem.id, repeat]
        return Sample(problem, repeat, completion, grade(work.grader, problem, completion, thinking, judge))

    try:
        if not work.grader.runs_code:
            return [one(key) for key in keys]
        samples: list[Sample] = []
        with ThreadPoolExecutor(sandbox.workers()) as pool:
            for sample in pool.map(one, keys):
                samples.append(sample)
                tell(len(samples))
        return samples
    finally:
        judge.close()


def _refuse_if_all_failed(task: str, samples: list[Sample]) -> None:
    if samples and all(sample.grade.excluded for sample in samples):
        first = samples[0].grade
        raise QuantkitError(f"every sample of {task} failed: {first.detail}", "fix that and run again; nothing is lost")


def _compared(results: EvalResults, reference: Baseline, margin: float, seed: int) -> EvalResults:
    tasks = {}
    for name, task in results.tasks.items():
        scores = reference.scores.get(name, {})
        comparison = compare(task.table(), scores, margin=margin, seed=seed, greedy=task.setting.generation.temperature == 0)
        notes = list(task.notes)
        if comparison is None:
            notes.append(f"the baseline {reference.name} has no sample of these problems")
        elif changed := reference.differs(name, task.facts):
            notes.append(f"the baseline was run with another {', '.join(changed)}: the comparison is not like for like")
        tasks[name] = replace(task, comparison=comparison, notes=notes)
    return replace(results, tasks=tasks, baseline=reference.name)


def _write(results: EvalResults, reference: Baseline | None, export: str | None) -> None:
    import json

    from quantkit.evaluation.results.report import write_report

    assert results.out is not None
    store.write_samples(results.out / "samples.jsonl", results.samples())
    write_report(results.out / "report.html", results, reference)
    if export == "evalscope":
        from quantkit.evaluation.results.evalscope_format import write_reports

        write_reports(results.out / "evalscope", results)
    store.write_atomically(results.out / "results.json", json.dumps(results.to_json(), indent=2) + "\n")
