"""The pages: tables and pictures agree with the stored results, links lead somewhere, quoted
commands are those of the command line."""

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import typer.main

from quantkit.cli import app

ROOT = Path(__file__).parent.parent
PAGES = sorted(
    page
    for page in (
        *ROOT.glob("*.md"),
        *ROOT.glob("docs/**/*.md"),
        *ROOT.glob("kernels/**/*.md"),
        *ROOT.glob("tools/**/*.md"),
    )
    if not page.is_relative_to(ROOT / "docs/lab")
)
LAB = sorted(ROOT.glob("docs/lab/*.md"))
COMMANDS = typer.main.get_command(app)


def named(page):
    return str(page.relative_to(ROOT))


def tables(root, *arguments):
    return subprocess.run(
        [sys.executable, "benchmarks/tables.py", *arguments],
        cwd=root,
        capture_output=True,
        text=True,
    )


def test_tables_and_pictures_agree_with_the_results():
    done = tables(ROOT, "--check")
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture
def copy(tmp_path):
    """The files that the tables are made from and written to; without the loader matrix, which
    needs the package."""
    for path in (
        *ROOT.glob("benchmarks/*.py"),
        *ROOT.glob("benchmarks/results/*.json"),
        *ROOT.glob("docs/bench*.md"),
        *ROOT.glob("docs/pictures/*.svg"),
        ROOT / "docs/lab/ascend.md",
        ROOT / "docs/lab/quality.md",
        ROOT / "docs/quantize.md",
        ROOT / "README.md",
    ):
        target = tmp_path / path.relative_to(ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(path.read_bytes())
    return tmp_path


def test_a_changed_figure_is_found_and_written(copy):
    result = copy / "benchmarks/results/r1-box.json"
    (_, length, tpot, rate, *_), *_ = json.loads(result.read_text())["rows"]
    result.write_text(result.read_text().replace(str(tpot), "6.25"))
    told = tables(copy, "--check").stderr
    assert "docs/benchmarks.md does not agree" in told
    assert "docs/pictures/decode-dark.svg does not agree" in told
    assert "6.25" not in (copy / "docs/benchmarks.md").read_text()
    assert tables(copy).returncode == 0
    assert f"| 1 | {length} | 6.25 | {rate} |" in (copy / "docs/benchmarks.md").read_text()
    assert "6.25 ms" in (copy / "docs/pictures/decode-dark.svg").read_text()
    assert tables(copy, "--check").returncode == 0


RESULT, PAGE = "benchmarks/results/r1-box.json", "docs/benchmarks.md"


@pytest.mark.parametrize(
    ("file", "old", "new", "told"),
    [
        (RESULT, '"commit"', '"comit"', "keys are"),
        (RESULT, "[1, 512, ", "[1, ", "does not fit the columns"),
        (PAGE, "", "<!-- table unheard-of -->\n", ""),
        (PAGE, "", "<!-- table r1-box; columns: TPOD -->\n", ""),
        (PAGE, "", "<!-- table r1-box; down: TPOT -->\n", ""),
    ],
)
def test_what_cannot_be_shown_is_told_in_a_line(copy, file, old, new, told):
    text = (copy / file).read_text()
    assert old in text
    (copy / file).write_text(text.replace(old, new) if old else text + new)
    done = tables(copy, "--check")
    assert done.returncode == 1
    assert told in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_a_result_that_no_page_shows_is_told(copy):
    (copy / "benchmarks/results/forgotten.json").write_text(
        (copy / "benchmarks/results/r1-box.json").read_text()
    )
    assert "benchmarks/results/forgotten.json is shown nowhere" in tables(copy, "--check").stderr


def test_the_main_pages_stay_short():
    """One person reads them: pages of topics, and of no day."""
    for folder, lines in (("docs", 2900), ("docs/lab", 1300)):
        pages = sorted(ROOT.glob(f"{folder}/*.md"))
        assert len(pages) <= 12, pages
        assert sum(len(page.read_text().splitlines()) for page in pages) <= lines, folder
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150


def headings(page):
    """The anchors of a page's headings, as its viewers make them."""
    found = re.findall(r"(?m)^#+ (.*)$", page.read_text())
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in found}


@pytest.mark.parametrize("page", [*PAGES, *LAB], ids=named)
def test_links_lead_somewhere(page):
    text = re.sub(r"(?s)```.*?```", "", page.read_text())
    links = re.findall(r"\]\(([^)\s]+)\)", text) + re.findall(
        r'(?:src|srcset|href)="([^"]+)"', text
    )
    for link in links:
        if re.match(r"https?://", link):
            continue
        file, _, anchor = link.partition("#")
        target = (page.parent / file).resolve() if file else page
        assert target.exists(), link
        assert target.is_relative_to(ROOT), link
        assert not anchor or anchor in headings(target), link


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_files_that_a_page_names_are_there(page):
    for file in re.findall(
        r"(?<![\w/.])(?:tests|quantkit|kernels|benchmarks)/[\w./-]+\.\w+(?![\w{*])",
        page.read_text(),
    ):
        assert (ROOT / file).exists(), file


def quoted(text):
    """Commands that begin with `quantkit`, without it, and whether each is whole: a line of a block
    is, words inside a sentence may be a part. In a block three spaces after an argument begin a
    remark."""
    fenced = re.findall(r"(?ms)^```\w*\n(.*?)^```", text)
    rest = re.sub(r"(?ms)^```.*?^```", "", text)
    indented = re.findall(r"(?m)^    (.*)$", rest)
    for line in "\n".join([*fenced, *indented]).replace("\\\n", " ").splitlines():
        for name, arguments in re.findall(r"(?:^|[\s;])quantkit (\w+)([^;&|>]*)", line):
            command = f"{name} {re.split(' {3,}', arguments.strip())[0]}"
            yield command, "..." not in command
    for span in re.findall(r"`([^`\n]+)`", rest):
        if match := re.match(r"(?:\$ )?quantkit (\w.*)", span):
            yield match[1], False


def test_the_readme_lists_every_command():
    listed = re.findall(
        r"(?m)^quantkit (\w+)", (ROOT / "README.md").read_text().partition("## Commands")[2]
    )
    assert set(listed) == {
        name for name, command in COMMANDS.commands.items() if not command.hidden
    }


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_quoted_commands_are_those_of_the_command_line(page):
    """The lab is left out: its commands are of the commits it names."""
    for line, whole in quoted(page.read_text()):
        name, *arguments = shlex.split(line, comments=True)
        command = COMMANDS.commands.get(name)
        assert command is not None, line
        options = {
            option
            for parameter in command.params
            for option in (*parameter.opts, *parameter.secondary_opts)
        } | {"--help", "--debug"}
        asked = {argument.partition("=")[0] for argument in arguments if argument.startswith("--")}
        assert asked <= options, line
        if whole:
            command.make_context(
                name, [argument for argument in arguments if argument != "--debug"]
            )
