"""Evaluation tasks: prompts, graders and protocols; problems and grades. A task is one YAML file in
eval/tasks or anywhere on disk.

A protocol fixes everything other than the model that affects a score: prompt, system prompt,
few-shot examples, sampling, repeats. Its defaults are in eval/protocols.yaml; a task adds its
prompt and overrides. `find_setting` combines the two into one `Setting`.
"""

import math
from dataclasses import dataclass, field
from functools import cache

from pydantic import Field

from quantkit.common.assets import asset
from quantkit.common.errors import QuantkitError, UsageError
from quantkit.common.result import JsonObject
from quantkit.common.settings import Strict, checked, find_yaml, read_yaml
from quantkit.evaluation.generators.generator import Generation

# Reason code -> meaning.
RIGHT = {
    "right": "right, in the requested format",
    "right-loose": "right, but found only by the flexible reading",
    "passed": "all tests passed",
}
WRONG = {
    "wrong": "wrong, in the requested format",
    "wrong-loose": "wrong, found by the flexible reading",
    "not-integer": "the answer is not an integer literal",
    "ungradable": "the comparison did not end in time",
    "failed": "a test failed or the program raised",
    "timeout": "the program ran out of time",
    "no-verdict": "the program ended before its tests did",
}
MISSING = {
    "no-answer": "no answer in the reply",
    "no-code": "no program in the reply",
    "truncated": "cut by the token limit before an answer",
    "unfinished": "never left its reasoning",
    "context": "refused: the request did not fit the model's context",
    "filtered": "cut by the server's content filter",
}
EXCLUDED = {
    "error": "the request failed",
    "sandbox-error": "the sandbox failed",
}  # not in the score
REASONS = RIGHT | WRONG | MISSING | EXCLUDED


@dataclass(frozen=True)
class Problem:
    """One row of a task under the task's field names. `gold` is the right answer as one readable
    line."""

    id: str
    fields: JsonObject
    gold: str = ""
    group: str = ""


@dataclass(frozen=True)
class Grade:
    """Verdict on one reply, by its reason.

    measures: other metrics of the task by name, as (points, possible points); summed over replies.
    strictly_right: by a strict reading alone (lm-evaluation-harness' first filter of gsm8k).
    """

    reason: str
    answer: str | None = None
    detail: str = ""
    measures: dict[str, tuple[int, int]] = field(default_factory=dict)
    strictly_right: bool = False

    @property
    def correct(self) -> bool:
        """Right by the flexible reading."""
        return self.reason in RIGHT

    @property
    def strict(self) -> bool:
        """Right where the prompt asked for the answer."""
        return self.strictly_right or (self.correct and self.reason != "right-loose")

    @property
    def excluded(self) -> bool:
        return self.reason in EXCLUDED


class DataSource(Strict):
    """Where rows come from: a file shipped with quantkit, a file below --data-dir, a hub through
    the `datasets` extra, or ModelScope.

    A name in `files` with a * means all matching files, one per subject: their rows get the field
    `file`, the file's name without its extension and without _test, _val or _dev.
    """

    builtin: str | None = None
    answers: list[str] = Field([])
    """Files with further fields of the rows, by `id`."""
    modelscope: str | None = None
    """The repository at ModelScope, where it has another name than `hub`'s."""
    files: list[str] = Field([])
    hub: dict[str, str] | None = None
    where: str = ""
    rows: int | None = None


class Dates(Strict):
    """Keep problems dated within [from, to], both inclusive, as YYYY-MM-DD."""

    first: str = Field(alias="from")
    last: str = Field(alias="to")


class Prompting(Strict):
    """What is asked. raw: a completion prompt, without a chat template; else a chat."""

    prompt: str
    system: str | None = None
    raw: bool = False
    shots: int = 0
    shots_same_group: bool = False
    dates: Dates | None = None


class TaskProtocol(Prompting):
    """A task's settings for one protocol. `generation` and `single_pass` override sampling
    parameters; `single_pass` only where every problem has one repeat."""

    repeats: int | None = None
    grader: str | None = None
    generation: JsonObject = Field({})
    single_pass: JsonObject = Field({})


class Task(Strict):
    """fields: our field name -> the row's name, or its possible names; optional: likewise, empty
    where the row has none. option_columns: columns that make up `options` where the row has
    no list. right_option: the column of the right option where it is not among those; all are
    then shuffled by the question's hash."""

    name: str
    version: int = 1
    title: str = Field(default_factory=lambda given: given.get("name", ""))
    summary: str = ""
    data: DataSource
    shots: DataSource | None = None
    fields: dict[str, str | list[str]]
    optional: dict[str, str] = Field({})
    option_columns: list[str] = Field([])
    right_option: str | None = None
    grader: str
    protocols: dict[str, TaskProtocol]


class Protocol(Strict):
    """`like`: the protocol whose prompts a task uses where it does not define this one.
    thinking: replies are expected to begin inside <think>."""

    summary: str
    like: str | None = None
    thinking: bool
    generation: JsonObject
    repeats: int


class Setting(Prompting):
    """One task under one protocol, fully resolved. The prompt is a Jinja2 template."""

    task: Task
    protocol: str
    thinking: bool
    grader: str
    repeats: int
    generation: Generation


# What others have and quantkit has not, with the reason.
ABSENT = {
    "ifbench": "its 58 kinds of constraints are not checked here; use allenai/IFBench's own code",
    "hle": "its questions need pictures, and its answers a judge of their own",
    "tau_bench": "a dialogue with a simulated user is not run here",
    "longbench": "its texts and its overlap scores are not here; `needle` tests long prompts",
}


def task_names() -> list[str]:
    return sorted(path.stem for path in asset("eval", "tasks").glob("*.yaml"))


def find_task(name: str) -> Task:
    """The task `name` of eval/tasks, or the task in the YAML file `name`."""
    path = find_yaml(name, "eval", "tasks")
    if path is None:
        if (reason := ABSENT.get(name.lower().replace("-", "_"))) is not None:
            raise UsageError(f"task {name} is not in quantkit", reason)
        raise UsageError(
            f"task {name!r} is not known",
            f"choose from {', '.join(task_names())}, or give the path of a task YAML",
        )
    return read_yaml(path, Task, "compare with eval/tasks/gsm8k.yaml")


@cache
def protocols() -> dict[str, Protocol]:
    return read_yaml(asset("eval", "protocols.yaml"), dict[str, Protocol], "restore that file")


def find_setting(
    task: Task,
    protocol: str,
    *,
    repeats: int | None = None,
    overrides: JsonObject | None = None,
) -> Setting:
    """The task under `protocol`; `overrides` replaces sampling parameters (temperature, top_p,
    max_tokens)."""
    if protocol not in protocols():
        raise UsageError(
            f"protocol {protocol!r} is not known", f"choose one of {', '.join(protocols())}"
        )
    base = protocols()[protocol]
    own = task.protocols.get(protocol)
    if own is None and base.like and (like := task.protocols.get(base.like)):
        own = like.model_copy(update={"repeats": None})
    if own is None:
        raise QuantkitError(
            f"task {task.name} does not define protocol {protocol}",
            f"use {' or '.join(task.protocols)}",
        )
    count = repeats or own.repeats or base.repeats
    parameters = (
        base.generation
        | own.generation
        | (own.single_pass if count == 1 else {})
        | (overrides or {})
    )
    generation = checked(
        parameters, Generation, f"generation of {task.name}", "compare with eval/tasks/gsm8k.yaml"
    )
    if not math.isfinite(generation.temperature):
        raise QuantkitError(
            f"--temperature is {generation.temperature}", "use 0 (greedy), or a number above it"
        )
    if count > 1 and generation.temperature == 0:
        raise QuantkitError(
            f"{count} repeats of {task.name} would be {count} times the same greedy reply",
            "use --repeats 1 or set a --temperature above 0",
        )
    return Setting(
        **{name: getattr(own, name) for name in Prompting.model_fields},
        task=task,
        protocol=protocol,
        thinking=base.thinking,
        grader=own.grader or task.grader,
        repeats=count,
        generation=generation,
    )
