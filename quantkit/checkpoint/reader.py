"""Checkpoint: a directory of safetensors shards, checked whole from its headers, then read tensor
by tensor.

One Checkpoint may be read from several threads, and from processes forked after it was opened.
"""

import hashlib
import json
import math
from collections.abc import Iterable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quantkit.checkpoint.check import CACHE_PARTS, QuantizedLinear, check_ignored, quantized_linears
from quantkit.checkpoint.description import check_description
from quantkit.checkpoint.formats import detect_format, fp8_block
from quantkit.checkpoint.formats.base import CODES, SIDE_FILES, Axis, Format, StoredPart, lifted
from quantkit.checkpoint.header import TensorInfo, read_at, read_header
from quantkit.checkpoint.shards import CPU, Shards
from quantkit.checkpoint.stacked_layouts import unstacked
from quantkit.checkpoint.tensor_aliases import renamed
from quantkit.common.errors import QuantkitError
from quantkit.common.model_files import LARGEST, is_inside, is_there, read_json
from quantkit.grids.schemes import SCHEMES, Grid, Scheme
from quantkit.grids.weights import Weight

_INDEX = "model.safetensors.index.json"
_WHOLE = "model.safetensors"
_SAMPLES, _SAMPLE_BYTES = 64, 4096
_CHECKED = 2**26
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
WITHOUT_PICKLES = "convert them to safetensors first, as save_pretrained of transformers does"


def pickles_of(files: Iterable[str]) -> list[str]:
    """Those files of a folder that are pickles by their names."""
    return sorted(name for name in files if name.endswith(_PICKLES))


def told_pickles(pickles: list[str]) -> str:
    return f"pickle weights ({pickles[0]}), which can run code when opened"


class Checkpoint:
    """An opened checkpoint.

    path, config (config.json), side (parsed SIDE_FILES that exist), described (the file that says
    how it is quantized), format, grid (weight grid the config declares, if any), tensors (every
    stored tensor by name, experts that are stacked one by one), linears (the quantized ones by
    module name), has_weights (whether tensors can be read).
    """

    has_weights = True

    def __init__(
        self,
        path: Path,
        config: dict[str, Any],
        side: dict[str, Any],
        tensors: dict[str, TensorInfo],
    ) -> None:
        self.path = path
        self.config = config = lifted(config)
        self.side = side
        self.tensors = tensors = unstacked(config, renamed(config, tensors))
        self.described = check_description(path, config, side)
        try:
            self.format: Format = detect_format(self.described, config, side)
            self.grid: Grid | None = self.format.grid(config, side)
            ignored = self.format.ignored(config, side)
            self.linears: dict[str, QuantizedLinear] = quantized_linears(
                path, self.format, fp8_block.FORMAT, self.grid, ignored, tensors
            )
            check_ignored(self.described, self.format, ignored, self.linears)
        except QuantkitError as fault:
            if str(path) in fault.problem:
                raise
            raise QuantkitError(f"{self.described}: {fault.problem}", fault.remedy) from fault
        self._shards = Shards(path)

    @classmethod
    def open(cls, path: Path) -> "Checkpoint":
        """Check everything that headers and JSON files tell; reads no weight. Raises QuantkitError
        naming the first fault."""
        if not path.is_dir():
            raise QuantkitError(
                f"{path} is not a directory",
                "give the directory of a checkpoint, or a model's name",
            )
        config = read_json(path / "config.json")
        side = {
            name: read_json(path / name, LARGEST) for name in SIDE_FILES if is_there(path / name)
        }
        return cls(path, config, side, _read_tensors(path))

    @property
    def scheme(self) -> Scheme | None:
        """The first known scheme with this grid in this format; methods such as AWQ leave no trace
        in the tensors."""
        if self.grid is None:
            return None
        cache = self.format.cache_codes(self.side)
        alike = [
            s for s in SCHEMES.values() if s.weight == self.grid and self.format.name in s.formats
        ]
        return next((s for s in alike if s.cache == cache), next(iter(alike), None))

    @property
    def step_names(self) -> set[str]:
        """Tensors with the steps of a cache in 8 bits, where what describes the checkpoint tells of
        one."""
        if self.format.cache_codes(self.side) is None:
            return set()
        return {name for name in self.tensors if CACHE_PARTS.fullmatch(name)}

    @cached_property
    def fingerprint(self) -> str:
        """sha256 over config, headers, sizes, and samples of the contents of the shards: another
        value means another source.

        Contents are sampled, _SAMPLES blocks of _SAMPLE_BYTES a shard: hashing them all would read
        the whole checkpoint before the first weight is quantized. Times do not count, so that a
        shard that was lost may be downloaded again.
        """
        shards = sorted({tensor.shard for tensor in self.tensors.values()})
        facts = [(name, (self.path / name).stat().st_size, self._sampled(name)) for name in shards]
        layout = sorted(
            (t.name, str(t.dtype), t.shape, t.shard, t.offset) for t in self.tensors.values()
        )
        text = json.dumps([self.config, self.side, facts, layout], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()

    def _sampled(self, shard: str) -> str:
        last, digest = max((self.path / shard).stat().st_size - _SAMPLE_BYTES, 0), hashlib.sha256()
        buffer = memoryview(bytearray(_SAMPLE_BYTES))
        for number in range(_SAMPLES):
            digest.update(
                buffer[
                    : read_at(
                        self._shards.descriptor(shard), buffer, last * number // (_SAMPLES - 1)
                    )
                ]
            )
        return digest.hexdigest()

    def stored(self, name: str) -> TensorInfo:
        """The tensor `name` as the file has it: a view of a checkpoint gives another name to it, or
        shows a part."""
        return self._info(name)

    @property
    def whole(self) -> "Checkpoint":
        """Of a view, what it is a view of."""
        return self

    @property
    def pruned(self) -> set[str]:
        """Stored tensors that a view of a checkpoint leaves out."""
        return set()

    def has(self, name: str) -> bool:
        return name in self.tensors

    def shape(self, module: str) -> tuple[int, ...]:
        """Logical shape of a module's weight, (N, K) for a linear, whatever it is stored as."""
        if module in self.linears:
            return self.linears[module].shape
        return self._info(f"{module}.weight").shape

    def activation_bits(self, module: str) -> int:
        """Of what the linear `module` reads: 8 or 4 where it rounds that, else 16."""
        linear = self.linears.get(module)
        if linear is None:
            return 16
        own = linear.format.member(module)
        return own.activation_bits if linear.grid is None else own.activation_bits_of(linear.grid)

    def parts(self, module: str) -> tuple[str, ...]:
        """Names of the stored tensors that make up a module's weight."""
        if module in self.linears:
            return self.linears[module].tensors
        return (self._info(f"{module}.weight").name,)

    @property
    def bytes_read(self) -> int:
        """Of tensors, since this was opened."""
        return self._shards.bytes_read

    def weight(self, module: str, device: torch.device = CPU) -> Weight:
        """Weight of the linear `module`: decoded by the format on a device, or a plain tensor where
        it is unquantized."""
        if module not in self.linears:
            return self.read(f"{module}.weight", device)
        linear = self.linears[module]
        return linear.format.unpack(
            module, {name: self.read(name, device) for name in linear.tensors}
        )

    def share(
        self, module: str, axis: Axis, start: int, stop: int, device: torch.device = CPU
    ) -> tuple[Weight, int]:
        """Outputs (axis N) or inputs (K) start..stop of a linear, with their neighbours in the same
        stored word or group, and the first's number. Reads no more than their bytes where those lie
        in pieces of a size worth it (`shards`)."""
        linear = self.linears.get(module)
        if linear is None:
            parts = {f"{module}.weight": StoredPart(".weight", (), self.shape(module), axes=CODES)}
        else:
            parts = {
                module + part.suffix: part
                for part in linear.format.parts(module, linear.shape, linear.grid)
            }
        unit = math.lcm(
            *(
                along[1]
                for part in parts.values()
                for along in part.axes
                if along and along[0] == axis
            )
        )
        begin, end = (
            start // unit * unit,
            min(-(-stop // unit) * unit, self.shape(module)["NK".index(axis)]),
        )
        names = [f"{module}.weight"] if linear is None else linear.tensors
        tensors = {
            name: self._shards.read(self._info(name), parts[name].block(axis, begin, end), device)
            for name in names
        }
        return (
            tensors[f"{module}.weight"] if linear is None else linear.format.unpack(module, tensors)
        ), begin

    def read(self, name: str, device: torch.device = CPU) -> Tensor:
        """The stored tensor, in its stored dtype."""
        return self._shards.read(self._info(name), device=device)

    def will_read(self, name: str, device: torch.device = CPU) -> None:
        """Have a stored tensor brought from the disk while something else is done, for a device to
        be given it."""
        self._shards.will_read(self._info(name), device)

    def _info(self, name: str) -> TensorInfo:
        if name not in self.tensors:
            raise QuantkitError(
                f"{self.path} has no tensor {name}",
                "config.json may not be the one of these weights",
            )
        return self.tensors[name]


def check_finite(name: str, tensor: Tensor) -> None:
    """Raise QuantkitError naming the tensor if it holds NaN or infinity."""
    count = 0
    for part in tensor.reshape(-1).split(
        _CHECKED
    ):  # in parts: torch needs several copies of what it looks at
        values = part.float() if part.dtype.itemsize == 1 else part
        count += values.numel() - int(torch.isfinite(values).sum())
    if count:
        raise QuantkitError(
            f"{name} holds {count} values that are NaN or infinite",
            "the checkpoint is damaged: download it again",
        )


def _read_tensors(path: Path) -> dict[str, TensorInfo]:
    """All tensors of the shards: those of the index where there is one, else those of the only
    shard."""
    index_path = _find_index(path)
    if index_path is None:
        return {tensor.name: tensor for tensor in read_header(path, _only_shard(path))}
    weight_map = read_json(index_path, LARGEST).get("weight_map")
    if (
        not isinstance(weight_map, dict)
        or not weight_map
        or not all(isinstance(shard, str) for shard in weight_map.values())
    ):
        raise QuantkitError(f"{index_path} has no weight_map", "download or copy that file again")
    held = {
        shard: _read_shard(path, shard, index_path) for shard in sorted(set(weight_map.values()))
    }
    tensors: dict[str, TensorInfo] = {}
    for name, shard in weight_map.items():
        if name not in held[shard]:
            raise QuantkitError(
                f"{index_path} says that {name} is in {shard}, and it is not",
                "download the index and that shard again",
            )
        tensors[name] = held[shard][name]
    _add_unlisted(index_path, held, tensors)
    return tensors


def _add_unlisted(
    index_path: Path, held: Mapping[str, Mapping[str, TensorInfo]], tensors: dict[str, TensorInfo]
) -> None:
    """Tensors the index leaves out: ModelOpt's DeepSeek script lists no scales. Two of one name are
    refused."""
    listed = frozenset(tensors)
    for shard in held.values():
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
    if len(shards) == 1:
        return shards[0].name
    if is_there(
        path / _WHOLE
        # as transformers reads it; others are another copy, such as Mistral's
        # consolidated.safetensors
    ):
        return _WHOLE
    if shards:
        raise QuantkitError(
            f"{path} has {len(shards)} safetensors files and no {_INDEX}", "download the index too"
        )
    if pickles := pickles_of(file.name for file in path.iterdir()):
        raise QuantkitError(f"{path} holds {told_pickles(pickles)}", WITHOUT_PICKLES)
    raise QuantkitError(
        f"{path} holds no safetensors file", "give the directory of a complete checkpoint"
    )


def _read_shard(path: Path, shard: str, index_path: Path) -> dict[str, TensorInfo]:
    if not is_inside(shard) or not shard.endswith(".safetensors"):
        raise QuantkitError(
            f"{index_path} names the shard {shard!r}, which is no safetensors file beside it",
            "download the index again",
        )
    if not is_there(path / shard):
        raise QuantkitError(
            f"shard {shard} is missing from {path} ({index_path.name} names it)",
            "download it, or restore it, and run again",
        )
    return {tensor.name: tensor for tensor in read_header(path, shard)}
