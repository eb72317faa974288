"""What commands say: values as they are, errors as one line or one object, and what is kept when
they are stopped."""

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys

import make_model
import numpy as np
import pytest
from commands import command, typed
from edited import edited
from replay_server import ReplayServer, Reply

from quantkit import cli
from quantkit.checkpoint.journal import Lock
from quantkit.checkpoint.output_dir import partial_path
from quantkit.checkpoint.reader import Checkpoint
from quantkit.checkpoint.writer import CheckpointWriter
from quantkit.evaluation.results.folder import ReplyJournal
from quantkit.quantization import conversion_plan as convert_module

MARKUP = "m[bold][/INST][x] [/]"
HOSTILE = f"{MARKUP}\x1b[31m\x07\u202e\x9b2J"
SEEN = MARKUP + r"\x1b[31m\x07\u202e\x9b2J"
ONE_LAYER = {"num_hidden_layers": 1, "num_nextn_predict_layers": 0}
UNSEEN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e]")


@pytest.fixture(scope="module")
def hostile(tmp_path_factory):
    """A model whose folder's name is markup and control characters."""
    folder = tmp_path_factory.mktemp("models") / HOSTILE.replace("/", "_")
    return make_model.random_dense(folder, **ONE_LAYER)


@pytest.fixture
def here(tmp_path, monkeypatch):
    (tmp_path / "text.txt").write_text("a b c d e f g h\n\n" * 40)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def as_seen(name):
    return "".join(one if one.isprintable() else ascii(one)[1:-1] for one in name)


LINES = """
inspect MODEL --engine vllm
plan MODEL --scheme rtn-w4a16
quantize MODEL --scheme rtn-w4a16 --out o[v1][/b]
convert MODEL c[v1][/b] --dtype fp32
run MODEL --prompt "[/INST] \x1b[31m" --max-new-tokens 3
ppl MODEL --text text.txt --limit 2
eval MODEL --tasks tiny-math --limit 1 --max-tokens 2 --out e[v1][/b]
bench MODEL --input-len 4 --concurrency 1 --output-len 2 --warmup 0 --requests 1
deploy MODEL --engine vllm --hosts a --nic a[b] --devices 2
kernels --device cpu
"""
COMMANDS = {line.split()[0]: shlex.split(line) for line in LINES.strip().split("\n")}


@pytest.mark.parametrize("name", COMMANDS)
def test_values_are_printed_as_they_are(hostile, here, name):
    said = command(*(str(hostile) if part == "MODEL" else part for part in COMMANDS[name]))
    assert said.code == 0, said
    assert not UNSEEN.search(said.out + said.err)
    shown = {
        "quantize": "o[v1][/b]",
        "convert": "c[v1][/b]",
        "eval": "e[v1][/b]",
        "run": "",
        "kernels": "",
        "deploy": "",
    }
    assert shown.get(name, as_seen(hostile.name)) in (said.out + said.err).replace("\n", "")


@pytest.mark.parametrize("name", [*COMMANDS, "serve"])
def test_errors_name_things_as_they_are(here, name):
    """One line; with --json one object, too, and the same exit code."""
    line = COMMANDS.get(name, ["serve", "MODEL"])
    arguments = [HOSTILE if part in ("MODEL", "cpu") else part for part in line]
    said = command(*arguments)
    code = 2 if name == "kernels" else 1  # a name that --device does not know is wrong usage
    assert (said.code, said.errors, said.out) == (code, 1, ""), said
    assert SEEN in said.error
    if name != "serve":
        said = command(*arguments, "--json")
        assert said.code == code
        assert set(said.json["error"]) == {"message", "remedy"}
        assert SEEN in said.json["error"]["message"]
        assert said.json["error"]["remedy"]


@pytest.mark.parametrize(
    "arguments",
    [
        ["inspect"],
        ["inspect", "tiny-r1", f"--{MARKUP}"],
        ["bench", "tiny-r1", "--input-len", HOSTILE],
        [HOSTILE],
    ],
)
def test_bad_usage(arguments):
    said = command(*arguments)
    assert (said.code, said.errors, said.out) == (2, 1, "")
    assert "--help" in said.error
    assert not UNSEEN.search(said.err)
    assert command(*arguments, "--json").json["error"]["message"]


@pytest.mark.parametrize("status", [200, 400])
@pytest.mark.parametrize("task", ["eval", "bench"])
def test_a_servers_texts(here, task, status):
    """Its name, its answers and its errors."""
    answer = Reply(HOSTILE, status=status)
    with ReplayServer(lambda question, body: answer, models=(HOSTILE,)) as server:
        said = command(task, server.url, *COMMANDS[task][2:])
    assert not UNSEEN.search(said.out + said.err)
    if status == 200:
        assert said.code == 0, said
        assert MARKUP in said.out or task == "bench"


@pytest.mark.parametrize("debug", [(), ("--debug",)])
def test_what_libraries_warn_of_is_for_debug(debug, monkeypatch):
    """NumPy's line on an overflow would precede the one that names the damaged file."""

    def overflow(*_):
        return int(np.isfinite(np.full(1, 1e38, np.float32) * 100).all())

    monkeypatch.setattr(cli, "_run", overflow)
    assert ("overflow" in command(*debug).err) == bool(debug)


def test_tables_are_whole_where_nobody_looks(source):
    """A long name is folded, not cut, and who closes a pipe early gets no traceback."""
    name = source.rename(source.with_name(("long " * 40).strip()))
    quantkit = [sys.executable, "-m", "quantkit"]
    environment = {key: value for key, value in os.environ.items() if key != "COLUMNS"}
    convert = [*quantkit, "convert", str(name), str(name.with_suffix(".new")), "--dtype", "fp32"]
    done = subprocess.run(convert, env=environment, capture_output=True, text=True, check=True)
    letters = re.sub(r"[^a-z]", "", done.stdout)  # a fold may split a word
    assert letters.count("long") == str(name).count("long")
    inspect, pipe = [*quantkit, "inspect", str(name)], subprocess.PIPE
    with subprocess.Popen(inspect, stdout=pipe, stderr=pipe, text=True) as process:
        process.stdout.close()
        assert process.stderr.read() == ""


# --- being stopped
# -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def source(tmp_path):
    return make_model.random_dense(tmp_path / "model", **ONE_LAYER)


JOBS = {
    "quantize": shlex.split("quantize model --scheme rtn-w4a16 --out 'an out'"),
    "convert": shlex.split("convert model 'an out' --dtype fp32"),
}


@pytest.fixture(autouse=True)
def as_in_a_terminal():
    """A shell starts what it runs in the background with SIGINT ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def small_units(monkeypatch):
    monkeypatch.setattr(convert_module, "UNIT_BYTES", 200_000)


def stop_after(monkeypatch, owner, method, calls, number):
    """Send this process a signal when `method` was called so many times."""
    original, seen = getattr(owner, method), 0

    def counted(self, *rest):
        nonlocal seen
        result = original(self, *rest)
        seen += 1
        if seen == calls:
            os.kill(os.getpid(), number)
        return result

    monkeypatch.setattr(owner, method, counted)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("name", JOBS)
def test_a_stopped_run_says_how_to_go_on(source, here, small_units, name, number):
    with pytest.MonkeyPatch.context() as patch:
        stop_after(patch, CheckpointWriter, "write", 3, number)
        said = command(*JOBS[name])
    assert said.code == 128 + number
    again = "quantkit " + " ".join(f"'{part}'" if " " in part else part for part in JOBS[name])
    found = re.search(
        r"(interrupted|terminated): 3 of (\d+) units are done, kept in .*/an out\.partial; to "
        r"resume: (.*)",
        said.err,
    )
    assert found, said.err
    assert found[3] == again
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    said = command(*JOBS[name])
    assert said.code == 0
    assert f"resuming an out: 3 of {found[2]} units are done" in said.err
    said = command(*JOBS[name], "--json")
    assert said.code == 0
    assert said.json["done_already"] is True
    assert "done already: an out" in said.err


def test_a_stopped_evaluation_says_how_to_go_on(here, monkeypatch):
    def ask(url, *more):
        asked = "--tasks tiny-math --limit 8 --concurrency 1 --api-key secret"
        return command("eval", url, *asked.split(), *more)

    with ReplayServer(lambda question, body: "no") as server:
        with monkeypatch.context() as patch:
            stop_after(patch, ReplyJournal, "add", 3, signal.SIGINT)
            said = ask(server.url, "--out", "e")
        assert said.code == 130
        kept = re.search(
            r"([23]) of 8 replies of replayed to tiny-math are complete, stored in e; to resume: "
            r"quantkit eval http",
            said.err,
        )
        assert kept, said.err
        assert "secret" not in said.err
        before = len(server.requests)
        assert ask(server.url, "--out", "e").code == 0
        assert (
            len(server.requests) - before <= 8 - int(kept[1]) + 1
        )  # one asks whether it is still the same model


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize(
    "line", ["serve tiny-r1 --port 18437", "run tiny-r1 --prompt 1", "ppl tiny-r1 --text FILE"]
)
def test_stopped_while_a_model_loads(line, number, monkeypatch):
    stop_after(monkeypatch, Checkpoint, "open", 1, number)
    said = command(*line.replace("FILE", __file__).split())
    assert said.code == 128 + number
    told = {signal.SIGINT: "interrupted", signal.SIGTERM: "terminated"}
    assert said.err.splitlines()[-1] == told[number]
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


# --- two at one output
# -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", JOBS)
def test_the_second_process_stops_at_once(source, here, name):
    """With the same settings, with others and with --overwrite."""
    out, others = here / "an out", ["--format", "compressed-tensors"]
    with CheckpointWriter(out, [], fingerprint={}, overwrite=False):
        for more in ([], ["--overwrite"], others if name == "quantize" else []):
            said = command(*JOBS[name], *more)
            assert (said.code, said.errors) == (1, 1)
            told = rf"process {os.getpid()} on \S+ is writing .*an out; wait for it, or stop it"
            assert re.search(told, said.error)
    shutil.rmtree(partial_path(out))
    assert command(*JOBS[name]).code == 0


def test_the_second_evaluation_stops_at_once(here):
    (here / "e").mkdir()
    with (
        Lock(here / "e" / ".lock", here / "e"),
        ReplayServer(lambda question, body: "no") as server,
    ):
        said = command("eval", server.url, "--tasks", "tiny-math", "--limit", "1", "--out", "e")
        assert not server.requests
    assert (said.code, said.errors) == (1, 1)
    assert f"process {os.getpid()} on " in said.error
    assert not list((here / "e").iterdir())


# --- advice
# ------------------------------------------------------------------------------------------------------------------


def test_advice_works_for_the_command_that_gives_it(source, here):
    """An unknown architecture can be rounded to nearest, and that can be planned, and nothing
    else."""
    with edited(source / "config.json") as config:
        config["model_type"] = "mamba"
    asked = "model --scheme awq-w4a16"
    refused = typed(f"quantize {asked} --out o --calibration text.txt").error
    assert "use --scheme rtn-w4a16" in refused == typed(f"plan {asked}").error
    assert typed("plan model --scheme rtn-w4a16").code == 0
    for line in ("run model --prompt a", "ppl model --text text.txt", "serve model"):
        said = typed(line)
        assert (said.code, said.errors) == (1, 1)
        assert "rtn" not in said.error


def test_a_table_that_is_not_a_terminals_has_100_columns():
    words = " ".join(["word"] * 60)
    code = f"from quantkit.cli.console import facts; facts('title', [('name', '{words}')])"
    environment = {key: value for key, value in os.environ.items() if key != "COLUMNS"}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment
    )
    assert done.stdout.count("word") == 60, done.stderr
    assert max(map(len, done.stdout.splitlines())) == 100


def _shell(line, folder):
    python = f"{sys.executable} -m quantkit"
    return subprocess.run(
        ["bash", "-c", line.replace("quantkit", python, 1)],
        capture_output=True,
        text=True,
        cwd=folder,
    )


@pytest.mark.parametrize(
    ("line", "code", "said"),
    [
        ("quantkit --version >&-", 0, ""),
        ("quantkit --version <&- >&- 2>&-", 0, ""),
        ("quantkit --version > /dev/full", 1, "error: the output: No space left on device"),
        (
            "quantkit compare nowhere nothing --json > /dev/full",
            1,
            "error: nowhere holds no results",
        ),
        (
            "mkdir gone; cd gone; rmdir ../gone; quantkit plan tiny-r1 --scheme rtn-w4a16",
            1,
            "error: the working folder was removed",
        ),
        ("quantkit serve tiny-r1 --port 99999", 2, "error: Invalid value for '--port'"),
    ],
)
def test_streams_and_folders_that_are_not_there(line, code, said, tmp_path):
    ended = _shell(line, tmp_path)
    assert ended.returncode == code, ended.stderr
    assert "Traceback" not in ended.stderr
    assert ended.stderr.startswith(said)
    assert len(ended.stderr.splitlines()) <= 1
