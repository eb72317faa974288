"""Judge: the corpus of answer styles through evalscope's own adapters, or through
lm-evaluation-harness' own tasks, beside quantkit.

    PYTHONPATH=. python tests/judges/style_agreement.py evalscope|lm-eval [--whole]

`make test-evalscope` and `test-lm-eval` run it, `make test-styles` with --whole.

One line a task: how often each grader agrees with the reader, of the whole corpus or of SAMPLE
styles a task, evenly out of it. quantkit must agree at least as often on every task, also if the
other one were right wherever it gave no verdict in time; and the other one must give a verdict
nearly always, else nothing was compared.
"""

import json
import math
import re
import sys
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
from answer_styles import TASKS, Style, styles
from bounded import bounded
from recorded import Record

SAMPLE = 240
SECONDS = 30.0
"""For one verdict: math-verify without a timeout, as evalscope runs it, does not end on some
powers."""
LEAST, UNGRADED = 0.98, 0.02

Verdict = Callable[[Record], bool]


def evalscope(task: str) -> Verdict:
    """It is given what stands behind the last </think>, as its FAQ recommends for R1."""
    from evalscope_parity import Evalscope, cheap_processes

    cheap_processes()
    return Evalscope(task).correct


def lm_eval(task: str) -> Verdict:
    """Its tasks' own graders, behind the last </think>; of gsm8k's two filters the more lenient."""
    if task == "gsm8k":
        from lm_eval_parity import theirs

        return lambda record: theirs(record)["flexible-extract"]
    if task == "mmlu_pro":
        import lm_eval

        described = (
            Path(lm_eval.__file__).parent / "tasks/mmlu_pro/_default_template_yaml"
        ).read_text()
        (pattern,) = re.findall(r"(?m)^ *regex_pattern: '(.*)'$", described)
        return lambda record: (
            [record.row["answer"]] == re.findall(pattern, _behind_thinking(record))[:1]
        )
    from lm_eval.tasks.aime import utils as aime
    from lm_eval.tasks.hendrycks_math import utils as mathematics

    process = {"aime24": aime, "math_500": mathematics}[task].process_results
    return lambda record: process(record.row, [_behind_thinking(record)])["exact_match"] == 1


def _behind_thinking(record: Record) -> str:
    return record.text.split("</think>")[-1]


def ours(task: str, asked: tuple[Style, ...]) -> list[bool | None]:
    from quantkit.evaluation.generators.generator import ModelReply
    from quantkit.evaluation.grading.graders import find_grader, grade
    from quantkit.evaluation.grading.math_equal import MathJudge
    from quantkit.evaluation.tasks import data
    from quantkit.evaluation.tasks.definitions import find_setting, find_task

    setting, judge = find_setting(find_task(task), "r1"), MathJudge()
    verdicts: list[bool | None] = []
    grader = find_grader(setting.grader)
    for style in asked:
        fields = data.map_fields(setting.task, style.row, 0)
        problem = data.Problem("0", fields, grader.gold(fields))
        verdicts.append(
            grade(grader, problem, ModelReply(0, style.reply), setting.thinking, judge).correct
        )
    judge.close()
    return verdicts


JUDGES = {
    "evalscope": (TASKS, evalscope),
    "lm-eval": (("aime24", "gsm8k", "math_500", "mmlu_pro"), lm_eval),
}


def compare(name: str, task: str, verdict: Verdict, whole: bool) -> list[str]:
    """Prints the line of a task; what is wrong with it."""
    asked = styles(task)
    asked = asked if whole else asked[:: math.ceil(len(asked) / SAMPLE)]
    theirs = bounded(
        verdict,
        [Record(task, style.row, "corpus", style.right, style.reply) for style in asked],
        SECONDS,
    )
    agree = [
        sum(found == style.right for found, style in zip(verdicts, asked))
        for verdicts in (ours(task, asked), theirs)
    ]
    ungraded = theirs.count(None)
    print(
        json.dumps(
            {
                "task": task,
                "styles": len(asked),
                "quantkit": agree[0],
                name: agree[1],
                "ungraded": ungraded,
            }
        ),
        flush=True,
    )
    for style in [style for style, found in zip(asked, theirs) if found is None][:5]:
        print(f"  no verdict by {name} in {SECONDS:.0f} s: {style.reply[:100]!r}")
    wrong = (
        [f"quantkit agrees less often than {name} on {task}"]
        if agree[0] < agree[1] + ungraded
        else []
    )
    wrong += (
        [f"quantkit agrees with fewer than {LEAST:.0%} of {task}"]
        if agree[0] < LEAST * len(asked)
        else []
    )
    return wrong + (
        [f"{name} gave too few verdicts on {task}"] if ungraded > UNGRADED * len(asked) else []
    )


def main() -> None:
    tasks, grader_of = JUDGES[sys.argv[1]]
    wrong = [
        line
        for task in tasks
        for line in compare(sys.argv[1], task, grader_of(task), "--whole" in sys.argv)
    ]
    sys.exit("; ".join(wrong) if wrong else 0)


if __name__ == "__main__":
    main()
