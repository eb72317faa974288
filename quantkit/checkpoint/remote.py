"""Opens a checkpoint's headers without its weights: of a directory, or of a Hub model that is not
downloaded."""

from pathlib import Path

import torch
from torch import Tensor

from quantkit.checkpoint.formats.base import SIDE_FILES
from quantkit.checkpoint.header import DTYPES, TensorInfo
from quantkit.checkpoint.hub import RemoteTensor, find_local, read_headers
from quantkit.checkpoint.reader import Checkpoint
from quantkit.checkpoint.shards import CPU, Block, Shards
from quantkit.common.errors import QuantkitError


def open_headers(model: str) -> Checkpoint:
    """The checkpoint of a directory, a built-in name or a Hub id. Of a Hub model that is not
    downloaded only the headers are read.

    Raises QuantkitError as `Checkpoint.open` does, and where the Hub cannot be reached.
    """
    local = find_local(model)
    if local is not None:
        return Checkpoint.open(local)
    remote = read_headers(model, ("config.json", *SIDE_FILES))
    if "config.json" not in remote.files:
        raise QuantkitError(
            f"hub model {model} has no config.json", "give a model in the layout of transformers"
        )
    tensors: dict[str, TensorInfo] = {}
    for shard, entries in remote.shards.items():
        for name, entry in entries.items():
            if name in tensors:
                raise QuantkitError(
                    f"{name} is in both {tensors[name].shard} and {shard} of hub model {model}",
                    "give another revision",
                )
            tensors[name] = remote_tensor(model, shard, name, entry)
    side = {name: remote.files[name] for name in SIDE_FILES if name in remote.files}
    return HeaderCheckpoint(Path(model), remote.files["config.json"], side, tensors)


class _NoShards(Shards):
    def read(
        self, info: TensorInfo, block: Block | None = None, device: torch.device = CPU
    ) -> Tensor:
        raise QuantkitError(
            f"{info.name} of {self.path} was not downloaded: only its header was",
            "download the model and give its directory",
        )


class HeaderCheckpoint(Checkpoint):
    """A checkpoint whose weights are not on this machine; reading one raises QuantkitError."""

    has_weights = False
    shards_type = _NoShards


def remote_tensor(model: str, shard: str, name: str, entry: RemoteTensor) -> TensorInfo:
    """The tensor `name` of a Hub model as a header describes it. Raises QuantkitError for an
    invalid header."""
    if entry.dtype not in DTYPES:
        raise QuantkitError(
            f"{name} of hub model {model} has dtype {entry.dtype}",
            f"quantkit reads {', '.join(DTYPES)}",
        )
    tensor = TensorInfo(name, DTYPES[entry.dtype], entry.shape, shard, entry.offsets[0])
    if entry.offsets[1] - entry.offsets[0] != tensor.nbytes:
        raise QuantkitError(
            f"{shard} of hub model {model} has a header that makes no sense for {name}",
            "give another revision",
        )
    return tensor
