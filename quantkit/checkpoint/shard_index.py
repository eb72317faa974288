"""Which shards a checkpoint has, and what their headers and the index say of its tensors."""

from collections.abc import Mapping
from pathlib import Path

from quantkit.checkpoint.containers import (
    check_download,
    numbering_fault,
)
from quantkit.checkpoint.header import TensorInfo, read_header
from quantkit.common.errors import QuantkitError
from quantkit.common.model_files import LARGEST, is_inside, is_there, read_json

_INDEX = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"


def read_tensors(path: Path) -> dict[str, TensorInfo]:
    """All tensors of the shards that the index names; without an index, of the only shard."""
    index_path = _find_index(path)
    if index_path is None:
        return {tensor.name: tensor for tensor in read_shard(path, _only_shard(path))}
    weight_map = read_json(index_path, LARGEST).get("weight_map")
    if (
        not isinstance(weight_map, dict)
        or not weight_map
        or not all(isinstance(shard, str) for shard in weight_map.values())
    ):
        raise QuantkitError(f"{index_path} has no weight_map", "download or copy that file again")
    shard_tensors = {
        shard: _read_shard(path, shard, index_path) for shard in sorted(set(weight_map.values()))
    }
    tensors: dict[str, TensorInfo] = {}
    for name, shard in weight_map.items():
        if name not in shard_tensors[shard]:
            raise QuantkitError(
                f"{index_path} says that {name} is in {shard}, and it is not",
                "download the index and that shard again",
            )
        tensors[name] = shard_tensors[shard][name]
    _add_tensors_missing_in_index(index_path, shard_tensors, tensors)
    return tensors


def _add_tensors_missing_in_index(
    index_path: Path,
    shard_tensors: Mapping[str, Mapping[str, TensorInfo]],
    tensors: dict[str, TensorInfo],
) -> None:
    """Add tensors that the index leaves out: ModelOpt's DeepSeek script lists no scales. Raises
    QuantkitError for two of one name."""
    listed = frozenset(tensors)
    for shard in shard_tensors.values():
        for tensor in shard.values():
            if tensor.name in listed:
                continue
            if tensor.name in tensors:
                first = tensors[tensor.name].shard
                raise QuantkitError(
                    f"{tensor.name} is in both {first} and {tensor.shard}, and {index_path} does "
                    "not say which",
                    "remove one",
                )
            tensors[tensor.name] = tensor


def _find_index(path: Path) -> Path | None:
    if is_there(path / _INDEX):
        return path / _INDEX
    found = sorted(path.glob("*.safetensors.index.json"))
    if len(found) > 1:
        raise QuantkitError(
            f"{path} has {len(found)} indexes: {', '.join(file.name for file in found)}",
            "keep the one of these weights",
        )
    return found[0] if found else None


def _only_shard(path: Path) -> str:
    shards = sorted(path.glob("*.safetensors"))
    problem, remedy = numbering_fault([file.name for file in shards])
    if len(shards) == 1 and not problem:
        return shards[0].name
    # As transformers reads it; other files are another copy, such as Mistral's
    # consolidated.safetensors.
    if is_there(path / SINGLE_FILE):
        return SINGLE_FILE
    if problem:
        raise QuantkitError(f"{path} holds {problem}, and there is no {_INDEX}", remedy)
    if shards:
        raise QuantkitError(
            f"{path} has {len(shards)} safetensors files and no {_INDEX}", "download the index too"
        )
    check_download(path, SINGLE_FILE)
    raise QuantkitError(
        f"{path} holds no safetensors file", "give the directory of a complete checkpoint"
    )


def read_shard(folder: Path, shard: str) -> list[TensorInfo]:
    """As `read_header`; of a shard that is still being downloaded the error says so."""
    try:
        found = read_header(folder, shard)
    except QuantkitError:
        check_download(folder, shard)
        raise
    if is_there(folder / f"{shard}.aria2"):  # which gives a file its whole size at once
        check_download(folder, shard)
    return found


def _read_shard(path: Path, shard: str, index_path: Path) -> dict[str, TensorInfo]:
    if not is_inside(shard) or not shard.endswith(".safetensors"):
        raise QuantkitError(
            f"{index_path} names the shard {shard!r}, which is not a safetensors file next to it",
            "download the index again",
        )
    if not is_there(path / shard):
        check_download(path, shard)
        raise QuantkitError(
            f"shard {shard} is missing from {path} ({index_path.name} names it)",
            "download it, or restore it, and run again",
        )
    return {tensor.name: tensor for tensor in read_shard(path, shard)}
