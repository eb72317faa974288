"""Whether the tests notice a change: mutants, each run against the tests that should fail.

    make mutants                           # 200 of the product; goes on where the last run stopped
    make mutants-ascend                    # of the Ascend side: by rule, and by patch
    python tests/judges/mutants/run.py product --again OLD.jsonl   # what OLD's tests killed

A copy of the checkout is changed, not the checkout. Caught is what fails or runs on; a test that
fails as it is catches nothing. Results are lines of out/mutants-KIND.jsonl by mutant, which a later
run does not repeat: delete the file to judge other tests. The table and the survivors are printed
at the end.
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
from dataclasses import asdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from by_rule import of_python
from mutants import ROOT, explained, of_ascend, of_product

COPIED = (
    *("kernels", "quantkit", "tests", "recipes", "eval", "tools", "docs", "benchmarks"),
    *("pyproject.toml", "README.md", "Makefile", "CONTRIBUTING.md", "constraints.txt"),
)
LIMIT = 900
"""Seconds of tests as they are."""


def pytest(folder, arguments, limit):
    """Its exit code, and the first test that failed; None if it ran on."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-rfE", "-p", "no:cacheprovider"]
    paths = {"PYTHONPATH": os.pathsep.join([str(folder), str(folder / "kernels")])}
    try:
        done = subprocess.run(
            [*command, *arguments],
            cwd=folder,
            env=os.environ | paths | {"PYTHONDONTWRITEBYTECODE": "1"},
            capture_output=True,
            text=True,
            timeout=limit,
        )
    except subprocess.TimeoutExpired:
        return None, ""
    lines = [one for one in done.stdout.splitlines() if one.startswith(("FAILED ", "ERROR "))]
    return done.returncode, lines[0].split(" ", 1)[1].split(" - ")[0] if lines else ""


def judge(folder, mutant, tests, killer, usual):
    """The test that notices a mutant, empty if none does. killer: one that is known to, or "".
    usual: seconds of tests as they are, which this adds to."""
    path = folder / mutant.path
    source = path.read_text()
    for arguments in ([killer],) * bool(killer) + (list(tests),):
        if (key := tuple(arguments)) not in usual:
            began = time.monotonic()
            code, failed = pytest(folder, arguments, LIMIT)
            assert code == 0 or arguments == [killer], f"{failed or arguments} fails as it is"
            usual[key] = time.monotonic() - began if code == 0 else None
        if usual[key] is None:  # the killer is no more
            continue
        path.write_text(mutant.apply(source))
        try:
            code, failed = pytest(folder, arguments, 60 + 5 * usual[key])
        finally:
            path.write_text(source)
        if code != 0:
            return failed or ("ran on" if code is None else "at import")
    return ""


def known(file):
    """Mutants that a former run caught, as the sources have them now, with what caught them."""
    for row in map(json.loads, file.read_text().splitlines()):
        text = (ROOT / row["path"]).read_text() if (ROOT / row["path"]).exists() else ""
        said = [row[name] for name in ("function", "rule", "old", "new")]
        like = [
            one
            for one in of_python(row["path"], text)
            if [one.function, one.rule, one.old, one.new] == said
        ]
        if row["killed_by"] and like:
            best = next((one for one in like if one.number == row["number"]), like[0])
            yield row["room"], best, row["killed_by"]


def table(rows):
    made, caught = Counter(), Counter()
    for row in rows:
        made[row["room"]] += 1
        caught[row["room"]] += bool(row["killed_by"])
    yield "| room | mutants | killed |"
    yield "|---|---|---|"
    for name in made:
        yield f"| {name} | {made[name]} | {caught[name]} |"
    yield f"| all | {made.total()} | {caught.total()} |"


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("kind", choices=["product", "ascend"])
    parser.add_argument("--rooms", nargs="*", default=[])
    parser.add_argument("--limit", type=int, default=10**9)
    parser.add_argument("--every", action="store_true", help="of ascend: all that the rules make")
    parser.add_argument("--again", type=Path)
    asked = parser.parse_args()
    results = ROOT / "out" / f"mutants-{asked.kind}{'-again' * bool(asked.again)}.jsonl"
    results.parent.mkdir(exist_ok=True)
    rows = [json.loads(one) for one in results.read_text().splitlines()] if results.exists() else []
    jobs = list(of_product() if asked.kind == "product" else of_ascend(asked.every))
    killers = {}
    if asked.again:
        tests = {one.path: files for _, one, files in jobs}
        again = list(known(asked.again))
        killers = {one.key: killer for _, one, killer in again}
        jobs = [
            (room, one, tests.get(one.path) or [killer.partition("::")[0]])
            for room, one, killer in again
        ]
    done, usual = {row["key"] for row in rows}, {}
    left = [job for job in jobs if job[1].key not in done and job[0] in (asked.rooms or [job[0]])]
    with tempfile.TemporaryDirectory(prefix="mutants_") as folder, results.open("a") as out:
        for name in COPIED:
            source, target = ROOT / name, Path(folder) / name
            (shutil.copytree if source.is_dir() else shutil.copy)(source, target)
        for room, one, tests in left[: asked.limit]:
            began = time.monotonic()
            killer = judge(Path(folder), one, tests, killers.get(one.key, ""), usual)
            row = {"key": one.key, "room": room, "killed_by": killer}
            rows.append(row | {"seconds": round(time.monotonic() - began, 1)} | asdict(one))
            out.write(json.dumps(rows[-1]) + "\n")
            out.flush()
            said = killer or f"SURVIVED: {explained(one) or 'a hole'}"
            print(
                f"{one.path}:{one.line} {one.rule}: {one.old!r} -> {one.new!r} ({said})", flush=True
            )
    print("\n".join(table(rows)))


if __name__ == "__main__":
    main()
