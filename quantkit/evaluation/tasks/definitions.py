"""Evaluation tasks: what to ask, how to grade, under which protocol. A task is one YAML file in
eval/tasks or anywhere on disk.

A protocol fixes everything that moves a score besides the model: prompt, system prompt, shots,
sampling, repeats. Its defaults are in eval/protocols.yaml; a task adds its prompt and overrides
what differs. `find_setting` joins the two into one `Setting`.
"""

import math
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from pydantic import Field

from quantkit.common.assets import asset
from quantkit.common.errors import QuantkitError, UsageError
from quantkit.common.settings import Strict, find_yaml, read_yaml
from quantkit.evaluation.generators.generator import Generation

# Reason code -> what it means. The first group counts as right.
RIGHT = {
    "right": "right, stated as asked",
    "right-loose": "right, but found only by the flexible reading",
    "passed": "all tests passed",
}
WRONG = {
    "wrong": "wrong, stated as asked",
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
}  # no verdict on the model: not in the score
REASONS = RIGHT | WRONG | MISSING | EXCLUDED


@dataclass(frozen=True)
class Problem:
    """One row of a task with the task's own field names. `gold` is the right answer in one line,
    for people to read."""

    id: str
    fields: dict[str, Any]
    gold: str = ""
    group: str = ""


@dataclass(frozen=True)
class Grade:
    """Verdict on one reply. `correct` is the flexible reading, `strict` wants the answer where the
    prompt asked for it.

    `measures`: other scores of a task by name, as (points, of how many); they are summed over
    replies.
    """

    reason: str
    correct: bool = False
    strict: bool = False
    answer: str | None = None
    detail: str = ""
    measures: dict[str, tuple[int, int]] = field(default_factory=dict)

    @property
    def excluded(self) -> bool:
        return self.reason in EXCLUDED


class DataSource(Strict):
    """Where rows come from: a file that ships with quantkit, a file below --data-dir, or the
    `datasets` extra.

    A name in `files` with a * means all files that match, one a subject: their rows get the
    field `file`, the file's name without its ending and without _test, _val or _dev.
    """

    builtin: str | None = None
    files: list[str] = Field([])
    hub: dict[str, str] | None = None
    where: str = ""
    rows: int | None = None


class Dates(Strict):
    """Keep problems dated within [from, to], both inclusive, as YYYY-MM-DD."""

    first: str = Field(alias="from")
    last: str = Field(alias="to")


class TaskProtocol(Strict):
    """What a task says about one protocol. `generation` and `single_pass` override single sampling
    parameters."""

    prompt: str
    system: str | None = None
    raw: bool = False  # a plain completion prompt: no chat template
    shots: int = 0
    shots_same_group: bool = False
    repeats: int | None = None
    grader: str | None = None
    dates: Dates | None = None
    generation: dict[str, Any] = Field({})
    single_pass: dict[str, Any] = Field(
        {}
    )  # on top of `generation` when every problem is asked once


class Task(Strict):
    name: str
    version: int
    title: str
    summary: str
    data: DataSource
    shots: DataSource | None = None
    fields: dict[str, str | list[str]]  # our name -> the row's, or the names it may have
    optional: dict[str, str] = Field({})  # likewise; empty where the row has none
    option_columns: list[str] = Field(
        []
    )  # the columns that make up `options`, where the options are no list
    right_option: str | None = (
        # the column with the right option, where it is none of those: all are shuffled, by the
        # question's hash
        None
    )
    grader: str
    protocols: dict[str, TaskProtocol]


class Protocol(Strict):
    """`like`: the protocol whose prompts a task uses where it says nothing about this one."""

    summary: str
    like: str | None = None
    thinking: bool  # replies are expected to begin inside <think>
    generation: dict[str, Any]
    repeats: int


class Setting(Strict):
    """One task under one protocol, everything resolved. The prompt is a Jinja2 template."""

    task: Task
    protocol: str
    thinking: bool
    prompt: str
    system: str | None
    raw: bool
    shots: int
    shots_same_group: bool
    dates: Dates | None
    grader: str
    repeats: int
    generation: Generation


def task_names() -> list[str]:
    return sorted(path.stem for path in asset("eval", "tasks").glob("*.yaml"))


def find_task(name: str) -> Task:
    """The task called `name` in eval/tasks, or the task in the YAML file `name`."""
    path = find_yaml(name, "eval", "tasks")
    if path is None:
        raise UsageError(
            f"task {name!r} is not known",
            f"choose from {', '.join(task_names())}, or give the path of a task YAML",
        )
    return read_yaml(path, Task, "compare with eval/tasks/gsm8k.yaml")


@cache
def protocols() -> dict[str, Protocol]:
    return read_yaml(asset("eval", "protocols.yaml"), dict[str, Protocol], "restore that file")


def _without_repeats(own: TaskProtocol | None) -> TaskProtocol | None:
    """Another protocol's prompts, without its number of replies."""
    return own.model_copy(update={"repeats": None}) if own is not None else None


def find_setting(
    task: Task,
    protocol: str,
    *,
    repeats: int | None = None,
    overrides: dict[str, Any] | None = None,
) -> Setting:
    """The task under `protocol`; `overrides` replaces single sampling parameters (temperature,
    top_p, max_tokens)."""
    if protocol not in protocols():
        raise UsageError(
            f"protocol {protocol!r} is not known", f"choose one of {', '.join(protocols())}"
        )
    base = protocols()[protocol]
    own = task.protocols.get(protocol) or (
        _without_repeats(task.protocols.get(base.like)) if base.like else None
    )
    if own is None:
        raise QuantkitError(
            f"task {task.name} does not define protocol {protocol}",
            f"use {' or '.join(task.protocols)}",
        )
    asked = repeats or own.repeats or base.repeats
    parameters = (
        base.generation
        | own.generation
        | (own.single_pass if asked == 1 else {})
        | (overrides or {})
    )
    generation = Generation(**parameters | {"stop": tuple(parameters.get("stop", ()))})
    if not math.isfinite(generation.temperature):
        raise QuantkitError(
            f"--temperature is {generation.temperature}", "use 0 (greedy), or a number above it"
        )
    if asked > 1 and generation.temperature == 0:
        raise QuantkitError(
            f"{asked} repeats of {task.name} would be {asked} times the same greedy reply",
            "use --repeats 1 or set a --temperature above 0",
        )
    return Setting(
        task=task,
        protocol=protocol,
        thinking=base.thinking,
        prompt=own.prompt,
        system=own.system,
        raw=own.raw,
        shots=own.shots,
        shots_same_group=own.shots_same_group,
        dates=own.dates,
        grader=own.grader or task.grader,
        repeats=asked,
        generation=generation,
    )
