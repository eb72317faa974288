"""Results of an evaluation: graded samples, the scores computed from them, and warnings where a
score needs explanation."""

import math
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from quantkit.common.result import Result
from quantkit.evaluation.generators.generator import ModelReply, Prompt
from quantkit.evaluation.statistics import estimates as statistics
from quantkit.evaluation.statistics.comparison import Comparison
from quantkit.evaluation.tasks.definitions import MISSING, Grade, Problem, Setting

WARNING_SHARE = (
    0.02  # share of replies lost to something other than a wrong answer that gives a warning
)
MAX_ERROR_SHARE = 0.02  # share of failed samples above which there is no verdict
_WITHOUT_ANSWER = tuple(
    reason for reason in MISSING if reason not in ("unfinished", "context", "filtered")
)
_FINISH_REASONS = {"stop", "length", "content_filter", "context"}


@dataclass(frozen=True)
class Sample:
    problem: Problem
    repeat: int
    completion: ModelReply
    grade: Grade

    def to_json(self, task: str) -> dict[str, Any]:
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
            "reasoning": c.reasoning,
            "text": c.text,
        }


@dataclass(frozen=True)
class TaskResult:
    """All samples of one task. `planned` is the number of requested samples; failed ones are
    excluded from every score and counted in `errors`. `render` returns the prompt of a
    problem as it was sent."""

    setting: Setting
    samples: list[Sample]
    planned: int
    reused: int
    seconds: float
    facts: dict[str, Any]
    origin: str
    notes: list[str] = field(default_factory=list)
    votes: bool = True
    comparison: Comparison | None = None
    group_differences: dict[str, dict[str, float]] = field(default_factory=dict)
    baseline_fault: str | None = None
    render: Callable[[Problem], Prompt] | None = None
    speed: dict[str, float] | None = None
    """Of the replies that this run generated."""

    @property
    def name(self) -> str:
        return self.setting.task.name

    @property
    def graded(self) -> list[Sample]:
        return [sample for sample in self.samples if not sample.grade.excluded]

    def table(self, strict: bool = False) -> dict[str, list[float]]:
        """Problem id -> 0/1 per repeat."""
        rows = defaultdict(list)
        for sample in self.graded:
            grade = sample.grade
            rows[sample.problem.id].append(float(grade.strict if strict else grade.correct))
        return dict(rows)

    def share(self, *reasons: str) -> float:
        return _mean([sample.grade.reason in reasons for sample in self.graded])

    @property
    def unfinished(self) -> float:
        return self.share("unfinished")

    @property
    def no_answer(self) -> float:
        """Share of replies without an answer that did finish their reasoning."""
        return self.share(*_WITHOUT_ANSWER)

    @property
    def no_answer_interval(self) -> tuple[float, float]:
        """Its 95 % interval over problems."""
        rows = defaultdict(list)
        for sample in self.graded:
            rows[sample.problem.id].append(float(sample.grade.reason in _WITHOUT_ANSWER))
        return statistics.interval(list(rows.values())) if rows else (0.0, 1.0)

    @property
    def truncated(self) -> float:
        """Share of replies that ended at the token limit."""
        return _mean([sample.completion.finish_reason == "length" for sample in self.graded])

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

    def _limit_and_remedy(self) -> tuple[str, str]:
        """The limit that cut replies, max_tokens or the model's context, and the remedy."""
        limit = self.setting.generation.max_tokens
        cut = [
            sample.completion.completion_tokens
            for sample in self.graded
            if sample.completion.finish_reason == "length"
        ]
        if cut and limit is not None and 0 < max(cut) < limit:
            return (
                f"max_tokens {limit}, but the context ended them at {max(cut)} or before",
                "a longer context is needed",
            )
        return f"max_tokens {limit}", "raise --max-tokens"

    def _unfinished_by_cause(self, limit: str, remedy: str) -> list[tuple[float, str]]:
        """Shares of replies that never left their reasoning: cut by a limit, all taken for
        reasoning by the server, or ended by the model."""
        ended, kept = [], []
        for sample in self.graded:
            is_ended = sample.grade.reason == "unfinished" and (
                sample.completion.finish_reason != "length"
            )
            kept.append(is_ended and sample.completion.reasoning is not None)
            ended.append(is_ended and not kept[-1])
        cut = self.unfinished - _mean(kept) - _mean(ended)
        return [
            (
                cut,
                f"did not finish their reasoning ({limit}): they count as wrong; {remedy}",
            ),
            (
                _mean(kept),
                "ended by themselves and are all reasoning, without an answer: the server's "
                "reasoning parser does not fit the model; serve it with the right one or none",
            ),
            (
                _mean(ended),
                "ended by themselves inside their reasoning: a longer limit does not help; look at "
                "the chat template and the stop tokens",
            ),
        ]

    def warnings(self) -> list[str]:
        """What may explain the score other than the model's ability."""
        graded, no_answer = self.graded, self.no_answer_interval
        limit, remedy = self._limit_and_remedy()
        refused, filtered = self.share("context"), self.share("filtered")
        loose = _mean([sample.grade.correct and not sample.grade.strict for sample in graded])
        unknown = sorted({sample.completion.finish_reason for sample in graded} - _FINISH_REASONS)
        uncounted = any(
            sample.completion.finish_reason == "stop" and sample.completion.completion_tokens == 0
            for sample in graded
        )
        checks = [
            *(
                (share >= WARNING_SHARE, f"{share:.0%} of replies {cause}")
                for share, cause in self._unfinished_by_cause(limit, remedy)
            ),
            (
                self.truncated - self.unfinished >= WARNING_SHARE,
                f"{self.truncated:.0%} of replies were cut by the token limit ({limit}); {remedy}",
            ),
            (
                refused > 0,
                f"{refused:.1%} of requests were refused as longer than the model's context: they "
                "count as wrong; lower --max-tokens, or serve a longer context",
            ),
            (
                filtered > 0,
                f"{filtered:.1%} of replies were cut by the server's content filter: they count as "
                "wrong",
            ),
            (
                self.no_answer >= WARNING_SHARE,
                f"{self.no_answer:.0%} of replies give no answer (95 % "
                f"{100 * no_answer[0]:.1f} to {100 * no_answer[1]:.1f}): they state none as asked "
                "and none is inferred; read some before trusting the score",
            ),
            (
                loose >= WARNING_SHARE,
                f"{loose:.0%} of replies are right but not in the requested format: the strict "
                "score counts them as wrong",
            ),
            (
                self.errors > 0,
                f"{self.errors} of {self.planned} samples failed and are excluded; run again to "
                f"retry them. The first: {self._first_error}",
            ),
            (
                bool(unknown),
                f"the server reported unknown finish reasons: {', '.join(unknown)}; these replies "
                "are graded as complete",
            ),
            (uncounted, "the endpoint reports no token counts"),
        ]
        return [*self.notes, *(text for applies, text in checks if applies)]

    def to_json(self) -> dict[str, Any]:
        table = self.table()
        if not table:
            return {
                "accuracy": None,
                "fault": self.fault,
                "stderr": None,
                "n": 0,
                "planned": self.planned,
                "errors": self.errors,
                "warnings": self.warnings(),
            }
        scores, repeats = list(table.values()), max(map(len, table.values()))
        tokens = [sample.completion.completion_tokens for sample in self.graded]
        low, high = statistics.interval(scores)
        return {
            "accuracy": statistics.accuracy(scores),
            "fault": self.fault,
            "stderr": _finite(statistics.clustered_stderr(scores)),
            "n": len(table),
            "unfinished": self.unfinished,
            "no_answer": self.no_answer,
            "no_answer_interval": list(self.no_answer_interval),
            "truncated": self.truncated,
            "strict": statistics.accuracy(list(self.table(strict=True).values())),
            "interval": [low, high],
            "sampling_stderr": _finite(statistics.sampling_stderr(scores)),
            "repeats": self.setting.repeats,
            "samples": len(self.graded),
            "planned": self.planned,
            "reused": self.reused,
            "errors": self.errors,
            "correct": int(sum(sum(row) for row in scores)),
            "per_repeat": self._per_repeat(),
            "measures": self._measures(),
            "pass_at_k": {
                str(k): _finite(statistics.pass_at_k(scores, k)) for k in _powers(repeats)
            },
            "majority": self._majority() if self.votes and repeats > 1 else None,
            "reasons": dict(Counter(sample.grade.reason for sample in self.samples).most_common()),
            "tokens": {"mean": sum(tokens) / len(tokens), "max": max(tokens), "total": sum(tokens)},
            "seconds": self.seconds,
            "speed": self.speed,
            "protocol": self.setting.protocol,
            "facts": self.facts,
            "data": self.origin,
            "warnings": self.warnings(),
            "groups": self._groups(),
            "comparison": self.comparison.to_json() if self.comparison else None,
        }

    def _measures(self) -> dict[str, float]:
        """The task's other metrics: points over all replies, as a share of the possible points."""
        rows = [sample.grade.measures for sample in self.graded]
        return {
            name: sum(row[name][0] for row in rows) / sum(row[name][1] for row in rows)
            for name in (rows[0] if rows else {})
        }

    def _groups(self) -> dict[str, dict[str, Any]]:
        """Accuracy per group (subject, number of steps) with its interval, and the difference
        from the baseline; empty with fewer than two groups."""
        groups = {sample.problem.id: sample.problem.group for sample in self.graded}
        tables = defaultdict(list)
        for problem, row in self.table().items():
            if groups[problem]:
                tables[groups[problem]].append(row)
        found: dict[str, dict[str, Any]] = {}
        for group in sorted(
            tables if len(tables) > 1 else (),
            key=lambda name: (int(name) if name.isdigit() else math.inf, name),
        ):
            scores = tables[group]
            low, high = statistics.interval(scores)
            found[group] = {
                "accuracy": statistics.accuracy(scores),
                "interval": [low, high],
                "n": len(scores),
            }
            found[group] |= self.group_differences.get(group, {})
        return found

    def _per_repeat(self) -> list[float]:
        rows = defaultdict(list)
        for sample in self.graded:
            rows[sample.repeat].append(sample.grade.correct)
        return [_mean(rows[repeat]) for repeat in sorted(rows)]

    def _majority(self) -> float:
        votes = defaultdict(list)
        for sample in self.graded:
            answer = sample.grade.answer if sample.grade.reason not in MISSING else None
            votes[sample.problem.id].append((answer, sample.grade.correct))
        return sum(statistics.majority(row) for row in votes.values()) / len(votes)


@dataclass(frozen=True, repr=False)
class EvalResults(Result):
    """Every task of one run. `out` is its output folder, None where nothing was written."""

    model: str
    identity: dict[str, Any]
    tasks: dict[str, TaskResult]
    hardware: str
    sandbox: str | None
    baseline: str | None
    version: str
    out: Path | None = None

    def to_json(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "identity": self.identity,
            "hardware": self.hardware,
            "sandbox": self.sandbox,
            "baseline": self.baseline,
            "quantkit": self.version,
            "out": str(self.out) if self.out else None,
            "faults": self.faults,
            "results": {name: task.to_json() for name, task in self.tasks.items()},
        }

    def rows(self) -> list[dict[str, Any]]:
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
            rows.append(
                (
                    name,
                    f"{100 * figures['accuracy']:.1f} %{spread} over {figures['n']} problems, "
                    f"{figures['repeats']} times each",
                )
            )
            if task.comparison is not None:
                rows.append(("  verdict", task.comparison.sentence()))
            rows += [("  warning", text) for text in figures["warnings"]]
        return rows

    def samples(self) -> list[dict[str, Any]]:
        return [
            sample.to_json(name) for name, task in self.tasks.items() for sample in task.samples
        ]


def _mean(values: list[bool]) -> float:
    return sum(values) / len(values) if values else math.nan


def _finite(value: float) -> float | None:
    return None if math.isnan(value) else value


def _powers(limit: int) -> list[int]:
    return [k for k in (1, 2, 4, 8, 16, 32, 64, 128, 256) if k <= limit]
