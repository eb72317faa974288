"""Judge: the prompts of the protocols `report` and `evalscope-1.0.1` next to the templates in
evalscope 1.0.1's own source, byte for byte.

    PYTHONPATH=. python tests/judges/evalscope_1_0_1.py FOLDER

FOLDER is that of `pip install --no-deps --target FOLDER evalscope==1.0.1`. The release is not
imported: its templates are constant expressions.
"""

import ast
import sys
from pathlib import Path

from quantkit.evaluation.tasks.definitions import Problem, find_setting, find_task
from quantkit.evaluation.tasks.prompts import render

SHOTS = [
    {"problem": f"How many, {n}?", "answer": f"It is {n}.\n#### {n}", "group": ""} for n in range(4)
]


def templates(path):
    """The module's string constants by name, and the adapter's `prompt_template`."""
    found = {}

    def value(node):
        return eval(compile(ast.Expression(node), path.name, "eval"), {"__builtins__": {}}, found)

    for node in ast.walk(ast.parse(path.read_text())):
        named = isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
        text = isinstance(node, ast.keyword) and node.arg == "prompt_template"
        if named and node.targets[0].id.endswith("TEMPLATE"):
            found[node.targets[0].id] = value(node.value)
        elif text and not isinstance(node.value, ast.Name):
            found["prompt_template"] = value(node.value)
    return found


def ours(task, protocol, fields):
    setting = find_setting(find_task(task), protocol)
    (message,) = render(setting, Problem("0", fields), SHOTS, 0).messages
    return message["content"]


def main():
    folder = Path(sys.argv[1]) / "evalscope/benchmarks"
    problem = {"problem": "How many {apples}?", "options": [], "group": ""}
    shots = "\n\n".join(
        f"How many, {n}?\n\nReasoning:\nIt is {n}.\n\nANSWER: {n}" for n in range(4)
    )
    gsm8k = templates(folder / "gsm8k/gsm8k_adapter.py")["FEWSHOT_TEMPLATE"]
    theirs = {"gsm8k": gsm8k.format(fewshot=shots, question=problem["problem"])}
    for task, file in (
        ("aime24", "aime/aime24_adapter.py"),
        ("aime25", "aime/aime25_adapter.py"),
        ("humaneval", "humaneval/humaneval_adapter.py"),
    ):
        template = templates(folder / file)["prompt_template"]
        theirs[task] = template.format(question=problem["problem"])
    for task, text in theirs.items():
        for protocol in ("report", "evalscope-1.0.1"):
            found = ours(task, protocol, problem)
            assert found == text, f"{task}, {protocol}:\n{found!r}\n{text!r}"
    print(f"evalscope 1.0.1: the prompts of {', '.join(theirs)} are equal byte for byte")


if __name__ == "__main__":
    main()
