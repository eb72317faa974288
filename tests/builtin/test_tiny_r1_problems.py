"""tiny-math cannot occur in training, and the shipped texts are what the generator writes."""

import gzip
import json
import random
from pathlib import Path

import problems
import pytest
import texts

ROOT = Path(__file__).parents[2]
TASK = ROOT / "eval/data/tiny-math.jsonl"
HELD_OUT = ROOT / "eval/data/tiny-heldout.jsonl"


def rows(path):
    data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    return [json.loads(line) for line in data.decode().splitlines()]


@pytest.fixture(scope="module")
def task():
    return list(texts.distinct(random.Random(31_001), "eval", texts.MATH, set()))


def test_the_task_is_the_generators(task):
    assert [(row["problem"], row["answer"]) for row in rows(TASK)] == [
        (p.question, p.answer) for p in task
    ]
    assert len({row["id"] for row in rows(TASK)}) == 200


@pytest.mark.parametrize("family", problems.FAMILIES, ids=lambda family: family.__name__)
def test_training_yields_no_key_of_the_evaluation_side(family):
    rng = random.Random(5)
    assert {problems.side(problems.sample(rng, "train", family).key) for _ in range(400)} == {
        "train"
    }
    unsplit = []
    while len(unsplit) < 200:
        try:
            unsplit.append(problems.side(family(rng).key))
        except problems.Rejected:
            continue
    assert "eval" in unsplit, "without the rule, evaluation keys do come up"


def test_held_out_and_calibration_text_keep_to_their_sides(tiny_r1, task):
    held_out = list(
        texts.distinct(random.Random(31_002), "eval", texts.HELD_OUT, {p.key for p in task})
    )
    assert [row["text"] for row in rows(HELD_OUT)] == [texts.conversation(p) for p in held_out]
    rng = random.Random(31_003)
    calibration = [problems.sample(rng, "train") for _ in range(texts.CALIBRATION)]
    assert [row["text"] for row in rows(tiny_r1 / "calibration.jsonl")] == [
        texts.conversation(p) for p in calibration
    ]
    assert not {p.key for p in (*task, *held_out)} & {p.key for p in calibration}
