"""Opening a checkpoint that may be broken: what can be read of it, and a finding for all that
cannot.

`Checkpoint.open` stops at the first fault. Here every file is read that can be, and what is wrong
is written down. A hub model that is not on this machine is read by its headers alone.
"""

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from quantkit.checkpoint.aux_files import JSON_AUX_FILES
from quantkit.checkpoint.formats.base import SIDE_FILES
from quantkit.checkpoint.header import TensorInfo, read_header
from quantkit.checkpoint.hub import fetch_small, find_local, read_shard_header
from quantkit.checkpoint.reader import PICKLE_REMEDY, describe_pickles, find_pickles
from quantkit.checkpoint.remote import remote_tensor
from quantkit.checkpoint.shards import Shards
from quantkit.checkpoint.stacked_experts import split_stacked_experts
from quantkit.checkpoint.tensor_aliases import aliases
from quantkit.common.errors import QuantkitError
from quantkit.common.model_files import LARGEST, is_inside, is_there, read_json, read_text
from quantkit.diagnosis.findings import DiagnosisFindings

INDEX = "model.safetensors.index.json"
TEMPLATE = "chat_template.jinja"
_READ = (*JSON_AUX_FILES, "tokenizer.json")
"""JSON files beside the weights that are looked at."""
_OLDER_KEY = "compression_config"
BLOCK = 16 << 20
"""Bytes of a plain tensor in memory at a time."""
_AT_ONCE = 8
"""Headers that are read at a time: those of the hub wait for the network."""
Header = Callable[[str], dict[str, TensorInfo]]
"""A shard's name -> its tensors by name. Raises QuantkitError for a damaged one."""
Holds = Callable[[str], bool]
"""Whether a shard that an index names in a folder below is there."""


@dataclass
class Survey:
    """What a folder holds. tensors: by the name the model's table has for them (`renamed` has the
    stored name of those that differ).

    settings: tokenizer and generation files that exist, parsed. template: the chat template's own
    file, None without. names: of all files.
    copies: tensors that another shard holds too, each as the index names it and as that shard has
    it, under its stored name.
    """

    path: Path
    config: dict[str, Any]
    side: dict[str, dict[str, Any]]
    tensors: dict[str, TensorInfo]
    settings: dict[str, dict[str, Any]]
    template: str | None
    names: frozenset[str]
    has_weights: bool
    copies: list[tuple[TensorInfo, TensorInfo]]

    def __post_init__(self) -> None:
        self.shards = Shards(self.path)
        self.renamed: dict[str, str] = {}
        self.rename(aliases(self.config, self.tensors))
        self.tensors = split_stacked_experts(self.config, self.tensors)

    @property
    def nbytes(self) -> int:
        """Of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def blocks(self, info: TensorInfo) -> Iterator[Tensor]:
        """A stored tensor, some of its rows at a time: BLOCK bytes, or one row. A vector whole."""
        if len(info.shape) < 2:
            yield self.shards.read(info)
            return
        rest = tuple((0, size) for size in info.shape[1:])
        step = max(BLOCK // max(info.nbytes // max(info.shape[0], 1), 1), 1)
        for start in range(0, info.shape[0], step):
            yield self.shards.read(info, ((start, min(start + step, info.shape[0])), *rest))

    def rename(self, names: Mapping[str, str]) -> None:
        """names: stored name -> the table's. The bytes stay where they are."""
        self.tensors = {
            names.get(name, name): replace(info, name=names.get(name, name))
            for name, info in self.tensors.items()
        }
        self.renamed |= {new: old for old, new in names.items()}


def survey_model(model: str, findings: DiagnosisFindings) -> Survey:
    """Look at a directory, a built-in name or a hub id. Raises QuantkitError where there is nothing
    to look at."""
    local = find_local(model)
    return _of_hub(model, findings) if local is None else of_folder(local, findings)


def of_folder(path: Path, findings: DiagnosisFindings) -> Survey:
    """Every file of a folder that tells something, the headers of all shards among them."""
    names = frozenset(file.name for file in path.iterdir())

    def holds(shard: str) -> bool:
        return is_there(path / shard)

    def header(shard: str) -> dict[str, TensorInfo]:
        return {info.name: info for info in read_header(path, shard)}

    return _looked_at(path, path, names, holds, header, findings)


def _of_hub(model: str, findings: DiagnosisFindings) -> Survey:
    """The same of a hub model: small files whole, headers by range requests."""
    folder, sizes = fetch_small(model, ("config.json", *SIDE_FILES, *_READ, INDEX, TEMPLATE))

    def header(shard: str) -> dict[str, TensorInfo]:
        entries = read_shard_header(model, shard, sizes[shard])
        return {name: remote_tensor(model, shard, name, entry) for name, entry in entries.items()}

    names = frozenset(name for name in sizes if "/" not in name)
    return replace(
        _looked_at(Path(model), folder, names, sizes.__contains__, header, findings),
        has_weights=False,
    )


def _looked_at(
    path: Path,
    folder: Path,
    names: frozenset[str],
    holds: Holds,
    header: Header,
    findings: DiagnosisFindings,
) -> Survey:
    """path: the model as it is told; folder: where its small files are; names: of all its files;
    holds: whether a folder below has one."""
    config = _json(folder, "config.json", findings)
    if not config and not findings.has("config-unreadable"):
        findings.add("config-unreadable", "config.json", "it is an empty object")
    config = _with_newer_key(config, findings)
    side = {name: _json(folder, name, findings) for name in SIDE_FILES if name in names}
    settings = {
        name: _json(folder, name, findings, "tokenizer-broken") for name in _READ if name in names
    }
    template = _text(folder, TEMPLATE, findings) if TEMPLATE in names else None
    tensors, copies = _tensors(path, folder, names, holds, header, findings)
    side = {name: value for name, value in side.items() if value}
    return Survey(path, config, side, tensors, settings, template, names, True, copies)


def _with_newer_key(config: dict[str, Any], findings: DiagnosisFindings) -> dict[str, Any]:
    """Releases of compressed-tensors before 0.5 wrote `compression_config`. vLLM reads it where
    there is no quantization_config."""
    older = config.get(_OLDER_KEY)
    if not isinstance(older, dict):
        return config
    newer = config.get("quantization_config")
    if newer is None:
        findings.add(
            "description-old-key",
            "config.json",
            f"the description is under {_OLDER_KEY}, which vLLM reads, and transformers does not",
        )
    elif newer != older:
        told = (
            f"{_OLDER_KEY} says something else than quantization_config, which engines read "
            "where both are there"
        )
        findings.add("description-old-key", "config.json", told)
    return {key: value for key, value in config.items() if key != _OLDER_KEY} | {
        "quantization_config": newer or older
    }


def _json(
    path: Path, name: str, findings: DiagnosisFindings, finding: str = "config-unreadable"
) -> dict[str, Any]:
    try:
        return read_json(path / name, LARGEST)
    except QuantkitError as fault:
        findings.add(finding, name, fault.problem)
        return {}


def _text(path: Path, name: str, findings: DiagnosisFindings) -> str:
    try:
        return read_text(path / name, LARGEST)
    except QuantkitError as fault:
        findings.add("tokenizer-broken", name, fault.problem)
        return ""


def _tensors(
    path: Path,
    folder: Path,
    names: frozenset[str],
    holds: Holds,
    header: Header,
    findings: DiagnosisFindings,
) -> tuple[dict[str, TensorInfo], list[tuple[TensorInfo, TensorInfo]]]:
    """Tensors by name, and copies as Survey has them."""
    weight_map = _weight_map(folder, findings)
    there = {name for name in names if name.endswith(".safetensors")}
    there |= {
        name for name in set(weight_map.values()) if "/" in name and is_inside(name) and holds(name)
    }
    # Names of an index that lead elsewhere are no shards of this folder.
    wanted = set(weight_map.values()) if weight_map else there
    missing = sorted(shard for shard in wanted if shard not in there)
    for shard in missing:
        lost = [name for name, where in weight_map.items() if where == shard]
        findings.add(
            "shard-missing",
            shard,
            f"the index names it, with {len(lost)} tensors such as {lost[0]}",
        )
    if not weight_map and len(there) > 1:
        findings.add("index-missing", INDEX, f"{len(there)} shards and no index")
    if not wanted:
        pickles = find_pickles(names)
        told = (
            f"no safetensors file is there{f', but {describe_pickles(pickles)}' if pickles else ''}"
        )
        findings.add(
            "shard-missing",
            str(path),
            told,
            PICKLE_REMEDY if pickles else "give the directory of a complete checkpoint",
        )
    shards = sorted(wanted & there)
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        read = list(pool.map(lambda shard: _header(shard, header), shards))
    held: dict[str, dict[str, TensorInfo]] = {}
    for shard, found in zip(shards, read):
        held[shard] = {} if isinstance(found, QuantkitError) else found
        if isinstance(found, QuantkitError):
            findings.add("shard-damaged", shard, found.problem)
    _compare_index(weight_map, held, findings)
    return _joined(weight_map, held, findings)


def _weight_map(path: Path, findings: DiagnosisFindings) -> dict[str, str]:
    found = (
        [path / INDEX] if is_there(path / INDEX) else sorted(path.glob("*.safetensors.index.json"))
    )
    if not found:
        return {}
    index = _json(path, found[0].name, findings, "index-wrong")
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not all(
        isinstance(shard, str) for shard in weight_map.values()
    ):
        if index:
            findings.add("index-wrong", found[0].name, "it has no weight_map of names and shards")
        return {}
    return weight_map


def _header(shard: str, header: Header) -> dict[str, TensorInfo] | QuantkitError:
    try:
        return header(shard)
    except QuantkitError as fault:
        return fault


def _compare_index(
    weight_map: Mapping[str, str],
    held: Mapping[str, Mapping[str, TensorInfo]],
    findings: DiagnosisFindings,
) -> None:
    everywhere = {name for tensors in held.values() for name in tensors}
    read = {shard for shard, tensors in held.items() if tensors}
    moved = [
        name
        for name, shard in weight_map.items()
        if shard in read and name not in held[shard] and name in everywhere
    ]
    lost = [name for name, shard in weight_map.items() if shard in read and name not in everywhere]
    left_out = [
        name
        for tensors in held.values()
        for name in tensors
        if weight_map and name not in weight_map
    ]
    if moved:
        findings.add(
            "index-wrong",
            moved,
            f"the index says {weight_map[moved[0]]}, and another shard holds it",
        )
    if lost:
        findings.add(
            "index-wrong",
            lost,
            f"the index says {weight_map[lost[0]]}, and no shard holds it",
            "download that shard and the index",
        )
    if left_out:
        findings.add(
            "index-wrong",
            left_out,
            f"{len(left_out)} tensors are stored, and the index leaves them out: so does "
            "transformers",
        )


def _joined(
    weight_map: Mapping[str, str],
    held: Mapping[str, Mapping[str, TensorInfo]],
    findings: DiagnosisFindings,
) -> tuple[dict[str, TensorInfo], list[tuple[TensorInfo, TensorInfo]]]:
    tensors: dict[str, TensorInfo] = {}
    for shard, own in held.items():
        for name, tensor in own.items():
            if name in tensors and name not in weight_map:
                findings.add(
                    "tensor-twice",
                    name,
                    f"in {tensors[name].shard} and in {shard}, and no index says which",
                )
            if name not in tensors or weight_map.get(name) == shard:
                tensors[name] = tensor
    copies = [
        (tensors[name], tensor)
        for shard, own in held.items()
        for name, tensor in own.items()
        if name in weight_map and tensors[name].shard != shard
    ]
    return tensors, copies
