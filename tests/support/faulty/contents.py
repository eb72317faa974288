"""A checkpoint in memory, to be changed and written again."""

import copy
import json
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from make_model import write_shards
from safetensors import safe_open
from torch import Tensor

from quantkit.checkpoint.reader import Checkpoint
from quantkit.grids.base import dequantize

SHARD = "model-{:05d}-of-000002.safetensors"


@dataclass
class Contents:
    """A checkpoint in memory. format: of the good one. linears: its quantized modules and their
    formats."""

    path: Path
    config: dict[str, Any]
    files: dict[str, bytes]
    tensors: dict[str, Tensor]
    format: Any
    linears: dict[str, Any]
    broken: dict[str, Callable[[Path], None]] = field(default_factory=dict)

    @classmethod
    def of(cls, path):
        checkpoint = Checkpoint.open(path)
        tensors = {}
        for shard in sorted(path.glob("*.safetensors")):
            with safe_open(shard, "pt") as file:
                tensors |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        others = ("config.json", "manifest.json", "model.safetensors.index.json")
        files = {
            file.name: file.read_bytes()
            for file in path.iterdir()
            if file.suffix in (".json", ".jinja") and file.name not in others
        }
        return cls(path, checkpoint.config, files, tensors, checkpoint.format, checkpoint.linears)

    def copy(self):
        config, held = copy.deepcopy(self.config), (self.files, self.tensors)
        return Contents(self.path, config, *map(dict, held), self.format, dict(self.linears))

    def write(self, folder):
        """Two shards, an index, and the files; then what breaks them."""
        if folder.exists():
            shutil.rmtree(folder)
        write_shards(folder, {name: own.clone() for name, own in self.tensors.items()}, 2)
        (folder / "config.json").write_text(json.dumps(self.config, indent=1))
        for name, content in self.files.items():
            (folder / name).write_bytes(content)
        for breaks in self.broken.values():
            breaks(folder)
        return folder

    # --- what faults ask
    # -------------------------------------------------------------------------------------------------

    @property
    def block(self):
        return self.config["quantization_config"]

    @property
    def experts(self):
        """Prefixes of the routed experts of the last layer but MTP that has them."""
        found = sorted(
            {
                m[1]
                for name in self.tensors
                if (m := re.match(r"(model\.layers\.\d+\.mlp\.experts\.\d+)\.", name))
            },
            key=numbers,
        )
        layers = [p for p in found if int(p.split(".")[2]) < self.config["num_hidden_layers"]]
        return [p for p in layers if p.split(".")[2] == layers[-1].split(".")[2]] if layers else []

    @property
    def mtp(self):
        layer = f"model.layers.{self.config['num_hidden_layers']}."
        return [name for name in self.tensors if name.startswith(layer)]

    def linear(self, ending="down_proj"):
        """A quantized linear of a middle layer."""
        found = sorted(
            (m for m in self.linears if m.endswith(ending) and "shared" not in m), key=numbers
        )
        inner = [m for m in found if int(m.split(".")[2]) < self.config["num_hidden_layers"]]
        return (inner or found)[len(inner or found) // 2]

    def parts(self, module):
        return [name for name in self.tensors if name.rpartition(".")[0] == module]

    def swap(self, one, other):
        """Exchange all tensors under two prefixes."""
        ours = {n: t for n, t in self.tensors.items() if n.startswith(f"{one}.")}
        theirs = {n: t for n, t in self.tensors.items() if n.startswith(f"{other}.")}
        for name, tensor in ours.items():
            self.tensors[other + name.removeprefix(one)] = tensor
        for name, tensor in theirs.items():
            self.tensors[one + name.removeprefix(other)] = tensor

    def plain(self, module):
        """Replace a quantized linear by its values in BF16."""
        linear = self.linears.pop(module)
        weight = linear.format.unpack(module, {name: self.tensors[name] for name in linear.tensors})
        for name in self.parts(module):
            del self.tensors[name]
        self.tensors[f"{module}.weight"] = dequantize(weight, torch.bfloat16)

    def json(self, name):
        return json.loads(self.files[name])

    def set_json(self, name, value):
        self.files[name] = json.dumps(value).encode()


def numbers(name):
    return [int(n) for n in re.findall(r"\d+", name)]
