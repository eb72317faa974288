"""What is opened of a model's folder, and what is not."""

import os

import pytest
from refused import refused

from quantkit import QuantkitError
from quantkit.checkpoint.aux_files import read_aux_files
from quantkit.checkpoint.header import read_header
from quantkit.common.model_files import LARGEST_SETTINGS, open_file, read_json, read_text


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "secret.json").write_text('{"a": 1}')
    return tmp_path / "model"


def hub_cache(root):
    """A snapshot as huggingface_hub lays it out: links to blobs."""
    repository = root / "models--org--name"
    snapshot = repository / "snapshots" / "0123abcd"
    snapshot.mkdir(parents=True)
    (repository / "blobs").mkdir()
    (repository / "blobs" / "f00d").write_text('{"a": 1}')
    (snapshot / "config.json").symlink_to("../../blobs/f00d")
    return snapshot


def test_links_of_the_hub_cache_are_followed(tmp_path):
    snapshot = hub_cache(tmp_path)
    assert read_json(snapshot / "config.json") == {"a": 1}
    (tmp_path / "elsewhere").symlink_to(snapshot)
    assert read_json(tmp_path / "elsewhere" / "config.json") == {"a": 1}


def test_links_out_of_the_hub_cache_are_refused(tmp_path):
    snapshot = hub_cache(tmp_path)
    (tmp_path / "models--org--other").mkdir()
    (tmp_path / "models--org--other" / "config.json").write_text("{}")
    (snapshot / "other.json").symlink_to("../../../models--org--other/config.json")
    with refused(r"other\.json is a link to .*models--org--other/config\.json, outside"):
        read_json(snapshot / "other.json")


def test_pointers_of_git_lfs_are_reported(folder):
    """A clone without Git LFS has them in place of shards and tokenizer.json."""
    for name in ("model.safetensors", "tokenizer.json"):
        (folder / name).write_text(
            "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a2146\nsize 12345\n"
        )
    for read in (
        lambda: read_header(folder, "model.safetensors"),
        lambda: read_json(folder / "tokenizer.json"),
    ):
        before = len(os.listdir("/proc/self/fd"))
        with refused("is a pointer of Git LFS, not the file itself; run `git lfs pull` there"):
            read()
        assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("target", ["../secret.json", "/etc/hostname", "../model/../secret.json"])
def test_a_licence_that_leads_out_is_not_copied(target, folder):
    (folder / "LICENSE").symlink_to(target)
    with refused(
        r"LICENSE is a link to .*, outside of the model's folder.*; put the file itself there"
    ):
        read_aux_files(folder)


@pytest.mark.parametrize(
    ("make", "fault"),
    [
        (lambda path: None, "does not exist"),
        (os.mkfifo, "is a pipe, not a file"),
        (lambda path: path.symlink_to("/dev/zero"), "is a device, not a file"),
        (lambda path: path.symlink_to("nowhere"), "is a link to nowhere, which does not exist"),
        (
            lambda path: path.symlink_to(path.name),
            "cannot read .*: Too many levels of symbolic links",
        ),
        (lambda path: os.mknod(path, 0o600 | 0o140000), "is a socket, not a file"),
    ],
)
def test_a_special_file_is_reported_without_blocking(make, fault, folder):
    make(folder / "config.json")
    with refused(fault):
        open_file(folder / "config.json")


@pytest.mark.parametrize("name", ["x" * 300, "a\0b", "\ud800"])
def test_names_that_no_file_has(name, folder):
    with pytest.raises(QuantkitError) as told:
        open_file(folder / name)
    assert "\n" not in str(told.value)


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        (b"", "is not valid JSON"),
        (b"[1]", "is not a JSON object"),
        (b'{"a": 1, "a": 2}', "a has two values"),
        (b'{"a": "\\ud800"}', "half of a character"),
        (b'{"a": "\xff"}', r"is not UTF-8 text \(byte 7\)"),
        (b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}", "nested too deep"),
        (b'{"a": ' + b"9" * 5000 + b"}", "is not valid JSON"),
    ],
)
def test_json_that_readers_would_read_differently_or_not_at_all(content, fault, folder):
    (folder / "config.json").write_bytes(content)
    with refused(fault):
        read_json(folder / "config.json")


def test_json_that_is_read(folder):
    (folder / "config.json").write_bytes(b'\xef\xbb\xbf{"a": 1, "a": 1, "b": "\\ud83d\\ude00"}')
    assert read_json(folder / "config.json") == {"a": 1, "b": "😀"}


def test_size_is_known_before_a_byte_is_read(folder):
    (folder / "config.json").touch()
    os.truncate(folder / "config.json", 10**13)
    with refused(rf"has 10000000000000 bytes, and such a file has {LARGEST_SETTINGS} at most"):
        read_text(folder / "config.json")


def test_a_folder_called_snapshots_is_no_hub_cache(tmp_path):
    model = tmp_path / "snapshots" / "model"
    model.mkdir(parents=True)
    (tmp_path / "secret.json").write_text("{}")
    (model / "config.json").symlink_to("../../secret.json")
    with refused("outside of the model's folder"):
        read_json(model / "config.json")
