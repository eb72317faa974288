import json
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import get_args

import pytest
import sandbox_attacks

from quantkit.evaluate import sandbox
from quantkit.evaluate.sandbox import HOLDS, Level, Run

LEVELS = [level for level in get_args(Level) if level == "rlimits" or sandbox.active_level() == "namespaces"]


def attack(level: str, name: str) -> bool:
    """Whether the level held the attack. A caller that was killed says nothing."""
    done = subprocess.run(
        [sys.executable, sandbox_attacks.__file__, level, name], stdout=subprocess.PIPE, text=True, timeout=60, start_new_session=True
    )
    return bool(done.stdout) and json.loads(done.stdout)["held"]


@pytest.mark.parametrize(("level", "name"), [(level, name) for level in LEVELS for name in sorted(HOLDS[level])])
def test_attacks_are_held_as_claimed(level: Level, name: str) -> None:
    assert attack(level, name), f"{level} claims to hold {name} and did not"


def test_every_attack_is_held_where_namespaces_work() -> None:
    assert HOLDS["namespaces"] == set(sandbox_attacks.ATTACKS)
    assert HOLDS["rlimits"] < HOLDS["namespaces"]


@pytest.mark.parametrize("name", ["network", "read-environment", "kill-parent", "orphan"])
def test_what_rlimits_do_not_claim_they_do_not_hold(name: str) -> None:
    """The suite can tell the difference: without it, `held` above could mean nothing."""
    assert name not in HOLDS["rlimits"]
    assert not attack("rlimits", name)


@pytest.mark.parametrize("level", LEVELS)
def test_verdicts(level: Level) -> None:
    def run(program: str, timeout_s: float = 5.0) -> Run:
        return sandbox.run_tests(
            program, "def check(c):\n    assert c(2) == 4, 'not four'\ncheck(f)", "f", timeout_s=timeout_s, level=level
        )

    assert run("def f(x): return x * 2").status == "passed"
    failed = run("def f(x): return x")
    assert (failed.status, failed.detail) == ("failed", "AssertionError: not four")
    assert run("def f(x) return x").detail.startswith("SyntaxError")
    assert run("def g(x): return x").detail.startswith("NameError")
    assert run("import nothing_of_that_name").detail.startswith("ModuleNotFoundError")
    assert run("def f(x):\n    import sys; sys.exit(0)").detail == "SystemExit: 0"
    assert run("def f(x):\n    import os; os._exit(0)").status == "no-verdict"
    assert run("def f(x):\n    while True: pass", timeout_s=0.7).status == "timeout"
    assert run("def f(x): return input()").status == "failed"
    assert run("def f(x): return x * 2\nif __name__ == '__main__': raise ValueError").status == "passed"


@pytest.mark.parametrize("level", LEVELS)
def test_scripts_and_calls(level: Level) -> None:
    echo = sandbox.run_script("import sys\nfor line in sys.stdin: print(line.strip()[::-1])\nsys.exit(3)", "abc\nde\n", level=level)
    assert (echo.status, echo.output) == ("passed", "cba\ned\n")
    assert sandbox.run_script("print(input())\nraise ValueError('late')", "x", level=level).status == "failed"
    numpy = sandbox.run_script("import numpy\nprint(int(numpy.arange(5).sum()))", "", level=level)
    assert (numpy.status, numpy.output) == ("passed", "10\n"), numpy
    called = sandbox.run_call("class Solution:\n    def pair(self, a, b): return (a + b, None)", "pair", [[1], [2]], level=level)
    assert (called.status, called.result) == ("passed", [[1, 2], None])
    assert sandbox.run_call("def f(): return object()", "f", [], level=level).status == "failed"


def test_namespaces_show_the_program_an_empty_world() -> None:
    if "namespaces" not in LEVELS:
        pytest.skip("this kernel gives no user namespaces")
    look = "import os\nprint(os.getuid() == 0, os.listdir('.'), os.environ['HOME'], sorted(os.listdir('/')))"
    run = sandbox.run_script(look, "", level="namespaces")
    assert run.status == "passed", run
    assert "['stdin'] /work" in run.output
    assert "'home'" not in run.output
    write = (
        "for name in ('/usr/x', '/lib/x', '/packages/numpy/x'):\n    try: open(name, 'w'); print('wrote', name)\n    except OSError: pass"
    )
    assert sandbox.run_script(write, "", level="namespaces").output == ""


def test_many_at_once_leave_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with ThreadPoolExecutor(4) as pool:
        runs = list(pool.map(lambda n: sandbox.run_tests(f"def f(): return {n % 2}", "assert f() == 1", "f"), range(16)))
    assert [run.status for run in runs] == ["failed", "passed"] * 8
    assert list(tmp_path.iterdir()) == []


def test_a_sandbox_that_cannot_start_is_not_the_programs_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "_interpreter", lambda: "/nowhere/python")
    start = time.monotonic()
    run = sandbox.run_tests("def f(): return 1", "assert f() == 1", "f")
    assert run.status == "sandbox-error"
    assert time.monotonic() - start < 5
