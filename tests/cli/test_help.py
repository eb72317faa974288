"""What a newcomer asks the command line: examples that are commands, names that a shell
completes."""

import ast
import re
import shlex
from pathlib import Path

import pytest
import typer.main
from commands import command, typed

import quantkit
from quantkit.cli import COMMANDS, app
from quantkit.cli.examples import EXAMPLES
from quantkit.grids.schemes import SCHEMES

GROUP = typer.main.get_command(app)


@pytest.mark.parametrize("line", [line for lines in EXAMPLES.values() for line in lines])
def test_examples_are_commands(line):
    program, name, *arguments = shlex.split(line)
    assert program == "quantkit"
    assert line in EXAMPLES[name]
    GROUP.commands[name].make_context(name, arguments)
    assert len(line) < 79, "it would be folded"


@pytest.mark.parametrize("name", [name for name, _ in COMMANDS])
def test_help_ends_with_them(name, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    silent = [one.opts[0] for one in GROUP.commands[name].params if not getattr(one, "help", None)]
    assert not silent
    said = typed(f"{name} --help")
    assert said.code == 0
    assert all(line in said.out for line in EXAMPLES[name]), said.out


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("quantkit pla", {"plan"} | {name for name, _ in COMMANDS if name.startswith("pla")}),
        ("quantkit plan tiny-r1 --scheme ", set(SCHEMES)),
        ("quantkit deploy out --engine vllm", {"vllm", "vllm-ascend"}),
        ("quantkit convert a b --format m", {"modelopt", "modelslim"}),
    ],
)
def test_a_shell_completes_names(typed, offered, monkeypatch):
    monkeypatch.setenv("COMP_WORDS", typed)
    monkeypatch.setenv("COMP_CWORD", str(len(typed.split(" ")) - 1))
    monkeypatch.setenv("_QUANTKIT_COMPLETE", "complete_bash")
    assert set(command().out.split()) == offered


def remedies():
    """What errors of the package say to do, by file; `X` is what is filled in."""
    package = Path(quantkit.__file__).parent
    for path in package.rglob("*.py"):
        for call in ast.walk(ast.parse(path.read_text())):
            if isinstance(call, ast.Call) and getattr(call.func, "id", "").endswith("Error"):
                parts = [node for one in call.args[1:] for node in ast.walk(one)]
                words = [
                    "X" if isinstance(part, ast.FormattedValue) else part.value
                    for part in parts
                    if isinstance(part, ast.FormattedValue)
                    or (isinstance(part, ast.Constant) and isinstance(part.value, str))
                ]
                yield str(path.relative_to(package)), "".join(words)


def test_what_remedies_name_is_on_the_command_line():
    flags = {"--debug", "--follow-links"}  # of every command
    flags |= {o for one in GROUP.commands.values() for row in one.params for o in row.opts}
    lines = list(remedies())
    assert len(lines) > 500
    for path, text in lines:
        assert not set(re.findall(r"(?<![\w-])--[a-z][\w-]*", text)) - flags, (path, text)
    told = [
        (name, path, line)
        for path, text in lines
        for line, name in re.findall(
            r"(quantkit (\w+) [A-Z]+(?: [A-Z]+| --[\w-]+(?: \w+)?)*)", text
        )
    ]
    assert {name for name, *_ in told} >= {"check", "convert"}
    for name, path, line in told:
        if name not in GROUP.commands:  # "quantkit reads X"
            assert "--" not in line, (path, line)
            continue
        GROUP.commands[name].make_context(name, shlex.split(line)[2:])


def test_an_answers_length_has_the_name_of_eval_too():
    context = GROUP.commands["run"].make_context("run", ["tiny-r1", "--max-tokens", "7"])
    assert context.params["max_new_tokens"] == 7


IGNORED = """
eval tiny-r1 --tasks tiny-math --accuracy 0.9 -> Invalid value for --accuracy: it is only for --plan
ppl tiny-r1 --text a.txt --data-dir . -> Invalid value for --data-dir: it is only for --sampled; see quantkit ppl --help
ppl tiny-r1 --text a.txt --max-tokens 9 -> Invalid value for --max-tokens: it is only for --sampled; see quantkit ppl --help
check tiny-r1 --text a.txt --depth headers -> Invalid value for --text: it is computed with --depth behaviour alone
quantize tiny-r1 out/awq -> Got unexpected extra argument(s) (out/awq); give the output with --out, or see quantkit quantize
nope -> No such command 'nope'; see quantkit --help
"""


@pytest.mark.parametrize("case", IGNORED.strip().splitlines())
def test_what_would_be_ignored_is_refused(case):
    line, said = case.split(" -> ")
    answer = typed(line)
    assert (answer.code, answer.out) == (2, "")
    assert answer.error.startswith(f"error: {said}")


def test_sampling_is_checked_before_a_model_is_loaded(monkeypatch):
    monkeypatch.setattr(
        "quantkit.executor.engine.Engine.open", lambda *_: pytest.fail("a model is loaded")
    )
    answer = typed("run tiny-r1 --prompt 1 --top-p 0")
    assert (answer.code, answer.err) == (
        1,
        "error: top_p is 0.0; use a number above 0 and at most 1\n",
    )


@pytest.mark.parametrize(
    ("line", "name", "value"),
    [
        ("run tiny-r1 --drafts 3", "--drafts", 3),
        ("deploy out --engine vllm --mtp 2", "--mtp", 2),
    ],
)
def test_an_old_flag_works_and_names_the_new_one(line, name, value, capsys):
    command, *words = line.split()
    context = GROUP.commands[command].make_context(command, words)
    assert context.params["draft_length"] == value
    assert f"{name} is now --draft-length" in capsys.readouterr().err
    assert name not in typed(f"{command} --help").out
