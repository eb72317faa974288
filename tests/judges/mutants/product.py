"""Whether the tests notice a change of the product: 200 mutants over all rooms, by their sizes.

    make mutants                                          # goes on where the last run stopped
    python tests/judges/mutants/product.py --root OLD     # those that the tests of a checkout kill
    python tests/judges/mutants/product.py --again FILE   # whether this checkout's tests kill them

The first form looks for mutants that are killed: of each room it draws some, always the same, runs
the test files that are likely to notice (rooms.py), and keeps drawing until the room has its share.
A test that fails as it is kills nothing. Rows of out/mutants.jsonl name the test.
"""

import argparse
import json
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from by_rule import Mutant
from mutants import ROOT
from rooms import Tests, pool, quotas
from run import Copy, enter
from warm import Warm

LIMIT = 5.0
"""Seconds of a processor for a mutant that is looked for, four times that for a known one. No test is run that takes longer."""
DRAWN = 3
"""So many times a room's share at most are drawn."""
Row = dict[str, Any]


class Judge:
    """A copy's tests, in forks of one process."""

    def __init__(self, warm: Warm, copy: Copy, tests: Tests) -> None:
        self._warm, self._copy, self._tests = warm, copy, tests
        self._items: dict[str, list[pytest.Item]] = {}
        for item in warm.items:
            self._items.setdefault(item.nodeid.partition("::")[0], []).append(item)
        self._sound: dict[tuple[str, str], bool] = {}

    def kill(self, one: Mutant, known: str, limit: float) -> str:
        """The test that notices, empty if none does. known: one that noticed before."""
        costs, files = self._warm.costs(), self._tests.likely(one)
        likely = [item for file in files for item in self._items.get(file, [])]
        likely = [item for item in likely if costs.get(item.nodeid, 0) < limit]
        likely.sort(
            key=lambda item: (
                not self._tests.names(one.function, item.nodeid),
                files.index(item.nodeid.partition("::")[0]) if limit > LIMIT else 0,
                costs.get(item.nodeid, 0.3),
            )
        )
        wanted = [item for item in self._warm.items if _alike(item.nodeid, known)]
        wanted = list(dict.fromkeys(wanted + likely))
        while wanted:
            with self._copy.changed(one):
                ended = self._warm.verdict([one.path], wanted, limit)
            if "::" not in ended or self._is_sound(one.path, ended):
                return ended if "::" in ended or ended == "at import" else ""
            wanted = [item for item in wanted if item.nodeid != ended]
        return ""

    def _is_sound(self, path: str, test: str) -> bool:
        """Whether a test passes with the source as it is."""
        if (path, test) not in self._sound:
            items = [item for item in self._warm.items if item.nodeid == test]
            self._sound[path, test] = not self._warm.verdict([path], items)
        return self._sound[path, test]


def _alike(test: str, known: str) -> bool:
    """Whether it is the test that was known, in whichever file."""
    return bool(known) and test.rpartition("::")[2] == known.rpartition("::")[2]


def looked_for(
    root: Path, rooms: list[str], rows: list[Row]
) -> Iterator[tuple[str, int, list[Mutant]]]:
    """Of each room: how many killed ones are missing, and those not yet tried."""
    every = pool(root)
    share = quotas({name: len(made) for name, made in every.items()}, 200)
    seen = {row["key"] for row in rows}
    for name in rooms or share:
        killed = sum(bool(row["killed_by"]) for row in rows if row["room"] == name)
        drawn = every[name][: DRAWN * share[name]]
        yield name, share[name] - killed, [one for one in drawn if one.key not in seen]


def again(root: Path, rows: list[Row]) -> Iterator[tuple[Row, Mutant | None]]:
    """Killed mutants, each as the sources have it now, or None where its place is gone."""
    every = [one for made in pool(root).values() for one in made]
    by_key = {one.key: one for one in every}
    for row in rows:
        like = [
            one
            for one in every
            if (one.function, one.rule, one.old, one.new)
            == (row["function"], row["rule"], row["old"], row["new"])
        ]
        yield row, by_key.get(row["key"]) or (like[0] if like else None)


def run(root: Path, files: list[str], work: Any) -> None:
    with tempfile.TemporaryDirectory(prefix="mutants_") as folder:
        copy, tests = Copy(Path(folder), root), Tests(root)
        enter(copy)

        def judge(warm: Warm) -> None:
            work(Judge(warm, copy, tests))

        ended = pytest.main(
            ["-x", "-p", "no:cacheprovider", "--no-header", *files],
            plugins=[Warm(copy.folder, judge)],
        )
        assert ended == 0, f"pytest ended with {ended}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--root", type=Path, default=ROOT)
    parser.add_argument("--rooms", nargs="*", default=[])
    parser.add_argument("--again", type=Path)
    parser.add_argument("--results", type=Path, default=ROOT / "out" / "mutants.jsonl")
    asked = parser.parse_args()
    root = asked.root.resolve()
    asked.results.parent.mkdir(exist_ok=True)
    rows = _rows(asked.results)
    tests = Tests(root)
    with asked.results.open("a") as out:

        def note(one: Mutant, room: str, killed: str, began: float) -> None:
            row = {"key": one.key, "room": room, "killed_by": killed, **asdict(one)}
            row["seconds"] = round(time.monotonic() - began, 1)
            rows.append(row)
            out.write(json.dumps(row) + "\n")
            out.flush()
            sys.stderr.write(
                f"{row['seconds']:5.1f} s {one.path}:{one.line} {one.rule}: {one.old!r} -> "
                f"{one.new!r} ({killed or 'NOT KILLED'})\n"
            )

        if asked.again:
            done = {row["key"] for row in rows}
            known = [
                row
                for row in _rows(asked.again)
                if row["killed_by"]
                and row["key"] not in done
                and (not asked.rooms or row["room"] in asked.rooms)
            ]
            placed = list(again(root, known))
            gone = [row for row, one in placed if one is None]
            for row in gone:
                sys.stderr.write(f"gone: {row['path']} {row['function']} {row['old']!r}\n")
            left = [(row, one) for row, one in placed if one is not None]
            files = {file for _, one in left for file in tests.likely(one)}
            names = {row["killed_by"].rpartition("::")[2].partition("[")[0] for row, _ in left}
            files |= {
                file
                for file in tests.texts
                if any(f"def {n}(" in tests.texts[file] for n in names if n)
            }

            def judge_again(judge: Judge) -> None:
                for row, one in left:
                    began = time.monotonic()
                    note(one, row["room"], judge.kill(one, row["killed_by"], 4 * LIMIT), began)

            if left:
                run(root, sorted(files), judge_again)
        else:
            left = list(looked_for(root, asked.rooms, rows))
            files = {file for _, _, made in left for one in made for file in tests.likely(one)}

            def judge_new(judge: Judge) -> None:
                for room, missing, made in left:
                    for one in made:
                        if missing <= 0:
                            break
                        began = time.monotonic()
                        killed = judge.kill(one, "", LIMIT)
                        note(one, room, killed, began)
                        missing -= bool(killed)

            run(root, sorted(files), judge_new)
    sys.stdout.write("\n".join(table(rows)) + "\n")


def _rows(path: Path) -> list[Row]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def table(rows: list[Row]) -> Iterator[str]:
    made = Counter(row["room"] for row in rows)
    killed = Counter(row["room"] for row in rows if row["killed_by"])
    yield "| room | mutants | killed |"
    yield "|---|---|---|"
    for name in made:
        yield f"| {name} | {made[name]} | {killed[name]} |"
    yield f"| all | {made.total()} | {killed.total()} |"


if __name__ == "__main__":
    main()
