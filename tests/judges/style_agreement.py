"""Judge: the corpus of answer styles through evalscope's own adapters, and through lm-evaluation-harness' gsm8k filters, beside quantkit.

    PYTHONPATH=. python tests/judges/style_agreement.py evalscope|lm-eval     (`make test-evalscope`, `test-lm-eval`)

One line a task: how often each grader agrees with the reader. quantkit must agree at least as often on every task.
"""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from answer_styles import TASKS, Style, styles
from recorded import Record


def record(style: Style) -> Record:
    return Record(style.task, style.row, "corpus", style.right, style.reply)


def evalscope(task: str) -> list[bool]:
    """evalscope's verdicts; it is given what stands behind the last </think>, as its FAQ recommends for R1."""
    from evalscope_parity import Evalscope, fork_instead_of_spawn

    adapter = Evalscope(task)
    fork_instead_of_spawn()
    return [adapter.correct(record(style)) for style in styles(task)]


def lm_eval(task: str) -> list[bool]:
    """The more lenient of its two filters for gsm8k."""
    from lm_eval_parity import theirs

    return [theirs(record(style))["flexible-extract"] for style in styles(task)]


def ours(task: str) -> list[bool]:
    from quantkit.evaluation.generators.generator import ModelReply
    from quantkit.evaluation.grading.graders import find_grader, grade
    from quantkit.evaluation.grading.math_equal import MathJudge
    from quantkit.evaluation.tasks import data
    from quantkit.evaluation.tasks.definitions import find_setting, find_task

    setting, judge, verdicts = find_setting(find_task(task), "r1"), MathJudge(), []
    grader = find_grader(setting.grader)
    for style in styles(task):
        fields = data.map_fields(setting.task, style.row, 0)
        problem = data.Problem("0", fields, grader.gold(fields))
        verdicts.append(grade(grader, problem, ModelReply(0, style.reply), setting.thinking, judge).correct)
    judge.close()
    return verdicts


def main() -> None:
    judges = {"evalscope": (TASKS, evalscope), "lm-eval": (("gsm8k",), lm_eval)}
    tasks, theirs = judges[sys.argv[1]]
    below = []
    for task in tasks:
        right = [style.right for style in styles(task)]
        agree = [sum(a == b for a, b in zip(verdicts, right)) for verdicts in (ours(task), theirs(task))]
        print(json.dumps({"task": task, "styles": len(right), "quantkit": agree[0], sys.argv[1]: agree[1]}), flush=True)
        below += [task] if agree[0] < agree[1] else []
    sys.exit(f"below {sys.argv[1]} on {', '.join(below)}" if below else 0)


if __name__ == "__main__":
    main()
