"""Faults of a checkpoint, made on purpose: each changes one thing of a good one, and says what a
diagnosis must find, and how deep.

    for fault in FAULTS:
        if fault.suits(contents): fault.apply(contents); contents.write(folder)

A module holds the faults of one part of a checkpoint. `replays` names the public thread that a
fault is taken from, where there is one.
"""

from faulty import against_source, codes, description, files, mtp, settings, structure, unquantized
from faulty.contents import Contents
from faulty.fault import FAULTS, Fault

__all__ = [
    "FAULTS",
    "Contents",
    "Fault",
    "against_source",
    "codes",
    "description",
    "files",
    "mtp",
    "settings",
    "structure",
    "unquantized",
]
