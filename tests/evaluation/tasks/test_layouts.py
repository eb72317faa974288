"""Every task on made-up rows in the layout that its data set is published in (field names and types of
the cards and repositories that docs/evaluation.md names): read, shown to a model, and graded. Then
tasks whose rows come as one file a subject, as columns, or in an order that must be made."""

import base64
import csv
import io
import json
import pickle
import zlib
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from graded import graded
from refused import refused

from quantkit.evaluation.generators.generator import ModelReply
from quantkit.evaluation.grading.graders import find_grader, grade, judged_by
from quantkit.evaluation.tasks.data import problems, read_rows, stratify
from quantkit.evaluation.tasks.definitions import Problem, find_setting, find_task, task_names
from quantkit.evaluation.tasks.prompts import render

Rows = list[dict[str, Any]]
SUM = "How much is 100 + 104?"
MATH_ARENA = {
    "problem_idx": 1,
    "answer": r"\frac{1}{2}",
    "problem_type": ["Algebra"],
    "problem": "?",
}
HUMANEVAL = {
    "task_id": "HumanEval/0",
    "prompt": 'def add(a: int, b: int) -> int:\n    """ The sum. """\n',
    "canonical_solution": "    return a + b\n",
    "entry_point": "add",
    "test": "def check(candidate):\n    assert candidate(1, 2) == 3\n",
}
MBPP = {
    "task_id": 11,
    "text": "Write a function to add two numbers.",
    "code": "def add(a, b):\n    return a + b",
    "test_list": ["assert add(1, 2) == 3", "assert add(0, 0) == 0"],
    "test_setup_code": "",
    "challenge_test_list": [],
}
MBPP_PLUS = {
    "task_id": 2,
    "code": MBPP["code"],
    "prompt": MBPP["text"],
    "source_file": "Benchmark Questions Verification V2.ipynb",
    "test_imports": ["import math"],
    "test_list": ["assert add(1, 2) == 3"],
    "test": "import math\nfor a in range(9):\n    assert math.isclose(add(a, 1), a + 1)\n",
}
OPTIONS = dict(zip("ABCD", ("3", "4", "5", "6")))
GPQA = {
    "Pre-Revision Question": "",
    "Question": "Which one?",
    "Correct Answer": "blue",
    "Incorrect Answer 1": "red",
    "Incorrect Answer 2": "green",
    "Incorrect Answer 3": "black",
    "Record ID": "rec0",
    "High-level domain": "Physics",
}
IFEVAL = {
    "key": 1000,
    "prompt": "Say something without a comma, in at least 2 words.",
    "instruction_id_list": ["punctuation:no_comma", "length_constraints:number_words"],
    "kwargs": [
        {"num_words": None, "relation": None},
        {"num_words": 2, "relation": "at least"},
    ],
}


def contest(day):
    """A row of code_generation_lite; its private tests are base64(zlib(pickle(JSON)))."""
    tests = [
        json.dumps([{"input": f"{n}\n", "output": f"{n * n}\n", "testtype": "stdin"}])
        for n in (3, 7)
    ]
    return {
        "question_title": "Square",
        "question_content": "Read n and print its square.",
        "platform": "atcoder",
        "question_id": "abc000_a",
        "contest_id": "abc000",
        "contest_date": f"{day}T00:00:00",
        "starter_code": "",
        "difficulty": "easy",
        "public_test_cases": tests[0],
        "private_test_cases": base64.b64encode(zlib.compress(pickle.dumps(tests[1]))).decode(),
        "metadata": "{}",
    }


ADD, SUBTRACT = (f"```python\ndef add(a, b):\n    return a {sign} b\n```" for sign in "+-")
SQUARE, DOUBLE = (f"```python\nn = int(input())\nprint(n {sign} n)\n```" for sign in "*+")
HALF, THIRD = r"\boxed{\frac{1}{2}}", r"\boxed{\frac{1}{3}}"
WEATHER = {
    "id": "simple_python_0",
    "question": [[{"role": "user", "content": "How is the weather in Ulm?"}]],
    "function": [
        {
            "name": "weather.get",
            "description": "The weather.",
            "parameters": {
                "type": "dict",
                "properties": {"city": {"type": "string"}},
                "required": ["city"],
            },
        }
    ],
}

LAYOUTS = {
    "aime26": (
        {"aime26/aime26.jsonl": [{"problem_idx": 1, "problem": SUM, "answer": 204}]},
        r"\boxed{204}",
        r"\boxed{24}",
    ),
    "hmmt25": ({"hmmt25/hmmt25.jsonl": [MATH_ARENA]}, HALF, THIRD),
    "hmmt26": ({"hmmt26/hmmt26.jsonl": [MATH_ARENA]}, r"\boxed{0.5}", THIRD),
    "math_500": (
        {
            "math_500/test.jsonl": [
                {
                    "problem": "?",
                    "solution": HALF,
                    "answer": r"\frac{1}{2}",
                    "subject": "Algebra",
                    "level": 2,
                    "unique_id": "test/algebra/0.json",
                }
            ]
        },
        HALF,
        THIRD,
    ),
    "humaneval_plus": ({"humaneval_plus/test.parquet": [HUMANEVAL]}, ADD, SUBTRACT),
    "mbpp": ({"mbpp/test.parquet": [MBPP]}, ADD, SUBTRACT),
    "mbpp_plus": ({"mbpp_plus/test.parquet": [MBPP_PLUS]}, ADD, SUBTRACT),
    "live_code_bench": ({"live_code_bench/test.jsonl": [contest("2024-09-01")]}, SQUARE, DOUBLE),
    "live_code_bench_v5": ({"live_code_bench/v5.jsonl": [contest("2024-09-01")]}, SQUARE, DOUBLE),
    "live_code_bench_v6": ({"live_code_bench/v6.jsonl": [contest("2025-04-01")]}, SQUARE, DOUBLE),
    "mmlu": (
        {
            "mmlu/test.parquet": [
                {"question": "2 + 2?", "subject": "logic", "choices": list("3456"), "answer": 1}
            ]
        },
        "ANSWER: B",
        "ANSWER: C",
    ),
    "gpqa_diamond": ({"gpqa_diamond/gpqa_diamond.csv": [GPQA]}, "ANSWER: {gold}", "red"),
    "ceval": (
        {
            "ceval/val/logic_val.csv": [
                {"id": 0, "question": "2 + 2 = ?"} | OPTIONS | {"answer": "B", "explanation": ""}
            ],
            "ceval/val/art_val.csv": [
                {"id": 0, "question": "1 + 3 = ?"} | OPTIONS | {"answer": "B"}
            ],
        },
        "答案：B",
        "答案：C",
    ),
    "cmmlu": (
        {"cmmlu/test/logic.csv": [{"": 0, "Question": "2 + 2 = ?"} | OPTIONS | {"Answer": "B"}]},
        "答案：B",
        "答案：C",
    ),
    "bbh": (
        {"bbh/navigate.json": [{"input": "Do you return?", "target": "Yes"}]},
        "So the answer is Yes.",
        "So the answer is No.",
    ),
    "ifeval": ({"ifeval/input_data.jsonl": [IFEVAL]}, "All is well", "Well, all is well"),
    "simpleqa": (
        {
            "simpleqa/simple_qa_test_set.csv": [
                {"metadata": "{}", "problem": "When?", "answer": "1969"}
            ]
        },
        "In 1969.",
        "In 1970.",
    ),
    "bfcl": (
        {
            "bfcl/BFCL_v4_simple_python.json": [WEATHER],
            "bfcl/possible_answer/BFCL_v4_simple_python.json": [
                {"id": WEATHER["id"], "ground_truth": [{"weather.get": {"city": ["Ulm"]}}]}
            ],
        },
        '[weather.get(city="Ulm")]',
        '[weather.get(city="Bonn")]',
    ),
}


def write(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    elif path.suffix == ".csv":
        text = io.StringIO(newline="")
        table = csv.DictWriter(text, list(rows[0]))
        table.writeheader()
        table.writerows(rows)
        path.write_text(text.getvalue(), encoding="utf-8")
    elif path.parent.name == "bbh":
        path.write_text(json.dumps({"canary": "x", "examples": rows}))
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def read(name, folder):
    setting = find_setting(find_task(name), "r1")
    return problems(
        setting, find_grader(setting.grader).gold, read_rows(name, setting.task.data, folder).rows
    )


def test_every_public_task_has_its_layout():
    """Or rows of its own, in grading/test_rows.py."""
    made_here = {"needle", *(name for name in task_names() if name.startswith("tiny-math"))}
    own_rows = {path.name for path in (Path(__file__).parents[1] / "grading/rows").iterdir()}
    assert set(LAYOUTS) | own_rows == set(task_names()) - made_here
    assert not set(LAYOUTS) & own_rows


@pytest.mark.parametrize("name", LAYOUTS)
def test_rows_as_published_are_read_shown_and_graded(name, tmp_path):
    files, right, wrong = LAYOUTS[name]
    for path, rows in files.items():
        write(tmp_path / path, rows)
    found = read(name, tmp_path)
    assert len(found) == sum(len(rows) for path, rows in files.items() if "possible" not in path)
    grader = find_grader(find_task(name).grader)
    if name == "simpleqa":
        grader = judged_by(lambda text: "A" if "Given answer: In 1969" in text else "B")
    for problem in found:
        for protocol in {"r1", "evalscope"} & set(find_task(name).protocols):
            setting = find_setting(find_task(name), protocol)
            if not setting.shots:
                (*_, message) = render(setting, problem, [], 0).messages
                assert name == "bfcl" or problem.fields["problem"][:9] in message["content"]
        for reply, is_right in ((right, True), (wrong, False), ("", False)):
            text = reply.format(gold=problem.gold) if name == "gpqa_diamond" else reply
            verdict = grade(grader, problem, ModelReply(0, text), False)
            assert verdict.correct is is_right, verdict


def test_a_gold_that_is_no_option_is_refused(tmp_path):
    row = {"question": "?", "subject": "logic", "choices": ["w", "x", "y", "z"], "answer": 4}
    (tmp_path / "mmlu_test.jsonl").write_text(json.dumps(row))
    with refused(r"row \d+ of \w+: the right answer .* is none of 4 options"):
        read("mmlu", tmp_path)


def test_gpqa_options_are_shuffled_by_the_question_alone(tmp_path):
    wrong = {f"Incorrect Answer {i}": f"wrong {i}" for i in (1, 2, 3)}
    rows = [{"Question": f"Which {n}?", "Correct Answer": "right ", **wrong} for n in range(40)]
    write(tmp_path / "gpqa_diamond.csv", rows)
    found = read("gpqa_diamond", tmp_path)
    for problem in found:
        assert problem.fields["options"]["ABCD".index(problem.gold)] == "right"
    golds = [problem.gold for problem in found]
    assert set(golds) == set("ABCD")
    write(tmp_path / "gpqa_diamond.csv", rows[::-1])
    assert [problem.gold for problem in read("gpqa_diamond", tmp_path)] == golds[::-1]
    write(tmp_path / "gpqa_diamond.csv", [{"Question": "?", "Correct Answer": "x"}])
    with refused("has no field Incorrect Answer 1"):
        read("gpqa_diamond", tmp_path)


@pytest.mark.parametrize(
    ("gold", "reply", "right"),
    [
        ("(C)", "hm. So the answer is (C).", True),
        ("(C)", "So the answer is (C) or (D).", False),
        ("True", "So the answer is **true**.", True),
        ("True", "So the answer is False.", False),
        ("24", "So the answer is 24/7.", False),
        ("valid", "So the answer is invalid.", False),
        ("] ) >", "So the answer is ] ) >.", True),
        ("Yes", "Yes", True),
        ("Yes", "So the answer is not Yes.", False),
    ],
)
def test_short_answers(gold, reply, right):
    assert graded("short", {"answer": gold}, reply).correct is right


WEATHER_CALL = [
    {"weather.get": {"city": ["Ulm", "Ulm, Germany"], "days": [3, 3.0], "unit": ["", "C"]}}
]
TWO = [{"f": {"x": [1]}}, {"f": {"x": [2]}}]


@pytest.mark.parametrize(
    ("possible", "reply", "right"),
    [
        (WEATHER_CALL, '[weather.get(city="ulm", days=3)]', True),
        (
            WEATHER_CALL,
            "```python\n[weather.get(city='Ulm, Germany', days=3, unit='c')]\n```",
            True,
        ),
        (WEATHER_CALL, '{"name": "weather.get", "arguments": {"city": "Ulm", "days": 3}}', True),
        (
            WEATHER_CALL,
            '<tool_call>\n{"name": "weather.get", "arguments": "{\\"city\\": \\"Ulm\\", '
            '\\"days\\": 3}"}\n</tool_call>',
            True,
        ),
        (WEATHER_CALL, '[weather.get(city="Bonn", days=3)]', False),
        (WEATHER_CALL, '[weather.get(city="Ulm", days=True)]', False),
        (WEATHER_CALL, '[weather.get(city="Ulm", days=3, more=1)]', False),
        (WEATHER_CALL, '[weather.get("Ulm", 3)]', False),
        (WEATHER_CALL, '[weather.get(city="Ulm", days=3)] * 2', False),
        (TWO, "[f(x=2), f(x=1)]", True),
        (TWO, "[f(x=1), f(x=1)]", False),
        (None, "None of the functions fits.", True),
        (None, "[f(x=1)]", False),
        (None, "", False),
    ],
)
def test_function_calls(possible, reply, right):
    days = {"name": "weather.get", "parameters": {"properties": {"days": {"type": "integer"}}}}
    fields = {"ground_truth": possible, "functions": [days]}
    assert graded("calls", fields, reply).correct is right


@pytest.mark.parametrize(
    ("said", "reason"),
    [("<think>A?</think>B", "wrong"), ("C", "no-answer"), ("I am not sure", "error")],
)
def test_a_model_judges(said, reason):
    asked = []
    grader = judged_by(lambda prompt: asked.append(prompt) or said)
    assert graded(grader, {"problem": "Who?", "answer": "Ada"}, "Bo").reason == reason
    assert all(word in asked[0] for word in ("Who?", "Ada", "Bo"))


def test_a_limit_takes_from_every_subject_in_proportion():
    sizes = {"a": 60, "b": 30, "c": 10}
    found = [Problem(f"{g}{n}", {}, group=g) for g, count in sizes.items() for n in range(count)]
    assert Counter(one.group for one in stratify(found, 10)) == {"a": 6, "b": 3, "c": 1}
    assert {one.id for one in stratify(found, 10)} < {one.id for one in stratify(found, 25)}
    assert stratify(found, None) == stratify(found, 500) == found
