"""Every row of the public data sets through mechanical replies: those that give the right answer are
right, all others wrong.

Where QUANTKIT_DATA names a folder with the data sets (docs/evaluation.md says which files), all rows
are taken and their number is that of the set; else the sample in rows/ is, whose AIME rows have no
statement. The number of rows of each task is printed.
"""

import functools
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from quantkit.evaluation import sandbox
from quantkit.evaluation.generators.generator import ModelReply
from quantkit.evaluation.grading.choices import LETTERS
from quantkit.evaluation.grading.graders import find_grader, grade
from quantkit.evaluation.tasks.data import problems, read_rows
from quantkit.evaluation.tasks.definitions import find_setting, find_task

DATA = os.environ.get("QUANTKIT_DATA")
SAMPLE = Path(__file__).with_name("rows")
Reply = tuple[str, bool]
"""What was replied, and whether it is right."""


def read(name, capfd):
    """All problems of a task; of the data set where it is there, all of its rows."""
    task = find_task(name)
    folder = Path(DATA or SAMPLE)
    if not any(folder.glob(f"{name}/*")):
        pytest.skip(f"{folder} has no {name}")
    found = problems(
        (setting := find_setting(task, "r1")),
        find_grader(setting.grader).gold,
        read_rows(name, task.data, folder).rows,
    )
    with capfd.disabled():
        print(f"\n{name}: {len(found)} rows of {task.data.rows}", file=sys.stderr)
    assert DATA is None or len(found) == task.data.rows
    return found


def options_listed(options):
    return "\n".join(f"{LETTERS[number]}) {option}" for number, option in enumerate(options))


def choice_replies(problem):
    options = [str(option) for option in problem.fields["options"]]
    texts = [option.strip().casefold() for option in options]
    yield options_listed(options), False
    yield f"Let me look at the options.\n\n{options_listed(options)}", False
    gold = LETTERS.index(problem.gold)
    for number in (gold, (gold + 1) % len(options)):
        letter, text, right = LETTERS[number], options[number], number == gold
        for reply in (
            "{letter}) {text}",
            "({letter}) {text}",
            "{letter}",
            "ANSWER: {letter}",
            "It follows.\n\nANSWER: {letter}) {text}",
            "**ANSWER: {letter}) {text}**",
            "**{letter}) {text}**",
            "The correct answer is {letter}) {text}.",
            "The answer is ({letter}).",
            "So the answer is $\\boxed{{{letter}}}$.",
            "{listed}\n\nANSWER: {letter}",
            "{listed}\n\nThe best of them is this:\n\n{letter}) {text}",
        ):
            yield reply.format(letter=letter, text=text, listed=options_listed(options)), right
        # A text that two options share, or that is itself a label, names no option.
        if texts.count(texts[number]) == 1 and len(texts[number].strip(".()")) > 1:
            yield text, right


def number_replies(problem):
    yield problem.fields["problem"] or "How many are there?", False
    for value in (int(problem.gold), int(problem.gold) + 1, -int(problem.gold) - 3):
        right = value == int(problem.gold)
        for reply in (
            "\\boxed{{{n}}}",
            "It is 3 + 4 = 7, then more.\n\n$$\\boxed{{{n}}}$$",
            "\\boxed{{{grouped}}}",
            "\\boxed{{{latex}}}",
            "\\boxed{{{n}.0}}",
            "\\boxed{{{n} \\text{{ apples}}}}",
            "\\boxed{{\\textbf{{{n}}}}}",
            "3 + 4 = 7\n#### {n}",
            "There are 7 steps.\n\n**Answer:** {grouped}",
            "Final answer: **{n}**",
            "The answer is {n}.",
            "The answer is ${grouped}$, as 7 of them are left.",
            "**{n}**",
            "{n}",
            "So they have **{grouped} apples** in total.",
            "So there are {grouped} of them.",
            "The 7 boxes weigh 12 kg, and therefore the total is {n}.",
            "<think>7, no: \\boxed{{7777}}</think>\\boxed{{{n}}}",
        ):
            yield (
                reply.format(n=value, grouped=f"{value:,}", latex=f"{value:,}".replace(",", "{,}")),
                right,
            )


def program_replies(problem, solution):
    prompt = problem.fields["problem"]
    name = problem.fields["entry_point"]
    draft = f"def {name}(*args):\n    return 'draft'\n"
    for body, right in ((solution, True), ("    return 'wrong'\n", False)):
        for program in (f"{prompt}{body}", body):
            for reply in (
                "{program}",
                "```python\n{program}```",
                "```\n{program}\n```\n",
                "```python\n{program}",  # either half of a fence
                "{program}```",
                "{program}\n```\n\nIt does what is asked.",
                "Here is the function.\n\n```python\n{program}```\n\nIt runs in **O(n)**: `n` is long.",
                "```python\n{program}```\n\nUsage:\n\n```python\nprint({name})\n```",
                "A draft:\n\n```python\n{draft}```\n\nBetter:\n\n```python\n{program}```",
            ):
                if body is not program or "draft" not in reply:
                    yield reply.format(program=program, name=name, draft=draft), right
        yield f"Here is the function:\n\n{prompt}{body}```\n", right
        yield f"```python\n{prompt}{body}\n\nThis function does what is asked.", right
    yield prompt, False


def misread(name, replies, found):
    grader = find_grader(find_setting(find_task(name), "r1").grader)

    def one(problem):
        return [
            f"{problem.id}: {reply!r} is {verdict.reason}, reads {verdict.answer!r}"
            for reply, right in replies(problem)
            if (verdict := grade(grader, problem, ModelReply(0, reply), False)).correct is not right
        ]

    with ThreadPoolExecutor(sandbox.workers() if grader.runs_code else 1) as pool:
        wrong = [line for lines in pool.map(one, found) for line in lines]
    return wrong


@pytest.mark.parametrize(("name", "total"), [("aime24", 8762), ("aime25", 8344), ("gsm8k", None)])
def test_numbers(name, total, capfd):
    found = read(name, capfd)
    assert DATA is None or total is None or sum(int(one.gold) for one in found) == total
    assert misread(name, number_replies, found) == []


def test_choices(capfd):
    assert misread("mmlu_pro", choice_replies, read("mmlu_pro", capfd)) == []


def test_programs(monkeypatch, capfd):
    monkeypatch.setattr(sandbox, "run_function", functools.cache(sandbox.run_function))
    rows = read_rows("humaneval", find_task("humaneval").data, Path(DATA or SAMPLE)).rows
    solutions = {row["task_id"]: row["canonical_solution"] for row in rows}

    def replies(problem):
        return program_replies(problem, solutions[problem.id])

    assert misread("humaneval", replies, read("humaneval", capfd)) == []
