"""CheckpointWriter: the bytes are the same whatever happened on the way, and nothing under OUT is
ever half-written."""

import hashlib
import json
import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import write_job
from refused import refused
from safetensors import safe_open
from safetensors.torch import save_file

from quantkit.checkpoint import output_dir
from quantkit.checkpoint.header import TensorSpec
from quantkit.checkpoint.writer import CheckpointWriter

_JOB = Path(write_job.__file__)


def _bytes(directory):
    return {path.name: path.read_bytes() for path in directory.iterdir()}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    out = tmp_path_factory.mktemp("undisturbed") / "out"
    write_job.write(out).finish(write_job.CONFIG, write_job.EXTRA)
    return out


def _writer(out, *, overwrite=False, recipe="def", rank=0):
    fingerprint = write_job.FINGERPRINT | {"recipe": recipe}
    return CheckpointWriter(
        out,
        write_job.specs(),
        fingerprint=fingerprint,
        overwrite=overwrite,
        shard_bytes=write_job.SHARD_BYTES,
        rank=rank,
    )


def test_safetensors_reads_the_output(undisturbed):
    index = json.loads((undisturbed / "model.safetensors.index.json").read_text())
    expected = {
        name: tensor
        for number in range(write_job.UNITS)
        for name, tensor in write_job.unit(number).items()
    }
    assert index["weight_map"].keys() == expected.keys()
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in expected.values())
    assert len(set(index["weight_map"].values())) > 2
    for name, shard in index["weight_map"].items():
        with safe_open(undisturbed / shard, "pt") as file:
            read = file.get_tensor(name)
        assert read.dtype == expected[name].dtype
        assert torch.equal(
            read.reshape(-1).view(torch.uint8), expected[name].reshape(-1).view(torch.uint8)
        )
    assert [path.name for path in undisturbed.parent.iterdir()] == ["out"]
    assert all(path.suffix in (".json", ".safetensors") for path in undisturbed.iterdir())
    assert json.loads((undisturbed / "config.json").read_text()) == write_job.CONFIG
    assert (undisturbed / "tokenizer.json").read_bytes() == write_job.EXTRA["tokenizer.json"]


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o077, 0o600), (0o002, 0o664)])
def test_files_take_the_umask(umask, mode, tmp_path):
    before = os.umask(umask)
    try:
        write_job.write(tmp_path / "out").finish({}, {"a.json": b""})
    finally:
        os.umask(before)
    assert {stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "out").iterdir()} == {mode}


def test_a_run_stopped_and_started_again_ends_with_the_same_bytes(undisturbed, tmp_path):
    with _writer(tmp_path / "out") as writer:
        for number in (7, 3, 11):
            assert not writer.is_done(f"unit {number}")
            writer.write(f"unit {number}", write_job.unit(number), {"error": number / 8})
    assert not (tmp_path / "out").exists()
    with _writer(tmp_path / "out") as writer:
        assert [
            number for number in range(write_job.UNITS) if writer.is_done(f"unit {number}")
        ] == [3, 7, 11]
        assert writer.facts("unit 11") == {"error": 11 / 8}
    write_job.write(tmp_path / "out").finish(write_job.CONFIG, write_job.EXTRA)
    assert _bytes(tmp_path / "out") == _bytes(undisturbed)


def test_state_that_cannot_be_saved_is_told_in_one_line(tmp_path):
    writer = CheckpointWriter(tmp_path / "out", write_job.specs(), fingerprint={}, overwrite=False)
    writer.run_after(
        lambda: save_file({"hidden": torch.zeros(8)}, tmp_path / "no directory" / "hidden")
    )
    with refused(r"cannot write .*/out: .*No such file.*; fix that and run the same command"):
        writer.wait()
    writer.close()


def test_a_tensor_may_change_as_soon_as_its_unit_is_handed_over(tmp_path):
    w = torch.zeros(2048, 2048)
    specs = [TensorSpec("w", w.dtype, tuple(w.shape))]
    with CheckpointWriter(tmp_path / "out", specs, fingerprint={}, overwrite=False) as writer:
        writer.write("all", {"w": w})
        w.fill_(1)
        assert not writer.read("all")["w"].any()


def test_bytes_changed_behind_the_journal_are_written_again(undisturbed, tmp_path):
    write_job.write(tmp_path / "out").close()
    shard = tmp_path / "out.partial" / "model-00002-of-00004.safetensors"
    with shard.open("r+b") as file:
        file.seek(-100, os.SEEK_END)
        file.write(b"\xaa" * 50)
    (tmp_path / "out.partial" / "model-00001-of-00004.safetensors").unlink()
    with _writer(tmp_path / "out") as writer:
        done = sum(writer.is_done(f"unit {number}") for number in range(write_job.UNITS))
        assert 0 < done < write_job.UNITS - 5
    write_job.write(tmp_path / "out").finish(write_job.CONFIG, write_job.EXTRA)
    assert _bytes(tmp_path / "out") == _bytes(undisturbed)


def _run_job(out, *arguments):
    return subprocess.run(
        [sys.executable, str(_JOB), str(out), *arguments],
        capture_output=True,
        text=True,
        check=True,
    ).stdout


def test_killed_at_random_moments_it_ends_with_the_same_bytes(undisturbed, tmp_path):
    """SIGKILL 25 times, while setting up and while writing; every run goes on where the journal
    ends."""
    found = json.loads(_run_job(tmp_path / "out", "kill", "25"))
    if (tmp_path / "out" / ".quantkit").exists():
        # Killed between the last rename and clearing up: the next start does that.
        with refused("exists"):
            _writer(tmp_path / "out")
    assert _bytes(tmp_path / "out") == _bytes(undisturbed)
    assert found == sorted(found), "a unit was lost"
    assert sum(0 < units < write_job.UNITS for units in found) >= 3, (
        f"no kill came in the middle: {found}"
    )


def test_several_processes_write_one_output(undisturbed, tmp_path):
    _run_job(tmp_path / "out", "ranks", "3")
    assert _bytes(tmp_path / "out") == _bytes(undisturbed)


def test_a_full_disk_is_told_and_making_room_is_enough(undisturbed, tmp_path):
    """On a file system of 8 MB, filled to the last page when only index and config are missing."""
    small = f'mount -t tmpfs -o size=8m none {tmp_path} && exec "$@"'
    mount = ["unshare", "-rm", "sh", "-c", small, "sh"]
    if (
        shutil.which("unshare") is None
        or subprocess.run([*mount, "true"], capture_output=True).returncode
    ):
        pytest.skip("this machine lets nobody mount a small file system")
    command = [*mount, sys.executable, str(_JOB), str(tmp_path / "out"), "full", "4096"]
    result = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    told = f"the disk is full while writing {tmp_path / 'out'}; free some space and run the same"
    assert told in result["told"]
    assert result["left"] == ["filler", "out.partial"]
    assert result["files"] == {
        name: hashlib.sha256(content).hexdigest() for name, content in _bytes(undisturbed).items()
    }


def test_a_run_of_other_ranks_goes_on(undisturbed, tmp_path):
    write_job.write(tmp_path / "out", rank=1, ranks=2).close()
    write_job.write(tmp_path / "out").finish(write_job.CONFIG, write_job.EXTRA)
    assert _bytes(tmp_path / "out") == _bytes(undisturbed)


def test_overwrite_discards_another_recipe_and_keeps_the_same(tmp_path):
    with _writer(tmp_path / "out") as writer:
        writer.write("unit 0", write_job.unit(0))
    with _writer(tmp_path / "out", overwrite=True) as writer:
        assert writer.is_done("unit 0")
    with _writer(tmp_path / "out", overwrite=True, recipe="other") as writer:
        assert not writer.is_done("unit 0")


def test_overwrite_replaces_only_at_the_end(undisturbed, tmp_path):
    specs = [TensorSpec("w", torch.float32, (2,))]
    with CheckpointWriter(tmp_path / "out", specs, fingerprint={}, overwrite=False) as old:
        old.write("all", {"w": torch.zeros(2)})
        old.finish({"model_type": "old"}, {"LICENSE": b"old"})
    before = _bytes(tmp_path / "out")
    writer = write_job.write(tmp_path / "out", overwrite=True)
    assert _bytes(tmp_path / "out") == before
    writer.finish(write_job.CONFIG, write_job.EXTRA)
    assert _bytes(tmp_path / "out") == _bytes(undisturbed)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_disk_too_small_is_told_before_anything_is_written(tmp_path):
    specs = [TensorSpec("a.weight", torch.float32, (10**9, 10**6))]
    with refused(r"B free and the output needs 4000 TB more; free .* TB, or choose another --out"):
        CheckpointWriter(tmp_path / "new" / "out", specs, fingerprint={}, overwrite=False)
    assert list(tmp_path.iterdir()) == []


_STATE = ".quantkit"


def _made(path, content, state):
    path.mkdir()
    (path / "config.json").write_text(content)
    files = {"config.json": {"size": len(content)}}
    (path / "manifest.json").write_text(json.dumps({"run": {}, "files": files}))
    if state:
        (path / _STATE).mkdir()
        (path / _STATE / "journal-00000.jsonl").write_text("{}\n")
    return path


def _names(path):
    return sorted(entry.name for entry in path.iterdir())


@pytest.mark.parametrize("exchange", [True, False])
@pytest.mark.parametrize("old", [True, False])
def test_the_new_takes_the_place_of_the_old(exchange, old, tmp_path, monkeypatch):
    partial = _made(tmp_path / "out.partial", "new", state=True)
    if old:
        _made(tmp_path / "out", "old", state=False)
    if not exchange:  # a file system that cannot
        monkeypatch.setattr(output_dir, "_exchange", lambda first, second: False)
    output_dir.replace_directory(partial, tmp_path / "out", _STATE)
    assert _names(tmp_path) == ["out"]
    assert _names(tmp_path / "out") == ["config.json", "manifest.json"]
    assert (tmp_path / "out" / "config.json").read_text() == "new"


def test_exchange_is_one_step_here(tmp_path):
    """Names are swapped, both directories whole: what the kernel does, not two renames."""
    first = _made(tmp_path / "a", "first", state=False)
    second = _made(tmp_path / "b", "second", state=False)
    if not output_dir._exchange(first, second):
        pytest.skip("this file system cannot exchange two names")
    assert ((first / "config.json").read_text(), (second / "config.json").read_text()) == (
        "second",
        "first",
    )


def test_killed_after_the_exchange_the_old_one_is_cleared_up(tmp_path):
    out = _made(tmp_path / "out", "new", state=True)
    (out / _STATE / "exchanging").touch()
    partial = _made(tmp_path / "out.partial", "old", state=False)
    output_dir.remove_leftovers(partial, out, _STATE)
    assert _names(tmp_path) == ["out"]
    assert _names(out) == ["config.json", "manifest.json"]


def test_killed_before_the_exchange_nothing_is_touched(tmp_path):
    out = _made(tmp_path / "out", "old", state=False)
    partial = _made(tmp_path / "out.partial", "new", state=True)
    (partial / _STATE / "exchanging").touch()
    output_dir.remove_leftovers(partial, out, _STATE)
    assert _names(tmp_path) == ["out", "out.partial"]
    assert _names(partial) == [_STATE, "config.json", "manifest.json"]


def test_what_quantkit_did_not_write_stays(tmp_path):
    """Put there while the new one was made: told before anything changes; and put there while the
    old one was removed."""
    partial = _made(tmp_path / "out.partial", "new", state=True)
    out = _made(tmp_path / "out", "old", state=False)
    (out / "letters").write_text("dear")
    with refused("out holds letters, which quantkit did not write"):
        output_dir.replace_directory(partial, out, _STATE)
    assert (out / "config.json").read_text() == "old"
    output_dir._exchange(partial, out)
    (out / _STATE / "exchanging").touch()
    for _ in range(2):  # the next start tells the same
        with refused(r"out\.partial, which was replaced, holds letters"):
            output_dir.remove_leftovers(partial, out, _STATE)
    assert _names(partial) == ["letters", "manifest.json"]
    assert (out / "config.json").read_text() == "new"
