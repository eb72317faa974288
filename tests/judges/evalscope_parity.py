"""Judge: evalscope's own adapters of quantkit's tasks: their prompts, and its reader of our reports.

    PYTHONPATH=. python tests/judges/evalscope_parity.py     in a virtual environment that has evalscope (`make test-evalscope`)

Zero-shot prompts must be the same text. Verdicts are style_agreement.py's, which runs `Evalscope` over the
corpus of answer styles, with the filter that evalscope's FAQ recommends for R1 (`remove_until: </think>`):
without it every prefilled reasoning would be graded.
"""

import json
import sys
from pathlib import Path
from typing import ClassVar

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
from answer_styles import TASKS, styles


def cheap_processes():
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
        def get_context(method):
            assert method == "spawn", method
            return multiprocessing.get_context("fork")

    humaneval.multiprocessing = contests.multiprocessing = Forking
    parser.isolation_available = lambda: False


class Evalscope:
    """The real adapter of one task, with our rows instead of a download."""

    def __init__(self, task):
        from evalscope.api.registry import get_benchmark
        from evalscope.config import TaskConfig

        config = TaskConfig(
            model="recorded",
            datasets=[task],
            dataset_args={task: {"filters": {"remove_until": "</think>"}, "few_shot_num": 0}},
        )
        self.adapter = get_benchmark(task, config)

    def sample(self, row):
        sample = self.adapter.record_to_sample(dict(row))
        sample.group_id = sample.id = 0
        return sample

    def prompt(self, row):
        sample = self.sample(row)
        if isinstance(sample.input, str):
            return str(self.adapter.process_sample_input(sample, subset="default"))
        return str(sample.input[-1].content)

    def correct(self, style):
        from evalscope.api.evaluator import TaskState
        from evalscope.api.messages import ChatMessageUser
        from evalscope.api.model import ModelOutput

        sample = self.sample(style.row)
        sample.input = [ChatMessageUser(content="asked")]
        output = ModelOutput.from_content("recorded", style.reply)
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


def check_prompts():
    from quantkit.evaluation.tasks import data, prompts
    from quantkit.evaluation.tasks.definitions import find_setting, find_task

    for task in TASKS:
        row, given = styles(task)[0].row, find_setting(find_task(task), "evalscope")
        setting = given.model_copy(update={"shots": 0})
        fields = data.map_fields(setting.task, row, 0)
        problem = data.Problem("0", fields, "", str(fields.get("group", "")))
        mine = prompts.render(setting, problem, [], 0).messages[-1]["content"]
        theirs = Evalscope(task).prompt(row)
        if given.task.protocols["evalscope"].shots:  # an introduction stands in front of shots
            mine = mine[-len(theirs) :]
        assert mine.strip() == theirs.strip(), (
            f"prompt of {task} differs:\n--- ours\n{mine}\n--- evalscope\n{theirs}"
        )
    return len(TASKS)


def check_export():
    """`--format evalscope` is read by evalscope's own Report, which finds the same score in it and
    writes the same file back."""
    import tempfile

    from evalscope.report.report import Report

    from quantkit.evaluation.generation import prepare, run_task
    from quantkit.evaluation.generators.generator import ModelReply
    from quantkit.evaluation.results.report import evalscope_report

    class Replayed:
        name = "replayed"
        identity: ClassVar[dict[str, str]] = {"model": "replayed"}

        def generate(self, asked, parameters):
            for index in range(len(asked)):
                yield ModelReply(index, f"hm</think>\\boxed{{{204 if index % 3 else 33}}}")

        def open_tokens(self):
            return []

        def drafts(self): ...

        def close(self): ...

    with tempfile.TemporaryDirectory() as folder:
        rows = {one.row["id"]: one.row for one in styles("aime24")}.values()
        (Path(folder) / "aime24.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        task = run_task(Replayed(), prepare("aime24", "r1", Path(folder), None, 3, None, 0), None)
    mine = evalscope_report("replayed", task)
    read = Report.from_dict(mine)
    assert read.score == round(task.to_json()["accuracy"], 4), (
        read.score,
        task.to_json()["accuracy"],
    )
    assert json.loads(read.to_json_str()) == mine


def main():
    check_export()
    print(json.dumps({"prompts": check_prompts()}))


if __name__ == "__main__":
    main()
