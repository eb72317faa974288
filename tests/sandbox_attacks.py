"""Hostile programs for the sandbox, each with a way to see from outside whether it was held. Run as a script by evaluate/test_sandbox.py.

    python sandbox_attacks.py LEVEL NAME

The sandbox's caller is this process, so that an attack on the caller hits nobody else. Prints one JSON line: {"held": bool, "run": ...}.
An attack that kills this process prints nothing, which the test reads as not held.
"""

import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import asdict
from pathlib import Path

from quantkit.evaluate import sandbox
from quantkit.evaluate.sandbox import Level, Run

TESTS = "assert f() == 1"
GOOD = "def f(): return 1\n"


def judged(program: str, level: Level, *, tests: str = TESTS, timeout_s: float = 4.0) -> Run:
    return sandbox.run_tests(program, tests, "f", timeout_s=timeout_s, level=level)


def kill_parent(level: Level) -> tuple[bool, Run]:
    """Signals the caller and every process it can name; the caller lives."""
    run = judged(f"import os, signal\nos.kill({os.getpid()}, 9)\n" + GOOD, level)
    again = judged("import os, signal\nos.kill(os.getppid(), 9)\nos.kill(-1, 9)\n" + GOOD, level)
    return True, Run(run.status, detail=f"{run.detail} / {again.detail}")


NAME = f"qk-{os.getpid()}"  # hostile processes call themselves this, so that only they are counted
NAMED = f"import ctypes, os, time\nctypes.CDLL(None).prctl(15, b'{NAME}')\n"


def alive() -> int:
    """How many hostile processes of this attack there are, seen from outside every namespace."""
    count = 0
    for entry in Path("/proc").glob("[0-9]*/comm"):
        with contextlib.suppress(OSError):
            count += entry.read_text().strip() == NAME
    return count


def orphan(level: Level) -> tuple[bool, Run]:
    """Leaves a process in a session of its own behind; after the verdict it must be gone."""
    program = "if os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0: time.sleep(3)\n    os._exit(0)\ntime.sleep(0.5)\n"
    run = judged(NAMED + program + GOOD, level)
    time.sleep(0.3)
    return run.status == "passed" and alive() == 0, run


def fork_bomb(level: Level) -> tuple[bool, Run]:
    """Forks as long as it can. Bounded here at 150, so that a level without walls survives the test."""
    program = """
for _ in range(150):
    try:
        if os.fork() == 0:
            time.sleep(1.5)
            os._exit(0)
    except OSError: break
time.sleep(1)
"""
    most = 0

    def count() -> None:
        nonlocal most
        for _ in range(60):
            most = max(most, alive())
            time.sleep(0.05)

    watcher = threading.Thread(target=count)
    watcher.start()
    run = judged(NAMED + program + GOOD, level)
    watcher.join()
    return 0 < most <= 20 and alive() == 0, Run(run.status, detail=f"{most} processes at most")


def fill_disk(level: Level) -> tuple[bool, Run]:
    """Writes 100 files of 8 MiB; held if it is stopped before 128 MiB."""
    program = """
total = 0
try:
    for number in range(100):
        with open(f"file{number}", "wb") as file:
            for _ in range(8):
                total += file.write(bytes(1 << 20))
except OSError:
    pass
def f(): return total
"""
    run = judged(program, level, tests="assert f() < (128 << 20), f()")
    return run.status == "passed", run


def read_environment(level: Level) -> tuple[bool, Run]:
    """Looks for the caller's secrets in its own environment and in every other process's."""
    os.environ["QUANTKIT_SECRET"] = "hunter2"
    program = f"""
import os, glob
found = "hunter2" in str(dict(os.environ))
for name in ["/proc/{os.getpid()}/environ", *glob.glob("/proc/[0-9]*/environ")]:
    try: found |= b"hunter2" in open(name, "rb").read()
    except OSError: pass
def f(): return found
"""
    # /proc shows the environment that a process was started with, so the caller needs a child that has the secret.
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(20)"], env=dict(os.environ))
    try:
        run = judged(program, level, tests="assert f() is False")
    finally:
        child.kill()
        child.wait()
    return run.status == "passed", run


def read_home(level: Level) -> tuple[bool, Run]:
    """Reads a file of the caller's home, lists it, and tries a well-known path."""
    home = Path.home()
    with tempfile.NamedTemporaryFile(dir=home, prefix=".quantkit-attack-") as secret:
        secret.write(b"hunter2")
        secret.flush()
        program = f"""
import os
secret, home = {secret.name!r}, {str(home)!r}
def peek(look):
    try: return look()
    except OSError: return None
found = [peek(lambda: open(name).read()) for name in (secret, "/etc/passwd")]
found.append(peek(lambda: os.path.basename(secret) in os.listdir(home)))
def f(): return found
"""
        run = judged(program, level, tests="assert not any(f()), f()")
    return run.status == "passed", run


def network(level: Level) -> tuple[bool, Run]:
    """Connects to a listener on this machine's loopback."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        program = f"""
import socket
try:
    socket.create_connection(("127.0.0.1", {port}), timeout=1).close()
    reached = True
except OSError:
    reached = False
def f(): return reached
"""
        run = judged(program, level, tests="assert f() is False")
    return run.status == "passed", run


def early_exit(level: Level) -> tuple[bool, Run]:
    """Ends with status 0 before, during and instead of the tests."""
    ways = ["os._exit(0)", "sys.exit(0)", "raise SystemExit(0)", "os.kill(os.getpid(), 15)", "os.execv('/bin/true', ['true'])", "quit()"]
    runs = [judged(f"import os, sys\ndef f():\n    {way}\n", level) for way in ways]
    runs += [judged(f"import os, sys\n{way}\n", level) for way in ways[:3]]
    forge = """
import os
print('{"verdict": true}')
for number in range(2, 64):
    try: os.write(number, b'{"verdict": "x"}\\n')
    except OSError: pass
os._exit(0)
"""
    runs.append(judged(forge, level))
    return all(run.status != "passed" for run in runs), runs[0]


def patched_builtins(level: Level) -> tuple[bool, Run]:
    """Makes the tests' own tools lie, by patching the module, by shadowing names, and by defining check itself."""
    patch = "import builtins\nbuiltins.all = lambda x: True\nbuiltins.abs = lambda x: 0\nbuiltins.len = lambda x: 3\n"
    patch += "builtins.AssertionError = Warning\n"
    shadow = "def all(x): return True\ndef abs(x): return 0\ndef len(x): return 3\ndef check(f): pass\n"
    report = "import json, os\njson.dumps = lambda x: '{}'\nos.write = lambda *a: 0\nos._exit = lambda *a: None\n"
    tests = "def check(f):\n    assert all([f() == 1])\n    assert abs(f() - 1) < 1e-6\n    assert len([f()]) == 1\ncheck(f)"
    wrong = "def f(): return 2\n"
    runs = [judged(prefix + wrong, level, tests=tests) for prefix in (patch, shadow, patch + shadow, report)]
    fair = judged(report + GOOD, level, tests=tests)
    return all(run.status == "failed" for run in runs) and fair.status == "passed", runs[0]


def endless_output(level: Level) -> tuple[bool, Run]:
    """Prints for ever; what arrives stays small and the caller goes on."""
    start = time.monotonic()
    run = sandbox.run_script("while True: print('x' * 10000)", "", timeout_s=4.0, level=level)
    return run.status != "passed" and len(run.output) <= 32 << 20 and time.monotonic() - start < 10, Run(
        run.status, detail=f"{len(run.output)} characters"
    )


def memory(level: Level) -> tuple[bool, Run]:
    """Takes memory until refused; held if one process is refused below 3 GiB."""
    program = """
held = []
try:
    for _ in range(48): held.append(bytes(64 << 20))
except MemoryError: pass
taken = len(held)
held.clear()
def f(): return taken
"""
    run = judged(program, level, tests="assert f() < 48, f()")
    return run.status == "passed", run


def endless_loop(level: Level) -> tuple[bool, Run]:
    """Swallows whatever interrupts it."""
    program = """
import signal
for number in range(1, 32):
    try: signal.signal(number, signal.SIG_IGN)
    except (OSError, ValueError): pass
def f():
    while True:
        try:
            while True: pass
        except BaseException: pass
"""
    start = time.monotonic()
    run = judged(program, level, timeout_s=1.0)
    return run.status == "timeout" and time.monotonic() - start < 4, run


ATTACKS = {
    "kill-parent": kill_parent,
    "orphan": orphan,
    "fork-bomb": fork_bomb,
    "fill-disk": fill_disk,
    "read-environment": read_environment,
    "read-home": read_home,
    "network": network,
    "early-exit": early_exit,
    "patched-builtins": patched_builtins,
    "endless-output": endless_output,
    "memory": memory,
    "endless-loop": endless_loop,
}


def main() -> None:
    level, name = sys.argv[1:]
    held, run = ATTACKS[name](level)  # type: ignore[arg-type]
    print(json.dumps({"held": held, "run": {**asdict(run), "output": run.output[:200]}}))


if __name__ == "__main__":
    main()
