"""compressed-tensors mixed-precision: linears on several grids in one checkpoint, each stored as
the format of its own grid stores it.

    int4            pack-quantized         X.weight_packed int32
    NVFP4           nvfp4-pack-quantized   X.weight_packed uint8
    int8            int-quantized          X.weight int8
    FP8             float-quantized        X.weight float8_e4m3fn [N, K]   X.weight_scale float32 [ceil(N / 128), ceil(K / 128)] or [N, 1]

config.json has a config group for each grid, with a format of its own, and names the modules of
each: engines go by the names, so they must say what the tensors are. Read, too, are groups of every
other variant that has a file here, and several groups of one variant, which llm-compressor calls by
that variant's name (declared.py). vLLM compares a target with a module's class before it looks into
fused modules; a group for the class Linear would take every fused linear, and none is written.
"""

import re
from collections import defaultdict
from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor

from quantkit.checkpoint.formats import (
    compressed,
    compressed_fp4,
    compressed_int4,
    compressed_int8,
    compressed_mxfp4,
    fp8,
)
from quantkit.checkpoint.formats.base import (
    Format,
    Grids,
    Json,
    Parts,
    Shape,
    Tensors,
    Unquantized,
)
from quantkit.checkpoint.formats.declared import Declared, DeclaredFormat, Placed
from quantkit.checkpoint.header import TensorSpec
from quantkit.common.errors import QuantkitError
from quantkit.grids.base import Grid, QuantizedWeight, Weight

_MEMBERS: tuple[Format, ...] = (
    compressed_int4.FORMAT,
    compressed_fp4.FORMAT,
    compressed_fp4.W4A4,
    compressed_int8.FORMAT,
    compressed_int4.INT8_WORDS,
    compressed_int4.W4A8,
    compressed_mxfp4.FORMAT,
    compressed_mxfp4.W4A4,
    fp8.COMPRESSED_BLOCK,
    fp8.COMPRESSED_CHANNEL,
    fp8.COMPRESSED_MX,
)


_READ: tuple[Format, ...] = (
    compressed_int4.FORMAT,
    compressed_int4.W4A8,
    compressed_int4.INT8_WORDS,
    compressed_fp4.FORMAT,
    compressed_fp4.W4A4,
    compressed_mxfp4.FORMAT,
    compressed_mxfp4.W4A4,
    compressed_int8.FORMAT,
    *compressed_int8.OTHERS,
    *(one for one in fp8.FORMATS if isinstance(one, fp8.CompressedFp8)),
)
"""Of a group, by what it says of itself."""


class CompressedMixed(compressed.Compressed):
    variant = compressed.MIXED
    outer = ("head", "embedding")
    writes_mixtures = True
    marker_dtype = torch.int8
    own_suffixes = tuple(
        dict.fromkeys(suffix for member in _MEMBERS for suffix in member.own_suffixes)
    )

    def takes(self, grid: Grid) -> bool:
        """Never as the one grid of a checkpoint: its own format is read by more engines."""
        return any(member.holds(grid) for member in _MEMBERS)

    def of_grid(self, grid: Grid) -> Format:
        return _member(grid)

    def scale_dtype_of(self, grid: Grid) -> torch.dtype:
        return _member(grid).scale_dtype

    def activation_bits_of(self, grid: Grid) -> int:
        return _member(grid).activation_bits

    def quantized_module(self, tensor: TensorSpec) -> str | None:
        return next(
            (module for member in _MEMBERS if (module := member.quantized_module(tensor))), None
        )

    def parts(self, module: str, shape: Shape, grid: Grid | None) -> Parts:
        assert grid is not None, module
        return _member(grid).parts(module, shape, grid)

    def pack(self, module: str, weight: Weight) -> dict[str, Tensor]:
        return _member(QuantizedWeight.of(weight).grid).pack(module, weight)

    def unpack(self, module: str, tensors: Tensors) -> Weight:
        specs = [
            TensorSpec(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()
        ]
        member = next(one for one in _MEMBERS if any(one.quantized_module(spec) for spec in specs))
        shape = tensors.get(f"{module}.weight_shape")
        if shape is not None and 4 * tensors[f"{module}.weight_packed"].shape[1] == int(shape[1]):
            member = compressed_int4.INT8_WORDS
        elif member is compressed_fp4.FORMAT and f"{module}.weight_global_scale" not in tensors:
            member = compressed_mxfp4.FORMAT
        elif member is compressed_fp4.FORMAT and f"{module}.input_global_scale" in tensors:
            member = compressed_fp4.W4A4
        elif (
            member is fp8.COMPRESSED_BLOCK
            and tensors[f"{module}.weight_scale"].dtype == torch.uint8
        ):
            member = fp8.COMPRESSED_MX
        elif member is fp8.COMPRESSED_BLOCK and len(tensors[f"{module}.weight_scale"]) == len(
            tensors[f"{module}.weight"]
        ):
            member = fp8.COMPRESSED_CHANNEL
        return member.unpack(module, tensors)

    def of_checkpoint(self, config: Json, side: Json) -> Format:
        return Declared(self, _placed(config), _READ)

    def config_block(
        self, grid: Grid | None, quantized: Grids, unquantized: Unquantized
    ) -> dict[str, Any]:
        by_grid: dict[Grid, list[str]] = defaultdict(list)
        for module, own in quantized.items():
            assert own is not None, module
            by_grid[own].append(module)
        groups = {}
        for number, (own, modules) in enumerate(by_grid.items()):
            member = _member(own)
            (group,) = member.config_block(own, {}, ())["config_groups"].values()
            others = [module for module in quantized if quantized[module] != own]
            targets = [*module_patterns(modules, others), *compressed.outer_targets(modules)]
            groups[f"group_{number}"] = {
                **group,
                "targets": list(dict.fromkeys(targets)),
                "format": member.variant,
            }
        variants = {group["format"] for group in groups.values()}
        variant = self.variant if len(variants) > 1 else variants.pop()
        block = compressed.config_block(variant, {}, None, quantized, unquantized)
        return {**block, "config_groups": groups}


def _member(grid: Grid) -> Format:
    return next(member for member in _MEMBERS if member.holds(grid))


def _placed(config: Json) -> Placed:
    """By name before by class, as compressed-tensors matches; listed modules are on nothing."""
    declared = _declared_groups(config)
    groups = [
        (placement, match(targets))
        for match in (compressed.matcher, compressed.class_matcher)
        for placement, targets in declared
    ]
    listed = compressed.matcher(config["quantization_config"].get("ignore") or [])

    def placed(module: str) -> DeclaredFormat | None:
        if listed(module):
            return None
        return next((placement for placement, meant in groups if meant(module)), None)

    return placed


def _declared_groups(config: Json) -> list[tuple[DeclaredFormat, list[str]]]:
    """The placement and the targets of every group that has weights."""
    block = config["quantization_config"]
    found = []
    for name, group in (block.get("config_groups") or {}).items():
        if not isinstance(group, dict) or not isinstance(group.get("targets"), list):
            raise QuantkitError(
                f"config_groups.{name} of quantization_config names no targets",
                "download config.json again",
            )
        if group.get("weights") is None:
            continue
        said = group.get("format") or (
            block.get("format") if block.get("format") != compressed.MIXED else None
        )
        alone = {"quantization_config": {**block, "format": said, "config_groups": {name: group}}}
        member = next((one for one in _READ if one.detect(alone, {})), None)
        if member is None:
            message = (
                f"config_groups.{name} of quantization_config is {said}, with weights "
                f"{_short(group['weights'])}"
            )
            raise QuantkitError(
                message,
                "in a mixture quantkit reads "
                f"{', '.join(dict.fromkeys(one.variant for one in _READ))}",
            )
        found.append(
            (
                DeclaredFormat(member, member.grid(alone, {})),
                [str(target) for target in group["targets"]],
            )
        )
    return found


def _short(args: Any) -> str:
    """What is said of weights, without what is not said."""
    return (
        ", ".join(f"{key} {value}" for key, value in args.items() if value is not None)
        if isinstance(args, dict)
        else str(args)
    )


def module_patterns(chosen: Collection[str], others: Collection[str]) -> list[str]:
    """Regular expressions, after "re:", that match every module of `chosen` and none of `others`;
    names where a pattern would.

    Linears that are alike in every layer, and in every expert, share a pattern that lists their
    layers.
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
        pattern = (
            f"{re.escape(prefix)}({'|'.join(numbers)})\\.({'|'.join(inner for inner, _ in kinds)})$"
        )
        if any(map(re.compile(pattern).match, others)):
            names += [module for _, modules in kinds for module in modules]
        else:
            patterns.append(f"re:{pattern}")
    return [*patterns, *names]


FORMAT = CompressedMixed()
