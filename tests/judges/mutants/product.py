"""Whether the tests notice a change of the product: 200 mutants over all rooms, by their sizes.

    make mutants                                          # goes on where the last run stopped
    python tests/judges/mutants/product.py --root OLD     # those that the tests of a checkout kill
    python tests/judges/mutants/product.py --again FILE   # whether this checkout's tests kill them

The first forms look for mutants that are killed: of each room they draw functions that a quick test
names, always in the same order, run the quick tests that are likely to notice (rooms.py), and go on
until the room has its share. The last one runs the test that killed a mutant, then those that are
likely. A test that fails as it is kills nothing. Rows of out/mutants.jsonl name the test.
"""

import argparse
import json
import sys
import tempfile
import time
from collections import Counter
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

from by_rule import Mutant
from mutants import ROOT
from rooms import Tests, pool, quotas, sources
from run import Copy, enter
from warm import Warm

LIMIT = 4.0
"""Seconds of a processor for a mutant that is looked for, four times that for a known one. A test may
take half of it."""
DRAWN = 6
"""So many times a room's share at most are drawn."""
Row = dict[str, Any]


class Judge:
    """A copy's tests, in forks of one process."""

    def __init__(self, warm, copy, tests):
        self._warm, self._copy, self._tests = warm, copy, tests
        self._items = {}
        for item in warm.items:
            self._items.setdefault(item.nodeid.partition("::")[0], []).append(item)
        self._sound = {}
        self._slow = set()

    def kill(self, one, known, limit):
        """The test that notices, empty if none does. known: one that noticed before."""
        costs, files = self._warm.costs(), self._tests.likely(one)
        likely = [item for file in files for item in self._items.get(file, [])]
        likely = [
            item
            for item in likely
            if costs.get(item.nodeid, 0) < limit / 2
            and item.nodeid not in self._slow
            and (known or self._tests.is_light(item.nodeid))
        ]
        likely.sort(
            key=lambda item: (
                not self._tests.names(one.function, item.nodeid),
                files.index(item.nodeid.partition("::")[0]),
                costs.get(item.nodeid, 0.1),
            )
        )
        wanted = [item for item in self._warm.items if _alike(item.nodeid, known)]
        wanted = list(dict.fromkeys(wanted + likely))
        while wanted:
            with self._copy.changed(one):
                ended = self._warm.verdict([one.path], wanted, limit)
            if ended == "ran on":
                last = self._warm.running()
                self._slow.add(last)
                wanted = wanted[[item.nodeid for item in wanted].index(last) + 1 :]
            elif "::" not in ended or self._is_sound(one.path, ended):
                return ended if "::" in ended or ended == "at import" else ""
            else:
                wanted = [item for item in wanted if item.nodeid != ended]
        return ""

    def _is_sound(self, path, test):
        """Whether a test passes with the source as it is."""
        if (path, test) not in self._sound:
            items = [item for item in self._warm.items if item.nodeid == test]
            self._sound[path, test] = not self._warm.verdict([path], items)
        return self._sound[path, test]


def _alike(test, known):
    """Whether it is the test that was known, in whichever file."""
    return bool(known) and test.rpartition("::")[2] == known.rpartition("::")[2]


Job = tuple[str, Mutant, str]
"""A room, a mutant, and the test that is known to kill it."""


def drawn(root, rows, rooms):
    """Mutants of each room that are not yet tried, and how many killed ones each still lacks."""
    tests, files, jobs = Tests(root), sources(root), list[Job]()
    lacking, tried = quotas(files, 200), {row["key"] for row in rows}
    for row in rows:
        lacking[row["room"]] -= bool(row["killed_by"])
    for room in rooms or files:
        fresh = (one for one in pool(files[room]) if one.key not in tried and tests.named(one))
        jobs += [(room, one, "") for one in islice(fresh, DRAWN * max(0, lacking[room]))]
    return jobs, lacking


def known(root, killed):
    """Mutants that were killed, each as the sources have it now."""
    files = sources(root)
    for room in dict.fromkeys(row["room"] for row in killed):
        every = pool(files[room])
        by_key = {one.key: one for one in every}
        for row in killed:
            said = tuple(row[name] for name in ("function", "rule", "old", "new"))
            like = (one for one in every if (one.function, one.rule, one.old, one.new) == said)
            if row["room"] == room:
                one = by_key.get(row["key"]) or next(like, None)
                if one is not None:
                    yield room, one, row["killed_by"]
                else:
                    sys.stderr.write(f"gone: {row['path']} {row['function']}: {row['old']!r}\n")


def judge(root, jobs, limit, note):
    """note: told of each mutant and its killer; whether the room wants more."""
    tests = Tests(root)
    files = {file for _, one, _ in jobs for file in tests.likely(one)}
    names = {test.rpartition("::")[2].partition("[")[0] for _, _, test in jobs if "::" in test}
    files |= {file for file, text in tests.texts.items() if any(f"def {n}(" in text for n in names)}
    with tempfile.TemporaryDirectory(prefix="mutants_") as folder:
        copy = Copy(Path(folder), root)
        enter(copy)

        def work(warm):
            own, full = Judge(warm, copy, tests), set[str]()
            for job in jobs:
                began = time.monotonic()
                if job[0] not in full and not note(job, own.kill(*job[1:], limit), began):
                    full.add(job[0])

        ended = pytest.main(
            ["-x", "-p", "no:cacheprovider", "--no-header", *sorted(files)],
            plugins=[Warm(copy.folder, work)],
        )
        assert ended == 0, f"pytest ended with {ended}"


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--root", type=Path, default=ROOT)
    parser.add_argument("--rooms", nargs="*", default=[])
    parser.add_argument("--again", type=Path)
    parser.add_argument("--results", type=Path, default=ROOT / "out" / "mutants.jsonl")
    asked = parser.parse_args()
    torch.set_num_threads(1)  # a fork has none of its parent's threads, and would wait for them
    root, lacking = asked.root.resolve(), dict[str, int]()
    asked.results.parent.mkdir(exist_ok=True)
    rows = _rows(asked.results)
    if asked.again:
        done = {row["key"] for row in rows}
        rows_again = [
            row
            for row in _rows(asked.again)
            if row["killed_by"]
            and row["key"] not in done
            and (not asked.rooms or row["room"] in asked.rooms)
        ]
        jobs = list(known(root, rows_again))
    else:
        jobs, lacking = drawn(root, rows, asked.rooms)
    with asked.results.open("a") as out:

        def note(job, killed, began):
            room, one, _ = job
            seconds = round(time.monotonic() - began, 1)
            row = {"key": one.key, "room": room, "killed_by": killed, "seconds": seconds}
            rows.append(row | asdict(one))
            out.write(json.dumps(rows[-1]) + "\n")
            out.flush()
            sys.stderr.write(
                f"{seconds:5.1f} s {one.path}:{one.line} {one.rule}: {one.old!r} -> {one.new!r} "
                f"({killed or 'NOT KILLED'})\n"
            )
            if room in lacking:
                lacking[room] -= bool(killed)
            return lacking.get(room, 1) > 0

        if jobs:
            judge(root, jobs, 4 * LIMIT if asked.again else LIMIT, note)
    sys.stdout.write("\n".join(table(rows)) + "\n")


def _rows(path):
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def table(rows):
    made = Counter(row["room"] for row in rows)
    killed = Counter(row["room"] for row in rows if row["killed_by"])
    yield "| room | mutants | killed |"
    yield "|---|---|---|"
    for name in made:
        yield f"| {name} | {made[name]} | {killed[name]} |"
    yield f"| all | {made.total()} | {killed.total()} |"


if __name__ == "__main__":
    main()
