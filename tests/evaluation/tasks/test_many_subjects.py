"""Tasks whose rows come as one file a subject, as columns, or in an order that must be made: MMLU,
C-Eval, CMMLU, BBH, GPQA."""

import csv
import json
from collections import Counter

import pytest

from quantkit.common.errors import QuantkitError
from quantkit.evaluation.generators.generator import ModelReply
from quantkit.evaluation.grading.graders import find_grader, grade
from quantkit.evaluation.grading.math_equal import MathJudge
from quantkit.evaluation.tasks.data import problems, read_rows, stratify
from quantkit.evaluation.tasks.definitions import Problem, find_setting, find_task


def read(name, folder):
    setting = find_setting(find_task(name), "r1")
    return problems(
        setting, find_grader(setting.grader), read_rows(name, setting.task.data, folder).rows
    )


def write_csv(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def test_an_index_is_a_letter_and_a_gold_that_is_no_option_is_refused(tmp_path):
    row = {"question": "?", "subject": "logic", "choices": ["w", "x", "y", "z"], "answer": 2}
    (tmp_path / "mmlu_test.jsonl").write_text(json.dumps(row))
    assert [problem.gold for problem in read("mmlu", tmp_path)] == ["C"]
    (tmp_path / "mmlu_test.jsonl").write_text(json.dumps(row | {"answer": 4}))
    with pytest.raises(
        QuantkitError, match=r"row \d+ of \w+: the right answer .* is none of 4 options"
    ):
        read("mmlu", tmp_path)


def test_gpqa_options_are_shuffled_by_the_question_alone(tmp_path):
    rows = [
        {
            "Question": f"Which {n}?",
            "Correct Answer": "right ",
            **{f"Incorrect Answer {i}": f"wrong {i}" for i in (1, 2, 3)},
        }
        for n in range(40)
    ]
    write_csv(tmp_path / "gpqa_diamond.csv", rows)
    found = read("gpqa_diamond", tmp_path)
    assert all(
        problem.fields["options"]["ABCD".index(problem.gold)] == "right" for problem in found
    )
    assert set(Counter(problem.gold for problem in found)) == set("ABCD")
    write_csv(tmp_path / "gpqa_diamond.csv", rows[::-1])
    assert [problem.gold for problem in read("gpqa_diamond", tmp_path)] == [
        problem.gold for problem in found
    ][::-1]
    write_csv(tmp_path / "gpqa_diamond.csv", [{"Question": "?", "Correct Answer": "x"}])
    with pytest.raises(QuantkitError, match="has no field Incorrect Answer 1"):
        read("gpqa_diamond", tmp_path)


@pytest.mark.parametrize(
    ("gold", "reply", "right"),
    [
        ("(C)", "hm. So the answer is (C).", True),
        ("(C)", "So the answer is C.", True),
        ("(C)", "So the answer is (C) or (D).", False),
        ("True", "So the answer is True.", True),
        ("True", "So the answer is **true**.", True),
        ("True", "So the answer is False.", False),
        ("24", "So the answer is 24.", True),
        ("24", "So the answer is 24/7.", False),
        ("valid", "So the answer is invalid.", False),
        ("alpha beta", "So the answer is alpha beta.", True),
        ("] ) >", "So the answer is ] ) >.", True),
        ("] ) >", "So the answer is ] >.", False),
        ("Yes", "Yes", True),
        ("Yes", "So the answer is not Yes.", False),
    ],
)
def test_short_answers(tmp_path, gold, reply, right):
    (tmp_path / "bbh").mkdir()
    (tmp_path / "bbh/kind.json").write_text(
        json.dumps({"canary": "x", "examples": [{"input": "?", "target": gold}]})
    )
    (problem,) = read("bbh", tmp_path)
    judge = MathJudge()
    assert grade(find_grader("short"), problem, ModelReply(0, reply), False, judge).correct is right
    judge.close()


WEATHER = [{"weather.get": {"city": ["Ulm", "Ulm, Germany"], "days": [3, 3.0], "unit": ["", "C"]}}]
TWO = [{"f": {"x": [1]}}, {"f": {"x": [2]}}]


@pytest.mark.parametrize(
    ("possible", "reply", "right"),
    [
        (WEATHER, '[weather.get(city="ulm", days=3)]', True),
        (WEATHER, "```python\n[weather.get(city='Ulm, Germany', days=3, unit='c')]\n```", True),
        (WEATHER, '{"name": "weather.get", "arguments": {"city": "Ulm", "days": 3}}', True),
        (
            WEATHER,
            '<tool_call>\n{"name": "weather.get", "arguments": "{\\"city\\": \\"Ulm\\", '
            '\\"days\\": 3}"}\n</tool_call>',
            True,
        ),
        (WEATHER, '[weather.get(city="Ulm")]', False),
        (WEATHER, '[weather.get(city="Bonn", days=3)]', False),
        (WEATHER, '[weather.get(city="Ulm", days=True)]', False),
        (WEATHER, '[weather.get(city="Ulm", days=3, more=1)]', False),
        (WEATHER, '[weather.get("Ulm", 3)]', False),
        (WEATHER, '[weather.get(city="Ulm", days=3)] * 2', False),
        (WEATHER, "It rains.", False),
        (TWO, "[f(x=2), f(x=1)]", True),
        (TWO, "[f(x=1), f(x=1)]", False),
        (TWO, "f(x=1)", False),
        (None, "[]", True),
        (None, "None of the functions fits.", True),
        (None, "[f(x=1)]", False),
        (None, "", False),
    ],
)
def test_function_calls(tmp_path, possible, reply, right):
    row = {"id": "simple_0", "question": [[{"role": "user", "content": "?"}]], "function": []}
    (tmp_path / "bfcl/possible_answer").mkdir(parents=True)
    rows = "\n".join(json.dumps(row | {"id": f"simple_{n}"}) for n in range(2))
    (tmp_path / "bfcl/BFCL_v4_simple.json").write_text(rows)
    if possible is not None:
        answer = json.dumps({"id": "simple_0", "ground_truth": possible})
        (tmp_path / "bfcl/possible_answer/BFCL_v4_simple.json").write_text(f"{answer}\n{answer}")
    problem, _ = read("bfcl", tmp_path)
    judge = MathJudge()
    assert grade(find_grader("calls"), problem, ModelReply(0, reply), False, judge).correct is right


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        ("A", "right"),
        ("<think>A?</think>B", "wrong"),
        ("C", "no-answer"),
        ("I am not sure", "error"),
    ],
)
def test_a_model_judges(said, reason):
    asked = []
    judge = MathJudge(ask=lambda prompt: asked.append(prompt) or said)
    problem = Problem("0", {"problem": "Who?", "answer": "Ada"}, "Ada")
    assert grade(find_grader("judged"), problem, ModelReply(0, "Bo"), False, judge).reason == reason
    assert all(word in asked[0] for word in ("Who?", "Ada", "Bo"))


def test_a_limit_takes_from_every_subject_in_proportion():
    found = [
        Problem(f"{group}{n}", {}, group=group)
        for group, count in (("a", 60), ("b", 30), ("c", 10))
        for n in range(count)
    ]
    assert Counter(problem.group for problem in stratify(found, 10)) == {"a": 6, "b": 3, "c": 1}
    assert {problem.id for problem in stratify(found, 10)} < {
        problem.id for problem in stratify(found, 25)
    }
    assert stratify(found, None) == stratify(found, 500) == found
    assert [problem.id for problem in stratify([Problem(str(n), {}) for n in range(5)], 2)] == [
        "0",
        "1",
    ]
