"""Mutants by rule of all rooms of the product, and the tests that are likely to notice each."""

import ast
import random
import re
from functools import cache, cached_property
from itertools import repeat

from by_rule import of_python

ROOMS = ("quantkit/**/*.py", "kernels/quantkit_kernels/**/*.py")
LEFT_OUT = re.compile(
    r"/__(main|init)__\.py$|/triton/|/cuda/|/ascend/kernels|/ascend/few_tokens"  # no CPU executes them
)
SLOW = re.compile(
    r"tests/(ascend/(lowered|schemas|test_acceptance|test_executor|test_r1|test_mutant)|judges|support)"
    r"|/test_(sandbox|corpus|fuzz|parallel|parallel_packed|kill|memory|ranks|benchmarks|package"
    r"|damaged_files|pages|house|words|architecture)\.py"
)
"""Minutes of a test, or rules of the sources' own text."""
HEAVY = {
    *("quantize", "convert", "command", "subprocess", "Popen", "serve", "serving", "diagnose"),
    *("load_model", "run", "measure", "Engine", "open_engine", "plan", "greedy", "written"),
    *("made", "outputs", "server", "client"),
}
"""Words of tests that take more than a second, most of them."""


def sources(root):
    """By room: the text of its files, by path below the checkout."""
    found = {}
    for pattern in ROOMS:
        for path in sorted(root.glob(pattern)):
            name = str(path.relative_to(root))
            room = "quantkit_kernels" if name.startswith("kernels/") else name.split("/")[1]
            if not LEFT_OUT.search(name):
                found.setdefault(room.removesuffix(".py"), {})[name] = path.read_text()
    return found


def pool(files):
    """All that the rules make of files, in an order that is always the same."""
    made = [one for name, text in files.items() for one in of_python(name, text)]
    random.Random(min(files)).shuffle(made)
    return made


def quotas(files, total):
    """How many mutants of `total` a room has: by its lines, and one at least."""
    lines = {room: sum(map(str.count, own.values(), repeat("\n"))) for room, own in files.items()}
    return {room: max(1, round(total * own / sum(lines.values()))) for room, own in lines.items()}


class Tests:
    """The test files of a checkout, and what each names."""

    def __init__(self, root):
        self._root = root
        files = [path for path in sorted((root / "tests").rglob("test_*.py"))]
        self.texts = {
            name: path.read_text()
            for path in files
            if not SLOW.search(name := str(path.relative_to(root)))
        }
        self._imports = {name: set(_imported(text)) for name, text in self.texts.items()}
        self._words = {name: set(re.findall(r"\w+", text)) for name, text in self.texts.items()}

    def likely(self, mutant, count=5):
        """Test files, the likeliest first: those that import its module, name its function, or
        carry its module's name."""
        module = mutant.path.removeprefix("kernels/").removesuffix(".py").replace("/", ".")
        module = module.removesuffix(".__init__")
        readers = {name for name, used in self._product.items() if module in used}
        words = {word for word in mutant.function.split(".") if len(word) > 4}
        room = "kernels" if "kernels/" in mutant.path else module.split(".")[1]

        def score(name):
            imports, found = self._imports[name], self._words[name] & words
            return (
                4 * (module in imports)
                + 3 * any("_" in word[1:] for word in found)
                + bool(found)
                + 2 * (module.rpartition(".")[2] in name)
                + 2 * bool(imports & readers)
                + 2 * (f"tests/{room}/" in name)
                - len(self.texts[name]) / 20_000
            )

        scores = {name: score(name) for name in self.texts}
        return [
            one for one in sorted(scores, key=scores.__getitem__)[-count:][::-1] if scores[one] > 1
        ]

    def names(self, function, test):
        """Whether a test's text names the innermost of a function's names."""
        file, _, name = test.partition("::")
        body = self._bodies(file).get(re.split(r"[\[:]", name)[0], set())
        return function.rpartition(".")[2].removeprefix("_") in body

    def named(self, mutant):
        """Whether a quick test names its function: the others are rarely killed by few tests."""
        name = mutant.function.rpartition(".")[2].removeprefix("_")
        return len(name) > 4 and any(
            name in body
            for file in self.likely(mutant)
            for test, body in self._bodies(file).items()
            if test.startswith("test_") and not body & HEAVY
        )

    def is_light(self, test):
        file, _, name = test.partition("::")
        return not self._bodies(file).get(re.split(r"[\[:]", name)[0], set()) & HEAVY

    @cache  # noqa: B019
    def _bodies(self, file):
        """Words of each function of a file."""
        lines = self.texts[file].splitlines()
        return {
            node.name: set(re.findall(r"\w+", "\n".join(lines[node.lineno - 1 : node.end_lineno])))
            for node in ast.walk(ast.parse(self.texts[file]))
            if isinstance(node, ast.FunctionDef)
        }

    @cached_property
    def _product(self):
        """By module of the product: what it imports."""
        found = {}
        for base in (self._root / "quantkit", self._root / "kernels" / "quantkit_kernels"):
            for path in base.rglob("*.py"):
                name = ".".join(path.relative_to(base.parent).with_suffix("").parts)
                found[name.removesuffix(".__init__")] = set(_imported(path.read_text()))
        return found


def _imported(text):
    """Modules and names that a source imports, with their paths."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            yield from (one.name for one in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{one.name}" for one in node.names)
