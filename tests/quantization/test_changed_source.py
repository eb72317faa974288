"""A source that changes while it is read, between two starts, or after it was read is noticed,
wherever the change lies."""

import os
import shutil
import time

import make_model
import pytest
import quantize_job
from output_files import files
from quantized import quantized, stop_when
from refused import refused

from quantkit import QuantkitError
from quantkit.calibrate.recipe import Recipe
from quantkit.checkpoint import reader
from quantkit.checkpoint.reader import Checkpoint
from quantkit.common.progress import Progress, ignore_event
from quantkit.quantization import conversion_plan as convert_module
from quantkit.quantization.convert import convert


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    path = tmp_path_factory.mktemp("models") / "source"
    return make_model.random_dense(path, num_hidden_layers=2, **make_model.FEW_EXPERTS)


@pytest.fixture
def source(original, tmp_path):
    return shutil.copytree(original, tmp_path / "source")


def awq(source, out, on_event=ignore_event):
    text = out.with_name("text.txt")
    text.write_text("what is read may change, and who reads it must know. " * 20)
    recipe = Recipe(scheme="awq-w4a16", calibration=str(text), **quantize_job.SMALL)
    return quantized(source, out, recipe, on_event=on_event).done_already


def rtn(source, out, on_event=ignore_event):
    return quantized(source, out, "rtn-w4a16", on_event=on_event).done_already


def to_fp16(source, out, on_event=ignore_event):
    return convert(source, out, dtype="fp16", on_event=on_event).done_already


@pytest.fixture(params=[rtn, to_fp16])
def run(request, monkeypatch):
    monkeypatch.setattr(convert_module, "UNIT_BYTES", 100_000)
    return request.param


def edit(source, tensor):
    """Flip a bit of a tensor where the fingerprint's samples do not look; returns the shard."""
    checkpoint = Checkpoint.open(source)
    info, before = checkpoint.tensors[tensor], checkpoint.fingerprint
    shard, size, steps = source / info.shard, reader._SAMPLE_BYTES, reader._SAMPLES - 1
    last = shard.stat().st_size - size
    places = (last * number // steps + size + 100 for number in range(steps))
    place = next(place for place in places if info.offset <= place < info.offset + info.nbytes)
    content = bytearray(shard.read_bytes())
    content[place] ^= 1
    shard.write_bytes(content)
    assert Checkpoint.open(source).fingerprint == before, "the samples saw it"
    return shard


EARLY = "model.layers.0.mlp.gate_proj.weight"


def stopped(run, source, out):
    """A run that was stopped after the first layer."""
    with pytest.raises(KeyboardInterrupt):
        run(source, out, stop_when(lambda event: "layers.1" in getattr(event, "unit", "")))


@pytest.mark.parametrize("time_kept", [False, True])
def test_changed_between_two_starts(run, source, tmp_path, time_kept):
    stopped(run, source, tmp_path / "out")
    shard = source / Checkpoint.open(source).tensors[EARLY].shard
    before = shard.stat()
    edit(source, EARLY)
    if time_kept:
        os.utime(shard, ns=(before.st_atime_ns, before.st_mtime_ns))
    with refused(rf"{shard.name} was changed after .*; restore that file, or give --overwrite"):
        run(source, tmp_path / "out")
    edit(source, EARLY)  # back
    assert not run(source, tmp_path / "out")


def test_the_same_bytes_with_other_times_go_on(run, source, original, tmp_path):
    """All shards downloaded again. The output is that of an undisturbed run."""
    stopped(run, source, tmp_path / "out")
    for shard in source.glob("*.safetensors"):
        shard.unlink()
        shutil.copyfile(original / shard.name, shard)
    assert not run(source, tmp_path / "out")
    run(source, tmp_path / "undisturbed")
    assert files(tmp_path / "out") == files(tmp_path / "undisturbed")


def test_changed_while_it_is_read(run, source, tmp_path):
    """Bytes are hashed beside the run: what was not yet entered when they changed is not kept, and
    then made of the new ones alone."""
    changed = []

    def change(event):
        if isinstance(event, Progress) and "layers.1" in event.unit and not changed:
            changed.append(edit(source, EARLY))

    with refused(r"while it was read; restore that file and run again|was changed after"):
        run(source, tmp_path / "out", change)
    assert not (tmp_path / "out").exists()
    told = ""
    try:
        run(source, tmp_path / "out")
    except QuantkitError as fault:
        told = str(fault)
    assert not told or "was changed after" in told
    if not told:
        run(source, tmp_path / "undisturbed")
        assert files(tmp_path / "out") == files(tmp_path / "undisturbed")


def test_changed_after_it_was_read(run, source, tmp_path):
    """ "Done already" is not said of another model; a shard that was only touched is the same."""
    run(source, tmp_path / "out")
    assert run(source, tmp_path / "out")
    time.sleep(0.01)
    for shard in source.glob("*.safetensors"):
        shard.touch()
    assert run(source, tmp_path / "out")
    shard = edit(source, EARLY)
    with refused(rf"{shard.name} was changed after"):
        run(source, tmp_path / "out")


def test_an_embedding_that_calibration_has_read(source, tmp_path):
    """It is written last, and the hidden states that are kept came from it."""
    stopped(awq, source, tmp_path / "out")
    edit(source, "model.embed_tokens.weight")
    with refused(r"was changed after model\.embed_tokens was made from it"):
        awq(source, tmp_path / "out")
