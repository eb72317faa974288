"""Faults of a checkpoint, made on purpose: each changes one thing of a good one, and says what a
diagnosis must find, and how deep.

    for fault in FAULTS.values():
        if fault.suits(contents): fault.apply(contents); contents.write(folder)

headers.py has those that headers and files show, tensors.py those that bytes or the source show.
"""

from faulty import headers, tensors
from faulty.contents import Contents
from faulty.fault import FAULTS, Fault

__all__ = ["FAULTS", "Contents", "Fault", "headers", "tensors"]
