"""What runs on the far side of the walls: standard library only, started by path, and importing
nothing of quantkit but each other.

gate.py        builds the walls (walls.py, seccomp.py) and becomes the interpreter that runs a program or a judge
candidate.py   runs the untrusted program and answers calls of its function
judge.py       runs the trusted tests, calling the function in the other process
values.py  messages.py   what crosses between the two, and how
"""
