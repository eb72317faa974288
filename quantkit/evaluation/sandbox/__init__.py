"""Running untrusted, model-written Python.

A program runs in a fresh interpreter inside namespaces, resource limits and a system call filter.
Its judge runs outside that process: the output of a script is compared here, and a function is
called by a judge in a second isolated process, with arguments and results exchanged as plain data.
So neither tests, nor expected values, nor the verdict are ever in a process, a descriptor or a file
that the program can reach.

From the first line of a program on, every failure counts against the program; before that it is a
failure of the sandbox, which is retried and finally excluded from the score.

  process.py   one isolated process tree: start, check its memory, kill
  cgroup.py    memory limited by the kernel, where this process may create cgroups
  programs.py  a program with its judge, a script, and the isolation level of this machine
  inside/      code that runs inside the isolation
"""

from quantkit.evaluation.sandbox.process import Level
from quantkit.evaluation.sandbox.programs import (
    IsolationLevel,
    Program,
    ProgramRun,
    active_level,
    find_level,
    run_function,
    run_script,
    workers,
)

__all__ = [
    "IsolationLevel",
    "Level",
    "Program",
    "ProgramRun",
    "active_level",
    "find_level",
    "run_function",
    "run_script",
    "workers",
]
