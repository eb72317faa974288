"""Diagnosis of checkpoints written by other tools: findings with evidence and remedy, and repair.

`checkpoint/check.py` rejects an invalid file at its first fault, and `engines/check.py` checks
whether an engine loads a sound checkpoint. This package continues after a fault and reports all of
them.
"""
