"""Every fault of tests/support/faulty on three models in every format, and what good checkpoints
alarm.

make test-faults                                        # python tests/judges/faults.py: about 25 minutes of one processor
python tests/judges/faults.py "qwen3-moe awq"           # one of them
"""

import sys
import tempfile
from pathlib import Path

import faulty
import good_checkpoints

from quantkit.diagnosis.diagnose import diagnose


def alarms(path, source, depth):
    found = diagnose(str(path), source=source, depth=depth).findings.found
    return [finding for finding in found if finding.severity != "note"]


def judge(path, source, bad):
    """Alarms of the good checkpoint, and faults that were not found."""
    good = faulty.Contents.of(path)
    for given in (None, source):
        yield from (f"alarm: {one}" for one in alarms(path, given, "tensors"))
    for fault in faulty.FAULTS.values():
        if fault.suits(good):
            contents = good.copy()
            fault.apply(contents)
            given = source if fault.source else None
            names = {one.name for one in alarms(contents.write(bad), given, fault.depth)}
            if not names & set(fault.finds):
                yield f"missed: {fault.name}, found {', '.join(sorted(names)) or 'nothing'}"


def main():
    wrong = 0
    with tempfile.TemporaryDirectory() as folder:
        for name, path, source in good_checkpoints.write_all(Path(folder), sys.argv[1:]):
            told = list(judge(path, str(source), Path(folder) / "bad"))
            print("\n".join([f"{name}: {len(told)} wrong", *told]), flush=True)
            wrong += len(told)
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
