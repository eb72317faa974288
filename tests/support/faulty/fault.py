"""What a fault is, the list of all, and what faults ask of a checkpoint before they change it."""

from collections.abc import Callable
from dataclasses import dataclass

from faulty.contents import Contents
from quantkit.grids.int_groups import IntGrid

Suits = Callable[[Contents], bool]
Apply = Callable[[Contents], object]


@dataclass(frozen=True)
class Fault:
    """finds: names of findings of which one must be there. depth: the shallowest that can. source:
    whether only a comparison can."""

    name: str
    finds: tuple[str, ...]
    depth: str
    apply: Apply
    suits: Suits
    source: bool


FAULTS = {}
FP4 = ("modelopt", "compressed-tensors nvfp4")
PACKED = ("awq", "gptq", "compressed-tensors pack")
INT8 = ("compressed-tensors int", "modelslim")


def of_depth(depth, suits):
    """A function that adds a fault, and a decorator that adds one by its function's name. suits:
    where none is given."""

    def add(finds, name, apply, suits=suits, source=False):
        FAULTS[name] = Fault(name, tuple(finds.split()), depth, apply, suits, source)

    def named(finds, suits=suits, source=False):
        return lambda apply: add(finds, apply.__name__, apply, suits, source)

    return add, named


def always(c):
    return True


def is_quantized(c):
    return bool(c.linears) and c.format.name != "fp8-block"


def is_fp8(c):
    return bool(c.linears) and c.format.name == "fp8-block"


def has_block(c):
    return is_quantized(c) and "quantization_config" in c.config


def has_experts(c):
    return bool(c.experts)


def has_quantized_experts(c):
    return is_quantized(c) and any(".experts." in module for module in c.linears)


def has_mtp(c):
    return bool(c.mtp)


def lists_plain_modules(c):
    """Whether the format has a list of unquantized modules that engines go by."""
    return has_block(c) and c.format.name in ("compressed-tensors", "awq", "modelopt")


def has_groups(c):
    grid = c.format.grid(c.config, {}) if has_block(c) else None
    return isinstance(grid, IntGrid) and grid.group_size is not None


def of_format(*names):
    return lambda c: is_quantized(c) and f"{c.format.name} {c.format.variant}".startswith(names)


def has_four_bits(c):
    return (
        of_format(*PACKED, *FP4)(c) and getattr(next(iter(c.linears.values())).grid, "bits", 4) == 4
    )


def has_codes_around_zero(c):
    kinds = of_format("compressed-tensors int", "compressed-tensors pack")
    return kinds(c) and c.linears[c.linear()].grid.symmetric


def list_of(c):
    return "ignore" if "ignore" in c.block else "modules_to_not_convert"


def listed(c):
    return c.block[list_of(c)] or []


def relist(c, entries):
    c.block[list_of(c)] = entries
    if c.format.name == "modelopt" and "hf_quant_config.json" in c.files:
        side = c.json("hf_quant_config.json")
        side["quantization"]["exclude_modules"] = entries
        c.set_json("hf_quant_config.json", side)


def layers(c):
    """With the MTP layer."""
    return range(c.config["num_hidden_layers"] + bool(c.mtp))


def keep(c, wanted):
    c.tensors = {name: tensor for name, tensor in c.tensors.items() if wanted(name)}


def rename(c, new):
    c.tensors = {new(name): tensor for name, tensor in c.tensors.items()}


def part(c, module, *endings):
    return next(name for name in c.parts(module) if name.endswith(endings))


def scale_of(c, module):
    return part(c, module, ".scales", ".weight_scale", ".weight_scale_inv")


def codes_of(c, module):
    return module + c.linears[module].format.marker


def change(c, name, change):
    tensor = c.tensors[name]
    c.tensors[name] = (
        change(tensor.float()).to(tensor.dtype)
        if tensor.dtype.is_floating_point
        else change(tensor)
    )


def bits_of(c):
    """Where the description has bits and zero points."""
    return c.block["config_groups"]["group_0"]["weights"] if "config_groups" in c.block else c.block
