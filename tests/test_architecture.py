"""Imports run one way, and the command line answers at once."""

import ast
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
LEVELS = [
    {"errors"},
    {"assets", "schemes", "plots", "progress", "devices", "model_files"},
    {"hub", "tokenizer", "settings_file"},
    {"quant", "recipe"},
    {"checkpoint", "quantkit_kernels"},
    {"models"},
    {"calibrate", "executor", "engines"},
    {"conversion", "quantization", "evaluation", "inspection", "costmodel"},
    {"planning"},
    {"api"},
    {"console"},
    {"cli"},
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
    files += [("quantkit_kernels", path) for path in sorted((ROOT / "kernels" / "quantkit_kernels").rglob("*.py"))]
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
        assert LEVEL_OF[target] < LEVEL_OF[room], f"{path.relative_to(ROOT)} imports {name}: {room} may not depend on {target}"


def test_kernels_stand_alone() -> None:
    for room, path in sources():
        if room == "quantkit_kernels":
            assert not [name for name in imported(path) if name.split(".")[0] == "quantkit"], path


def test_help_is_quick_and_imports_nothing_heavy() -> None:
    probe = (
        "import sys, runpy\n"
        "sys.argv = ['quantkit', '--help']\n"
        "try: runpy.run_module('quantkit', run_name='__main__')\n"
        f"except SystemExit: print('HEAVY', sorted({HEAVY!r} & set(sys.modules)), file=sys.stderr)\n"
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
