"""The texts that travel with tiny-r1: its tasks, its held-out text, its calibration text.

    python texts.py REPOSITORY

eval/data/tiny-math.jsonl       200 problems of the evaluation side, 20 of each family
eval/data/tiny-math-2000.jsonl  2,000 problems of the evaluation side, 200 of each family: first
those of tiny-math, then 1,800 more eval/data/tiny-math-8000.jsonl.gz  8,000 problems, 800 of each
family: first those of tiny-math-2000, then 6,000 more eval/data/tiny-math-steps.jsonl 1,000
problems of the evaluation side of 2 to 12 steps, 100 of each length and family; training has 3 to 7
eval/data/tiny-heldout.jsonl    64 documents of the evaluation side, none of their keys in any task
calibration.jsonl               640 documents of the training side, about 75,000 tokens, beside the weights

A document is a conversation in the chat template with its thought, one `{"text": ...}` a line.
Every part has a seed of its own.
"""

from __future__ import annotations

import argparse
import gzip
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import tokenizer as tok
from problems import FAMILIES, Side, StoryProblem, ledger, machine, sample

MATH, HELD_OUT, CALIBRATION = 200, 64, 640
MORE, MOST = 1800, 6000
LENGTHS = tuple((ledger, steps) for steps in (2, 4, 6, 8, 10, 12)) + tuple(
    (machine, steps) for steps in (2, 4, 6, 8)
)
EACH = 100


def distinct(
    rng: random.Random, which: Side, count: int, taken: set[str]
) -> Iterator[StoryProblem]:
    """`count` problems, every family in turn, no key in `taken`, to which theirs are added."""
    families = list(FAMILIES)
    for i in range(count):
        while (problem := sample(rng, which, families[i % len(families)])).key in taken:
            pass
        taken.add(problem.key)
        yield problem


def of_lengths(rng: random.Random, which: Side, taken: set[str]) -> Iterator[StoryProblem]:
    """EACH problems of every family and length of LENGTHS, no key in `taken`, to which theirs are
    added."""
    for family, steps in LENGTHS:
        for _ in range(EACH):
            while (problem := sample(rng, which, partial(family, length=steps))).key in taken:
                pass
            taken.add(problem.key)
            yield problem


@dataclass(frozen=True)
class Texts:
    """All that is made of problems of the evaluation side: no key occurs twice. `more` is what
    tiny-math-2000 has besides tiny-math,
    `most` what tiny-math-8000 has besides both."""

    task: list[StoryProblem]
    held_out: list[StoryProblem]
    more: list[StoryProblem]
    lengths: list[StoryProblem]
    most: list[StoryProblem]


def texts() -> Texts:
    seen: set[str] = set()
    task = list(distinct(random.Random(31_001), "eval", MATH, seen))
    held_out = list(distinct(random.Random(31_002), "eval", HELD_OUT, seen))
    more = list(distinct(random.Random(31_004), "eval", MORE, seen))
    lengths = list(of_lengths(random.Random(31_005), "eval", seen))
    return Texts(
        task, held_out, more, lengths, list(distinct(random.Random(31_006), "eval", MOST, seen))
    )


def rows(problems: list[StoryProblem]) -> list[dict[str, object]]:
    """What a task's file holds of problems that every family gave in turn."""
    return [
        {
            "id": f"{p.family}-{i // len(FAMILIES):02d}",
            "problem": p.question,
            "answer": p.answer,
            "steps": p.steps,
        }
        for i, p in enumerate(problems)
    ]


def rows_by_length(problems: list[StoryProblem]) -> list[dict[str, object]]:
    """The same of problems that of_lengths made."""
    return [
        row | {"id": f"{p.family}-{p.steps}-{i % EACH:02d}"}
        for i, (p, row) in enumerate(zip(problems, rows(problems)))
    ]


def conversation(problem: StoryProblem) -> str:
    """The problem and its whole response in the chat template."""
    return f"{tok.BOS}{tok.USER}{problem.question}{tok.ASSISTANT}{tok.THINK}\n{problem.response}{tok.EOS}"


def _write(path: Path, rows: list[dict[str, object]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    data = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()
    path.write_bytes(gzip.compress(data, mtime=0) if path.suffix == ".gz" else data)
    path.chmod(0o644)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("repository", type=Path)
    root = parser.parse_args().repository
    made = texts()
    rng = random.Random(31_003)
    calibration = [sample(rng, "train") for _ in range(CALIBRATION)]
    _write(
        root / "eval/data/tiny-math.jsonl",
        [{name: row[name] for name in ("id", "problem", "answer")} for row in rows(made.task)],
    )
    _write(root / "eval/data/tiny-math-2000.jsonl", rows(made.task + made.more))
    _write(root / "eval/data/tiny-math-8000.jsonl.gz", rows(made.task + made.more + made.most))
    _write(root / "eval/data/tiny-math-steps.jsonl", rows_by_length(made.lengths))
    _write(
        root / "eval/data/tiny-heldout.jsonl", [{"text": conversation(p)} for p in made.held_out]
    )
    _write(
        root / "quantkit/builtin/tiny-r1/calibration.jsonl",
        [{"text": conversation(p)} for p in calibration],
    )


if __name__ == "__main__":
    main()
