"""A run that a power failure stopped at any flush or rename goes on, or is refused in one line; its
result is then the one of a run that was not stopped."""

import itertools
import os

import torch
from power_cuts import Recorder, restore
from replay_server import ReplayServer
from sample_sizes import sized
from two_runs import solve, write_task

from quantkit import QuantkitError
from quantkit.checkpoint.header import TensorSpec
from quantkit.checkpoint.writer import CheckpointWriter
from quantkit.common.atomic_write import check_writable, write_atomic
from quantkit.evaluation.options import EvaluateOptions
from quantkit.evaluation.run import run_evaluation

UNITS = {f"unit {n}": {f"model.layers.{n}.weight": torch.full((64, 64), n)} for n in range(6)}


def _write_checkpoint(out):
    specs = [
        TensorSpec(name, tensor.dtype, tuple(tensor.shape))
        for tensors in UNITS.values()
        for name, tensor in tensors.items()
    ]
    with CheckpointWriter(
        out, specs, fingerprint={"source": "a"}, overwrite=False, shard_bytes=1 << 16
    ) as writer:
        for unit, tensors in UNITS.items():
            if not writer.is_done(unit):
                writer.write(unit, tensors, {})
                writer.wait()
        writer.finish({"model_type": "test"}, {"tokenizer.json": b"{}"})
    return {path.name: path.read_bytes() for path in out.iterdir()}


def test_a_checkpoint_goes_on(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        recorder = Recorder(tmp_path / "first", patch)
        expected = _write_checkpoint(tmp_path / "first" / "out")
    images = recorder.sample(sized(10, 40))
    assert len(images) == sized(10, 40)
    for number, image in enumerate(images):
        folder = restore(image, tmp_path / f"cut{number}")
        if (folder / "out").exists():
            continue  # complete
        assert _write_checkpoint(folder / "out") == expected, number
        assert os.listdir(folder) == ["out"]


def test_an_evaluation_goes_on(tmp_path, monkeypatch):
    task = write_task(tmp_path, range(6))

    def run(out, temperature=0.6):
        with ReplayServer(solve) as server:
            options = EvaluateOptions(
                data_dir=tmp_path, out=out, repeats=1, temperature=temperature, concurrency=1
            )
            results = run_evaluation(server.url, [task], options)
        return float(results.tasks["sums"].to_json()["accuracy"])

    with monkeypatch.context() as patch:
        recorder = Recorder(tmp_path / "first", patch)
        run(tmp_path / "first" / "out", 0.1)
        run(tmp_path / "first" / "out")
    images, refused = recorder.sample(sized(5, 30)), 0
    for number, image in enumerate(images):
        out = restore(image, tmp_path / f"cut{number}") / "out"
        journals = list(out.rglob("*-*.jsonl"))
        try:
            assert run(out) == 1.0, number
        except QuantkitError as error:
            refused += 1
            named = [path for path in journals if str(path) in str(error)]
        else:
            named = [out]
        assert named, number
    assert refused <= len(images) // 4


def test_a_file_is_never_written_through_another_name(tmp_path):
    """Names that a writer may have used before, and links with them, stay as they are."""
    target, precious = tmp_path / "report.html", tmp_path / "precious"
    precious.write_text("mine")
    endings = (".partial", ".new", ".tmp", "~", ".bak", ".swp", ".lock")
    names = itertools.product(("report.html", "report", ".report.html"), endings)
    for number, name in enumerate(names):
        (os.symlink, os.link)[number % 2](precious, tmp_path / "".join(name))
    before = {path: path.lstat().st_ino for path in tmp_path.iterdir()}
    for content in ("one", "two"):
        check_writable(target, "--out")
        write_atomic(target, content)
    assert {path: path.lstat().st_ino for path in tmp_path.iterdir() if path != target} == before
    target.unlink()
    target.symlink_to(precious)
    mask = os.umask(0o027)
    try:
        write_atomic(target, "three")
    finally:
        os.umask(mask)
    assert (precious.read_text(), target.read_text()) == ("mine", "three")
    assert not target.is_symlink()
    assert target.stat().st_mode & 0o777 == 0o640
