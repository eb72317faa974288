"""Whether the tests of the Ascend side notice a change: mutants of its sources, each run against
the narrow tests that should fail.

    make mutants-ascend                    # makes .venv-ascend; goes on where the last run stopped
    python tests/judges/mutants/run.py --limit 40        # so many of what is left
    python tests/judges/mutants/run.py --every           # all that the rules make, not the sample

A copy of the checkout is changed, not the checkout. Every mutant is one process, forked from one in
which the tests have run (warm.py), and the tests that execute its lines run first. Caught is what
fails, dies or runs on. Results are lines of out/mutants-ascend.jsonl by mutant, which a later run
does not repeat: delete the file to judge other tests. The table and the survivors are printed at
the end.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from areas import EXPLAINED
from mutants import ROOT, chosen
from warm import Followed

COPIED = (
    *("kernels", "quantkit", "tests", "recipes", "eval", "tools", "docs", "benchmarks"),
    *("pyproject.toml", "README.md", "Makefile", "CONTRIBUTING.md", "constraints.txt"),
)
Row = dict[str, Any]


class Copy:
    """A copy of the checkout, in which one file at a time is changed."""

    def __init__(self, folder, root=ROOT):
        self.folder = folder
        for name in COPIED:
            source, target = root / name, folder / name
            if source.is_dir():
                shutil.copytree(
                    source,
                    target,
                    ignore=shutil.ignore_patterns("__pycache__", ".venv*", "out", "build"),
                )
            else:
                shutil.copy(source, target)
        # Bytecode that knows its source by a hash: a changed file of the same size and second is
        # seen.
        compiled = [
            sys.executable,
            "-m",
            "compileall",
            "-q",
            "--invalidation-mode",
            "checked-hash",
            str(folder),
        ]
        subprocess.run(compiled, check=False, stdout=subprocess.DEVNULL)

    @contextmanager
    def changed(self, mutant):
        path = self.folder / mutant.path
        source = path.read_text()
        path.write_text(mutant.apply(source))
        try:
            yield
        finally:
            path.write_text(source)


def enter(copy):
    """Make a copy what this process and its children import."""
    os.chdir(copy.folder)
    sys.dont_write_bytecode = True
    sys.path[:0] = [str(copy.folder), str(copy.folder / "kernels")]
    os.environ["PYTHONPATH"] = os.pathsep.join(sys.path[:2])
    sys.meta_path[:] = [one for one in sys.meta_path if "editable" not in repr(one).lower()]


def judge(left, note):
    """Run these, and tell of each how it ended."""
    sources = sorted({one.path for _, one in left if one.path.endswith(".py")})
    files = list(
        dict.fromkeys(
            file for area, _ in sorted(left, key=lambda one: one[0].apart) for file in area.tests
        )
    )
    apart = {file for area, _ in left if area.apart for file in area.tests}
    with tempfile.TemporaryDirectory(prefix="mutants_") as folder:
        copy = Copy(Path(folder))

        def work(warm):
            failed = warm.verdict(sources, warm.items)
            assert not failed, (
                f"{failed} fails once the sources as they are were taken in anew:\n{warm.report()}"
            )
            for area, one in left:
                began = time.monotonic()
                tests, followed = warm.tests_of(one, area)
                with copy.changed(one):
                    caught = warm.verdict([one.path] if one.path in sources else [], tests)
                    if not caught and (area.loaded_once or (one.path in sources and not followed)):
                        caught = warm.cold_verdict(tests)
                note(
                    {
                        "key": one.key,
                        "area": area.name,
                        "caught": caught,
                        "seconds": round(time.monotonic() - began, 1),
                        **asdict(one),
                    }
                )

        enter(copy)
        ended = pytest.main(
            ["-x", "-p", "no:cacheprovider", "--no-header", *files],
            plugins=[Followed(copy.folder, sources, apart, work)],
        )
        assert ended == 0, f"pytest ended with {ended}"


def table(every, known):
    made, caught = Counter[str](), Counter[str]()
    survivors = []
    for area, one in every:
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
    yield (
        f"{len(every) - made.total()} of {len(every)} not run yet; "
        f"{100 * caught.total() / max(made.total(), 1):.1f} % caught"
    )
    for one in survivors:
        why = EXPLAINED.get((one.path, one.function.rpartition(".")[2], one.rule), "a hole")
        yield (
            f"survived {one.key} {one.path}:{one.line} in {one.function}, {one.rule}: "
            f"{one.old!r} -> {one.new!r}: {why}"
        )


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
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
    every = [
        (area, one)
        for area, one in chosen(asked.every)
        if asked.area in area.name or asked.area in area.path
    ]
    if asked.survivors:
        known = {key: row for key, row in known.items() if row["caught"]}
    with asked.results.open("a") as out:

        def note(row):
            known[row["key"]] = row
            out.write(json.dumps(row) + "\n")
            out.flush()
            told = (
                f"{row['seconds']:5.1f} s {row['path']}:{row['line']} {row['rule']}: "
                f"{row['old']!r} -> {row['new']!r} ({row['caught']})"
            )
            sys.stderr.write(f"{'caught' if row['caught'] else 'SURVIVED'} {told}\n")

        left = [(area, one) for area, one in every if one.key not in known][: asked.limit]
        if left:
            judge(left, note)
    sys.stdout.write("\n".join(table(every, known)) + "\n")


if __name__ == "__main__":
    main()
