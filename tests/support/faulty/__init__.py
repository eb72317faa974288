"""Faults of a checkpoint, made on purpose: each changes one thing of a good one, and says what a
diagnosis must find, and how deep.

    for fault in FAULTS.values():
        if fault.suits(contents): fault.apply(contents); contents.write(folder)

headers.py has those that headers and files show, tensors.py those that bytes or the source show.
"""

from faulty import headers, tensors
from faulty.contents import Contents
from faulty.fault import FAULTS, Fault
from quantkit.diagnosis import catalogue
from quantkit.diagnosis.diagnose import diagnose

__all__ = ["FAULTS", "Contents", "Fault", "check_found", "damaged", "headers", "tensors"]


def damaged(good, fault, folder):
    """The name of a folder with a copy of a good checkpoint, its path or Contents, and a fault in
    it."""
    contents = good.copy() if isinstance(good, Contents) else Contents.of(good)
    FAULTS[fault].apply(contents)
    return str(contents.write(folder / "bad"))


def check_found(fault, opened, folder):
    """On the first that it suits, of Contents and their sources: by a finding of its own above a
    note, and the verdict."""
    good, source = next((good, source) for good, source in opened if fault.suits(good))
    bad, source = damaged(good, fault.name, folder), str(source) if fault.source else None
    findings = diagnose(bad, source=source, depth=fault.depth).findings
    told = {finding.name for finding in findings.found if finding.severity != "note"}
    assert told & set(fault.finds), findings.to_json()
    severe = catalogue()[fault.finds[0]].severity == "error"
    assert findings.verdict == ("bad" if severe else "doubtful")
