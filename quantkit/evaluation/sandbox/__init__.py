"""Running untrusted, model-written Python.

A program runs in a box: a fresh interpreter inside namespaces, limits and a filter of system calls.
What judges it runs elsewhere: the output of a script is compared here, and a function is called by
a judge in a box of its own, with arguments and results crossing as plain data. So neither tests,
nor expected values, nor the verdict are ever in a process, a descriptor or a file that the program
can reach.

Once the first line of a program may have run, everything that goes wrong counts against it; before
that it is a fault of the sandbox, tried again, and in the end left out of the score.

boxes.py    one process tree inside walls: start, watch its memory, end
cgroup.py   memory held by the kernel, where this process may make groups
runs.py     a program and its judge, a script, and which level of walls this machine gives
inside/     what runs inside the walls
"""

from quantkit.evaluation.sandbox.process import Level
from quantkit.evaluation.sandbox.programs import (
    IsolationLevel,
    Program,
    ProgramRun,
    active_level,
    find_level,
    run_calls,
    run_script,
    run_tests,
    workers,
)

__all__ = [
    "IsolationLevel",
    "Level",
    "Program",
    "ProgramRun",
    "active_level",
    "find_level",
    "run_calls",
    "run_script",
    "run_tests",
    "workers",
]
