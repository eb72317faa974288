"""A source is never written to, whatever is asked, and --overwrite removes only what quantkit
wrote: as command lines, in this process.

Before and after every command all files of the source are the same: content, times, inode, links,
mode.
"""

import json
import os
import shutil
from pathlib import Path

import pytest
from commands import command
from make_model import random_dense

from quantkit.quantization.convert import convert

ARGUMENTS = {"quantize": ["--scheme", "rtn-w4a16"], "convert": ["--dtype", "fp32"]}


def state(folder):
    """Everything about every file below, the folder itself included."""
    found = {}
    for place, folders, files in os.walk(folder):
        for path in [Path(place), *(Path(place) / name for name in (*folders, *files))]:
            about = path.lstat()
            content = path.read_bytes() if path.is_file() and not path.is_symlink() else None
            kept = (about.st_ino, about.st_mode, about.st_size, about.st_mtime_ns, about.st_nlink)
            found[str(path)] = (kept, os.readlink(path) if path.is_symlink() else content)
    return found


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A directory to work in, with the source in it."""
    sizes = {"num_hidden_layers": 1, "num_nextn_predict_layers": 0}
    random_dense(tmp_path / "models" / "source", **sizes)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write(name, source, out, *options):
    where = ["--out", str(out)] if name == "quantize" else [str(out)]
    return command(name, str(source), *where, *ARGUMENTS[name], *options)


def linked(place, name, target):
    (place / name).symlink_to(target)
    return place / name


def hub_cache(place):
    """The source as a hub keeps it: a snapshot of links to blobs."""
    repository = place / "models--org--name"
    snapshot, blobs = repository / "snapshots" / "abc", repository / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for number, path in enumerate(sorted((place / "models" / "source").iterdir())):
        shutil.copyfile(path, blobs / f"{number}")
        (snapshot / path.name).symlink_to(Path("../../blobs") / f"{number}")
    return snapshot


def with_shards_in(place, out, link):
    """A source whose shards are those of `out`, linked."""
    mixed = place / "mixed"
    shutil.copytree(place / "models" / "source", mixed)
    out.mkdir()
    for shard in mixed.glob("*.safetensors"):
        shard.rename(out / shard.name)
        link(out / shard.name, shard)
    return mixed


def _symlink(old, new):
    new.symlink_to(old)


def moved(place, name):
    (place / "models" / "source").rename(place / name)
    return place / name


CASES = {
    "the source": lambda p: (p / "models/source", p / "models/source"),
    "in the source": lambda p: ("models/source", "models/source/out"),
    "in the source through a link": lambda p: (
        "models/source",
        linked(p, "link", p / "models/source") / "out",
    ),
    "holds the source": lambda p: ("models/source", "models"),
    "a link to the source": lambda p: ("models/source", linked(p, "out", p / "models/source")),
    "the source, which is a link": lambda p: (
        linked(p, "link", p / "models/source"),
        "models/source",
    ),
    "a link to nothing": lambda p: ("models/source", linked(p, "out", p / "nowhere")),
    "shards of the source linked into it": lambda p: (
        with_shards_in(p, p / "out", _symlink),
        "out",
    ),
    "hard links of shards": lambda p: (with_shards_in(p, p / "out", os.link), "out"),
    "hard links in what is unfinished": lambda p: (
        with_shards_in(p, p / "out.partial", os.link),
        "out",
    ),
    "the blobs of a hub's cache": lambda p: (hub_cache(p), p / "models--org--name/blobs"),
    "the source is called OUT.partial": lambda p: (moved(p, "out.partial"), "out"),
    "the source is called OUT.replaced": lambda p: (moved(p, "out.replaced"), "out"),
    "OUT.partial is a link to the source": lambda p: (
        "models/source",
        linked(p, "out.partial", p / "models/source").with_suffix(""),
    ),
    "OUT.replaced is a link to the source": lambda p: (
        "models/source",
        linked(p, "out.replaced", p / "models/source").with_suffix(""),
    ),
}


def _made(place, name):
    (place / name).mkdir()
    return place / name


@pytest.mark.parametrize("name", ARGUMENTS)
@pytest.mark.parametrize("case", CASES)
def test_the_source_is_never_written_to(place, case, name):
    source, out = CASES[case](place)
    before = state(place)
    for options in ([], ["--overwrite"]):
        said = write(name, source, out, *options)
        assert said.code == 1, said
        assert said.errors == 1, said
        assert state(place) == before


FOREIGN = {
    "a folder with a note": lambda p: _with(_made(p, "out"), "note.txt", "mine").parent,
    "somebody's model": lambda p: shutil.copytree(p / "models/source", p / "out"),
    "an output without a list": lambda p: (
        _with(
            shutil.copytree(p / "models/source", p / "out"), "manifest.json", '{"tensors": {}}'
        ).parent
    ),
    "an output and a note": lambda p: _with(_output(p), "note.txt", "mine").parent,
    "an output with an edited config": lambda p: _with(_output(p), "config.json", "{}").parent,
    "an output with another shard": lambda p: (
        _with(_output(p), "model-00001-of-00001.safetensors", "mine").parent
    ),
    "an output with a link": lambda p: (
        linked(_output(p), "tokenizer.model", p / "models/source/tokenizer.json").parent
    ),
    "a note in what is unfinished": lambda p: _with(
        _made(p, "out.partial"), "note.txt", "mine"
    ).parent.with_suffix(""),
    "something called OUT.replaced": lambda p: _with(
        _made(p, "out.replaced"), "note.txt", "mine"
    ).parent.with_suffix(""),
}


def _with(folder, name, text):
    (folder / name).write_text(text)
    return folder / name


def _output(place):
    convert(place / "models/source", place / "out", dtype="bf16")
    return place / "out"


@pytest.mark.parametrize("name", ARGUMENTS)
@pytest.mark.parametrize("case", FOREIGN)
def test_overwrite_removes_only_what_quantkit_wrote(place, case, name):
    out = FOREIGN[case](place)
    before = state(place)
    said = write(name, "models/source", out, "--overwrite")
    assert (said.code, said.errors) == (1, 1), said
    assert state(place) == before


@pytest.mark.parametrize("name", ARGUMENTS)
def test_an_output_of_quantkit_is_replaced(place, name):
    before, out = state(place / "models"), _output(place)
    refused = write(name, "models/source", out)
    assert refused.code == 1
    assert "made with a different " in refused.error
    assert "--overwrite" in refused.error
    assert write(name, "models/source", out, "--overwrite").code == 0
    kept = json.loads((out / "manifest.json").read_text())["files"]
    sizes = {path.name: path.stat().st_size for path in out.iterdir()}
    del sizes["manifest.json"]
    assert sizes == {file: facts["size"] for file, facts in kept.items()}
    assert sorted(path.name for path in place.iterdir()) == ["models", "out"]
    assert state(place / "models") == before


def test_the_calibration_text_is_kept_too(place):
    """In the folder to be replaced, even under a name that quantkit wrote, and as the folder."""
    out = _output(place)
    text = out / "tokenizer_config.json"
    for calibration in (
        text,
        linked(place, "text", text),
        _with(_made(place, "new.partial"), "text.txt", "a b c"),
    ):
        before = state(place)
        target = "new" if calibration.name == "text.txt" else "out"
        where = f"--scheme awq-w4a16 --out {target} --calibration {calibration} --overwrite"
        said = command("quantize", "models/source", *where.split())
        assert (said.code, said.errors) == (1, 1), said
        assert "which is to be written" in said.error
        assert state(place) == before


@pytest.mark.parametrize("out", ["models/source", "link/results", "other"])
@pytest.mark.parametrize("name", ["eval", "bench"])
def test_results_do_not_go_into_a_model(place, name, out):
    linked(place, "link", place / "models/source")
    shutil.copytree(place / "models/source", place / "other")
    before = state(place)
    tasks = ["--tasks", "tiny-math"] if name == "eval" else []
    said = command(name, "models/source", "--out", out, *tasks)
    assert (said.code, said.errors) == (1, 1), said
    assert state(place) == before
