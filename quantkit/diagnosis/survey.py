"""Opening a checkpoint that may be broken: what can be read of it, and a finding for all that cannot.

`Checkpoint.open` stops at the first fault. Here every file is read that can be, and what is wrong is written down. A hub model that is
not on this machine is read by its headers alone.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from quantkit.checkpoint.companions import SETTINGS
from quantkit.checkpoint.formats.base import SIDE_FILES
from quantkit.checkpoint.header import TensorInfo, read_header
from quantkit.checkpoint.remote import remote_tensor
from quantkit.checkpoint.shards import Shards
from quantkit.checkpoint.stacked import unstacked
from quantkit.diagnosis.findings import DiagnosisFindings
from quantkit.errors import QuantkitError
from quantkit.hub import find_local, read_headers
from quantkit.model_files import LARGEST, is_there, read_json, read_text

INDEX = "model.safetensors.index.json"
TEMPLATE = "chat_template.jinja"
_READ = (*SETTINGS, "tokenizer.json")
"""JSON files beside the weights that are looked at."""


@dataclass
class Survey:
    """What a folder holds. tensors: by the name the model's table has for them (`renamed` has the stored name of those that differ).

    settings: tokenizer and generation files that exist, parsed. template: the chat template's own file, None without. names: of all files.
    """

    path: Path
    config: dict[str, Any]
    side: dict[str, dict[str, Any]]
    tensors: dict[str, TensorInfo]
    settings: dict[str, dict[str, Any]]
    template: str | None
    names: frozenset[str]
    has_weights: bool

    def __post_init__(self) -> None:
        self.tensors = unstacked(self.config, self.tensors)
        self.shards = Shards(self.path)
        self.renamed: dict[str, str] = {}

    @property
    def nbytes(self) -> int:
        """Of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def rename(self, names: Mapping[str, str]) -> None:
        """names: stored name -> the table's. The bytes stay where they are."""
        self.tensors = {names.get(name, name): replace(info, name=names.get(name, name)) for name, info in self.tensors.items()}
        self.renamed |= {new: old for old, new in names.items()}


def survey(model: str, findings: DiagnosisFindings) -> Survey:
    """Look at a directory, a built-in name or a hub id. Raises QuantkitError where there is nothing to look at."""
    local = find_local(model)
    return _of_hub(model, findings) if local is None else of_folder(local, findings)


def of_folder(path: Path, findings: DiagnosisFindings) -> Survey:
    """Every file of a folder that tells something, the headers of all shards among them."""
    names = frozenset(file.name for file in path.iterdir())
    config = _json(path, "config.json", findings)
    side = {name: _json(path, name, findings) for name in SIDE_FILES if name in names}
    settings = {name: _json(path, name, findings, "tokenizer-broken") for name in _READ if name in names}
    template = _text(path, TEMPLATE, findings) if TEMPLATE in names else None
    tensors = _tensors(path, findings)
    return Survey(path, config, {name: value for name, value in side.items() if value}, tensors, settings, template, names, True)


def _of_hub(model: str, findings: DiagnosisFindings) -> Survey:
    remote = read_headers(model, ("config.json", *SIDE_FILES, *_READ))
    if "config.json" not in remote.files:
        findings.add("config-unreadable", "config.json", f"hub model {model} has no config.json")
    tensors: dict[str, TensorInfo] = {}
    for shard, entries in remote.shards.items():
        twice = [name for name in entries if name in tensors]
        if twice:
            findings.add("tensor-twice", twice, f"in {tensors[twice[0]].shard} and in {shard}")
        tensors |= {name: remote_tensor(model, shard, name, entry) for name, entry in entries.items()}
    side = {name: remote.files[name] for name in SIDE_FILES if name in remote.files}
    settings = {name: remote.files[name] for name in _READ if name in remote.files}
    return Survey(Path(model), remote.files.get("config.json", {}), side, tensors, settings, None, remote.names, False)


def _json(path: Path, name: str, findings: DiagnosisFindings, finding: str = "config-unreadable") -> dict[str, Any]:
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


def _tensors(path: Path, findings: DiagnosisFindings) -> dict[str, TensorInfo]:
    weight_map = _weight_map(path, findings)
    there = {file.name for file in path.glob("*.safetensors")}
    # Names of an index that lead elsewhere are no shards of this folder.
    wanted = set(weight_map.values()) if weight_map else there
    missing = sorted(shard for shard in wanted if shard not in there)
    for shard in missing:
        lost = [name for name, where in weight_map.items() if where == shard]
        findings.add("shard-missing", shard, f"the index names it, with {len(lost)} tensors such as {lost[0]}")
    if not weight_map and len(there) > 1:
        findings.add("index-missing", INDEX, f"{len(there)} shards and no index")
    if not wanted:
        findings.add("shard-missing", str(path), "no safetensors file is there", "give the directory of a complete checkpoint")
    held = {shard: _header(path, shard, findings) for shard in sorted(wanted & there)}
    _compare_index(weight_map, held, findings)
    return _joined(weight_map, held, findings)


def _weight_map(path: Path, findings: DiagnosisFindings) -> dict[str, str]:
    found = [path / INDEX] if is_there(path / INDEX) else sorted(path.glob("*.safetensors.index.json"))
    if not found:
        return {}
    index = _json(path, found[0].name, findings, "index-wrong")
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(shard, str) for shard in weight_map.values()):
        if index:
            findings.add("index-wrong", found[0].name, "it has no weight_map of names and shards")
        return {}
    return weight_map


def _header(path: Path, shard: str, findings: DiagnosisFindings) -> dict[str, TensorInfo]:
    try:
        return {tensor.name: tensor for tensor in read_header(path / shard)}
    except QuantkitError as fault:
        findings.add("shard-damaged", shard, fault.problem)
        return {}


def _compare_index(weight_map: Mapping[str, str], held: Mapping[str, Mapping[str, TensorInfo]], findings: DiagnosisFindings) -> None:
    everywhere = {name for tensors in held.values() for name in tensors}
    read = {shard for shard, tensors in held.items() if tensors}
    moved = [name for name, shard in weight_map.items() if shard in read and name not in held[shard] and name in everywhere]
    lost = [name for name, shard in weight_map.items() if shard in read and name not in everywhere]
    if moved:
        findings.add("index-wrong", moved, f"the index says {weight_map[moved[0]]}, and another shard holds it")
    if lost:
        findings.add(
            "index-wrong", lost, f"the index says {weight_map[lost[0]]}, and no shard holds it", "download that shard and the index"
        )


def _joined(
    weight_map: Mapping[str, str], held: Mapping[str, Mapping[str, TensorInfo]], findings: DiagnosisFindings
) -> dict[str, TensorInfo]:
    tensors: dict[str, TensorInfo] = {}
    for shard, own in held.items():
        for name, tensor in own.items():
            if name not in tensors or weight_map.get(name) == shard:
                if name in tensors and name not in weight_map:
                    findings.add("tensor-twice", name, f"in {tensors[name].shard} and in {shard}, and no index says which")
                tensors[name] = tensor
            elif name not in weight_map:
                findings.add("tensor-twice", name, f"in {tensors[name].shard} and in {shard}, and no index says which")
    return tensors
