"""What is wrong with a checkpoint that somebody else wrote: findings with evidence and remedy, and
the cure where there is one.

Not to be mistaken for `checkpoint/check.py`, which refuses a file that is no checkpoint at its
first fault, and `engines/check.py`, which asks whether an engine loads a sound one. This room goes
on after a fault, and finds all of them.
"""
