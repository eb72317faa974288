"""JSON files and tensors of a model's folder, changed in place."""

import json
from contextlib import contextmanager

from safetensors.torch import load_file, save_file


@contextmanager
def edited(file):
    """What a file holds, which is written back as the `with` leaves it."""
    value = json.loads(file.read_text())
    yield value
    file.write_text(json.dumps(value))


@contextmanager
def edited_tensor(model, name):
    """A tensor of a model's folder, which is written back as the `with` leaves it."""
    index = json.loads((model / "model.safetensors.index.json").read_text())
    shard = model / index["weight_map"][name]
    tensors = load_file(shard)
    yield tensors[name]
    save_file(tensors, shard, metadata={"format": "pt"})
