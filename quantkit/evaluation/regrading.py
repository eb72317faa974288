"""Grade the stored replies of a run again, without loading a model or contacting a server.

A reply is valid only for the prompt and data that it was generated from; where these changed,
regrading is refused. The graders may have changed: that is its purpose.
"""

import time
from dataclasses import replace
from pathlib import Path

from quantkit.common.errors import QuantkitError
from quantkit.common.result import JsonObject
from quantkit.evaluation.generation import (
    Notice,
    TaskRun,
    check_not_all_failed,
    grade_samples,
    prepare,
    silent,
)
from quantkit.evaluation.options import RegradeOptions
from quantkit.evaluation.results.baseline import compare_results, read_run
from quantkit.evaluation.results.folder import ReplyJournal, journals
from quantkit.evaluation.results.report import write_results
from quantkit.evaluation.results.stored import read_journal_head, read_results
from quantkit.evaluation.results.task_results import EvalResults, TaskResult
from quantkit.evaluation.run import check_consent, check_export, sandbox_level

_MUST_MATCH = ("prompt", "system", "shots", "data", "generation")


def regrade(
    out: Path, options: RegradeOptions = RegradeOptions(), *, notice: Notice = silent
) -> EvalResults:
    """Grade the replies in `out`, the folder of an evaluation, again and rewrite its results.

    Of every task the replies of the last run are graded; `notice` says which. Raises QuantkitError where there are none, or they
    were made from other prompts or data than there are now.
    """
    check_export(options.format, out)
    baseline = options.baseline
    kept = journals(out)
    if not kept:
        raise QuantkitError(
            f"{out} has no stored replies", "give the --out folder of an evaluation"
        )
    reference = read_run(baseline) if baseline is not None else None
    found = [(runs[-1], *read_journal_head(runs[-1])) for runs in kept.values()]
    works = [_prepare(path, facts, request, options.data_dir) for path, facts, request in found]
    check_consent(works, options, notice)
    tasks = {}
    for (path, facts, _), work, runs in zip(found, works, kept.values()):
        name = work.setting.task.name
        tasks[name] = task = _grade(path, work, facts, options)
        notice(f"{name}: {task.reused} replies reused from {out}, none generated")
        if len(runs) > 1:
            said = ", ".join(f"{key} {value}" for key, value in facts["generation"].items())
            notice(
                f"{name}: {out} has replies of {len(runs)} runs; these are of the last, "
                f"{path.name}: {said}"
            )
    _, facts, request = found[-1]
    model, where = request.get("model") or facts["model"].get("model") or "a model", "not known"
    if (out / "results.json").exists():  # not of an unfinished run
        stored = read_results(out / "results.json")
        model, where = stored["model"], stored.get("hardware", where)
    results = EvalResults(str(model), facts["model"], tasks, where, sandbox_level(works), out=out)
    if reference is not None:
        results = compare_results(results, reference, options.margin, seed=0)
    write_results(results, reference, options.format, notice)
    return results


def _prepare(path: Path, facts: JsonObject, request: JsonObject, data_dir: Path | None) -> TaskRun:
    folder = data_dir or (Path(request["data_dir"]) if request.get("data_dir") else None)
    generation = facts["generation"]
    repeats = (
        1 if generation["temperature"] == 0 else None
    )  # `prepare` refuses repeated greedy runs
    name = request.get("task") or facts["task"]
    work = prepare(name, facts["protocol"], folder, None, repeats, generation, facts["seed"])
    if changed := [name for name in _MUST_MATCH if work.facts[name] != facts[name]]:
        raise QuantkitError(
            f"{', '.join(changed)} of {facts['task']} changed since the replies in {path} were made",
            "restore it, or run eval again",
        )
    return work


def _grade(path: Path, work: TaskRun, facts: JsonObject, options: RegradeOptions) -> TaskResult:
    start = time.monotonic()
    kept = ReplyJournal(path).kept
    by_id = {problem.id: (place, problem) for place, problem in enumerate(work.problems)}
    if unknown := [problem for problem, _ in kept if problem not in by_id]:
        raise QuantkitError(
            f"{facts['task']} has no problem {unknown[0]!r}, which has a stored reply",
            "give the data that the run used",
        )
    ordered = sorted((repeat, *by_id[problem]) for problem, repeat in kept)
    keys = [(problem, repeat) for repeat, _, problem in ordered]
    samples = grade_samples(work, keys, kept, lambda done: None, options)
    check_not_all_failed(facts["task"], samples)
    repeats = 1 + (ordered[-1][0] if ordered else 0)
    work = replace(work, setting=work.setting.model_copy(update={"repeats": repeats}))
    return work.result(samples, facts, len(keys), time.monotonic() - start)
