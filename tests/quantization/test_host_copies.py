"""Hidden states of a device are saved from memory that is kept, and never while an earlier save
reads it."""

import threading
from types import SimpleNamespace

import torch
from safetensors.torch import load_file

from quantkit.calibrate.output import HostCopies, Output
from quantkit.checkpoint.writer import BackgroundWriter


def test_memory_is_used_again():
    copies, turned = HostCopies(), torch.arange(6.0).view(2, 3).t()
    first = copies.of({"a": turned})["a"]
    assert torch.equal(first, turned)
    assert first.is_contiguous()
    place = first.data_ptr()
    second = copies.of({"a": torch.ones(3, 2)})["a"]
    assert (second.data_ptr(), second.unique().tolist()) == (place, [1.0])
    other = copies.of({"a": torch.ones(3, 2).half()})["a"]
    assert other.dtype == torch.float16, "another dtype or shape has other memory"


def test_a_layer_is_saved_before_its_copies_are_written_over(tmp_path):
    """Two layers in a row, and a writer that has not come to the first when the second is there."""
    output = Output(SimpleNamespace(device=torch.device("meta")), None, {}, {}, {}, {})
    background, begin, saved = BackgroundWriter(1), threading.Event(), []

    def run_after(job):
        def run():
            begin.wait()
            job()
            saved.append(float(load_file(tmp_path / "hidden.safetensors")["quantized"][0]))

        background.submit(run, 0)

    output._writer = SimpleNamespace(state_dir=tmp_path, run_after=run_after, wait=background.wait)
    output.save_state(1, {"quantized": torch.full((4,), 1.0)}, {})
    threading.Timer(0.2, begin.set).start()
    output.save_state(2, {"quantized": torch.full((4,), 2.0)}, {})
    background.close()
    assert saved == [1.0, 2.0]
