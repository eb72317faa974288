"""Checkpoint: a directory of safetensors shards, validated from its headers, then read tensor by
tensor.

A Checkpoint may be read from several threads, and from processes forked after it was opened.

Opens a checkpoint's headers without its weights: of a directory, or of a Hub model that is not
downloaded.
"""

import copy
import hashlib
import json
import math
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from quantkit.checkpoint.check import (
    CACHE_SCALES,
    QuantizedLinear,
    check_description,
    check_ignored,
    quantized_linears,
)
from quantkit.checkpoint.containers import (
    check_files,
    check_readable,
)
from quantkit.checkpoint.formats import detect_format, fp8_block
from quantkit.checkpoint.formats.base import CODES, SIDE_FILES, Axis, Format, StoredPart, lifted
from quantkit.checkpoint.header import DTYPES, TensorInfo, read_at
from quantkit.checkpoint.hub import find_local, read_headers
from quantkit.checkpoint.shard_index import read_tensors
from quantkit.checkpoint.shards import CPU, Block, Shards, StoredTensor
from quantkit.checkpoint.stacked_experts import Stack, split_stacked_experts
from quantkit.checkpoint.tensor_aliases import apply_aliases
from quantkit.common.errors import QuantkitError
from quantkit.common.model_files import LARGEST, is_there, read_json
from quantkit.grids.base import Grid, Weight
from quantkit.grids.schemes import SCHEMES, Scheme

if TYPE_CHECKING:
    from huggingface_hub.utils import TensorInfo as HubTensor

_SAMPLES, _SAMPLE_BYTES = 64, 4096
_FINITE_CHUNK = 2**22
_PUBLISHED_VARIANTS = {"kimi_k3": "mxfp4-pack-quantized"}
"""By model_type of config.json, the variant of compressed-tensors of a release."""


class Checkpoint:
    """An opened checkpoint.

    path; config (config.json); side (parsed SIDE_FILES that exist); description_file (the file that
    describes the quantization); format; grid (weight grid that the config declares, if any);
    tensors (every stored tensor by name, stacked experts split into one tensor per expert); linears
    (quantized linears by module name); has_weights (whether tensors can be read).
    """

    has_weights = True
    shards_type: ClassVar[type[Shards]] = Shards

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
        self.tensors = tensors = split_stacked_experts(config, apply_aliases(config, tensors))
        check_readable(path, config, tensors.values())
        self.description_file = check_description(path, config, side)
        try:
            self.format: Format = detect_format(self.description_file, config, side)
            self.grid: Grid | None = self.format.grid(config, side)
            ignored = self.format.ignored(config, side)
            self.linears: dict[str, QuantizedLinear] = quantized_linears(
                path, self.format, fp8_block.FORMAT, self.grid, ignored, tensors
            )
            check_ignored(self.description_file, self.format, ignored, self.linears)
            self._input_rotations = self.format.input_rotations(config)
        except QuantkitError as fault:
            if str(path) in fault.problem:
                raise
            raise QuantkitError(
                f"{self.description_file}: {fault.problem}", fault.remedy
            ) from fault
        self._shards = self.shards_type(path)

    @classmethod
    def open(cls, path: Path) -> "Checkpoint":
        """Validate headers and JSON files without reading a weight. Raises QuantkitError naming the
        first fault."""
        if not path.is_dir():
            raise QuantkitError(
                f"{path} is not a directory",
                "give the directory of a checkpoint, or a model's name",
            )
        check_files(path)
        config = read_json(path / "config.json")
        side = {
            name: read_json(path / name, LARGEST) for name in SIDE_FILES if is_there(path / name)
        }
        return cls(path, config, side, read_tensors(path))

    @property
    def scheme(self) -> Scheme | None:
        """The first known scheme with this grid, in groups of whatever size, and this format;
        methods such as AWQ leave no trace in the tensors."""
        if self.grid is None:
            return None
        cache = self.format.cache_codes(self.side)
        size = self.grid.group_size
        candidates = [
            s
            for s in SCHEMES.values()
            if self.grid
            in (s.weight, s.weight.group_size and size and s.weight.with_group_size(size))
            and self.format.name in s.formats
        ]
        return next((s for s in candidates if s.cache == cache), next(iter(candidates), None))

    @property
    def is_source(self) -> bool:
        """Whether its format is one in which those who trained such a model publish it, so that it
        may be quantized further; of a release's variant, if only routed experts are packed."""
        published = _PUBLISHED_VARIANTS.get(str(self.config.get("model_type")))
        return self.format.is_source or self.format.variant == published

    @property
    def cache_scale_names(self) -> set[str]:
        """Tensors with the scales of an 8-bit KV cache, if the checkpoint declares one."""
        if self.format.cache_codes(self.side) is None:
            return set()
        return {name for name in self.tensors if CACHE_SCALES.fullmatch(name)}

    @cached_property
    def fingerprint(self) -> str:
        """sha256 over config, headers, sizes, and samples of the shards' contents; identifies the
        source.

        _SAMPLES blocks of _SAMPLE_BYTES are sampled per shard, because hashing everything would
        read the whole checkpoint before the first weight is quantized. Times are not included, so
        that a lost shard may be downloaded again.
        """
        shards = sorted({tensor.shard for tensor in self.tensors.values()})
        facts = [(name, (self.path / name).stat().st_size, self._sample(name)) for name in shards]
        layout = sorted(
            (t.name, str(t.dtype), t.shape, t.shard, t.offset) for t in self.tensors.values()
        )
        text = json.dumps([self.config, self.side, facts, layout], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()

    def _sample(self, shard: str) -> str:
        last, digest = max((self.path / shard).stat().st_size - _SAMPLE_BYTES, 0), hashlib.sha256()
        buffer = memoryview(bytearray(_SAMPLE_BYTES))
        descriptor = self._shards.descriptor(shard)
        for number in range(_SAMPLES):
            count = read_at(descriptor, buffer, last * number // (_SAMPLES - 1))
            digest.update(buffer[:count])
        return digest.hexdigest()

    def stored(self, name: str) -> tuple[TensorInfo, ...]:
        """What the file has of the tensor `name`: a pruned view shows it under another name or in
        part, and a rotated one unpacked."""
        return (self._info(name),)

    @property
    def source(self) -> "Checkpoint":
        """The underlying checkpoint of a pruned or rotated view."""
        return self

    def is_rotated(self, name: str) -> bool:
        """Whether a view shows the tensor rotated."""
        return False

    def input_rotation(self, module: str) -> int:
        """As `Format.input_rotations`."""
        return self._input_rotations(module)

    @property
    def pruned(self) -> set[str]:
        """Stored tensors that a pruned view leaves out."""
        return set()

    def has(self, name: str) -> bool:
        return name in self.tensors

    def shape(self, module: str) -> tuple[int, ...]:
        """Logical shape of a module's weight, (N, K) for a linear, however it is stored."""
        if module in self.linears:
            return self.linears[module].shape
        return self._info(f"{module}.weight").shape

    def activation_bits(self, module: str) -> int:
        """Bits of a linear's input activations: 8 or 4 where they are quantized, else 16."""
        linear = self.linears.get(module)
        if linear is None:
            return 16
        own = linear.format.member(module)
        return own.activation_bits if linear.grid is None else own.activation_bits_of(linear.grid)

    def is_on(self, module: str, grid: Grid) -> bool:
        """Whether a linear is stored on the grid: a copy of it is exact."""
        linear = self.linears.get(module)
        return linear is not None and linear.grid == grid

    def parts(self, module: str) -> tuple[str, ...]:
        """Names of the stored tensors of a module's weight."""
        if module in self.linears:
            return self.linears[module].tensors
        return (self._info(f"{module}.weight").name,)

    @property
    def bytes_read(self) -> int:
        """Bytes of tensors read since this was opened."""
        return self._shards.bytes_read

    def weight(self, module: str, device: torch.device = CPU) -> Weight:
        """Weight of the linear `module`: unpacked by the format on a device, or a tensor where it
        is unquantized."""
        if module not in self.linears:
            return self.read(f"{module}.weight", device)
        linear = self.linears[module]
        return linear.format.unpack(
            module, {name: self.read(name, device) for name in linear.tensors}
        )

    def weight_slice(
        self, module: str, axis: Axis, start: int, stop: int, device: torch.device = CPU
    ) -> tuple[Weight, int]:
        """Outputs (axis N) or inputs (K) start..stop of a linear, extended to whole stored words
        and groups, and the number of the first one. Reads only their bytes where the contiguous
        pieces are large enough (`shards.SMALLEST_PIECE`)."""
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
        begin = start // unit * unit
        end = min(-(-stop // unit) * unit, self.shape(module)["NK".index(axis)])
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

    def in_parts(self, name: str) -> StoredTensor:
        """The stored tensor, to be copied without being read whole."""
        return StoredTensor(self._shards, self._info(name))

    def read_rows(self, name: str, numbers: Tensor) -> Tensor:
        """Rows of a stored matrix by rising numbers int64 [n], and no other byte of it, in its
        stored dtype."""
        return self._shards.read_rows(self._info(name), numbers.tolist())

    def prefetch(self, name: str, device: torch.device = CPU) -> None:
        """Start reading a stored tensor in the background, for a later `read` to the device."""
        self._shards.prefetch(self._info(name), device)

    def split_stacks(self, stacks: Iterable[Stack]) -> "Checkpoint":
        """A view in which these stacked tensors are split into their parts, where stored so."""
        view = copy.copy(self)
        view.tensors = dict(self.tensors)
        for stack in stacks:
            info = view.tensors.get(stack.name)
            parts = [] if info is None else stack.split(info)
            if parts:
                del view.tensors[stack.name]
                view.tensors |= {part.name: part for part in parts}
        return view

    def _info(self, name: str) -> TensorInfo:
        if name not in self.tensors and (module := name.removesuffix(".weight")) in self.linears:
            raise QuantkitError(
                f"{module} of {self.path} is quantized, and is read unquantized here",
                f"quantkit convert {self.path} OUT --dtype bf16 writes it so",
            )
        if name not in self.tensors:
            raise QuantkitError(
                f"{self.path} has no tensor {name}",
                "config.json may not be the one of these weights",
            )
        return self.tensors[name]


def check_finite(name: str, tensor: Tensor) -> None:
    """Raise QuantkitError naming the tensor if it holds NaN or infinity."""
    count = 0
    # In chunks: isfinite needs several copies of its input.
    for part in tensor.reshape(-1).split(_FINITE_CHUNK):
        values = part.float() if part.dtype.itemsize == 1 else part
        if not bool(torch.isfinite(values.sum())):  # one pass, and nothing is copied
            count += values.numel() - int(torch.isfinite(values).sum())
    if count:
        raise QuantkitError(
            f"{name} holds {count} values that are NaN or infinite",
            "the checkpoint is damaged: download it again",
        )


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


class CheckpointView(Checkpoint):
    """`base` with another config.json and other tensors. Its fingerprint is that of `base`, because
    the rest follows from the other inputs of a run."""

    def __init__(
        self,
        base: Checkpoint,
        config: dict[str, Any],
        side: dict[str, Any],
        tensors: dict[str, TensorInfo],
    ) -> None:
        self.base = base
        super().__init__(base.path, config, side, tensors)
        self.has_weights = base.has_weights

    @property
    def fingerprint(self) -> str:  # type: ignore[override]
        return self.base.fingerprint

    @property
    def source(self) -> Checkpoint:
        return self.base


def remote_tensor(model: str, shard: str, name: str, entry: "HubTensor") -> TensorInfo:
    """The tensor `name` of a Hub model as a header describes it. Raises QuantkitError for an
    invalid header."""
    if entry.dtype not in DTYPES:
        raise QuantkitError(
            f"{name} of hub model {model} has dtype {entry.dtype}",
            f"quantkit reads {', '.join(DTYPES)}",
        )
    begin, end = entry.data_offsets
    tensor = TensorInfo(name, DTYPES[entry.dtype], tuple(entry.shape), shard, begin)
    if end - begin != tensor.nbytes:
        raise QuantkitError(
            f"{shard} of hub model {model} has a header that makes no sense for {name}",
            "give another revision",
        )
    return tensor
