"""Every fault of tests/support/faulty on three models in every format: what share is found, at which depth,
and what good checkpoints alarm.

make test-faults                                        # python tests/judges/faults.py: about 25 minutes of one processor
python tests/judges/faults.py --only "qwen3-moe awq"    # one of them
python tests/judges/faults.py --good DIR --source SRC   # a checkpoint of another writer, which must have no finding
"""

import argparse
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import faulty
import good_checkpoints

from quantkit.diagnosis.diagnose import DEPTHS, diagnose


def judge(name, path, source, bad, tally):
    """Lines that say what went wrong: alarms of the good checkpoint, and faults that were not
    found."""
    told = alarms(name, path, source)
    good = faulty.Contents.of(path)
    for fault in faulty.FAULTS.values():
        if not fault.suits(good):
            continue
        contents = good.copy()
        fault.apply(contents)
        given = str(source) if fault.source else None
        found = diagnose(
            str(contents.write(bad)), source=given, depth=DEPTHS[DEPTHS.index(fault.depth)]
        ).findings
        names = {finding.name for finding in found.found if finding.severity != "note"}
        tally[fault.depth, bool(names & set(fault.finds))] += 1
        if not names & set(fault.finds):
            told.append(
                f"missed {name}: {fault.name}, found {', '.join(sorted(names)) or 'nothing'}"
            )
    return told


def alarms(name, path, source):
    told = []
    for given in (None, str(source)):
        for finding in diagnose(str(path), source=given, depth="tensors").findings.found:
            if finding.severity != "note":
                told.append(
                    f"alarm {name}{' with its source' if given else ''}: {finding.name} in "
                    f"{finding.where}, {finding.evidence}"
                )
    return told


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--only", action="append", help="a model and format, such as 'qwen3-moe awq'"
    )
    parser.add_argument("--good", type=Path, help="a checkpoint that must have no finding")
    parser.add_argument("--source", type=Path)
    given = parser.parse_args()
    if given.good is not None:
        told = alarms(str(given.good), given.good, given.source or given.good)
        print("\n".join(told) or "no alarm")
        return bool(told)
    tally = Counter()
    told, start, count = [], time.process_time(), 0
    with tempfile.TemporaryDirectory() as folder:
        for name, path, source in good_checkpoints.write_all(Path(folder), given.only or ()):
            found = judge(name, path, source, Path(folder) / "bad", tally)
            print("\n".join(found or [f"{name}: every fault found, no alarm"]), flush=True)
            told, count = told + found, count + 1
    for depth in DEPTHS:
        found, missed = tally[depth, True], tally[depth, False]
        if found + missed:
            print(f"{depth}: {found} of {found + missed} found")
    print(
        f"{count} good checkpoints, {sum(line.startswith('alarm') for line in told)} alarms; "
        f"{time.process_time() - start:.0f} CPU s"
    )
    return bool(told)


if __name__ == "__main__":
    sys.exit(main())
