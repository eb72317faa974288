"""Tensors saved beside other threads: as the safetensors library reads them."""

import numpy as np
import torch
from safetensors import safe_open

from quantkit.checkpoint import header
from quantkit.checkpoint.header import save_tensors, write_at


def test_the_library_reads_what_is_saved(tmp_path):
    path = tmp_path / "some.safetensors"
    path.write_bytes(b"x" * 10_000)  # left by another
    tensors = {
        "a": torch.arange(6, dtype=torch.int8).view(2, 3),
        "b": torch.randn(5, 7),
        "c": torch.randn(0, 7).bfloat16(),
    }
    tensors["d"] = torch.tensor(3.0)
    save_tensors(path, tensors, {"layer": "7", "facts": '{"\u00fc": 1}'})
    with safe_open(path, framework="pt") as file:
        assert file.metadata() == {"format": "pt", "layer": "7", "facts": '{"\u00fc": 1}'}
        assert set(file.keys()) == tensors.keys()
        for name, tensor in tensors.items():
            assert torch.equal(file.get_tensor(name), tensor)
            assert file.get_tensor(name).dtype == tensor.dtype


def test_bytes_are_written_from_where_they_lie(tmp_path, monkeypatch):
    """By the system alone: nothing holds Python's lock meanwhile, and nothing is copied before."""
    tensor, places = torch.randn(1000), []

    def write(descriptor, data, offset):
        places.append(np.frombuffer(data, dtype=np.uint8).ctypes.data)
        write_at(descriptor, data, offset)

    monkeypatch.setattr(header, "write_at", write)
    save_tensors(tmp_path / "a.safetensors", {"a": tensor}, {})
    assert places[1:] == [tensor.data_ptr()], "behind the header"
