"""What is mutated, and the tests that should notice: the product room by room, and the Ascend side
by ascend.yaml and the patches of faults that the rules do not make.

A file of patches/ has the header of a unified diff and then hunks, each after a line `# what the
fault is`. A hunk is found by its lines, which occur once in the source; its line numbers are a help
to the reader alone.
"""

import ast
import random
import re
from collections import Counter
from functools import cache
from pathlib import Path

import yaml
from by_rule import Mutant, of_cpp, of_python

ROOT = Path(__file__).parents[3]
HERE = Path(__file__).parent
SAMPLE = 200
"""Of the mutants by rule, of either kind, drawn in proportion to the sources, always the same."""
LEFT_OUT = re.compile(
    r"/__(main|init)__\.py$|/triton/|/cuda/|/ascend/kernels|/ascend/few_tokens"  # no CPU executes them
)
SLOW = re.compile(
    r"tests/(ascend/(lowered|schemas|test_acceptance|test_executor|test_r1|test_mutant)|judges|support)"
    r"|/test_(sandbox|corpus|fuzz|parallel|parallel_packed|kill|memory|ranks|benchmarks|package"
    r"|damaged_files|pages|house)\.py"
)
"""Minutes of a test, or rules of the sources' own text."""


def of_product():
    """(room, mutant, test files that are likely to notice, the likeliest first)"""
    sources, tests = {}, {}
    for path in sorted(
        [*ROOT.glob("quantkit/**/*.py"), *ROOT.glob("kernels/quantkit_kernels/**/*.py")]
    ):
        name = str(path.relative_to(ROOT))
        room = "kernels" if name.startswith("kernels/") else name.split("/")[1]
        if not LEFT_OUT.search(name):
            sources.setdefault(room.removesuffix(".py"), {})[name] = path.read_text()
    for path in sorted(ROOT.glob("tests/**/test_*.py")):
        if not SLOW.search(name := str(path.relative_to(ROOT))):
            tests[name] = (path.read_text(), set(_imported(path.read_text())))
    lines = Counter({room: "".join(own.values()).count("\n") for room, own in sources.items()})
    for room, own in sources.items():
        made = [one for name, text in own.items() for one in of_python(name, text)]
        random.Random(min(own)).shuffle(made)
        for one in made[: max(1, round(SAMPLE * lines[room] / lines.total()))]:
            yield room, one, _likely(one, room, tests)


def _likely(mutant, room, tests, count=4):
    """Those that import its module, name its function, or carry its module's name."""
    module = mutant.path.removeprefix("kernels/").removesuffix(".py").replace("/", ".")
    function = mutant.function.rpartition(".")[2].removeprefix("_") or module

    def score(name):
        text, imports = tests[name]
        return (
            4 * (module in imports)
            + 3 * (function in text)
            + 2 * (module.rpartition(".")[2] in name)
            + 2 * (f"tests/{room}/" in name)
            - len(text) / 20_000
        )

    return [name for name in sorted(tests, key=score)[-count:][::-1] if score(name) > 1]


def _imported(text):
    """Modules and names that a source imports, with their paths."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            yield from (one.name for one in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{one.name}" for one in node.names)


@cache
def _said():
    return yaml.safe_load((HERE / "ascend.yaml").read_text())


def explained(one):
    """Why a mutant survives that does, empty if it should not."""
    said = (one.path, one.function.rpartition(".")[2], one.rule)
    rows = _said()["explained"]
    return next((e["why"] for e in rows if (e["path"], e["function"], e["rule"]) == said), "")


def of_ascend(every):
    """(area, mutant, arguments of pytest). every: all that the rules make, not a sample."""
    pools = {}
    for at, area in enumerate(_said()["areas"]):
        text = (ROOT / area["path"]).read_text()
        rules = of_cpp if area["path"].endswith((".cpp", ".h")) else of_python
        pools[at] = rules(area["path"], text) if area.get("ruled", True) else []
    total = sum(map(len, pools.values()))
    for area, pool in zip(_said()["areas"], pools.values()):
        path = area["path"]
        count = len(pool) if every else min(len(pool), max(4, round(SAMPLE * len(pool) / total)))
        for one in [*_patched(path), *random.Random(path).sample(pool, count)]:
            words = area.get("words", {})
            wanted = words.get(one.function.partition(".")[0], words.get("", []))
            chosen = ["-k", " or ".join(wanted)] if wanted else []
            yield area["name"], one, [*area["tests"], *chosen]


def _patched(path):
    source = (ROOT / path).read_text()
    for file in sorted((HERE / "patches").glob("*.patch")):
        _, header, *lines = file.read_text().splitlines()
        if header.removeprefix("+++ b/") != path:
            continue
        for hunk in "\n".join(lines).removeprefix("# ").split("\n# "):
            what, _, *body = hunk.split("\n")
            before = "\n".join(line[1:] for line in body if line[:1] != "+")
            after = "\n".join(line[1:] for line in body if line[:1] != "-")
            count = f"\n{source}".count(f"\n{before}\n")
            assert count == 1, f"{path} has the lines of {what!r} {count} times: an old patch"
            start = f"\n{source}".index(f"\n{before}\n")
            line = source.count("\n", 0, start) + 1
            end = start + len(before)
            yield Mutant(path, start, end, after, before, f"by hand: {what}", line, "")
