"""The texts that travel with tiny-r1: its task, its held-out text, its calibration text.

    python texts.py REPOSITORY

eval/data/tiny-math.jsonl       200 problems of the evaluation side, 20 of each family
eval/data/tiny-heldout.jsonl    64 documents of the evaluation side, none of their keys in tiny-math
calibration.jsonl               640 documents of the training side, about 75,000 tokens, beside the weights

A document is a conversation in the chat template with its thought, one `{"text": ...}` a line. Every part has a seed of its own.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterator
from pathlib import Path

import tokenizer as tok
from problems import FAMILIES, Problem, Side, sample

MATH, HELD_OUT, CALIBRATION = 200, 64, 640


def distinct(rng: random.Random, which: Side, count: int, taken: set[str]) -> Iterator[Problem]:
    """`count` problems, every family in turn, no key in `taken`, to which theirs are added."""
    families = list(FAMILIES)
    for i in range(count):
        while (problem := sample(rng, which, families[i % len(families)])).key in taken:
            pass
        taken.add(problem.key)
        yield problem


def conversation(problem: Problem) -> str:
    """The problem and its whole response in the chat template."""
    return f"{tok.BOS}{tok.USER}{problem.question}{tok.ASSISTANT}{tok.THINK}\n{problem.response}{tok.EOS}"


def _write(path: Path, rows: list[dict[str, object]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    path.chmod(0o644)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("repository", type=Path)
    root = parser.parse_args().repository
    seen: set[str] = set()
    task = list(distinct(random.Random(31_001), "eval", MATH, seen))
    held_out = list(distinct(random.Random(31_002), "eval", HELD_OUT, seen))
    rng = random.Random(31_003)
    calibration = [sample(rng, "train") for _ in range(CALIBRATION)]
    rows = [{"id": f"{p.family}-{i // len(FAMILIES):02d}", "problem": p.question, "answer": p.answer} for i, p in enumerate(task)]
    _write(root / "eval/data/tiny-math.jsonl", rows)
    _write(root / "eval/data/tiny-heldout.jsonl", [{"text": conversation(p)} for p in held_out])
    _write(root / "quantkit/builtin/tiny-r1/calibration.jsonl", [{"text": conversation(p)} for p in calibration])


if __name__ == "__main__":
    main()
