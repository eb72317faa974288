"""Judge: the same recorded completions through evalscope's own adapters and through quantkit's
graders.

    PYTHONPATH=. python tests/judges/evalscope_parity.py     in a virtual environment that has evalscope (`make test-evalscope`)

quantkit's grading imports nothing that evalscope lacks. Verdicts per sample must be equal, except
for the styles in EXPECTED, each with the reading that makes ours right. evalscope runs with the
filter that its FAQ recommends for R1 (`remove_until: </think>`); without it every prefilled
reasoning would be graded. Prompts are compared too.
"""

import json
import sys
from collections import Counter
from collections.abc import Iterator
from typing import Any, ClassVar

from recorded import AIME, Record, data_dir, records


def cheap_processes() -> None:
    """The same checks without what evalscope pays for its processes.

    It checks a program in two spawned processes that import evalscope first, seconds each: here
    they fork. It parses and compares mathematics in a forked process each, with 30 seconds, and
    each compiles math-verify's expressions again: here that is done in the calling process, which
    `bounded` gives its time.
    """
    import multiprocessing

    from evalscope.benchmarks.humaneval import utils as humaneval
    from evalscope.benchmarks.live_code_bench import evaluate_utils as contests
    from evalscope.metrics.math import parser

    class Forking:
        @staticmethod
        def get_context(method: str) -> Any:
            assert method == "spawn", method
            return multiprocessing.get_context("fork")

    humaneval.multiprocessing = contests.multiprocessing = Forking
    parser.isolation_available = lambda: False


# Replies that give no answer, whatever numbers are in them.
NO_ANSWER = {
    "answer cut before number",
    "box cut",
    "empty",
    "empty after think",
    "prose",
    "refusal",
    "think unfinished, tagged",
}
# Style -> why a person reading the reply would side with quantkit. A difference fails the judge if
# its style is not here, or if quantkit's verdict is not the reader's: right where the right answer
# was put into the reply and the reply gives it.
EXPECTED = {
    "answer colon bold": "`**Answer: 18**` states 18",
    "answer cut before number": "the reply was cut by the token limit; its last number is a step, "
    "not an answer",
    "answer is, then remark": "`The answer is (I). Option B is wrong.` chooses I; the last capital "
    "letter is not the choice",
    "block not closed": "the program is whole, only the closing fence is missing",
    "boxed, bare unit": "a box of `18 pears` says 18",
    "boxed, bold": "bold is typesetting",
    "boxed, cjk unit": "a box of 18 with the unit in Chinese says 18",
    "boxed, degrees": "a box of 18 degrees says 18",
    "boxed, equation": "a box of `x = 18` says 18",
    "boxed, expression": "`204+4-4` is 204",
    "boxed, fraction": "`\\frac{408}{2}` is 204",
    "boxed, full width": "full-width digits are digits",
    "boxed, point": "the full stop ends the sentence",
    "boxed, sum equation": "AIME asks for m+n; a box of `m+n=204` says 204",
    "boxed, text": "\\text is typesetting",
    "boxed, thin space": "a LaTeX thin space separates thousands; 1 234 is not 235",
    "chinese answer": "the Chinese sentence states 18",
    "draft block first": "the last block that defines the function is the answer, not the draft "
    "before it",
    "example block first": "the block that defines the function is the answer, not the usage "
    "example",
    "fbox": "a box is a box",
    "lower case label": "`ANSWER: c` chooses C",
    "raw, no block": "the reply is the program itself",
    "think unfinished, tagged": "the reply never left its reasoning: a number in there is not an "
    "answer",
    "two boxes, last counts": "`5, no wait, 18` answers 18, not the set of both",
}


class Evalscope:
    """The real adapter of one task, with our rows instead of a download."""

    def __init__(self, task: str) -> None:
        from evalscope.api.registry import get_benchmark
        from evalscope.config import TaskConfig

        config = TaskConfig(
            model="recorded",
            datasets=[task],
            dataset_args={task: {"filters": {"remove_until": "</think>"}, "few_shot_num": 0}},
        )
        self.adapter: Any = get_benchmark(task, config)

    def sample(self, row: dict[str, Any]) -> Any:
        sample = self.adapter.record_to_sample(dict(row))
        sample.group_id = sample.id = 0
        return sample

    def prompt(self, row: dict[str, Any]) -> str:
        sample = self.sample(row)
        if isinstance(sample.input, str):
            return str(self.adapter.process_sample_input(sample, subset="default"))
        return str(sample.input[-1].content)

    def correct(self, record: Record) -> bool:
        from evalscope.api.evaluator import TaskState
        from evalscope.api.messages import ChatMessageUser
        from evalscope.api.model import ModelOutput

        sample = self.sample(record.row)
        sample.input = [ChatMessageUser(content="asked")]
        output = ModelOutput.from_content("recorded", record.text)
        state = TaskState(
            model="recorded",
            sample=sample,
            messages=[*sample.input, output.message],
            output=output,
            completed=True,
        )
        score = self.adapter.calculate_metrics(state).score
        values = [float(value) for value in score.value.values()]
        return bool(values) and values[0] == 1.0


def setting_of(task: str) -> Any:
    from quantkit.evaluation.tasks.definitions import find_setting, find_task

    return find_setting(find_task(task), "evalscope")


def ours(record: Record, judge: Any) -> tuple[bool, str]:
    from quantkit.evaluation.generators.generator import ModelReply
    from quantkit.evaluation.grading.graders import find_grader, grade
    from quantkit.evaluation.tasks import data

    setting = setting_of(record.task)
    grader = find_grader(setting.grader)
    fields = data.map_fields(setting.task, record.row, 0)
    problem = data.Problem("0", fields, grader.gold(fields))
    verdict = grade(
        grader, problem, ModelReply(0, record.text, record.finish_reason), setting.thinking, judge
    )
    return verdict.correct, verdict.reason


def compare(found: list[Record]) -> list[dict[str, Any]]:
    from quantkit.evaluation.grading.math_equal import MathJudge

    judge, adapters = (
        MathJudge(),
        {task: Evalscope(task) for task in {record.task for record in found}},
    )

    def one(record: Record) -> dict[str, Any]:
        mine, reason = ours(record, judge)
        theirs = adapters[record.task].correct(record)
        return {
            "task": record.task,
            "style": record.style,
            "right": record.right,
            "reader": record.right and record.style not in NO_ANSWER,
            "ours": mine,
            "reason": reason,
            "theirs": theirs,
            "text": record.text,
        }

    cheap_processes()
    rows = [one(record) for record in found]
    judge.close()
    return rows


def check_prompts(found: list[Record]) -> int:
    """Zero-shot prompts must be the same text."""
    from quantkit.evaluation.tasks import data, prompts

    checked = 0
    first = {record.task: record.row for record in reversed(found)}
    for task, row in first.items():
        setting = setting_of(task).model_copy(update={"shots": 0})
        fields = data.map_fields(setting.task, row, 0)
        problem = data.Problem("0", fields, "", str(fields.get("group", "")))
        mine = prompts.render(setting, problem, [], 0).messages[-1]["content"]
        theirs = Evalscope(task).prompt(row)
        if setting.shots != setting_of(task).task.protocols["evalscope"].shots:
            mine, theirs = (
                mine[-len(theirs) :],
                theirs,
            )  # the shots' introduction stands in front only where there are shots
        assert mine.strip() == theirs.strip(), (
            f"prompt of {task} differs:\n--- ours\n{mine}\n--- evalscope\n{theirs}"
        )
        checked += 1
    return checked


def check_export() -> None:
    """`--format evalscope` is read by evalscope's own Report, which finds the same score in it and
    writes the same file back."""
    import tempfile
    from pathlib import Path

    from evalscope.report.report import Report

    from quantkit.evaluation.generation import prepare, run_task
    from quantkit.evaluation.generators.generator import Generation, ModelReply, Prompt
    from quantkit.evaluation.results.evalscope_format import report

    class Replayed:
        name = "replayed"
        identity: ClassVar[dict[str, str]] = {"model": "replayed"}

        def generate(self, asked: list[Prompt], parameters: Generation) -> Iterator[ModelReply]:
            for index in range(len(asked)):
                yield ModelReply(index, f"hm</think>\\boxed{{{204 if index % 3 else 33}}}")

        def open_tokens(self) -> list[int]:
            return []

        def drafts(self) -> None: ...

        def close(self) -> None: ...

    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "aime24.jsonl").write_text("".join(json.dumps(row) + "\n" for row in AIME))
        task = run_task(Replayed(), prepare("aime24", "r1", Path(folder), None, 3, None, 0), None)
    mine = report("replayed", task)
    read = Report.from_dict(mine)
    assert read.score == round(task.to_json()["accuracy"], 4), (
        read.score,
        task.to_json()["accuracy"],
    )
    assert json.loads(read.to_json_str()) == mine


def main() -> None:
    check_export()
    found = records(data_dir())
    checked = check_prompts(found)
    rows = compare(found)
    differences = [row for row in rows if row["ours"] != row["theirs"]]
    unexplained = [
        row for row in differences if row["style"] not in EXPECTED or row["ours"] != row["reader"]
    ]
    counts = Counter(
        (row["task"], row["style"], row["right"], row["ours"], row["theirs"], row["reason"])
        for row in differences
    )
    for (task, style, right, mine, theirs, reason), count in sorted(counts.items()):
        why = EXPECTED.get(style, "NOT EXPLAINED")
        answer = "right" if right else "wrong"
        print(
            f"{count:4d} x {task:16s} {style:26s} {answer} answer: ours {mine!s:5} ({reason}), "
            f"evalscope {theirs!s:5}: {why}"
        )
    agreed = len(rows) - len(differences)
    print(
        json.dumps(
            {
                "samples": len(rows),
                "agree": agreed,
                "listed": len(differences) - len(unexplained),
                "unexplained": len(unexplained),
                "prompts": checked,
            }
        )
    )
    for row in unexplained[:20]:
        print("UNEXPLAINED", json.dumps(row, ensure_ascii=False))
    sys.exit(1 if unexplained else 0)


if __name__ == "__main__":
    main()
