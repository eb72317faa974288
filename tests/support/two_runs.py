"""A task of small sums, and two finished evaluations of ten of them, for what reads results
folders."""

import json

from replay_server import ReplayServer, Reply

from quantkit.evaluation.options import EvaluateOptions
from quantkit.evaluation.run import run_evaluation

TASK = """
name: sums
version: 1
title: Sums
summary: Small sums.
data: {files: [sums.jsonl]}
optional: {id: id}
fields: {problem: question, answer: answer, group: steps}
grader: integer
protocols:
  r1: {prompt: "{{ problem }}", generation: {max_tokens: 64}}
  evalscope: {prompt: "{{ problem }} Box it."}
"""


def write_task(folder, numbers=range(10, 20)):
    """The task on n + n for these numbers; returns the file that names it."""
    rows = [
        {"id": f"s{n}", "question": f"{n} + {n}", "answer": str(2 * n), "steps": n % 2 + 1}
        for n in numbers
    ]
    (folder / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "sums.yaml").write_text(TASK)
    return str(folder / "sums.yaml")


def solve(question, body):
    return f"</think>\\boxed{{{2 * int(question.split()[0])}}}"


def poorly(question, body):
    return (
        Reply("no", status=400)
        if question.startswith("19")
        else solve(question, body).replace("8}", "7}")
    )


def write_runs(folder):
    """folder/good and folder/poor; the poor one's last problem has no reply."""
    task = write_task(folder)
    for name, answer in (("good", solve), ("poor", poorly)):
        with ReplayServer(answer, models=(name,)) as server:
            run_evaluation(
                server.url,
                [task],
                EvaluateOptions(data_dir=folder, out=folder / name, repeats=2),
            )
