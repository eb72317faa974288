"""A run of quantize() killed, starved of disk or robbed of its source goes on, and ends with the
bytes of an undisturbed one."""

import json
import os
import shutil
import subprocess
import sys
import time

import pytest
import quantize_job
from output_files import files
from quantized import quantized, stop_when
from refused import refused

from quantkit.calibrate.recipe import Recipe
from quantkit.checkpoint.writer import CheckpointWriter
from quantkit.common.progress import Progress
from quantkit.quantization import run as run_module

KILLS = 2


pytestmark = pytest.mark.usefixtures("one_thread")


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
    asked = (quantize_job.__file__, source, text, out, "kill", KILLS, seconds)
    command = [sys.executable, *map(str, asked)]
    result = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    assert files(out) == expected
    assert min(result["deaths"].values()) >= KILLS, result
    assert max(result["found"]) > 0, "no run found a finished unit"


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
    copy, out = shutil.copytree(source, tmp_path / "source"), tmp_path / "out"
    shard = sorted(copy.glob("*.safetensors"))[-1]

    def lose(event):
        if isinstance(event, Progress) and event.unit == "layers.0.feed_forward":
            os.truncate(shard, 10_000)

    with refused(rf"{shard.name} became shorter while it was read; restore that file and run"):
        quantize_job.run(copy, text, out, also=lose)
    shard.unlink()
    with refused(rf"shard {shard.name} is missing from"):
        quantize_job.run(copy, text, out)
    shutil.copyfile(source / shard.name, shard)
    quantize_job.run(copy, text, out)
    assert files(out) == undisturbed[0]


def test_what_was_begun_otherwise_is_refused(source, tmp_path, monkeypatch):
    """Another source, recipe or version; and an output that is there already."""
    copy, out = shutil.copytree(source, tmp_path / "source"), tmp_path / "out"
    recipe = Recipe(scheme="rtn-w4a16")

    def run(recipe=recipe, **options):
        return quantized(copy, out, recipe, **options)

    with pytest.raises(KeyboardInterrupt):
        run(on_event=stop_when(lambda event: True))
    other = Recipe(scheme="rtn-w4a16", fit_points=2)
    with refused("begun with a different recipe; run the command that began it, or give --overw"):
        run(other)
    with monkeypatch.context() as patch:
        patch.setattr(run_module, "__version__", "0.0.0")
        with refused("was begun with a different version"):
            run()
    shard = sorted(copy.glob("*.safetensors"))[0]
    content = shard.read_bytes()
    shard.write_bytes(content[:-4] + b"\x00\x3c\x00\x3c")
    with refused("was begun with a different source"):
        run()
    shard.write_bytes(content)
    report, again = run(), run()
    assert (report.done_already, again.done_already) == (False, True)
    assert again.findings.errors == report.findings.errors
    with refused(
        "exists, made with a different recipe; choose another --out .*, or give --overwrite"
    ):
        run(other)
