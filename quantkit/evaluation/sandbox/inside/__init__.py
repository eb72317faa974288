"""Code that runs inside the isolation: standard library only, started by path, importing nothing of
quantkit but each other.

  launcher.py   sets up the isolation (isolation.py, seccomp.py) and executes a program or a judge
  candidate.py  runs the untrusted program and answers calls of its function
  judge.py      runs the trusted tests, which call the function in the other process
  values.py, messages.py  data exchanged between the two
"""
