"""compressed-tensors mixed-precision: linears on several grids in one checkpoint, each stored as the format of its own grid stores it.

    int4            pack-quantized         X.weight_packed int32
    NVFP4           nvfp4-pack-quantized   X.weight_packed uint8
    int8            int-quantized          X.weight int8
    FP8 in blocks   float-quantized        X.weight float8_e4m3fn [N, K]   X.weight_scale float32 [ceil(N / 128), ceil(K / 128)]

A linear's tensors say which it is. config.json has a config group for each grid, with a format of its own, and names the modules of each:
engines go by the names, so they must say what the tensors say. vLLM compares a target with a module's class before it looks into fused
modules; a group for the class Linear would take every fused linear, and none is written.
"""

import re
from collections import defaultdict
from collections.abc import Callable, Collection, Container, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from quantkit.checkpoint.formats import compressed, compressed_fp4, compressed_int4, compressed_int8, fp8
from quantkit.checkpoint.formats.base import CODES, FLOAT_DTYPES, Format, StoredPart
from quantkit.checkpoint.header import TensorSpec
from quantkit.errors import QuantkitError
from quantkit.quant.weights import FP8_BLOCK, Fp4Weight, Fp8BlockWeight, IntWeight, Weight
from quantkit.schemes import Fp8BlockGrid, Grid, IntGrid


class _Fp8Blocks(fp8.CompressedFp8):
    """float-quantized with blocks of 128 x 128, written too."""

    def holds(self, grid: Grid) -> bool:
        return isinstance(grid, Fp8BlockGrid)

    def parts(self, module: str, shape: tuple[int, int], grid: Grid | None) -> tuple[StoredPart, ...]:
        blocks = (-(-shape[0] // FP8_BLOCK), -(-shape[1] // FP8_BLOCK))
        return (
            StoredPart(".weight", (torch.float8_e4m3fn,), shape, axes=CODES),
            StoredPart(".weight_scale", (torch.float32, *FLOAT_DTYPES), blocks, axes=(("N", FP8_BLOCK), ("K", FP8_BLOCK))),
        )

    def grid(self, config: Mapping[str, Any], side: Mapping[str, Any]) -> Grid | None:
        return Fp8BlockGrid()

    def config_block(self, grid: Grid | None, quantized: Mapping[str, Grid | None], plain: Sequence[TensorSpec]) -> dict[str, Any]:
        shared = {"num_bits": 8, "type": "float", "symmetric": True}
        weights = {**shared, "strategy": "block", "block_structure": [FP8_BLOCK, FP8_BLOCK], "dynamic": False}
        activations = {**shared, "strategy": "group", "group_size": FP8_BLOCK, "dynamic": True}
        return compressed.config_block(self.variant, weights, activations, quantized, plain)


_FP8 = _Fp8Blocks(fp8.BLOCK)
_MEMBERS: tuple[Format, ...] = (compressed_int4.FORMAT, compressed_fp4.FORMAT, compressed_int8.FORMAT, _FP8)


_ONLY_GRIDS: dict[Format, Grid] = {
    compressed_fp4.FORMAT: compressed_fp4.GRID,
    compressed_int8.FORMAT: compressed_int8.GRID,
    _FP8: Fp8BlockGrid(),
}
"""Of members that hold one."""


class CompressedMixed(Format):
    name = "compressed-tensors"
    variant = "mixed-precision"
    scale_dtype = torch.float32
    marker = ".weight"
    marker_dtype = torch.int8
    own_suffixes = tuple(dict.fromkeys(suffix for member in _MEMBERS for suffix in member.own_suffixes))

    def holds(self, grid: Grid) -> bool:
        """Never as the one grid of a checkpoint: its own format is read by more engines."""
        return False

    def takes(self, grid: Grid) -> bool:
        return any(member.holds(grid) for member in _MEMBERS)

    def scale_dtype_of(self, grid: Grid) -> torch.dtype:
        return _member(grid).scale_dtype

    def activation_bits_of(self, grid: Grid) -> int:
        return _member(grid).activation_bits

    def main_tensor(self, module: str, names: Container[str]) -> str:
        return next((name for name in (f"{module}.weight_packed", f"{module}.weight") if name in names), f"{module}.weight")

    def quantized_module(self, tensor: TensorSpec) -> str | None:
        return next((module for member in _MEMBERS if (module := member.quantized_module(tensor))), None)

    def parts(self, module: str, shape: tuple[int, int], grid: Grid | None) -> tuple[StoredPart, ...]:
        assert grid is not None, module
        return _member(grid).parts(module, shape, grid)

    def stored(self, module: str, tensors: Mapping[str, TensorSpec], grid: Grid | None) -> tuple[tuple[int, int], Grid | None]:
        main = tensors[self.main_tensor(module, tensors)]
        member = next(one for one in _MEMBERS if one.quantized_module(main) is not None)
        shape, _ = member.stored(module, tensors, None)
        if member is not compressed_int4.FORMAT:
            return shape, _ONLY_GRIDS[member]
        scale = tensors.get(f"{module}.weight_scale")
        groups = scale.shape[-1] if scale is not None and len(scale.shape) == 2 else 0
        size = shape[1] // groups if groups and shape[1] % groups == 0 else None
        return shape, IntGrid(4, size, symmetric=f"{module}.weight_zero_point" not in tensors)

    def pack(self, module: str, weight: Weight) -> dict[str, Tensor]:
        return _member_of(weight).pack(module, weight)

    def unpack(self, module: str, tensors: Mapping[str, Tensor]) -> Weight:
        main = tensors[self.main_tensor(module, tensors)]
        spec = TensorSpec(self.main_tensor(module, tensors), main.dtype, tuple(main.shape))
        return next(one for one in _MEMBERS if one.quantized_module(spec) is not None).unpack(module, tensors)

    def detect(self, config: Mapping[str, Any], side: Mapping[str, Any]) -> bool:
        return compressed.detect(config, self.variant)

    def grid(self, config: Mapping[str, Any], side: Mapping[str, Any]) -> Grid | None:
        """None: there are several. Raises QuantkitError where a group is on a grid that is not read."""
        _declared_groups(config)
        return None

    def declared_grids(self, config: Mapping[str, Any]) -> Callable[[str], Grid | None]:
        groups = [(grid, *_matchers(targets)) for grid, targets in _declared_groups(config)]

        def declared(module: str) -> Grid | None:
            named = (grid for grid, by_name, _ in groups if by_name(module))
            return next(named, next((grid for grid, _, by_class in groups if by_class), None))

        return declared

    def ignored(self, config: Mapping[str, Any], side: Mapping[str, Any]) -> Callable[[str], bool] | None:
        return compressed.ignored(config)

    def config_block(self, grid: Grid | None, quantized: Mapping[str, Grid | None], plain: Sequence[TensorSpec]) -> dict[str, Any]:
        by_grid: dict[Grid, list[str]] = defaultdict(list)
        for module, own in quantized.items():
            assert own is not None, module
            by_grid[own].append(module)
        groups = {}
        for number, (own, modules) in enumerate(by_grid.items()):
            member = _member(own)
            (group,) = member.config_block(own, {}, ())["config_groups"].values()
            others = [module for module in quantized if quantized[module] != own]
            groups[f"group_{number}"] = {**group, "targets": module_patterns(modules, others), "format": member.variant}
        block = compressed.config_block(self.variant, {}, None, quantized, plain)
        return {**block, "config_groups": groups}


def _member(grid: Grid) -> Format:
    return next(member for member in _MEMBERS if member.holds(grid))


def _member_of(weight: Weight) -> Format:
    match weight:
        case Fp8BlockWeight():
            return _FP8
        case Fp4Weight():
            return compressed_fp4.FORMAT
        case IntWeight(bits=8):
            return compressed_int8.FORMAT
    assert isinstance(weight, IntWeight), type(weight)
    return compressed_int4.FORMAT


def _declared_groups(config: Mapping[str, Any]) -> list[tuple[Grid, list[str]]]:
    """The grid and the targets of every group."""
    groups = config["quantization_config"].get("config_groups") or {}
    found = []
    for name, group in groups.items():
        if not isinstance(group, dict) or not isinstance(group.get("targets"), list):
            raise QuantkitError(f"config_groups.{name} of quantization_config names no targets", "download config.json again")
        alone = {"quantization_config": {**config["quantization_config"], "format": group.get("format"), "config_groups": {name: group}}}
        member = next((one for one in _MEMBERS if one.detect(alone, {})), None)
        grid = None if member is None else member.grid(alone, {})
        if grid is None:
            told = f"config_groups.{name} of quantization_config is {group.get('format')}, with weights {group.get('weights')}"
            raise QuantkitError(told, f"in a mixture quantkit reads {', '.join(one.variant for one in _MEMBERS)}")
        found.append((grid, [str(target) for target in group["targets"]]))
    return found


def _matchers(targets: Iterable[str]) -> tuple[Callable[[str], bool], bool]:
    """Whether a module is meant by its name; and whether every linear is, by its class."""
    entries = list(targets)
    by_name = compressed.ignored({"quantization_config": {"ignore": [entry for entry in entries if entry != "Linear"]}})
    return by_name, "Linear" in entries


def module_patterns(chosen: Collection[str], others: Collection[str]) -> list[str]:
    """Regular expressions, after "re:", that match every module of `chosen` and none of `others`; names where a pattern would.

    Linears that are alike in every layer, and in every expert, share a pattern that lists their layers.
    """
    layers: dict[tuple[str, str], dict[str, list[str]]] = {}
    names: list[str] = []
    for module in chosen:
        found = re.fullmatch(r"(.*?\blayers\.)(\d+)\.(.+)", module)
        if found is None:
            names.append(module)
            continue
        inner = re.sub(r"\\\.\d+\\\.", r"\\.\\d+\\.", re.escape(found[3]))
        layers.setdefault((found[1], inner), {}).setdefault(found[2], []).append(module)
    alike: dict[tuple[str, tuple[str, ...]], list[tuple[str, list[str]]]] = {}
    for (prefix, inner), by_layer in layers.items():
        modules = [module for own in by_layer.values() for module in own]
        alike.setdefault((prefix, tuple(by_layer)), []).append((inner, modules))
    patterns = []
    for (prefix, numbers), kinds in alike.items():
        pattern = f"{re.escape(prefix)}({'|'.join(numbers)})\\.({'|'.join(inner for inner, _ in kinds)})$"
        if any(map(re.compile(pattern).match, others)):
            names += [module for _, modules in kinds for module in modules]
        else:
            patterns.append(f"re:{pattern}")
    return [*patterns, *names]


FORMAT = CompressedMixed()
