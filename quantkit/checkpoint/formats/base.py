"""What a format is: how one quantized linear becomes stored tensors and back, and how a checkpoint
says so.

A linear `module` (a name without ".weight") of shape [N, K] is stored as `parts`, each a suffix
with a dtype and a shape; reading, writing, planning and checking all follow that one table.
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from quantkit.checkpoint.header import TensorSpec
from quantkit.common.errors import QuantkitError
from quantkit.common.result import JsonObject
from quantkit.grids.base import Grid, Weight
from quantkit.grids.names import CacheCodes

# JSON files next to config.json that say how a checkpoint is quantized.
SLIM_FILES = (
    "quant_model_description.json",
    *(
        f"quant_model_description_{kind}.json"
        for kind in ("w8a8", "w8a8_dynamic", "w8a16", "w4a16", "w4a8_dynamic")
    ),
)
"""ModelSlim's names for its description: today's, and those of its first releases."""
SIDE_FILES = ("hf_quant_config.json", *SLIM_FILES, "quant_config.json", "quantize_config.json")

NGRAM_TABLE = re.compile(
    r"\.(?:engram\.embed\.(?:weight|scale)|ngram_embedding\.(?:shard_\d+\.weight|weight_scale))$"
)
"""Tables of n-gram embeddings, which are no linears: DeepSeek-V4.1's in FP8 with scales along each
row, Qwen3.8-Flash-Next's in parts, and in FP8 with one scale."""
FLOAT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


Axis = Literal["N", "K"]
"""Of a weight [N, K]: outputs or inputs."""

Along = tuple[Axis, int] | None
"""What a stored tensor's dimension runs along, and how many channels of it an element covers; None:
all of them share it."""

CODES: tuple[Along, ...] = (("N", 1), ("K", 1))
"""A tensor with an element for each weight."""


@dataclass(frozen=True)
class StoredPart:
    """One stored tensor of a quantized linear. `dtypes`: written as the first, read as any of them.

    axes: of each dimension; empty where the tensor belongs to the weight as a whole. any_shape: its
    shape is its own, and all of it is read for any channels.
    """

    suffix: str
    dtypes: tuple[torch.dtype, ...]
    shape: tuple[int, ...]
    required: bool = True
    axes: tuple[Along, ...] = ()
    any_shape: bool = False

    def block(self, axis: Axis, start: int, stop: int) -> tuple[tuple[int, int], ...] | None:
        """Where the channels start..stop of an axis lie in this tensor, by dimension; None: in all
        of it."""
        if not self.axes or self.any_shape:
            return None
        return tuple(
            (start // along[1], -(-stop // along[1])) if along and along[0] == axis else (0, size)
            for along, size in zip(self.axes, self.shape)
        )


Shape = tuple[int, int]
"""(N, K) of a linear."""


def stored_part(
    suffix: str, dtypes: tuple[torch.dtype, ...], shape: Shape, *axes: Along, required: bool = True
) -> StoredPart:
    """The part of a linear of `shape` whose dimensions run along `axes`; None: a size of 1."""
    sizes = (1 if along is None else -(-shape["NK".index(along[0])] // along[1]) for along in axes)
    return StoredPart(suffix, dtypes, tuple(sizes), required, axes)


Parts = tuple[StoredPart, ...]
Specs = Mapping[str, TensorSpec]
Tensors = Mapping[str, Tensor]
Grids = Mapping[str, Grid | None]
Unquantized = Sequence[TensorSpec]
Json = Mapping[str, Any]
"""config.json, or the files next to it by name, or an object of one."""
Ignored = Callable[[str], bool] | None


class Format(ABC):
    """One on-disk format. Stateless; each file of this package exposes one as FORMAT."""

    name: ClassVar[str]  # what the command line calls it
    variant: ClassVar[str]  # which of the formats of that name
    # What scales are rounded to before codes are computed.
    scale_dtype: ClassVar[torch.dtype] = torch.float32
    marker: ClassVar[str] = ".weight"  # suffix of the tensor that only a quantized linear has,
    marker_dtype: ClassVar[torch.dtype] = torch.uint8  # with this dtype
    per_element: ClassVar[int] = 1  # inputs to an element of that tensor
    own_suffixes: ClassVar[tuple[str, ...]] = ()  # that no other tensor has: alone, a fault
    is_source: ClassVar[bool] = (
        False  # models are published so by those who trained them, and may be quantized further
    )
    writes_mixtures: ClassVar[bool] = False  # its config_block describes linears on several grids
    # Roles around the layers that it may store quantized where that is asked for.
    outer: ClassVar[tuple[str, ...]] = ()
    activation_bits: ClassVar[int] = (
        16  # 8 or 4: linears round what they read, to int8 per token or as their grid says
    )

    def holds(self, grid: Grid) -> bool:
        """Whether weights on this grid can be stored. False: the format is only read."""
        return False

    @abstractmethod
    def parts(self, module: str, shape: Shape, grid: Grid | None) -> Parts:
        """Stored tensors of one quantized linear of `shape` (N, K). Raises QuantkitError where the
        shape does not fit."""

    def stored(self, module: str, tensors: Specs, grid: Grid | None) -> tuple[Shape, Grid | None]:
        """Shape (N, K) and grid of a quantized linear, from the headers of its tensors."""
        rows, columns = tensors[module + self.marker].shape
        return (rows, columns * self.per_element), grid

    def of_grid(self, grid: Grid) -> "Format":
        """The format that stores the linears on this grid, where this one has several. A weight
        alone does not say its grid: a row that is one group has a scale per channel, too."""
        return self

    def pack(self, module: str, weight: Weight) -> dict[str, Tensor]:
        """Tensors to store, by full name."""
        raise AssertionError(f"{self.name} {self.variant} is read, and never written: {module}")

    @abstractmethod
    def unpack(self, module: str, tensors: Tensors) -> Weight:
        """Exact inverse of `pack`."""

    def detect(self, config: Json, side: Json) -> bool:
        """Whether config.json and the files of SIDE_FILES next to it are those of this format.
        False: it is read through a `Declared` alone."""
        return False

    def grid(self, config: Json, side: Json) -> Grid | None:
        """The weight grid a checkpoint declares, None where the format has only one, or several.
        Raises QuantkitError for one not read."""
        return None

    def ignored(self, config: Json, side: Json) -> Ignored:
        """Whether the checkpoint declares a module unquantized; None where it declares nothing."""
        return None

    def input_rotations(self, config: Json) -> Callable[[str], int]:
        """Rows of the block Hadamard matrix by which the inputs of a module are multiplied as the
        model runs, 0 for none. Raises QuantkitError for other transforms of activations."""
        return lambda module: 0

    def config_block(
        self, grid: Grid | None, quantized: Grids, unquantized: Unquantized
    ) -> JsonObject:
        """`quantization_config` of config.json; empty where the format has none.

        quantized: the modules stored quantized, with their grids. unquantized: the other
        tensors.
        """
        raise AssertionError(f"{self.name} {self.variant} is read, and never written")

    def extra_files(
        self, grid: Grid | None, quantized: Grids, unquantized: Unquantized
    ) -> dict[str, bytes]:
        """Files next to config.json that engines need, by name."""
        return {}

    def cache_codes(self, side: Json) -> CacheCodes | None:
        """The dtype of a KV cache whose scales the checkpoint holds, by the files next to
        config.json; None for 16 bits."""
        return None

    def specs(self, module: str, shape: Shape, grid: Grid | None) -> list[TensorSpec]:
        """Tensors that `pack` will return for a linear of `shape` (N, K)."""
        return [
            TensorSpec(module + part.suffix, part.dtypes[0], part.shape)
            for part in self.parts(module, shape, grid)
            if part.required
        ]

    def split_fault(self, module: str, grid: Grid, *, row_parallel: bool) -> str | None:
        """Why engines could not cut the module as the model's table does, if they could not.
        row_parallel: along its inputs."""
        return None

    def takes(self, grid: Grid) -> bool:
        """Whether some linears of a checkpoint may be on this grid, where others are not."""
        return self.holds(grid)

    def scale_dtype_of(self, grid: Grid) -> torch.dtype:
        """`scale_dtype`, of a format whose linears may be on several grids."""
        return self.scale_dtype

    def activation_bits_of(self, grid: Grid) -> int:
        """`activation_bits`, likewise."""
        return self.activation_bits

    def of_checkpoint(self, config: Json, side: Json) -> "Format":
        """The format for one checkpoint that it detects: another where the description says more
        than one thing (declared.py)."""
        return self

    def member(self, module: str) -> "Format":
        """The format of one linear, where a checkpoint has several."""
        return self

    def main_tensor(self, module: str, names: Container[str]) -> str:
        """The tensor of a quantized linear that holds its codes. names: those of the checkpoint."""
        return module + self.marker

    def declared_grids(self, config: Json) -> Callable[[str], Grid | None] | None:
        """The grid that config.json declares for a module, where it declares them module by
        module."""
        return None

    def quantized_module(self, tensor: TensorSpec) -> str | None:
        """The quantized linear whose main tensor this is, if it is one."""
        if NGRAM_TABLE.search(tensor.name):
            return None
        if tensor.dtype == self.marker_dtype and tensor.name.endswith(self.marker):
            return tensor.name.removesuffix(self.marker)
        return None

    def quantizes(self, module: str, role: str, *, mtp: bool = False) -> bool:
        """Whether this format may store the module quantized. `mtp`: it belongs to a
        multi-token-prediction layer."""
        return role == "linear"


def lifted(config: JsonObject) -> JsonObject:
    """config.json with its quantization at the top, where models with a text_config have it inside
    that."""
    text = config.get("text_config")
    if (
        config.get("quantization_config")
        or not isinstance(text, dict)
        or not text.get("quantization_config")
    ):
        return config
    bare = {key: value for key, value in text.items() if key != "quantization_config"}
    return {**config, "text_config": bare, "quantization_config": text["quantization_config"]}


def is_cache_alone(config: Json, side: Json) -> bool:
    """Whether the description is of a cache, and weights are not quantized: compressed-tensors' and
    ModelOpt's way to say so."""
    block = config.get("quantization_config") or side.get("hf_quant_config.json", {}).get(
        "quantization"
    )
    if not isinstance(block, dict) or not (
        block.get("kv_cache_scheme") or block.get("kv_cache_quant_algo")
    ):
        return False
    groups = (block.get("config_groups") or {}).values()
    weights = any(isinstance(group, dict) and group.get("weights") is not None for group in groups)
    if block.get("quant_method") == "compressed-tensors":
        return not weights
    return (
        block.get("quant_algo") is None
        and not weights
        and str(block.get("quant_method", "modelopt")).startswith("modelopt")
    )


def output_config(source: Json, block: Json) -> JsonObject:
    """The source's config.json with its quantization replaced by `block`, or removed where that is
    empty."""
    config = {key: value for key, value in source.items() if key != "quantization_config"}
    return config | ({"quantization_config": dict(block)} if block else {})


def stored_scale(module: str, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """`scale` in the stored dtype; rounding must have happened before codes were computed."""
    stored = scale.to(dtype)
    assert torch.equal(stored.float(), scale), f"{module}: scales are not representable in {dtype}"
    return stored


def group_axis(module: str, columns: int, grid: Grid) -> Along:
    """Of a dimension with the scale groups along K. Raises QuantkitError where they do not divide
    it."""
    size = grid.group_size or columns
    require_multiple(module, "input channels", columns, size)
    return along_groups(columns, columns // size)


def along_groups(columns: int, count: int) -> Along:
    """Of a dimension with `count` scale groups along K: one group is a scale per channel, of
    whatever inputs there are."""
    return None if count == 1 else ("K", columns // count)


def require_multiple(module: str, what: str, size: int, divisor: int) -> None:
    if size % divisor:
        raise QuantkitError(
            f"{module} has {size} {what}, not a multiple of {divisor}",
            "choose another group size or format",
        )


HEAD = "lm_head"
"""What engines call the linear that makes logits."""


def unquantized_linears(unquantized: Iterable[TensorSpec], quantized: Container[str]) -> list[str]:
    """Unquantized modules that an engine may take for a linear: those of 2-D weights other than
    embeddings, and the head.

    A head that is tied to the embedding has no tensor, and engines make a linear of it all the
    same: transformers quantizes it with compressed-tensors as it loads, vLLM with ModelOpt.
    """
    names = {
        spec.name.removesuffix(".weight")
        for spec in unquantized
        if spec.name.endswith(".weight") and len(spec.shape) == 2
    }
    if HEAD not in quantized:
        names.add(HEAD)
    return sorted(name for name in names if not name.endswith("embed_tokens"))


@dataclass(frozen=True)
class IgnoreSpelling:
    """How a format writes that modules are unquantized, and how its engines match that."""

    layer: Callable[[str], str]  # every module under this prefix
    tails: Callable[
        [str], tuple[str, ...]
    ]  # every module that ends so, ways of saying it in order of preference
    name: Callable[[str], str]  # this one module
    matches: Callable[[str, str], bool]  # (entry, module)


def ignore_list(
    quantized: Iterable[str], linears: Iterable[str], spelling: IgnoreSpelling
) -> list[str]:
    """Shortest list of entries that covers every module of `linears` and none of `quantized`.

    Layers with nothing quantized are one entry each, then endings such as self_attn.kv_b_proj, then
    single names.
    """
    quantized = list(quantized)
    layers_with_quantized = {_layer(name) for name in quantized}
    entries: dict[str, None] = {}
    left: dict[str, list[str]] = {}
    for module in linears:
        layer = _layer(module)
        if layer and layer not in layers_with_quantized:
            entries[spelling.layer(layer)] = None
        else:
            left.setdefault(re.split(r"\.\d+\.", module)[-1], []).append(module)
    for tail, modules in left.items():
        ways = (spelling.name(tail),) if modules == [tail] else spelling.tails(tail)
        if any(name.endswith(f".{tail}") for name in quantized):
            ways = ()  # linears of one name, of which only some are quantized
        safe = [
            entry for entry in ways if not any(spelling.matches(entry, name) for name in quantized)
        ]
        entries.update(dict.fromkeys(safe[:1] or [spelling.name(module) for module in modules]))
    return list(entries)


def _layer(module: str) -> str:
    found = re.match(r"(.*?\.layers\.\d+)\.", module)
    return found[1] if found else ""
