"""Faults of the files themselves: shards, index, config.json."""

import json
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from faulty.contents import SHARD, Contents
from faulty.fault import fault


@fault("shard-missing")
def shard_is_missing(c: Contents) -> None:
    c.broken["shard"] = lambda folder: (folder / SHARD.format(2)).unlink()


@fault("shard-damaged")
def shard_is_cut_short(c: Contents) -> None:
    def cut(folder: Path) -> None:
        file = folder / SHARD.format(1)
        file.write_bytes(file.read_bytes()[:-1000])

    c.broken["shard"] = cut


@fault("shard-damaged")
def header_is_garbled(c: Contents) -> None:
    def garble(folder: Path) -> None:
        file = folder / SHARD.format(1)
        content = bytearray(file.read_bytes())
        content[10:14] = b"\xff\xfe\x00\x01"
        file.write_bytes(bytes(content))

    c.broken["shard"] = garble


@fault("shard-damaged")
def shard_is_a_pointer(c: Contents) -> None:
    text = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5000000000\n"
    c.broken["shard"] = lambda folder: (folder / SHARD.format(2)).write_text(text) and None


@fault("index-missing")
def index_is_missing(c: Contents) -> None:
    c.broken["index"] = lambda folder: (folder / "model.safetensors.index.json").unlink()


def edit_index(edit: Callable[[dict[str, str]], None]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        file = folder / "model.safetensors.index.json"
        index = json.loads(file.read_text())
        edit(index["weight_map"])
        file.write_text(json.dumps(index))

    return apply


@fault("index-wrong")
def index_names_the_wrong_shard(c: Contents) -> None:
    def edit(weight_map: dict[str, str]) -> None:
        name = next(name for name, shard in weight_map.items() if shard == SHARD.format(1))
        weight_map[name] = SHARD.format(2)

    c.broken["index"] = edit_index(edit)


@fault("index-wrong")
def index_lists_what_is_nowhere(c: Contents) -> None:
    c.broken["index"] = edit_index(
        lambda weight_map: weight_map.update({"model.layers.0.extra.weight": SHARD.format(1)})
    )


@fault("config-unreadable")
def config_is_no_json(c: Contents) -> None:
    c.broken["config"] = lambda folder: (
        (folder / "config.json").write_text("{'model_type': ") and None
    )


@fault("index-wrong")
def the_index_leaves_tensors_out(c: Contents) -> None:
    def edit(weight_map: dict[str, str]) -> None:
        for name in list(weight_map)[3:6]:
            del weight_map[name]

    c.broken["index"] = edit_index(edit)


def copied(change: Callable[[Tensor], Tensor]) -> Callable[[Path], None]:
    """The last tensor of the second shard also in the first, changed; the index does not list the
    copy."""

    def apply(folder: Path) -> None:
        tensors = load_file(folder / SHARD.format(1))
        name, tensor = list(load_file(folder / SHARD.format(2)).items())[-1]
        save_file(
            tensors | {name: change(tensor)}, folder / SHARD.format(1), metadata={"format": "pt"}
        )

    return apply


@fault("shards-disagree", depth="tensors")
def two_shards_hold_other_values(c: Contents) -> None:
    def invert_one_byte(tensor: Tensor) -> Tensor:
        changed = tensor.clone()
        changed.view(-1).view(torch.uint8)[-1] ^= 1
        return changed

    c.broken["shard"] = copied(invert_one_byte)


@fault("shards-disagree")
def two_shards_hold_other_shapes(c: Contents) -> None:
    c.broken["shard"] = copied(lambda tensor: tensor.reshape(1, *tensor.shape).clone())


@fault("tensor-twice")
def two_shards_hold_a_tensor_and_no_index_says_which(c: Contents) -> None:
    def without_index(folder: Path) -> None:
        copied(torch.clone)(folder)
        (folder / "model.safetensors.index.json").unlink()

    c.broken["shard"] = without_index


@fault("adapter-beside")
def an_adapter_lies_beside(c: Contents) -> None:
    c.files["adapter_config.json"] = (
        b'{"peft_type": "LORA", "base_model_name_or_path": "someone/base"}'
    )
