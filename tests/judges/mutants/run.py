"""Whether the tests of the Ascend side notice a change: mutants of its sources, each run against the narrow tests that should fail.

    make mutants-ascend                    # makes .venv-ascend; goes on where the last run stopped
    python tests/judges/mutants/run.py --limit 40        # so many of what is left
    python tests/judges/mutants/run.py --every           # all that the rules make, not the sample

A copy of the checkout is changed, not the checkout. Every mutant is one process, forked from one that has imported torch and the like, with
a time limit of its own. Caught is what fails, dies or runs on. Results are lines of out/mutants-ascend.jsonl by mutant, which a later run
does not repeat: delete the file to judge other tests. The table and the survivors are printed at the end.
"""

import argparse
import importlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

ROOT = Path(__file__).parents[3]
sys.path.insert(0, str(Path(__file__).parent))

from areas import AREAS, EXPLAINED, Area  # noqa: E402
from by_class import BY_CLASS  # noqa: E402
from by_hand import HAND  # noqa: E402
from by_rule import Mutant, of_cpp, of_python  # noqa: E402

COPIED = ("kernels", "quantkit", "tests", "recipes", "eval", "pyproject.toml", "README.md", "tools")
SAMPLE = 201
"""Of the mutants by rule, drawn area by area in proportion, always the same."""


def mutants(every: bool) -> list[tuple[Area, Mutant]]:
    """Those by hand, and those by rule or a sample of them."""
    found = []
    pool = {area: _generated(area) for area in AREAS}
    total = sum(map(len, pool.values()))
    for area, generated in pool.items():
        source = (ROOT / area.path).read_text()
        by_hand = (*HAND.get(area.path, ()), *BY_CLASS.get(area.path, ()))
        found += [(area, _placed(area.path, source, *change)) for change in by_hand]
        count = len(generated) if every else min(len(generated), max(4, round(SAMPLE * len(generated) / total)))
        found += [(area, one) for one in random.Random(area.path).sample(generated, count)]
    return found


def _generated(area: Area) -> list[Mutant]:
    source = (ROOT / area.path).read_text()
    return of_cpp(area.path, source) if area.path.endswith((".cpp", ".h")) else of_python(area.path, source)


def _placed(path: str, source: str, old: str, new: str, what: str, function: str = "") -> Mutant:
    """A mutant by hand: its text stands once in the file, or in the function."""
    first = source.index(f"def {function}(") if function else 0
    after = re.compile(r"\n(?:@|def |class )").search(source, first) if function else None
    body = source[first : after.start() if after else len(source)]
    assert body.count(old) == 1, f"{path} {function} has {old!r} {body.count(old)} times: the mutant is out of date"
    start = first + body.index(old)
    return Mutant(path, start, start + len(old), new, old, f"by hand: {what}", source.count("\n", 0, start) + 1, function)


class Copy:
    """A copy of the checkout, in which one file at a time is changed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name in COPIED:
            source, target = ROOT / name, folder / name
            if source.is_dir():
                shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__", ".venv*", "out", "build"))
            else:
                shutil.copy(source, target)
        # Bytecode that knows its source by a hash: a changed file of the same size and second is seen.
        compiled = [sys.executable, "-m", "compileall", "-q", "--invalidation-mode", "checked-hash", str(folder)]
        subprocess.run(compiled, check=False, stdout=subprocess.DEVNULL)

    def failure(self, mutant: Mutant | None, tests: Sequence[str], seconds: float) -> tuple[str, float]:
        """How the tests failed, empty where they passed, and the seconds they took."""
        began = time.monotonic()
        if mutant is None:
            return self._run(tests, seconds), time.monotonic() - began
        path = self.folder / mutant.path
        source = path.read_text()
        path.write_text(mutant.apply(source))
        try:
            return self._run(tests, seconds), time.monotonic() - began
        finally:
            path.write_text(source)

    def _run(self, tests: Sequence[str], seconds: float) -> str:
        child = os.fork()
        if child == 0:
            os.setsid()
            _test(self.folder, tests)
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            done, status = os.waitpid(child, os.WNOHANG)
            if done:
                code = os.waitstatus_to_exitcode(status)
                return "" if code == 0 else f"signal {-code}" if code < 0 else "failed"
            time.sleep(0.02)
        os.killpg(child, signal.SIGKILL)
        os.waitpid(child, 0)
        return "ran on"


def _test(folder: Path, tests: Sequence[str]) -> None:
    """In the child: run the tests of the copy, and end with pytest's word. Nothing of quantkit has been imported before."""
    import pytest

    log = os.open(folder / "last.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.chdir(folder)
    sys.dont_write_bytecode = True
    sys.path[:0] = [str(folder), str(folder / "kernels")]
    os.environ["PYTHONPATH"] = f"{folder}:{folder / 'kernels'}"
    sys.meta_path[:] = [one for one in sys.meta_path if "editable" not in repr(one).lower()]
    os._exit(int(pytest.main(["-x", "-p", "no:cacheprovider", "--no-header", "--tb=line", *tests])))


def _import_others() -> None:
    """What tests import that is not ours, so that a fork has it already."""
    ours = ("quantkit", "quantkit_kernels")
    probe = "import sys, torch, numpy, pytest, quantkit.executor.engine, quantkit.api, typer.testing\n"
    probe += f"print('\\n'.join(sorted(one for one in sys.modules if one.partition('.')[0] not in {ours!r})))"
    listed = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True).stdout.split()
    for name in listed:
        try:
            importlib.import_module(name)
        except ImportError:
            continue
    assert not any(one.partition(".")[0] in ours for one in sys.modules)


def judge(chosen: list[tuple[Area, Mutant]], known: dict[str, dict[str, object]], results: Path, limit: int) -> None:
    """Run what is not known, at most `limit`."""
    left = [(area, one) for area, one in chosen if one.key not in known][:limit]
    if not left:
        return
    _import_others()
    with tempfile.TemporaryDirectory(prefix="mutants_") as folder, results.open("a") as out:
        copy, usual = Copy(Path(folder)), {}
        for area, one in left:
            tests = area.tests_of(one.function)
            if tests not in usual:
                failed, usual[tests] = copy.failure(None, tests, 600)
                assert not failed, f"{' '.join(tests)} fail as they are ({failed}):\n{(copy.folder / 'last.log').read_text()[-2000:]}"
            failed, seconds = copy.failure(one, tests, 10 + 4 * usual[tests])
            row = {"key": one.key, "area": area.name, "caught": failed, "seconds": round(seconds, 1), **asdict(one)}
            known[one.key] = row
            out.write(json.dumps(row) + "\n")
            out.flush()
            sys.stderr.write(f"{failed or 'SURVIVED':9} {seconds:5.1f} s {one.path}:{one.line} {one.rule}: {one.old!r} -> {one.new!r}\n")


def table(chosen: list[tuple[Area, Mutant]], known: dict[str, dict[str, object]]) -> Iterator[str]:
    made, caught = Counter[str](), Counter[str]()
    survivors = []
    for area, one in chosen:
        row = known.get(one.key)
        if row is None:
            continue
        made[area.name] += 1
        caught[area.name] += bool(row["caught"])
        if not row["caught"]:
            survivors.append(one)
    yield "| area | made | caught | survived |"
    yield "|---|---|---|---|"
    for name in made:
        yield f"| {name} | {made[name]} | {caught[name]} | {made[name] - caught[name]} |"
    yield f"| all | {made.total()} | {caught.total()} | {made.total() - caught.total()} |"
    yield f"{len(chosen) - made.total()} of {len(chosen)} not run yet; {100 * caught.total() / max(made.total(), 1):.1f} % caught"
    for one in survivors:
        why = EXPLAINED.get((one.path, one.function.rpartition(".")[2], one.rule), "a hole")
        yield f"survived {one.key} {one.path}:{one.line} in {one.function}, {one.rule}: {one.old!r} -> {one.new!r}: {why}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--limit", type=int, default=10**9)
    parser.add_argument("--every", action="store_true")
    parser.add_argument("--area", default="", help="only areas whose name or path has this")
    parser.add_argument("--survivors", action="store_true", help="run again what survived")
    parser.add_argument("--results", type=Path, default=ROOT / "out" / "mutants-ascend.jsonl")
    asked = parser.parse_args()
    asked.results.parent.mkdir(exist_ok=True)
    known = {}
    if asked.results.exists():
        known = {row["key"]: row for row in map(json.loads, asked.results.read_text().splitlines())}
    chosen = [(area, one) for area, one in mutants(asked.every) if asked.area in area.name or asked.area in area.path]
    if asked.survivors:
        known = {key: row for key, row in known.items() if row["caught"]}
    judge(chosen, known, asked.results, asked.limit)
    sys.stdout.write("\n".join(table(chosen, known)) + "\n")


if __name__ == "__main__":
    main()
