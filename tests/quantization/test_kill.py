"""A run of quantize() killed, starved of disk or robbed of its source goes on, and ends with the
bytes of an undisturbed one."""

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import make_model
import pytest
import quantize_job
from output_files import files
from refused import refused

from quantkit.calibrate.recipe import Recipe
from quantkit.checkpoint.writer import CheckpointWriter
from quantkit.common.progress import Progress
from quantkit.grids.schemes import find_scheme
from quantkit.quantization import quantize
from quantkit.quantization import run as run_module

JOB = Path(quantize_job.__file__)
KILLS = 2


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    config = make_model.tiny_config(num_hidden_layers=2, **make_model.FEW_EXPERTS)
    return make_model.write_fp8(
        tmp_path_factory.mktemp("models") / "source",
        config,
        make_model.random_tensors(config),
        shards=4,
    )


@pytest.fixture(scope="module")
def undisturbed(source, text, tmp_path_factory):
    """The files, and the seconds it took."""
    out = tmp_path_factory.mktemp("undisturbed") / "out"
    start = time.perf_counter()
    quantize_job.run(source, text, out)
    return files(out), time.perf_counter() - start


def test_killed_at_random_moments_and_in_writes(source, text, undisturbed, tmp_path):
    """SIGKILL, also with half of a tensor written."""
    expected, seconds = undisturbed
    out = tmp_path / "out"
    command = [
        sys.executable,
        str(JOB),
        str(source),
        str(text),
        str(out),
        "kill",
        str(KILLS),
        str(seconds),
    ]
    result = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    assert files(out) == expected
    assert min(result["deaths"].values()) >= KILLS, result
    assert max(result["found"]) > 0, "no run found a finished unit"
    print(f"kills survived: {result['deaths']}")


@pytest.mark.parametrize("last", ["layers.0.attend", "layers.1.experts.0", "layers.1.experts.1"])
def test_stopped_after_a_unit(last, source, text, undisturbed, tmp_path, monkeypatch):
    """Also between the two experts of a batch, which is then solved again for the second one's
    sake."""
    write = CheckpointWriter.write

    def write_and_stop(writer, unit, *rest):
        write(writer, unit, *rest)
        if unit == last:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(CheckpointWriter, "write", write_and_stop)
        with pytest.raises(KeyboardInterrupt):
            quantize_job.run(source, text, tmp_path / "out")
    quantize_job.run(source, text, tmp_path / "out")
    assert files(tmp_path / "out") == undisturbed[0]


def test_a_lost_shard_is_named_and_bringing_it_back_is_enough(source, text, undisturbed, tmp_path):
    """Cut short while the first layer is in work, then gone. The copy that comes back has another
    time of change."""
    copy, out = tmp_path / "source", tmp_path / "out"
    shutil.copytree(source, copy)
    shard = sorted(copy.glob("*.safetensors"))[-1]

    def lose(event):
        if isinstance(event, Progress) and event.unit == "layers.0.feed_forward":
            os.truncate(shard, 10_000)

    recipe = Recipe(scheme="awq-w4a16", calibration=str(text), **quantize_job.SMALL)
    scheme = find_scheme("awq-w4a16")
    with refused(
        rf"{shard.name} became shorter while it was read; restore that file and run again"
    ):
        quantize(copy, out, scheme, "auto", recipe, device="cpu", on_event=lose)
    shard.unlink()
    with refused(rf"shard {shard.name} is missing from"):
        quantize(copy, out, scheme, "auto", recipe, device="cpu")
    shutil.copyfile(source / shard.name, shard)
    quantize_job.run(copy, text, out)
    assert files(out) == undisturbed[0]


def test_what_was_begun_otherwise_is_refused(source, text, tmp_path, monkeypatch):
    """Another source, recipe or version; and an output that is there already."""
    copy, out = tmp_path / "source", tmp_path / "out"
    shutil.copytree(source, copy)
    recipe = Recipe(scheme="rtn-w4a16")
    scheme = find_scheme("rtn-w4a16")

    def stop(event):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        quantize(copy, out, scheme, "auto", recipe, device="cpu", on_event=stop)
    with refused(
        "was begun with a different recipe; run the command that began it, or give --overwrite"
    ):
        quantize(
            copy, out, scheme, "auto", recipe.model_copy(update={"fit_points": 2}), device="cpu"
        )
    with monkeypatch.context() as patch:
        patch.setattr(run_module, "__version__", "0.0.0")
        with refused("was begun with a different version"):
            quantize(copy, out, scheme, "auto", recipe, device="cpu")
    shard = sorted(copy.glob("*.safetensors"))[0]
    content = shard.read_bytes()
    shard.write_bytes(content[:-4] + b"\x00\x3c\x00\x3c")
    with refused("was begun with a different source"):
        quantize(copy, out, scheme, "auto", recipe, device="cpu")
    shard.write_bytes(content)
    report = quantize(copy, out, scheme, "auto", recipe, device="cpu")
    assert not report.done_already
    again = quantize(copy, out, scheme, "auto", recipe, device="cpu")
    assert again.done_already
    assert (again.findings.errors, again.output_bytes) == (
        report.findings.errors,
        report.output_bytes,
    )
    with refused("exists, made with a different recipe; choose another --out, or give --overwrite"):
        quantize(
            copy, out, scheme, "auto", recipe.model_copy(update={"fit_points": 2}), device="cpu"
        )
