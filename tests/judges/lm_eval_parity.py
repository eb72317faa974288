"""Judge: the corpus' answers to gsm8k through lm-evaluation-harness' own task and through quantkit's
gsm8k-filters.

    PYTHONPATH=. python tests/judges/lm_eval_parity.py     in a virtual environment that has lm-eval (`make test-lm-eval`)

Both filters of every reply must give equal verdicts; reasoning is cut at the last </think> first, as its
`think_end_token` does, and other marks of reasoning (OTHER) it does not know. The prompt with five shots
is compared byte for byte.
"""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
import lm_eval
import yaml
from answer_styles import styles
from lm_eval.api.instance import Instance
from lm_eval.api.metrics import exact_match_hf_evaluate
from lm_eval.filters import build_filter_ensemble
from lm_eval.utils import apply_template

from quantkit.evaluation.generators.generator import ModelReply
from quantkit.evaluation.grading.graders import find_grader, grade
from quantkit.evaluation.tasks import data, prompts
from quantkit.evaluation.tasks.definitions import Problem, find_setting, find_task

CONFIG = yaml.safe_load((Path(lm_eval.__file__).parent / "tasks/gsm8k/gsm8k.yaml").read_text())
SETTING = find_setting(find_task("gsm8k"), "lm-eval")
OTHER = ("<think>", "[THINK]", "<|channel|>")


def theirs(style):
    """Filter name -> exact match, as their task computes it from gsm8k.yaml."""
    metric = CONFIG["metric_list"][0]
    options = {
        key: metric[key] for key in ("ignore_case", "ignore_punctuation", "regexes_to_ignore")
    }
    text = style.reply.split("</think>")[-1]
    found = {}
    for described in CONFIG["filter_list"]:
        steps = [
            (
                step["function"],
                {key: value for key, value in step.items() if key != "function"} or None,
            )
            for step in described["filter"]
        ]
        instance = Instance(request_type="generate_until", doc=style.row, arguments=("", {}), idx=0)
        instance.resps = [text]
        build_filter_ensemble(described["name"], steps).apply([instance])
        value = exact_match_hf_evaluate(
            predictions=[instance.filtered_resps[described["name"]]],
            references=[style.row["answer"]],
            **options,
        )
        found[described["name"]] = bool(value["exact_match"])
    return found


def ours(style):
    grader = find_grader(SETTING.grader)
    fields = data.map_fields(SETTING.task, style.row, 0)
    problem = Problem("0", fields, grader.gold(fields))
    verdict = grade(
        grader,
        problem,
        ModelReply(0, style.reply.split("</think>")[-1], think_open=False),
        False,
    )
    return {"strict-match": verdict.strict, "flexible-extract": verdict.correct}


def check_prompt():
    rows = list({one.row["answer"]: one.row for one in styles("gsm8k")}.values())[:6]
    shots = [data.map_fields(SETTING.task, row, number) for number, row in enumerate(rows[:5])]
    mine = prompts.render(
        SETTING, Problem("0", data.map_fields(SETTING.task, rows[-1], 0)), shots, 0
    ).text
    written = [apply_template(CONFIG["doc_to_text"], row) + " " + row["answer"] for row in rows[:5]]
    expected = "\n\n".join([*written, apply_template(CONFIG["doc_to_text"], rows[-1])])
    assert mine == expected, f"prompt differs:\n--- ours\n{mine}\n--- lm-eval\n{expected}"
    assert list(SETTING.generation.stop) == CONFIG["generation_kwargs"]["until"]
    assert SETTING.shots == CONFIG["num_fewshot"]


def main():
    check_prompt()
    found = [style for style in styles("gsm8k") if not style.reply.startswith(OTHER)]
    rows = [(style, ours(style), theirs(style)) for style in found]
    different = [one for one in rows if one[1] != one[2]]
    print(json.dumps({"samples": len(rows), "verdicts": 2 * len(rows), "differ": len(different)}))
    for style, mine, other in different[:20]:
        print("DIFFERS", style.row["answer"], mine, other, json.dumps(style.reply))
    sys.exit(1 if different else 0)


if __name__ == "__main__":
    main()
