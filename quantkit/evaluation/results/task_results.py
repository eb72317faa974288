"""Results of an evaluation: graded samples, the scores computed from them, and warnings where a
score needs explanation."""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any, TypeVar

from quantkit import __version__
from quantkit.common.result import JsonObject, Result
from quantkit.evaluation.generators.generator import ModelReply, Prompt, estimated_tokens
from quantkit.evaluation.statistics import estimates as statistics
from quantkit.evaluation.statistics.comparison import Comparison
from quantkit.evaluation.tasks.definitions import MISSING, Grade, Problem, Setting

MAX_ERROR_SHARE = 0.02  # share of failed samples above which there is no verdict
_WITHOUT_ANSWER = MISSING.keys() - {"unfinished", "context", "filtered"}
_FINISH_REASONS = {"stop", "length", "content_filter", "context"}
_POWERS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
K = TypeVar("K")
V = TypeVar("V")


def grouped(pairs: Iterable[tuple[K, V]]) -> dict[K, list[V]]:
    """The values of every key, in order."""
    found: dict[K, list[V]] = {}
    for key, value in pairs:
        found.setdefault(key, []).append(value)
    return found


# What is lost to anything but a wrong answer: the share of the replies from which on it is said,
# and how.
_WARNINGS = {
    "cut-thinking": (
        0.02,
        "{share:.0%} of replies did not finish their reasoning ({limit}): they count as wrong; "
        "{remedy}",
    ),
    "parser": (
        0.02,
        "{share:.0%} of replies ended by themselves and are all reasoning, without an answer: the "
        "server's reasoning parser does not fit the model; serve it with the right one or none",
    ),
    "thinking": (
        0.02,
        "{share:.0%} of replies ended by themselves inside their reasoning: a longer limit does not "
        "help; look at the chat template and the stop tokens",
    ),
    "cut": (0.02, "{share:.0%} of replies were cut by the token limit ({limit}); {remedy}"),
    "context": (
        0,
        "{share:.1%} of requests were refused as longer than the model's context: they count as "
        "wrong; lower --max-tokens, or serve a longer context",
    ),
    "filtered": (
        0,
        "{share:.1%} of replies were cut by the server's content filter: they count as wrong",
    ),
    "no-answer": (
        0.02,
        "{share:.0%} of replies give no answer (95 % {low:.1f} to {high:.1f}): they state none as "
        "asked and none is inferred; read some before trusting the score",
    ),
    "loose": (
        0.02,
        "{share:.0%} of replies are right but not in the requested format: the strict score counts "
        "them as wrong",
    ),
    "error": (
        0,
        "{errors} of {planned} samples failed and are excluded; run again to retry them. The "
        "first: {first}",
    ),
    "unknown": (
        0,
        "the server reported unknown finish reasons: {unknown}; these replies are graded as "
        "complete",
    ),
    "uncounted": (0, "the endpoint reports no token counts"),
}


@dataclass(frozen=True)
class Sample:
    problem: Problem
    repeat: int
    completion: ModelReply
    grade: Grade

    def to_json(self, task: str) -> JsonObject:
        c, g = self.completion, self.grade
        return {
            "task": task,
            "problem": self.problem.id,
            "repeat": self.repeat,
            "correct": g.correct,
            "strict": g.strict,
            "reason": g.reason,
            "answer": g.answer,
            "gold": self.problem.gold,
            "detail": g.detail,
            "finish_reason": c.finish_reason,
            "prompt_tokens": c.prompt_tokens,
            "completion_tokens": c.completion_tokens,
            "latency_s": round(c.latency_s, 3),
            "think_open": c.think_open,
            "reasoning": c.reasoning,
            "text": c.text,
        }

    def faults(self) -> Iterator[str]:
        """Those of _WARNINGS that this sample has."""
        reply, grade, reason = self.completion, self.grade, self.grade.reason
        is_cut = reply.finish_reason == "length"
        if grade.excluded:
            yield "error"
            return
        if reason == "unfinished":
            ended = "parser" if reply.reasoning is not None else "thinking"
            yield "cut-thinking" if is_cut else ended
        elif is_cut:
            yield "cut"
        if reason in ("context", "filtered"):
            yield reason
        if reason in _WITHOUT_ANSWER:
            yield "no-answer"
        if grade.correct and not grade.strict:
            yield "loose"
        if reply.finish_reason not in _FINISH_REASONS:
            yield "unknown"
        if reply.finish_reason == "stop" and not reply.completion_tokens:
            yield "uncounted"


@dataclass(frozen=True)
class TaskResult:
    """All samples of one task. Failed ones are excluded from every score and counted in `errors`.
    `render` returns the prompt of a problem as it was sent."""

    setting: Setting
    samples: list[Sample]
    reused: int
    seconds: float
    facts: JsonObject
    origin: str
    notes: list[str] = field(default_factory=list)
    votes: bool = True
    comparison: Comparison | None = None
    baseline_scores: dict[str, list[float]] = field(default_factory=dict)
    """Of the problems that have any."""
    baseline_tokens: dict[str, float] = field(default_factory=dict)
    """Of the baseline's replies to these problems, the mean."""
    baseline_fault: str | None = None
    render: Callable[[Problem], Prompt] | None = None
    speed: dict[str, float] | None = None
    """Of the replies that this run generated."""

    @property
    def name(self) -> str:
        return self.setting.task.name

    @property
    def planned(self) -> int:
        return len(self.samples)

    @property
    def graded(self) -> list[Sample]:
        return [sample for sample in self.samples if not sample.grade.excluded]

    def table(
        self, score: Callable[[Sample], bool] = lambda one: one.grade.correct
    ) -> statistics.Table:
        """Problem id -> 0/1 per repeat."""
        return grouped((one.problem.id, float(score(one))) for one in self.graded)

    @property
    def errors(self) -> int:
        return self.planned - len(self.graded)

    @property
    def _first_error(self) -> str:
        return next((sample.grade.detail for sample in self.samples if sample.grade.excluded), "")

    @property
    def fault(self) -> str | None:
        """Why the task has no verdict (too many samples failed), or None."""
        if self.errors <= MAX_ERROR_SHARE * self.planned:
            return self.baseline_fault
        return (
            f"{self.errors} of {self.planned} samples of {self.name} failed: no verdict. The "
            f"first: {self._first_error}"
        )

    def _no_answer_interval(self) -> tuple[float, float]:
        table = self.table(lambda one: one.grade.reason in _WITHOUT_ANSWER)
        return statistics.interval(table.values()) if table else (0.0, 1.0)

    def warnings(self) -> list[str]:
        """What may explain the score other than the model's ability."""
        replies, most = [one.completion for one in self.graded], self.setting.generation.max_tokens
        limit, remedy = f"max_tokens {most}", "raise --max-tokens"
        longest = max(
            (r.completion_tokens for r in replies if r.finish_reason == "length"), default=0
        )
        if most is not None and 0 < longest < most:
            limit += f", but the context ended them at {longest} or before"
            remedy = "a longer context is needed"
        low, high = self._no_answer_interval()
        about = {
            "limit": limit,
            "remedy": remedy,
            "low": 100 * low,
            "high": 100 * high,
            "errors": self.errors,
            "planned": self.planned,
            "first": self._first_error,
            "unknown": ", ".join(sorted({r.finish_reason for r in replies} - _FINISH_REASONS)),
        }
        counts = Counter(fault for sample in self.samples for fault in sample.faults())
        shares = {name: counts[name] / max(len(replies), 1) for name in _WARNINGS if counts[name]}
        said = [(share, *_WARNINGS[name]) for name, share in shares.items()]
        return self.notes + [
            text.format(share=share, **about) for share, least, text in said if share >= least
        ]

    def to_json(self) -> JsonObject:
        table, graded = self.table(), self.graded
        found: JsonObject = {
            "accuracy": None,
            "fault": self.fault,
            "stderr": None,
            "n": len(table),
            "planned": self.planned,
            "errors": self.errors,
            "warnings": self.warnings(),
        }
        if not table:
            return found
        scores, repeats = table.values(), max(map(len, table.values()))
        tokens = [sample.completion.completion_tokens for sample in graded]
        reasons = Counter(sample.grade.reason for sample in graded)
        strict = self.table(lambda one: one.grade.strict)
        by_repeat = grouped((one.repeat, one.grade.correct) for one in graded)
        cut = [sample.completion.finish_reason == "length" for sample in graded]
        return found | {
            **statistics.figures(scores),
            "stderr": statistics.clustered_stderr(scores),
            "unfinished": reasons["unfinished"] / len(graded),
            "no_answer": sum(reasons[name] for name in _WITHOUT_ANSWER) / len(graded),
            "no_answer_interval": list(self._no_answer_interval()),
            "truncated": fmean(cut),
            "strict": statistics.accuracy(strict.values()),
            "sampling_stderr": statistics.sampling_stderr(scores),
            "repeats": self.setting.repeats,
            "samples": len(graded),
            "reused": self.reused,
            "correct": sum(sample.grade.correct for sample in graded),
            "per_repeat": [fmean(row) for _, row in sorted(by_repeat.items())],
            "measures": self._measures(),
            "pass_at_k": {str(k): statistics.pass_at_k(scores, k) for k in _POWERS if k <= repeats},
            "majority": self._majority() if self.votes and repeats > 1 else None,
            "reasons": dict(Counter(sample.grade.reason for sample in self.samples).most_common()),
            "tokens": {"mean": fmean(tokens), "max": max(tokens), "total": sum(tokens)},
            "seconds": self.seconds,
            "speed": self.speed,
            "protocol": self.setting.protocol,
            "facts": self.facts,
            "data": self.origin,
            "groups": self._groups(table),
            "lengths": self._lengths(table),
            "comparison": self.comparison.to_json() if self.comparison else None,
        }

    def _measures(self) -> dict[str, float]:
        """The task's other metrics: points over all replies, as a share of the possible points."""
        rows = [pair for sample in self.graded for pair in sample.grade.measures.items()]
        sums = {name: map(sum, zip(*points)) for name, points in grouped(rows).items()}
        return {name: points / possible for name, (points, possible) in sums.items()}

    def _groups(self, table: statistics.Table) -> dict[str, JsonObject]:
        """Accuracy per group (subject, number of steps) with its interval, and the difference
        from the baseline; empty with fewer than two groups."""
        groups = {sample.problem.id: sample.problem.group for sample in self.graded}
        members = grouped((groups[name], name) for name in table if groups[name])
        return self._by_group(table, dict(sorted(members.items(), key=_group_place)))

    def _lengths(self, table: statistics.Table) -> dict[str, JsonObject]:
        """As `_groups`, by the mean length of the replies to a problem, the baseline's where it has
        any: both models are then compared on the same problems."""
        tokens = {
            name: fmean(lengths)
            for name, lengths in grouped(
                (one.problem.id, reply_tokens(one.to_json(self.name))) for one in self.graded
            ).items()
        } | {name: mean for name, mean in self.baseline_tokens.items() if name in table}
        ranges = grouped((statistics.doubling_range(tokens[name]), name) for name in table)
        return self._by_group(
            table,
            {f"{first:,} to {last:,}": names for (first, last), names in sorted(ranges.items())},
        )

    def _by_group(
        self, table: statistics.Table, members: dict[str, list[str]]
    ) -> dict[str, JsonObject]:
        """members: problems by group."""
        found: dict[str, JsonObject] = {}
        for group, names in members.items() if len(members) > 1 else ():
            found[group] = statistics.figures([table[name] for name in names])
            shared = [name for name in names if name in self.baseline_scores]
            if shared:
                theirs = [self.baseline_scores[name] for name in shared]
                ours = statistics.problem_means([table[name] for name in shared])
                differences = ours - statistics.problem_means(theirs)
                low, high = statistics.mean_bounds(differences, -1, 1).interval()
                found[group] |= {
                    "baseline_accuracy": statistics.accuracy(theirs),
                    "difference": float(differences.mean()),
                    "low": low,
                    "high": high,
                }
        return found

    def _majority(self) -> float:
        votes = grouped(
            (
                one.problem.id,
                (None if one.grade.reason in MISSING else one.grade.answer, one.grade.correct),
            )
            for one in self.graded
        )
        return fmean([statistics.majority(row) for row in votes.values()])


def reply_tokens(row: JsonObject) -> int:
    """Tokens of a sample, estimated where a server did not count them."""
    return row["completion_tokens"] or estimated_tokens(row["text"], row.get("reasoning"))


def _group_place(group: tuple[str, Any]) -> tuple[float, str]:
    """Numbers first, by size."""
    return int(group[0]) if group[0].isdigit() else math.inf, group[0]


@dataclass(frozen=True, repr=False)
class EvalResults(Result):
    """Every task of one run. `out` is its output folder, None where nothing was written."""

    model: str
    identity: JsonObject
    tasks: dict[str, TaskResult]
    hardware: str
    sandbox: str | None
    baseline: str | None = None
    out: Path | None = None

    def to_json(self) -> JsonObject:
        return {
            "model": self.model,
            "identity": self.identity,
            "hardware": self.hardware,
            "sandbox": self.sandbox,
            "baseline": self.baseline,
            "quantkit": __version__,
            "out": str(self.out) if self.out else None,
            "faults": self.faults,
            "results": {name: task.to_json() for name, task in self.tasks.items()},
        }

    def rows(self) -> list[JsonObject]:
        """A row for each task: the figures of its JSON that are one value."""
        figures = {name: task.to_json() for name, task in self.tasks.items()}
        return [
            {"task": name}
            | {key: value for key, value in one.items() if not isinstance(value, dict | list)}
            for name, one in figures.items()
        ]

    @property
    def faults(self) -> list[str]:
        """Why tasks have no verdict; empty for a complete run."""
        return [task.fault for task in self.tasks.values() if task.fault is not None]

    @property
    def heading(self) -> str:
        return (
            self.model if self.baseline is None else f"{self.model} compared with {self.baseline}"
        )

    def facts(self) -> list[tuple[str, str]]:
        rows = []
        for name, task in self.tasks.items():
            figures = task.to_json()
            if not figures["n"]:
                rows.append((name, "no reply could be scored"))
                continue
            spread = "" if figures["stderr"] is None else f" ± {100 * figures['stderr']:.1f}"
            over = f"over {figures['n']} problems, {figures['repeats']} times each"
            rows.append((name, f"{100 * figures['accuracy']:.1f} %{spread} {over}"))
            if task.comparison is not None:
                rows.append(("  verdict", task.comparison.sentence()))
            rows += [("  warning", text) for text in figures["warnings"]]
        return rows

    def samples(self) -> list[JsonObject]:
        return [
            sample.to_json(name) for name, task in self.tasks.items() for sample in task.samples
        ]
