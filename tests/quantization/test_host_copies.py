"""Hidden states of a device are saved from memory that is kept, and never while an earlier save
reads it."""

import threading
from types import SimpleNamespace

import torch
from safetensors.torch import load_file

from quantkit.calibrate.output import HostCopies, Output
from quantkit.checkpoint.background_writer import BackgroundWriter


def test_memory_is_used_again():
    copies = HostCopies()
    first = copies.of({"a": torch.arange(6.0).view(2, 3).t(), "b": torch.zeros(2)})
    assert torch.equal(first["a"], torch.arange(6.0).view(2, 3).t())
    assert first["a"].is_contiguous()
    places = {name: one.data_ptr() for name, one in first.items()}
    second = copies.of({"a": torch.ones(3, 2), "b": torch.ones(3)})
    assert second["a"].data_ptr() == places["a"]
    assert torch.equal(second["a"], torch.ones(3, 2))
    assert torch.equal(second["b"], torch.ones(3)), "another shape has other memory"
    assert copies.of({"a": torch.ones(3, 2).half()})["a"].dtype == torch.float16


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
