"""What is shipped: dependencies say what is imported, and a wheel and an sdist hold all that a
fresh environment needs to run."""

import ast
import importlib.metadata
import json
import os
import re
import subprocess
import sys
import sysconfig
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PACKAGES = {
    "quantkit": ROOT / "quantkit",
    "quantkit_kernels": ROOT / "kernels" / "quantkit_kernels",
}
DATA = {"quantkit/_assets/recipes": ROOT / "recipes", "quantkit/_assets/eval": ROOT / "eval"}
MACHINE = {"torch_npu", "triton", "IPython", "vllm", "vllm_ascend"}
"""They belong to a device, and come with the torch that is made for it; to a notebook, which is
asked only where one runs; or to an engine that loads a plugin of ours."""


def normal(distribution):
    return re.sub(r"[-_.]+", "-", distribution).lower()


def declared(requirements):
    return {normal(re.split(r"[^\w.-]", requirement)[0]) for requirement in requirements}


def imported():
    """Distributions that the packages import from, and the files that do. A file's neighbours in a
    sandbox are none."""
    homes = importlib.metadata.packages_distributions()
    found = {}
    for folder in PACKAGES.values():
        for path in folder.rglob("*.py"):
            neighbours = {other.stem for other in path.parent.glob("*.py")}
            for node in ast.walk(ast.parse(path.read_text())):
                names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
                names += [node.module] if isinstance(node, ast.ImportFrom) and node.module else []
                for top in (
                    {name.partition(".")[0] for name in names}
                    - sys.stdlib_module_names
                    - MACHINE
                    - PACKAGES.keys()
                    - neighbours
                ):
                    found.setdefault(normal(homes.get(top, [top])[0]), set()).add(
                        str(path.relative_to(ROOT))
                    )
    return found


FOR_LIBRARIES = {
    *("accelerate", "gguf"),  # GGUF files, in transformers
    *("sentencepiece", "protobuf", "tiktoken"),  # tokenizers, in transformers
    "h11",  # the lowest version that is safe, in uvicorn and httpx
}
"""Dependencies that other dependencies import."""


def test_what_is_imported_is_declared_and_nothing_else():
    needed = declared(PROJECT["dependencies"])
    extra = {
        name
        for kind, names in PROJECT["optional-dependencies"].items()
        if kind != "test"
        for name in declared(names)
    }
    found = imported()
    assert {name: files for name, files in found.items() if name not in needed | extra} == {}
    assert needed - found.keys() == FOR_LIBRARIES


def remedies():
    """What the packages say to install: the words after `pip install` in their texts."""
    texts = [
        node.value
        for folder in PACKAGES.values()
        for path in folder.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]
    return {
        found[1]
        for text in texts
        for found in re.finditer(r"pip install ([\w. -]+?)(?:,| on |$)", text)
    }


def test_remedies_can_be_run_as_printed(tmp_path):
    """In a fresh environment; `make check-long` installs each, with what it needs, and CI asks the
    index for all at once."""
    lines = remedies()
    names = {word for line in lines for word in line.split() if not word.startswith("-")}
    assert len(lines) > 5
    assert names <= declared(PROJECT["dependencies"]) | MACHINE, names
    venv.create(tmp_path / "fresh", with_pip=False)
    pip = [sys.executable, "-m", "pip", "--python", str(tmp_path / "fresh"), "install", "--quiet"]
    every = os.environ.get("QUANTKIT_EVERY_CASE") == "1"
    sparing = ["--dry-run --no-deps " + " ".join(sorted(names - MACHINE))]
    for line in sorted(lines) if every else sparing:
        if not MACHINE & {*line.split()}:
            done = subprocess.run([*pip, *line.split()], capture_output=True, text=True)
            assert done.returncode == 0, (line, done.stderr)


def test_the_dockerfile_is_of_files_that_are_there():
    lines = (ROOT / "Dockerfile").read_text().replace("\\\n", " ").splitlines()
    stages = []
    for words in (line.split() for line in lines if line[:1].isupper()):
        if words[0] == "FROM":
            assert words[1] in stages or ":" in words[1], words
            stages.append(words[3])
        if words[0] == "COPY" and words[1].startswith("--from="):
            assert words[1].removeprefix("--from=") in stages
    assert stages[-2:] == ["cuda", "cpu"]
    assert [line for line in lines if line.startswith("USER")] == ["USER 10001"]
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    needed = {"quantkit", "kernels", "recipes", "eval", "tools", "pyproject.toml", "README.md"}
    assert not needed & set(ignored)


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The sdist, and the wheel, by the end of their names."""
    folder = tmp_path_factory.mktemp("dist")
    build = [sys.executable, "-m", "hatchling", "build", "-d", str(folder)]
    subprocess.run(build, cwd=ROOT, capture_output=True, text=True, check=True)
    return {path.suffix: path for path in folder.iterdir()}


def test_the_wheel_holds_every_file_of_the_packages(built):
    with zipfile.ZipFile(built[".whl"]) as wheel:
        held = {name for name in wheel.namelist() if ".dist-info/" not in name}
        licensed = [
            name for name in wheel.namelist() if name.endswith(".dist-info/licenses/LICENSE")
        ]
    there = {
        f"{name}/{path.relative_to(folder)}"
        for name, folder in (PACKAGES | DATA).items()
        for path in folder.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert held == there
    assert len(licensed) == 1


class Fresh:
    """An environment of its own that has this one's packages beside it, but not the checkout."""

    def __init__(self, folder, package):
        self.folder = folder
        self.environment = {
            name: value for name, value in os.environ.items() if name != "PYTHONPATH"
        }
        venv.create(folder, with_pip=False)
        where = "import sysconfig; print(sysconfig.get_path('purelib'))"
        self.site = Path(self.run("python", "-c", where).strip())
        # A plain path: .pth files in it are not read.
        (self.site / "beside.pth").write_text(sysconfig.get_path("purelib"))
        install = "-m pip install --quiet --ignore-installed --no-deps --no-build-isolation"
        self.run("python", *install.split(), "--no-index", str(package))

    def run(self, program, *arguments):
        """What a program of the environment prints."""
        command = [str(self.folder / "bin" / program), *arguments]
        done = subprocess.run(
            command,
            cwd=self.folder,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def quantkit(self, *arguments):
        """The one JSON object that a command prints."""
        about = json.loads(self.run("quantkit", *arguments, "--json"))
        return about


@pytest.mark.parametrize("kind", [".whl", ".gz"])
def test_it_installs_and_runs_anywhere(kind, built, tmp_path):
    fresh = Fresh(tmp_path / "fresh", built[kind])
    for name in PACKAGES:
        assert fresh.run("python", "-c", f"import {name}; print({name}.__file__)").startswith(
            str(fresh.site)
        )
    asked = "Ada has 3 rows of 20 beets. How many beets?"
    answer = fresh.quantkit("run", "tiny-r1", "--prompt", asked, "--max-new-tokens", "8")
    assert answer["tokens"] == 8
    if kind == ".whl":  # the sdist is made into the same wheel
        plan = "plan tiny-r1 --scheme awq-w4a16"
        assert fresh.quantkit(*plan.split())["format"] == "awq"
        score = "eval tiny-r1 --tasks tiny-math --limit 1 --max-tokens 8"
        scored = fresh.quantkit(*score.split())
        assert scored["results"]["tiny-math"]["n"] == 1
