"""Judge: the corpus of answer styles through evalscope's own adapters, or through
lm-evaluation-harness' own tasks, beside quantkit.

    PYTHONPATH=. python tests/judges/style_agreement.py evalscope|lm-eval [--whole]

`make test-evalscope` and `test-lm-eval` run it, `make test-styles` with --whole.

Two lines a task, common and rare styles: how often each grader agrees with the reader, of the whole
corpus or of SAMPLE styles, evenly out of it. On the common ones quantkit must agree at least as often,
also if the other one were right wherever it gave no verdict in time; and the other one must give a
verdict nearly always, else nothing was compared.
"""

import json
import math
import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
from answer_styles import TASKS, styles
from bounded import bounded

SAMPLE = 240
SECONDS = 30.0
"""For one verdict: math-verify without a timeout, as evalscope runs it, does not end on some
powers."""
LEAST, UNGRADED = 0.98, 0.02


def evalscope(task):
    """It is given what stands behind the last </think>, as its FAQ recommends for R1."""
    from evalscope_parity import Evalscope, cheap_processes

    cheap_processes()
    return Evalscope(task).correct


def lm_eval(task):
    """Its tasks' own graders, behind the last </think>; of gsm8k's two filters the more lenient."""
    if task == "gsm8k":
        from lm_eval_parity import theirs

        return lambda style: theirs(style)["flexible-extract"]
    if task == "mmlu_pro":
        import lm_eval

        described = (
            Path(lm_eval.__file__).parent / "tasks/mmlu_pro/_default_template_yaml"
        ).read_text()
        (pattern,) = re.findall(r"(?m)^ *regex_pattern: '(.*)'$", described)
        return lambda style: (
            [style.row["answer"]] == re.findall(pattern, _behind_thinking(style))[:1]
        )
    from lm_eval.tasks.aime import utils as aime
    from lm_eval.tasks.hendrycks_math import utils as mathematics

    process = {"aime24": aime, "math_500": mathematics}[task].process_results
    return lambda style: process(style.row, [_behind_thinking(style)])["exact_match"] == 1


def _behind_thinking(style):
    return style.reply.split("</think>")[-1]


def ours(task, asked):
    from quantkit.evaluation.generators.generator import ModelReply
    from quantkit.evaluation.grading.graders import find_grader, grade
    from quantkit.evaluation.tasks import data
    from quantkit.evaluation.tasks.definitions import find_setting, find_task

    setting = find_setting(find_task(task), "r1")
    verdicts = []
    grader = find_grader(setting.grader)
    for style in asked:
        fields = data.map_fields(setting.task, style.row, 0)
        problem = data.Problem("0", fields, grader.gold(fields))
        verdicts.append(
            grade(grader, problem, ModelReply(0, style.reply), setting.thinking).correct
        )
    return verdicts


JUDGES = {
    "evalscope": (TASKS, evalscope),
    "lm-eval": (("aime24", "gsm8k", "math_500", "mmlu_pro"), lm_eval),
}


def compare(name, task, verdict, whole):
    """Prints two lines of a task, common and rare styles; what is wrong with the common ones."""
    wrong = []
    for is_common in (True, False):
        asked = tuple(style for style in styles(task) if style.is_common is is_common)
        asked = asked if whole else asked[:: math.ceil(len(asked) / SAMPLE)]
        theirs = bounded(verdict, asked, SECONDS)
        found = {"quantkit": ours(task, asked), name: theirs}
        agree, false_right = (
            {who: sum(map(count, verdicts, asked)) for who, verdicts in found.items()}
            for count in (
                lambda verdict, style: verdict == style.right,
                lambda verdict, style: verdict is True and not style.right,
            )
        )
        ungraded = theirs.count(None)
        line = {"task": task, "common": is_common, "styles": len(asked), **agree}
        print(json.dumps(line | {"false right": false_right, "ungraded": ungraded}), flush=True)
        if not is_common:
            continue
        if agree["quantkit"] < agree[name] + ungraded:
            wrong.append(f"quantkit agrees less often than {name} on {task}")
        if agree["quantkit"] < LEAST * len(asked):
            wrong.append(f"quantkit agrees with fewer than {LEAST:.0%} of {task}")
        if ungraded > UNGRADED * len(asked):
            wrong.append(f"{name} gave too few verdicts on {task}")
    return wrong


def main():
    tasks, grader_of = JUDGES[sys.argv[1]]
    wrong = [
        line
        for task in tasks
        for line in compare(sys.argv[1], task, grader_of(task), "--whole" in sys.argv)
    ]
    sys.exit("; ".join(wrong) if wrong else 0)


if __name__ == "__main__":
    main()
