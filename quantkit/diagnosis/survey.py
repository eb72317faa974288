"""Reading a checkpoint that may be broken: everything that can be read, and a finding for
everything else.

`Checkpoint.open` stops at the first fault; this continues. Of a Hub model that is not on this
machine only headers and small files are read.
"""

import gc
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from quantkit.checkpoint.aux_files import JSON_AUX_FILES
from quantkit.checkpoint.containers import (
    check_download,
    foreign_files,
    numbering_fault,
)
from quantkit.checkpoint.formats.base import SIDE_FILES, lifted
from quantkit.checkpoint.header import TensorInfo
from quantkit.checkpoint.hub import fetch_small, find_local, read_shard_header
from quantkit.checkpoint.reader import remote_tensor
from quantkit.checkpoint.shard_index import SINGLE_FILE, read_shard
from quantkit.checkpoint.shards import Shards
from quantkit.checkpoint.stacked_experts import split_stacked_experts
from quantkit.checkpoint.tensor_aliases import aliases, renamed
from quantkit.common.errors import QuantkitError
from quantkit.common.model_files import LARGEST, is_inside, is_there, read_json, read_text
from quantkit.common.result import JsonObject
from quantkit.diagnosis import Findings

INDEX = "model.safetensors.index.json"
TEMPLATE = "chat_template.jinja"
_SETTINGS_FILES = (*JSON_AUX_FILES, "tokenizer.json")
"""JSON files next to the weights that are checked."""
_UNREADABLE = {"generation_config.json": "sampling-wrong", "chat_template.json": "template-broken"}
"""Findings of files that cannot be read, by name; of all others they are the tokenizer's."""
_OLDER_KEY = "compression_config"
BLOCK = 16 << 20
"""Bytes of an unquantized tensor in memory at a time."""
_NUM_THREADS = 8
"""Headers read concurrently: those on the Hub wait for the network."""
Header = Callable[[str], dict[str, TensorInfo]]
"""Shard name -> its tensors by name. Raises QuantkitError for a damaged shard."""
Holds = Callable[[str], bool]
"""Whether a shard exists that an index names in a subfolder."""


@dataclass
class Survey:
    """The content of a folder.

    tensors: by the name in the model's table (`renamed` maps names that differ to the stored ones).
    settings: tokenizer and generation files, parsed. template: the chat template file, None without
    one. names: of all files. copies: tensors that another shard also holds, as pairs of the index's
    entry and the other one, under the stored name.
    """

    path: Path
    config: JsonObject
    side: dict[str, JsonObject]
    tensors: dict[str, TensorInfo]
    settings: dict[str, JsonObject]
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
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def blocks(self, info: TensorInfo) -> Iterator[Tensor]:
        """The tensor in blocks of rows: BLOCK bytes, or one row. A vector is one block."""
        if len(info.shape) < 2:
            yield self.shards.read(info)
            return
        rest = tuple((0, size) for size in info.shape[1:])
        step = max(BLOCK // max(info.nbytes // max(info.shape[0], 1), 1), 1)
        for start in range(0, info.shape[0], step):
            yield self.shards.read(info, ((start, min(start + step, info.shape[0])), *rest))

    def rename(self, names: Mapping[str, str]) -> None:
        """names: stored name -> the table's. The stored bytes stay as they are."""
        self.tensors = renamed(self.tensors, names)
        self.renamed |= {new: old for old, new in names.items()}


def survey_model(model: str, findings: Findings) -> Survey:
    """Survey of a directory, a built-in name or a Hub id. Raises QuantkitError if there is no such
    model."""
    local = find_local(model)
    return _survey_hub(model, findings) if local is None else survey_folder(local, findings)


def survey_folder(path: Path, findings: Findings) -> Survey:
    """Survey of a folder, including the headers of all shards."""
    names = frozenset(file.name for file in path.iterdir())

    def holds(shard: str) -> bool:
        return is_there(path / shard)

    def header(shard: str) -> dict[str, TensorInfo]:
        return {info.name: info for info in read_shard(path, shard)}

    return _survey(path, path, names, holds, header, findings)


def _survey_hub(model: str, findings: Findings) -> Survey:
    """The same for a Hub model: small files are downloaded, headers read by range requests. Raises
    QuantkitError if it is no checkpoint."""
    folder, sizes = fetch_small(
        model, ("config.json", *SIDE_FILES, *_SETTINGS_FILES, INDEX, TEMPLATE)
    )
    config = _json(folder, "config.json", Findings())
    if found := foreign_files(sizes, config, model):
        raise QuantkitError(f"hub model {model} holds {found[0]}", found[1])

    def header(shard: str) -> dict[str, TensorInfo]:
        entries = read_shard_header(model, shard, sizes[shard])
        return {name: remote_tensor(model, shard, name, entry) for name, entry in entries.items()}

    names = frozenset(name for name in sizes if "/" not in name)
    return replace(
        _survey(Path(model), folder, names, sizes.__contains__, header, findings), has_weights=False
    )


def _survey(
    path: Path,
    folder: Path,
    names: frozenset[str],
    holds: Holds,
    header: Header,
    findings: Findings,
) -> Survey:
    """path: the model as named by the user; folder: of its small files; names: of all its files;
    holds: whether a subfolder has a shard."""
    config = _json(folder, "config.json", findings)
    if not config and not findings.has("config-unreadable"):
        findings.add("config-unreadable", "config.json", "it is an empty object")
    config = lifted(_with_newer_key(config, findings))
    side = {name: _json(folder, name, findings) for name in SIDE_FILES if name in names}
    settings = {
        name: _json(folder, name, findings, _UNREADABLE.get(name, "tokenizer-broken"))
        for name in _SETTINGS_FILES
        if name in names
    }
    template = _text(folder, TEMPLATE, findings) if TEMPLATE in names else None
    tensors, copies = _tensors(path, folder, names, holds, header, findings)
    side = {name: value for name, value in side.items() if value}
    return Survey(path, config, side, tensors, settings, template, names, True, copies)


def _with_newer_key(config: JsonObject, findings: Findings) -> JsonObject:
    """compressed-tensors before 0.5 wrote `compression_config`, which vLLM reads if there is no
    quantization_config."""
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
        evidence = (
            f"{_OLDER_KEY} differs from quantization_config, which engines read if both are there"
        )
        findings.add("description-old-key", "config.json", evidence)
    return {key: value for key, value in config.items() if key != _OLDER_KEY} | {
        "quantization_config": newer or older
    }


def _json(
    path: Path, name: str, findings: Findings, finding: str = "config-unreadable"
) -> JsonObject:
    try:
        return read_json(path / name, LARGEST)
    except QuantkitError as fault:
        findings.add(finding, name, fault.problem, fault.remedy)
        return {}


def _text(path: Path, name: str, findings: Findings) -> str | None:
    try:
        return read_text(path / name, LARGEST)
    except QuantkitError as fault:
        findings.add("template-broken", name, fault.problem)
        return None


def _tensors(
    path: Path,
    folder: Path,
    names: frozenset[str],
    holds: Holds,
    header: Header,
    findings: Findings,
) -> tuple[dict[str, TensorInfo], list[tuple[TensorInfo, TensorInfo]]]:
    """Tensors by name, and copies as in Survey."""
    weight_map = _weight_map(folder, findings)
    present = {name for name in names if name.endswith(".safetensors")}
    present |= {
        name for name in set(weight_map.values()) if "/" in name and is_inside(name) and holds(name)
    }
    # Names in an index that lead out of the folder are not shards of it.
    wanted = set(weight_map.values()) if weight_map else present
    if present and not wanted & present:
        evidence = f"it names {min(wanted)}, and none of the {len(present)} shards that are here"
        findings.add("index-wrong", INDEX, evidence)
        weight_map, wanted = {}, present
    elif not weight_map and present:
        problem, remedy = numbering_fault(present)
        if problem and "missing" in problem:
            findings.add("shard-missing", str(path), problem, remedy)
        elif len(present) > 1 and not findings.has("index-wrong"):
            evidence = problem or f"{len(present)} shards"
            findings.add("index-missing", INDEX, f"{evidence} and no index", remedy)
    elif unused := sorted(name for name in present - wanted if name.startswith("model")):
        findings.add("shards-unused", unused, "the index names none of them")
    for shard in sorted(wanted - present):
        of_shard = [name for name, where in weight_map.items() if where == shard]
        evidence = f"the index names it, with {len(of_shard)} tensors such as {of_shard[0]}"
        try:
            check_download(folder, shard)
            findings.add("shard-missing", shard, evidence)
        except QuantkitError as fault:
            findings.add("shard-missing", shard, fault.problem, fault.remedy)
    if not wanted:
        try:
            check_download(folder, SINGLE_FILE)
            problem, remedy = "there is no safetensors file", "give that of a complete checkpoint"
        except QuantkitError as fault:
            problem, remedy = fault.problem, fault.remedy
        findings.add("shard-missing", str(path), problem, remedy)
    shards = sorted(wanted & present)
    # Headers hold no cycles, and looking for some takes as long as reading 300,000 tensors.
    gc.disable()
    try:
        with ThreadPoolExecutor(_NUM_THREADS) as pool:
            read = list(pool.map(lambda shard: _header(shard, header), shards))
    finally:
        gc.enable()
    held: dict[str, dict[str, TensorInfo]] = {}
    for shard, found in zip(shards, read):
        held[shard] = {} if isinstance(found, QuantkitError) else found
        if isinstance(found, QuantkitError):
            findings.add("shard-damaged", shard, found.problem, found.remedy)
    _compare_index(weight_map, held, findings)
    return _merge_shards(weight_map, held, findings)


def _weight_map(path: Path, findings: Findings) -> dict[str, str]:
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
        if not findings.has("index-wrong"):
            findings.add("index-wrong", found[0].name, "it has no weight_map of names and shards")
        return {}
    return weight_map


def _header(shard: str, header: Header) -> dict[str, TensorInfo] | QuantkitError:
    try:
        return header(shard)
    except QuantkitError as fault:
        return fault


def _compare_index(
    weight_map: Mapping[str, str], held: Mapping[str, Mapping[str, TensorInfo]], findings: Findings
) -> None:
    everywhere = {name for tensors in held.values() for name in tensors}
    read = {shard for shard, tensors in held.items() if tensors}
    moved = [
        name
        for name, shard in weight_map.items()
        if shard in read and name not in held[shard] and name in everywhere
    ]
    missing_tensors = [
        name for name, shard in weight_map.items() if shard in read and name not in everywhere
    ]
    unindexed = [
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
    if missing_tensors:
        findings.add(
            "index-wrong",
            missing_tensors,
            f"the index says {weight_map[missing_tensors[0]]}, and no shard holds it",
            "download that shard and the index",
        )
        findings.are_lost = True
    if unindexed:
        findings.add(
            "index-wrong",
            unindexed,
            f"{len(unindexed)} tensors are stored and missing from the index, so "
            "transformers ignores them",
        )


def _merge_shards(
    weight_map: Mapping[str, str], held: Mapping[str, Mapping[str, TensorInfo]], findings: Findings
) -> tuple[dict[str, TensorInfo], list[tuple[TensorInfo, TensorInfo]]]:
    tensors: dict[str, TensorInfo] = {}
    twice: dict[str, list[tuple[str, str]]] = {"tensor-twice": []}
    for shard, own in held.items():
        for name, tensor in own.items():
            if name in tensors and name not in weight_map:
                evidence = f"in {tensors[name].shard} and in {shard}, and no index says which"
                twice["tensor-twice"].append((name, evidence))
            if name not in tensors or weight_map.get(name) == shard:
                tensors[name] = tensor
    findings.add_groups(twice)
    copies = [
        (tensors[name], tensor)
        for shard, own in held.items()
        for name, tensor in own.items()
        if name in weight_map and tensors[name].shard != shard
    ]
    return tensors, copies


def compare_copy_headers(survey: Survey, findings: Findings) -> None:
    """Tensors that two shards hold with different dtype or shape. transformers reads the one that
    the index names; vLLM and SGLang keep the last one they read."""
    _report([pair for pair in survey.copies if not _same_header(*pair)], "dtype or shape", findings)


def compare_copy_values(survey: Survey, findings: Findings) -> None:
    """Tensors that two shards hold with the same dtype and shape but different bytes."""
    alike = (pair for pair in survey.copies if _same_header(*pair))
    _report([pair for pair in alike if _bytes_differ(survey, *pair)], "values", findings)


def _same_header(indexed: TensorInfo, other: TensorInfo) -> bool:
    return (indexed.dtype, indexed.shape) == (other.dtype, other.shape)


def _bytes_differ(survey: Survey, indexed: TensorInfo, other: TensorInfo) -> bool:
    return not all(
        torch.equal(*(part.view(-1).view(torch.uint8) for part in pair))
        for pair in zip(survey.blocks(indexed), survey.blocks(other))
    )


def _report(
    differing: Iterable[tuple[TensorInfo, TensorInfo]], what: str, findings: Findings
) -> None:
    """One finding per pair of shards, with all tensors that both hold."""
    by_shards: dict[tuple[str, str], list[str]] = {}
    for indexed, other in differing:
        by_shards.setdefault((indexed.shard, other.shard), []).append(other.name)
    for (named_shard, other_shard), names in by_shards.items():
        findings.add(
            "shards-disagree",
            names,
            f"the index says {named_shard}, and {other_shard} holds other {what} under the "
            "same name",
        )
