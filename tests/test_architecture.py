"""Imports run one way, and the command line answers at once."""

import ast
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
LEVELS = [
    {"quantkit_kernels"},
    {"common"},
    {"tokenizer"},
    {"grids"},
    {"quant"},
    {"checkpoint"},
    {"models"},
    {"calibrate", "executor", "engines"},
    {"quantization", "evaluation"},
    {"planning", "diagnosis", "deploy", "playground"},
    {"api"},
    {"guide"},
    {"cli"},
]
EXECUTOR_LEVELS = [
    {"options"},
    {"sampling"},
    {"checks", "cache", "ranks"},
    {"weights"},
    {"scheduler"},
    {"runner"},
    {"speculation"},
    set(),  # the engine and the other files at the top of executor/
    {"server"},
]
LEVEL_OF = {room: level for level, rooms in enumerate(LEVELS) for room in rooms}
HEAVY = {"torch", "transformers", "matplotlib", "fastapi", "math_verify", "numpy", "sympy"}


def sources() -> list[tuple[str, Path]]:
    """(room, file) of every module of both packages."""
    files = []
    for path in sorted((ROOT / "quantkit").rglob("*.py")):
        parts = path.relative_to(ROOT / "quantkit").parts
        if parts[0] not in ("__init__.py", "__main__.py"):
            files.append((parts[0].removesuffix(".py"), path))
    files += [
        ("quantkit_kernels", path)
        for path in sorted((ROOT / "kernels" / "quantkit_kernels").rglob("*.py"))
    ]
    return files


def imported(path: Path) -> list[str]:
    names = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names += [f"{node.module}.{alias.name}" for alias in node.names]
    return names


def imports_when_run(tree: ast.AST) -> Iterator[str]:
    """What code imports at its top or inside a function, `a.b` of `from a import b`; what only a
    type checker reads is left out."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            yield from (name for other in node.orelse for name in imports_when_run(other))
        else:
            yield from imports_when_run(node)


def file_imports(files: dict[str, str]) -> dict[str, set[str]]:
    """files: source by module name -> the modules among them that each imports; a name of a package
    is the package's own file."""
    found = {}
    for module, source in files.items():
        names = set(imports_when_run(ast.parse(source)))
        found[module] = {
            name if name in files else name.rpartition(".")[0] for name in names
        } & set(files) - {module}
    return found


def circle(imports: dict[str, set[str]]) -> list[str]:
    """Modules that import each other in a circle, the first one again at the end; empty where there
    is none."""
    done: set[str] = set()

    def search(path: list[str]) -> list[str]:
        for target in sorted(imports[path[-1]] - done):
            if target in path:
                return [*path[path.index(target) :], target]
            if found := search([*path, target]):
                return found
        done.add(path[-1])
        return []

    return next(
        (found for module in sorted(imports) if module not in done and (found := search([module]))),
        [],
    )


def room_of(name: str) -> str | None:
    parts = name.split(".")
    if parts[0] == "quantkit_kernels":
        return "quantkit_kernels"
    if parts[0] == "quantkit" and len(parts) > 1 and parts[1] != "__version__":
        return parts[1]
    return None


@pytest.mark.parametrize(("room", "path"), sources(), ids=lambda value: str(value)[-40:])
def test_imports_run_one_way(room: str, path: Path) -> None:
    assert room in LEVEL_OF, f"{room} has no place in the house: add it to LEVELS"
    for name in imported(path):
        target = room_of(name)
        if target is None or target == room:
            continue
        assert LEVEL_OF[target] < LEVEL_OF[room], (
            f"{path.relative_to(ROOT)} imports {name}: {room} may not depend on {target}"
        )


def executor_level(name: str) -> int:
    """name: of a file or folder of executor/."""
    found = [level for level, names in enumerate(EXECUTOR_LEVELS) if name in names]
    return found[0] if found else EXECUTOR_LEVELS.index(set())


def test_folders_of_executor_import_one_way() -> None:
    executor = ROOT / "quantkit" / "executor"
    for path in sorted(executor.rglob("*.py")):
        own = path.relative_to(executor).parts[0].removesuffix(".py")
        for name in imported(path):
            parts = name.split(".")
            if parts[:2] == ["quantkit", "executor"] and len(parts) > 2 and parts[2] != own:
                lower, upper = executor_level(parts[2]), executor_level(own)
                same_level = lower == upper == EXECUTOR_LEVELS.index(set())
                assert lower < upper or same_level, (
                    f"executor/{path.relative_to(executor)} imports {name}"
                )


def test_files_do_not_import_in_a_circle() -> None:
    folders = {"quantkit": ROOT, "quantkit_kernels": ROOT / "kernels"}
    files = {
        ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(
            ".__init__"
        ): path.read_text()
        for package, root in folders.items()
        for path in (root / package).rglob("*.py")
    }
    found = circle(file_imports(files))
    assert not found, " imports ".join(found)


def test_circles_are_found() -> None:
    late = "def f():\n    from p.a import x"
    typed = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from p.a import x"
    assert circle(
        file_imports({"p": "", "p.a": "from p import b", "p.b": "import p.c", "p.c": late})
    ) == ["p.a", "p.b", "p.c", "p.a"]
    assert circle(file_imports({"p": "from p.a import x", "p.a": "from p import x"})) == [
        "p",
        "p.a",
        "p",
    ]
    assert not circle(
        file_imports({"p": "", "p.a": "from p import b", "p.b": "import p.c", "p.c": typed})
    )


def test_kernels_stand_alone() -> None:
    for room, path in sources():
        if room == "quantkit_kernels":
            assert not [name for name in imported(path) if name.split(".")[0] == "quantkit"], path


def test_help_is_quick_and_imports_nothing_heavy() -> None:
    probe = (
        "import sys, runpy\n"
        "sys.argv = ['quantkit', '--help']\n"
        "try: runpy.run_module('quantkit', run_name='__main__')\n"
        f"except SystemExit: print('HEAVY', sorted({HEAVY!r} & set(sys.modules)), "
        "file=sys.stderr)\n"
    )
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True)
    assert "HEAVY []" in done.stderr
    assert "quantize" in done.stdout
    best = min(_seconds([sys.executable, "-m", "quantkit", "--help"]) for _ in range(3))
    print(f"quantkit --help: {best:.2f} s")


def _seconds(command: list[str]) -> float:
    start = time.perf_counter()
    subprocess.run(command, capture_output=True, check=True)
    return time.perf_counter() - start


OWN_NAMES = {"Config", "Model", "DecoderLayer", "Attention", "MtpLayer"}
"""Classes that each architecture has."""


def class_names(files: dict[str, str]) -> dict[str, list[str]]:
    """files: source by path -> where each class stands, less an architecture's own and what a
    backend calls by its operator."""
    found: dict[str, list[str]] = {}
    for path, source in files.items():
        architecture = "/models/" in path or path.endswith("/model.py")
        backend = "/quantkit_kernels/" in path and path.count("/") > 2
        for node in ast.walk(ast.parse(source)):
            by_rule = isinstance(node, ast.ClassDef) and (
                (architecture and node.name in OWN_NAMES)
                or (backend and node.name.endswith(("Linear", "Experts")))
            )
            if isinstance(node, ast.ClassDef) and not by_rule:
                found.setdefault(node.name, []).append(f"{path}:{node.lineno}")
    return found


def test_a_class_name_means_one_thing_in_a_room() -> None:
    rooms: dict[str, dict[str, str]] = {}
    for folder in ("quantkit", "kernels", "benchmarks", "tools"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            name = str(path.relative_to(ROOT))
            rooms.setdefault("/".join(name.split("/")[:2]), {})[name] = path.read_text()
    names = {room: class_names(files) for room, files in rooms.items()}
    assert sum(map(len, names.values())) > 500
    twice = [places for found in names.values() for places in found.values() if len(places) > 1]
    assert twice == []


def test_names_of_two_classes_are_found() -> None:
    own = "class Config:\n  pass\nclass Table:\n  pass"
    names = class_names(
        {
            "quantkit/models/a.py": own,
            "quantkit/models/b.py": own,
            "quantkit/c.py": "class Config:\n  pass",
        }
    )
    assert names == {
        "Table": ["quantkit/models/a.py:3", "quantkit/models/b.py:3"],
        "Config": ["quantkit/c.py:1"],
    }
