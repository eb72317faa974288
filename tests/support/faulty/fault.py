"""What a fault is, the list of all, and what faults ask of a checkpoint before they change it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from faulty.contents import Contents
from quantkit.grids.int_groups import IntGrid

Suits = Callable[[Contents], bool]
Apply = Callable[[Contents], object]


@dataclass(frozen=True)
class Fault:
    """finds: names of findings of which one must be there. depth: the shallowest that can. source:
    whether only a comparison can. replays: the public thread that it is taken from."""

    name: str
    finds: tuple[str, ...]
    depth: str
    apply: Apply
    suits: Suits
    source: bool
    replays: str


FAULTS: dict[str, Fault] = {}


def add(
    depth: str,
    finds: str,
    name: str,
    apply: Apply,
    suits: Suits,
    source: bool = False,
    replays: str = "",
) -> None:
    FAULTS[name] = Fault(name, tuple(finds.split()), depth, apply, suits, source, replays)


def always(c: Contents) -> bool:
    return True


def is_quantized(c: Contents) -> bool:
    return bool(c.linears) and c.format.name != "fp8-block"


def is_fp8(c: Contents) -> bool:
    return bool(c.linears) and c.format.name == "fp8-block"


def has_block(c: Contents) -> bool:
    return is_quantized(c) and "quantization_config" in c.config


def has_experts(c: Contents) -> bool:
    return bool(c.experts)


def has_quantized_experts(c: Contents) -> bool:
    return is_quantized(c) and has_experts(c) and any(m.startswith(c.experts[0]) for m in c.linears)


def has_mtp(c: Contents) -> bool:
    return bool(c.mtp)


def lists_plain_modules(c: Contents) -> bool:
    """Whether the format has a list of unquantized modules that engines go by."""
    return has_block(c) and c.format.name in ("compressed-tensors", "awq", "modelopt")


def has_groups(c: Contents) -> bool:
    grid = c.format.grid(c.config, {}) if has_block(c) else None
    return isinstance(grid, IntGrid) and grid.group_size is not None


def of_format(*names: str) -> Suits:
    return lambda c: is_quantized(c) and f"{c.format.name} {c.format.variant}".startswith(names)


def has_four_bits(c: Contents) -> bool:
    kinds = of_format("awq", "gptq", "compressed-tensors pack", *FP4)
    return kinds(c) and getattr(next(iter(c.linears.values())).grid, "bits", 4) == 4


def has_codes_around_zero(c: Contents) -> bool:
    kinds = of_format("compressed-tensors int", "compressed-tensors pack")
    return kinds(c) and c.linears[c.linear()].grid.symmetric


FP4 = ("modelopt", "compressed-tensors nvfp4")
PACKED = ("awq", "gptq", "compressed-tensors pack")
INT8 = ("compressed-tensors int", "modelslim")


def listed(c: Contents) -> list[str]:
    return c.block["ignore" if "ignore" in c.block else "modules_to_not_convert"] or []


def relist(c: Contents, entries: list[str]) -> None:
    c.block["ignore" if "ignore" in c.block else "modules_to_not_convert"] = entries
    if c.format.name == "modelopt" and "hf_quant_config.json" in c.files:
        side = c.json("hf_quant_config.json")
        side["quantization"]["exclude_modules"] = entries
        c.set_json("hf_quant_config.json", side)


def layers(c: Contents) -> range:
    """With the MTP layer."""
    return range(c.config["num_hidden_layers"] + bool(c.mtp))


def keep(c: Contents, wanted: Callable[[str], bool]) -> None:
    c.tensors = {name: tensor for name, tensor in c.tensors.items() if wanted(name)}


def rename(c: Contents, new: Callable[[str], str]) -> None:
    c.tensors = {new(name): tensor for name, tensor in c.tensors.items()}


def part(c: Contents, module: str, *endings: str) -> str:
    return next(name for name in c.parts(module) if name.endswith(endings))


def scale_of(c: Contents, module: str) -> str:
    return part(c, module, ".scales", ".weight_scale", ".weight_scale_inv")


def codes_of(c: Contents, module: str) -> str:
    return module + c.linears[module].format.marker


def change(c: Contents, name: str, change: Callable[[Tensor], Tensor]) -> None:
    tensor = c.tensors[name]
    c.tensors[name] = (
        change(tensor.float()).to(tensor.dtype)
        if tensor.dtype.is_floating_point
        else change(tensor)
    )


def bits_of(c: Contents) -> dict[str, Any]:
    """Where the description has bits and zero points."""
    return c.block["config_groups"]["group_0"]["weights"] if "config_groups" in c.block else c.block
