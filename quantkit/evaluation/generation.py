"""One task against one model: its prompts, replies stored by earlier runs, new replies, and grades.

A server can serve another model under the same name. So before a run's first request one prompt is
sent greedily and its reply stored; a resumed run sends it again. A model in this process is
identified by a hash of its files instead.
"""

import textwrap
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from threading import Event, Thread
from typing import Literal

from quantkit.common.errors import QuantkitError
from quantkit.common.result import JsonObject
from quantkit.evaluation import sandbox
from quantkit.evaluation.generators.generator import (
    Drafts,
    Generation,
    Generator,
    ModelReply,
    Prompt,
    estimated_tokens,
)
from quantkit.evaluation.grading import math_equal, reasoning
from quantkit.evaluation.grading.graders import Grader, find_grader, grade, judged_by
from quantkit.evaluation.options import GradingOptions
from quantkit.evaluation.results.folder import Key, ReplyJournal
from quantkit.evaluation.results.task_results import Sample, TaskResult
from quantkit.evaluation.tasks import data, prompts
from quantkit.evaluation.tasks.definitions import (
    EXCLUDED,
    Problem,
    Setting,
    find_setting,
    find_task,
)

Stage = Literal["generate", "grade"]


@dataclass(frozen=True)
class EvaluationProgress:
    """`done` of `total` samples of a task have passed `stage`; `tokens` were generated in
    `seconds`, those of unfinished replies included. share: of the work by tokens, 0 to 1."""

    model: str
    task: str
    stage: Stage
    done: int
    total: int
    tokens: int
    seconds: float
    share: float


Report = Callable[[EvaluationProgress], None]
Notice = Callable[[str], None]


def silent(_: object) -> None:
    """Discard a report or notice."""


@dataclass(frozen=True)
class TaskRun:
    """A prepared task: settings, problems, few-shot examples, and the facts (other than the
    model) that determine a reply. `request` is what regrading needs to prepare it again: the
    task's name or file, and the data folder."""

    setting: Setting
    grader: Grader
    problems: list[Problem]
    shots: list[prompts.Shot]
    origin: str
    facts: JsonObject
    request: JsonObject
    counts: dict[str, int] | None = None
    """Repeats by problem; None: the setting's for each."""

    @property
    def keys(self) -> list[tuple[Problem, int]]:
        """Repeats are the outer loop: an interrupted run has sampled all problems about equally
        often."""
        counts = self.counts or dict.fromkeys(
            (problem.id for problem in self.problems), self.setting.repeats
        )
        return [
            (problem, repeat)
            for repeat in range(max(counts.values()))
            for problem in self.problems
            if repeat < counts[problem.id]
        ]

    def prompt(self, problem: Problem, repeat: int) -> prompts.Prompt:
        return prompts.render(
            self.setting,
            problem,
            self.shots,
            prompts.sample_seed(self.facts["seed"], problem.id, repeat),
        )

    def result(
        self, samples: list[Sample], facts: JsonObject, reused: int, seconds: float
    ) -> TaskResult:
        """Prompts are shown as those of the first repeat; others differ in the seed only."""
        return TaskResult(
            self.setting,
            samples,
            reused,
            seconds,
            facts,
            self.origin,
            votes=self.grader.votes,
            render=lambda problem: self.prompt(problem, 0),
        )


def prepare(
    name: str,
    protocol: str,
    data_dir: Path | None,
    limit: int | None,
    repeats: int | None,
    generation: JsonObject | None,
    seed: int,
) -> TaskRun:
    """Read a task and its data. `facts` are what the fingerprint covers, other than the model."""
    task = find_task(name)
    setting = find_setting(task, protocol, repeats=repeats, overrides=generation)
    grader = find_grader(setting.grader)
    rows = data.read_rows(task.name, task.data, data_dir)
    problems = data.problems(setting, grader.gold, rows.rows)
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
    request = {
        "task": str(Path(name).resolve()) if Path(name).is_file() else name,
        "data_dir": str(data_dir.resolve()) if data_dir else None,
    }
    return TaskRun(
        setting, grader, data.stratify(problems, limit), shots, rows.origin, facts, request
    )


TICK_S = 2.0
_ASSUMED = 2048  # tokens of a reply where nothing limits it


def expected_length(finished: Sequence[int], running: Sequence[int], limit: int | None) -> float:
    """Mean length of a run's replies, from those that ended and those that go on: tokens per ended
    reply, as if lengths were exponential. Until half of those that run have ended, further replies
    of a third of the limit count as ended: without any the estimate has no end."""
    most = limit or _ASSUMED
    assumed = max(0.0 if finished else 1.0, len(running) / 2 - len(finished))
    total = sum(finished) + sum(running) + assumed * most / 3
    longest = max((*finished, *running, most if limit else 0))
    return min(total / (len(finished) + assumed), longest or total)


@contextmanager
def _ticking(report: Callable[[], None]) -> Iterator[None]:
    """Call `report` every TICK_S seconds, in a thread of its own."""
    ended = Event()

    def work() -> None:
        while not ended.wait(TICK_S):
            report()

    thread = Thread(target=work, daemon=True, name="quantkit-progress")
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def run_task(
    generator: Generator,
    work: TaskRun,
    out: Path | None,
    progress: Report | None = None,
    *,
    notice: Notice = silent,
    trust_kept: bool = False,
    options: GradingOptions | None = None,
) -> TaskResult:
    """Run one task on one model. Replies in the journal of `out` are reused.

    trust_kept: skip the check that the stored replies are this model's. notice: receives what is
    reused.
    """
    start = time.monotonic()
    setting = work.setting
    facts = work.facts | {"model": generator.identity}
    journal = (
        ReplyJournal.of(out, setting.task.name, facts, work.request | {"model": generator.name})
        if out is not None
        else None
    )
    if journal is not None and not trust_kept:
        check_same_model(
            generator, journal, work.prompt(work.problems[0], 0), setting.generation, notice
        )
    keys = work.keys
    kept = journal.kept if journal else {}
    replies = {key: kept[key] for p, r in keys if (key := (p.id, r)) in kept}
    reused = len(replies)
    missing = [(problem, repeat) for problem, repeat in keys if (problem.id, repeat) not in replies]
    if reused:
        notice(
            f"{setting.task.name}: {reused} replies reused from {out}, {len(missing)} to generate"
        )
    lengths, counted = list[int](), 0

    def report(stage: Stage, done: int) -> None:
        if progress is None:
            return
        running = generator.open_tokens() if stage == "generate" else []
        tokens, share = sum(lengths) + sum(running), done / len(keys)
        if stage == "generate" and missing:
            expected = expected_length(lengths, running, setting.generation.max_tokens)
            share = tokens / max(expected * len(missing), tokens, 1)
            share = 1.0 if len(lengths) == len(missing) else min(share, 0.99)
        seconds = time.monotonic() - start
        progress(
            EvaluationProgress(
                generator.name, setting.task.name, stage, done, len(keys), tokens, seconds, share
            )
        )

    report("generate", reused)
    before = generator.drafts()
    if missing:
        requests = [work.prompt(problem, repeat) for problem, repeat in missing]
        with _ticking(lambda: report("generate", reused + len(lengths))):
            for completion in generator.generate(requests, setting.generation):
                problem, repeat = missing[completion.index]
                replies[problem.id, repeat] = completion
                counted += completion.completion_tokens
                length = estimated_tokens(completion.text, completion.reasoning)
                lengths.append(completion.completion_tokens or length)
                if journal is not None:
                    journal.add((problem.id, repeat), completion)
                report("generate", len(replies))
    speed = _speed(counted, time.monotonic() - start, before, generator.drafts())
    samples = grade_samples(work, keys, replies, lambda done: report("grade", done), options)
    check_not_all_failed(setting.task.name, samples)
    notes = []
    if journal is not None and journal.changed:
        notes.append(
            f"changed since the last run in this folder: {', '.join(journal.changed)}; its replies "
            "are not reused"
        )
    result = work.result(samples, facts, reused, time.monotonic() - start)
    return replace(result, notes=notes, speed=speed)


def _speed(
    tokens: int, seconds: float, before: Drafts | None, after: Drafts | None
) -> dict[str, float] | None:
    """Tokens per second of what this run generated and, where drafts were made, the tokens that a
    step of a sequence yields (accepted length) and the accepted share of the drafts."""
    if not tokens:
        return None
    found = {"tokens_per_s": tokens / seconds}
    if before is not None and after is not None and (drafted := after.drafted - before.drafted):
        accepted = after.accepted - before.accepted
        found["acceptance_rate"] = accepted / drafted
        found["accepted_length"] = tokens / max(tokens - accepted, 1)
    return found


def open_judge(options: GradingOptions) -> Callable[[str], str]:
    """The model at options.judge as a function from a prompt to its greedy reply."""
    from quantkit.evaluation.generators.endpoint import Endpoint

    assert options.judge is not None
    endpoint = Endpoint(options.judge, model=options.judge_model, api_key=options.judge_key)
    greedy = Generation(max_tokens=JUDGE_TOKENS)

    def ask(text: str) -> str:
        prompt = Prompt(messages=({"role": "user", "content": text},))
        (reply,) = endpoint.generate([prompt], greedy)
        return reply.text if reply.error is None else reply.error

    return ask


def grade_samples(
    work: TaskRun,
    keys: list[tuple[Problem, int]],
    replies: dict[Key, ModelReply],
    report: Callable[[int], None],
    options: GradingOptions | None = None,
) -> list[Sample]:
    """Samples in the order of `keys`. Programs run, and the model that judges is asked, in parallel
    threads."""
    grader = judged_by(open_judge(options)) if options and work.grader.judged else work.grader
    thinking = work.setting.thinking or reasoning.thinks(replies.values())

    def one(key: tuple[Problem, int]) -> Sample:
        problem, repeat = key
        completion = replies[problem.id, repeat]
        return Sample(problem, repeat, completion, grade(grader, problem, completion, thinking))

    try:
        if not (grader.runs_code or grader.judged):
            return [one(key) for key in keys]
        samples: list[Sample] = []
        with ThreadPoolExecutor(sandbox.workers()) as pool:
            for sample in pool.map(one, keys):
                samples.append(sample)
                report(len(samples))
        return samples
    finally:
        math_equal.close()


def check_not_all_failed(task: str, samples: list[Sample]) -> None:
    """Raise QuantkitError where no sample says anything about the model."""
    reasons = {sample.grade.reason for sample in samples}
    detail = samples[0].grade.detail if samples else ""
    if reasons and reasons <= EXCLUDED.keys():
        refused = next((name for name in REQUEST_FIELDS if name in detail), None)
        raise QuantkitError(
            f"every sample of {task} failed: {detail}",
            f"leave {refused} out with --extra-body '{{\"{refused}\": null}}'"
            if refused
            else "fix that and run again; finished replies are stored",
        )
    if reasons == {"context"}:
        raise QuantkitError(
            f"every request of {task} was refused as too long: {detail}",
            "lower --max-tokens, or serve a longer context",
        )


REQUEST_FIELDS = ("stream_options", "temperature", "top_p", "max_tokens", "seed", "stop")
"""Fields of a request that a server may refuse."""
PROBE_TOKENS = 64
JUDGE_TOKENS = 8192  # of a judge's reply, its reasoning included
_QUOTE_CHARS = 60  # characters


def check_same_model(
    generator: Generator,
    journal: ReplyJournal,
    prompt: Prompt,
    generation: Generation,
    notice: Callable[[str], None],
) -> None:
    """Raise QuantkitError where the model that answers now is not the one whose replies `journal`
    holds. `prompt` is used where no probe is stored yet.

    A server with non-deterministic greedy replies cannot be verified: that is reported with
    `notice`, and the run continues.
    """
    if generator.identity_is_certain:
        return
    limit = min(PROBE_TOKENS, generation.max_tokens or PROBE_TOKENS)
    greedy = Generation(temperature=0.0, top_p=1.0, max_tokens=limit, stop=generation.stop)

    def ask(prompt: Prompt) -> ModelReply:
        (reply,) = generator.generate([replace(prompt, seed=0)], greedy)
        return reply

    if journal.probe is None:
        reply = ask(prompt)
        if reply.error is None:
            journal.add_probe(prompt, reply)
        if journal.kept:
            notice(
                "the stored replies cannot be verified to be this model's: no greedy reply was "
                "stored"
            )
        return
    before, replies = journal.probe.reply, list[ModelReply]()
    for _ in range(2):
        replies.append(ask(journal.probe.prompt))
        if replies[-1].error is not None or not journal.kept or _same_text(before, replies[-1]):
            return
    if not _same_text(*replies):
        notice(
            f"{generator.name} gives different replies at temperature 0, so the server may set its "
            "own temperature: the stored replies cannot be verified to be this model's; serve it "
            "without, or give another --out"
        )
        return
    raise QuantkitError(
        f"{generator.name} is not the model whose {len(journal.kept)} replies are stored in "
        f"{journal.path.parent.parent}: to the same greedy prompt it replies {_quote(replies[0])} "
        f"now and {_quote(before)} before",
        "give another --out or a new --model-revision; --trust-kept uses the stored replies anyway",
    )


def _whole(reply: ModelReply) -> str:
    return f"{reply.reasoning or ''}{reply.text}"


def _same_text(one: ModelReply, other: ModelReply) -> bool:
    """Whether two replies agree; where one of them was cut earlier, as far as both go."""
    a, b = sorted(map(_whole, (one, other)), key=len)
    return a == b if one.finish_reason == other.finish_reason else b.startswith(a)


def _quote(reply: ModelReply) -> str:
    return repr(textwrap.shorten(_whole(reply), _QUOTE_CHARS, placeholder="..."))
