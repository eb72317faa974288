"""A thousand and more damaged checkpoints through the command line: each works, or is refused by one line
that names the damaged file.

In one process, as starting Python and torch takes longer than all commands together; a few go
through a process of their own. Nothing may be written where a command fails, and never anything in
the source.
"""

import os
import random
import shutil
import signal
import subprocess
import sys
from dataclasses import dataclass
from typing import Any

import damage
import make_model
import pytest
import random_damage
import typer
from commands import command
from sample_sizes import sized

from quantkit import cli

COMMANDS = typer.main.get_command(cli.app)
CPU_S = 30.0
"""Of the processor, for a command: ten times what one takes, for the machine may be busy."""
BLOCKED_S = 120.0
"""By the clock: it waits for something that never comes."""
SIZES = make_model.NARROW | {
    "num_hidden_layers": 2,
    "vocab_size": 272,
    "max_position_embeddings": 8192,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Two layers and an MTP layer with four experts each, in FP8."""
    return make_model.random_fp8(tmp_path_factory.mktemp("good") / "model", shards=2, **SIZES)


@pytest.fixture(scope="module")
def text(model):
    path = model.parent / "calibration.txt"
    path.write_text("the quick brown fox jumps over the lazy dog. " * 40)
    return path


@pytest.fixture(autouse=True)
def _made_once(monkeypatch):
    """typer makes the commands anew at each call, which takes longer than most of them."""
    monkeypatch.setattr(cli, "app", COMMANDS)


@pytest.fixture(autouse=True)
def _stopped():
    """What never ends becomes a failure."""

    def stop(number, frame):
        raise TimeoutError("the command takes too long")

    kept = {kind: signal.signal(kind, stop) for kind in (signal.SIGPROF, signal.SIGALRM)}
    yield
    for kind, handler in kept.items():
        signal.signal(kind, handler)


@dataclass(frozen=True)
class Outcome:
    code: Any
    errors: str

    def fault(self, file):
        """What is wrong with how a command ended, if anything."""
        # The progress of a run, which stands above what ended it.
        lines = [
            line
            for line in self.errors.splitlines()
            if line.strip() and not line.startswith("checking ")
        ]
        if self.code == 0:
            return None
        if self.code != 1 or "Traceback" in self.errors:
            return f"ended with {self.code}"
        if len(lines) != 1 or not lines[0].startswith("error: "):
            return "not one line"
        if "run again with --debug" in lines[0]:
            return "an internal error"
        return None if file in lines[0] else f"{file} is not named"


def run(*arguments):
    signal.setitimer(signal.ITIMER_PROF, CPU_S)
    signal.setitimer(signal.ITIMER_REAL, BLOCKED_S)
    try:
        answer = command(*map(str, arguments))
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
    return Outcome(answer.code, answer.err)


def commands(folder, out, text):
    calibrated = ["--calibration", text, "--samples", "2", "--seq-len", "16"]
    return {
        "inspect": ["inspect", folder],
        "plan": ["plan", folder, "--scheme", "awq-w4a16"],
        "round": ["quantize", folder, "--scheme", "rtn-w4a16", "--out", out],
        "calibrate": ["quantize", folder, "--scheme", "awq-w4a16", "--out", out, *calibrated],
        "run": ["run", folder, "--prompt", "hi", "--max-new-tokens", "2"],
    }


def contents(folder):
    return sorted(
        (path.name, path.lstat().st_mtime_ns, path.lstat().st_size) for path in folder.iterdir()
    )


def faults(damages, model, text, tmp_path):
    """All damages through all commands; one that works is not quantized each time, as that is no
    test of files."""
    found = []
    for number, one in enumerate(damages):
        folder, out = damage.copied(model, tmp_path / "model"), tmp_path / "out" / "model"
        out.parent.mkdir()
        one.apply(folder)
        before, planned = contents(folder), True
        for verb, arguments in commands(folder, out, text).items():
            if planned and (
                (verb == "round" and number % 10) or (verb == "calibrate" and number % 50)
            ):
                continue
            outcome = run(*arguments)
            fault = outcome.fault(one.file)
            if outcome.code and any(out.parent.iterdir()):
                fault = f"{fault or ''} left {[path.name for path in out.parent.iterdir()]}"
            if contents(folder) != before:
                fault = "changed the source"
            if fault:
                found.append(f"{verb}, {one.name}: {fault}: {outcome.errors.strip()[-400:]}")
            if verb == "plan":
                planned = outcome.code == 0
            shutil.rmtree(out, ignore_errors=True)
        shutil.rmtree(folder)
        shutil.rmtree(out.parent)
    return found


@pytest.fixture(scope="module")
def rules(model):
    """Damages by rule, in an order that has all kinds in proportion."""
    every = damage.by_rule(model)
    random.Random(5).shuffle(every)
    return every


@pytest.mark.parametrize(
    "name",
    [
        "config.json: pipe",
        "config.json: nested deep",
        "tokenizer.json: 5 tenths",
        "config.json: link up and back",
    ],
)
def test_a_few_in_a_process_of_their_own(name, rules, model, tmp_path):
    one = next(one for one in rules if name in one.name)
    folder = damage.copied(model, tmp_path / "model")
    one.apply(folder)
    command = [sys.executable, "-m", "quantkit", "run", str(folder), "--prompt", "hi"]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=BLOCKED_S,
        env={**os.environ, "COLUMNS": "200"},
    )
    assert done.returncode == 1
    assert Outcome(done.returncode, done.stderr).fault(one.file) is None, done.stderr


@pytest.mark.parametrize("part", range(4))
def test_damage_by_rule_is_told(part, rules, model, text, tmp_path):
    found = faults(rules[: sized(280, 1000)][part::4], model, text, tmp_path)
    assert not found, "\n".join(found)


@pytest.mark.parametrize("seed", range(11, 11 + sized(1, 4)))
def test_damage_at_random_is_told(seed, model, text, tmp_path):
    found = faults(list(random_damage.at_random(model, seed, 150)), model, text, tmp_path)
    assert not found, "\n".join(found)
