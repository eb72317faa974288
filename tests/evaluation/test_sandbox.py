"""Hostile and odd but right programs, graded by `quantkit eval`: every reply of a server is one of
them."""

import itertools
import json
import os
import re
import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import sandbox_attacks as attacks
import sandbox_generated as generated
import sandbox_idioms as idioms
from replay_server import ReplayServer
from sample_sizes import sized
from sandbox_walls import RESOURCES, WALLS, wall
from typer.testing import CliRunner

from quantkit import QuantkitError
from quantkit.cli import app
from quantkit.evaluation import sandbox
from quantkit.evaluation.grading import programs
from quantkit.evaluation.sandbox import process
from quantkit.evaluation.sandbox import programs as sandbox_programs

isolated = pytest.mark.skipif(
    sandbox.active_level() == "rlimits", reason="this machine gives no namespaces"
)


def fenced(source):
    return f"Here:\n```python\n{source}\n```\n"


def cases(kind, attack, right, replies=()):
    """Replies by name; `replies` are whole, the others programs."""
    found = {f"attack: {kind}{name}": fenced(source) for name, source in attack.items()}
    found |= {f"right: {kind}{name}": fenced(source) for name, source in right.items()}
    return found | dict(replies)


def whole(kind, replies):
    return {f"{kind} {name}": reply for name, reply in replies.items()}


FUNCTIONS = cases(
    "",
    attacks.FUNCTIONS | generated.wrong_functions(sized(12, 75)),
    idioms.FUNCTIONS,
    whole("attack: reply", attacks.REPLIES) | whole("right: reply", idioms.REPLIES),
)
SCRIPTS = cases(
    "script ",
    attacks.SCRIPTS | generated.wrong_scripts(sized(12, 75)),
    idioms.SCRIPTS | generated.right_scripts(sized(12, 60)),
    whole("right: script reply", idioms.SCRIPT_REPLIES),
)
METHODS = cases("method ", attacks.METHODS, idioms.METHODS)
ENDLESS = {f"attack: {name}" for name in attacks.ENDLESS_FUNCTIONS}
ENDLESS |= {f"attack: script {name}" for name in attacks.ENDLESS_SCRIPTS}


def function_row(name):
    return {
        "task_id": name,
        "prompt": attacks.PROMPT.format(case=f"<{name}>"),
        "entry_point": "total",
        "test": attacks.TESTS,
    }


def contest_row(name):
    if name in SCRIPTS:
        tests, metadata = [("1 2 3\n", "6\n"), ("4 6\n", "10\n")], {}
    else:
        tests, metadata = [("[1, 2, 3]", "6"), ("[4, 6]", "10")], {"func_name": "total"}
    public, private = (json.dumps([{"input": given, "output": out}]) for given, out in tests)
    return {
        "question_id": name,
        "question_content": f"Sum. Case <{name}>.",
        "contest_date": "2024-10-01T00:00:00",
        "metadata": json.dumps(metadata),
        "public_test_cases": public,
        "private_test_cases": private,
    }


def write_rows(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


class Victim:
    """What the attacks reach for: a listener on loopback, a secret file in this user's home, a
    process with a secret in its environment."""

    def __init__(self):
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.reached = threading.Event()
        threading.Thread(target=self._accept, daemon=True).start()
        self.secret = Path.home() / f".quantkit-test-{os.getpid()}"
        self.secret.write_text("hunter2")
        os.environ["QUANTKIT_SECRET"] = "hunter2"
        self._child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        port = self._listener.getsockname()[1]
        self.names = (
            f"HOME, SECRET, PORT, CALLER = {str(Path.home())!r}, {str(self.secret)!r}, "
            f"{port}, {os.getpid()}\n"
        )

    def _accept(self):
        try:
            self._listener.accept()
            self.reached.set()
        except OSError:
            pass

    def close(self):
        del os.environ["QUANTKIT_SECRET"]
        self.secret.unlink()
        self._listener.close()
        self._child.kill()
        self._child.wait()


@pytest.fixture(scope="module")
def victim():
    victim = Victim()
    yield victim
    victim.close()


def evaluate(rows, victim, folder, *options):
    """Samples by problem, of one run of `quantkit eval` against a server that answers a problem by
    the reply of that name."""
    write_rows(
        folder / "humaneval" / "HumanEval.jsonl",
        [function_row(name) for name in rows if name in FUNCTIONS],
    )
    write_rows(
        folder / "live_code_bench" / "test.jsonl",
        [contest_row(name) for name in rows if name not in FUNCTIONS],
    )

    def reply(question, body):
        found = re.search(r"<(\w+: [^<>]+)>", question)
        assert found, question
        return "</think>\n" + rows[found[1]].replace(
            "```python\nimport os, sys, ctypes", f"```python\n{victim.names}import os, sys, ctypes"
        )

    tasks = ",".join(
        name
        for name, there in (
            ("humaneval", set(rows) & set(FUNCTIONS)),
            ("live_code_bench", set(rows) - set(FUNCTIONS)),
        )
        if there
    )
    with ReplayServer(reply) as server:
        command = f"eval {server.url} --tasks {tasks} --data-dir {folder} --out {folder / 'out'}"
        command += " --allow-code-exec --repeats 1 --json"
        done = CliRunner().invoke(app, [*command.split(), *options], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    lines = (folder / "out" / "samples.jsonl").read_text().strip("\n").split("\n")
    return {sample["problem"]: sample for sample in map(json.loads, lines)}


@isolated
def test_every_attack_fails_and_every_idiom_passes(tmp_path, victim, monkeypatch):
    """Forgeries, crashes of the grader, walls, resources: wrong, and in the score. Beside them
    right programs in unusual dress: right."""
    rows, samples = FUNCTIONS | SCRIPTS | METHODS, dict[str, dict[str, Any]]()
    for timeout_s, part in (
        (6.0, set(rows) - ENDLESS),
        (2.0, ENDLESS),
    ):  # what needs no time to come through, but to be ended
        monkeypatch.setattr(sandbox_programs, "TIMEOUT_S", timeout_s)
        monkeypatch.setattr(programs, "CONTEST_TIMEOUT_S", timeout_s)
        samples |= evaluate(
            {name: rows[name] for name in rows if name in part}, victim, tmp_path / f"{timeout_s}"
        )
    graded = {
        name: (sample["correct"], sample["reason"], sample["detail"])
        for name, sample in samples.items()
    }
    assert set(graded) == set(rows)
    wrong = {
        name: told
        for name, told in graded.items()
        if told[0] is not name.startswith("right") or told[1] in ("error", "sandbox-error")
    }
    assert wrong == {}
    assert not victim.reached.is_set()


@isolated
def test_what_is_held_at_the_end_counts(victim, monkeypatch):
    """A busy machine does not look while the program runs; its processes still hold the memory when
    it answers."""
    monkeypatch.setattr(sandbox_programs, "WATCH_S", 60.0)
    program = sandbox.Program(
        (attacks.PROMPT, victim.names + wall(RESOURCES["memory-of-many"])), "total"
    )
    run = sandbox.run_function(program, "", f"{attacks.TESTS}\ncheck(total)", timeout_s=60.0)
    assert (run.status, run.detail) == ("failed", "more than 2048 MiB of memory")


@pytest.fixture
def limits_alone(monkeypatch):
    monkeypatch.setattr(sandbox_programs, "active_level", lambda: "rlimits")


@isolated
@pytest.mark.usefixtures("limits_alone")
def test_the_walls_are_what_holds(victim):
    """The same programs with limits alone: those that must get through do, so that `fails` above
    means something."""
    for name in ("home", "secret", "processes", "kill-caller", "environment-of-others"):
        program = sandbox.Program((attacks.PROMPT, victim.names + wall(WALLS[name])), "total")
        run = sandbox.run_function(program, "", f"{attacks.TESTS}\ncheck(total)")
        assert run.status == "passed", (name, run)


def run(
    program,
    tests="assert f(2) == 4, 'not four'",
    timeout_s=6.0,
):
    return sandbox.run_function(sandbox.Program((program,), "f"), "", tests, timeout_s=timeout_s)


@pytest.mark.parametrize("level", [pytest.param("namespaces", marks=isolated), "rlimits"])
def test_verdicts(level, monkeypatch):
    monkeypatch.setattr(sandbox_programs, "active_level", lambda: level)
    assert run("def f(x): return x * 2").status == "passed"
    assert (found := run("def f(x): return x")).status == "failed"
    assert found.detail == "AssertionError: not four"
    for program, detail in (
        ("def f(x) return x", "SyntaxError"),
        ("def g(x): return x", "NameError"),
        ("import nothing_of_that_name", "ModuleNotFoundError"),
        ("def f(x):\n    import sys; sys.exit(0)", "SystemExit: 0"),
        ("def f(x): return input()", "EOFError"),
        (
            "def f(x): return print",
            "the function returned a value of type builtin_function_or_method",
        ),
    ):
        assert run(program).detail.startswith(detail)
    assert run("def f(x):\n    import os; os._exit(0)").status == "no-verdict"
    assert run("def f(x):\n    while True: pass", timeout_s=0.7).status == "timeout"


def test_tests_may_expect_an_exception_but_not_catch_a_fault():
    expecting = (
        "try: f(1)\nexcept ValueError as error: assert 'odd' in str(error)\nelse: assert False"
    )
    assert (
        run("class Odd(ValueError): pass\ndef f(x): raise Odd('odd')", expecting).status == "passed"
    )
    assert run("def f(x): raise KeyError('odd')", expecting).status == "failed"
    catching = "try: f(1)\nexcept BaseException: pass"
    for body in (
        "raise SystemExit",
        "import os; os._exit(0)",
        "return object()",
        "raise KeyboardInterrupt",
    ):
        assert run(f"def f(x): {body}", catching).status in ("failed", "no-verdict"), body
    assert run("def f(x): raise OSError", catching).status == "passed"


@isolated
def test_the_program_sees_an_empty_world():
    look = (
        "import os\nprint(os.getuid() == 0, os.environ['HOME'], *(sorted(os.listdir(place)) "
        "for place in ('.', '/', '/dev')))"
    )
    told = sandbox.run_script(look, "").output
    assert told.startswith("False /work ['main.py'] [")
    assert "['fd', 'null', 'random', 'shm', 'stderr', 'stdin', 'stdout', 'urandom']" in told
    assert "'home'" not in told
    listed = "import os\nprint([(place, names, files) for place, names, files in os.walk('/proc')])"
    assert sandbox.run_script(listed, "").output.startswith(
        "[('/proc', ['self'], []), ('/proc/self', ['fd'], []), ('/proc/self/fd', [], ["
    )


@pytest.mark.usefixtures("limits_alone")
def test_nothing_of_the_tests_is_in_the_candidates_process():
    """It looks through its own memory, descriptors, directory and arguments, where limits alone
    leave it /proc to do so."""
    look = """
import ctypes, os
OWN = "my own words"
def f(word):
    word = word[::-1].encode()
    found = {}
    for line in open('/proc/self/maps'):
        low, high = (int(x, 16) for x in line.split()[0].split('-'))
        if ' rw-p' in line: found[line] = ctypes.string_at(low, high - low)
    found['cmdline'] = open('/proc/self/cmdline', 'rb').read()
    found.update({name: open(name, 'rb').read() for name in os.listdir('.')})
    pipes = [n for n in range(3, 4096) if os.path.exists(f'/proc/self/fd/{n}')]
    del line
    seen = [name for name, data in found.items() if b'expected-' + word in data]
    return seen, any(b'my own' in data for data in found.values()), len(pipes)
"""
    told = run(
        look,
        "got = f('yranac')\nassert got == ([], True, 2), got\n# expected-canary",
    )
    assert told.status == "passed", told


def test_many_at_once_leave_nothing_behind(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    before = len(os.listdir("/proc/self/fd"))
    with ThreadPoolExecutor(4) as pool:
        found = list(
            pool.map(lambda n: run(f"def f(x): return {n % 2}", "assert f(1) == 1"), range(12))
        )
    assert [one.status for one in found] == ["failed", "passed"] * 6
    assert list(tmp_path.iterdir()) == []
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.usefixtures("limits_alone")
def test_a_sandbox_that_cannot_start_is_not_the_programs_fault(monkeypatch):
    monkeypatch.setattr(process, "_interpreter", lambda: "/nowhere/python")
    found = run("def f(x): return 4")
    assert found.status == "sandbox-error"
    assert "/nowhere/python" in found.detail


def test_the_level_is_found_by_trying_again(monkeypatch):
    """Walls that fail three times out of four are still walls; walls that always fail are told with
    their reason."""
    tries = itertools.count(1)
    real = sandbox_programs._run_judged

    def busy(*arguments):
        if next(tries) < 4:
            raise process.SandboxError("unshare: Resource temporarily unavailable")
        return real(*arguments)

    monkeypatch.setattr(sandbox_programs, "_PROBE_PAUSE_S", 0.01)
    monkeypatch.setattr(sandbox_programs, "_run_judged", busy)
    assert sandbox_programs.find_level.__wrapped__().level == sandbox.active_level()
    tries = itertools.count(-1000)
    found = sandbox_programs.find_level.__wrapped__()
    assert (found.level, found.reason) == ("rlimits", "unshare: Resource temporarily unavailable")
    assert "this user's rights" in str(found)


def test_limits_alone_are_refused_unless_asked_for(victim, tmp_path, monkeypatch):
    weak = sandbox.IsolationLevel("rlimits", "unshare: Operation not permitted")
    monkeypatch.setattr(sandbox, "find_level", lambda: weak)
    monkeypatch.setattr(sandbox_programs, "find_level", lambda: weak)
    write_rows(tmp_path / "humaneval" / "HumanEval.jsonl", [function_row("right: builtin")])
    with ReplayServer(lambda question, body: "</think>\n" + FUNCTIONS["right: builtin"]) as server:
        command = f"eval {server.url} --tasks humaneval --data-dir {tmp_path}".split()
        command += ["--allow-code-exec", "--repeats", "1", "--json"]
        refused = CliRunner().invoke(app, command)
        assert server.requests == []
        allowed = CliRunner().invoke(app, [*command, "--allow-weak-sandbox"])
    assert isinstance(refused.exception, QuantkitError)
    assert "unshare: Operation not permitted" in str(refused.exception)
    assert "--allow-weak-sandbox" in str(refused.exception)
    assert (allowed.exit_code, json.loads(allowed.stdout)["results"]["humaneval"]["accuracy"]) == (
        0,
        1.0,
    )
    assert "level rlimits, with this user's rights" in allowed.stderr
