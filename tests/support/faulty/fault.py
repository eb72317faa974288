"""What a fault is, the list of all, and what faults ask of a checkpoint before they change it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from faulty.contents import Contents
from quantkit.grids.int_groups import IntGrid


@dataclass(frozen=True)
class Fault:
    """finds: names of findings of which one must be there. depth: the shallowest that can. source:
    whether only a comparison can."""

    name: str
    finds: tuple[str, ...]
    depth: str
    apply: Callable[[Contents], None]
    suits: Callable[[Contents], bool] = lambda contents: True
    source: bool = False
    replays: str = ""


FAULTS: list[Fault] = []


def fault(
    *finds: str,
    depth: str = "headers",
    suits: Callable[[Contents], bool] = lambda c: True,
    source: bool = False,
    replays: str = "",
) -> Callable[[Callable[[Contents], None]], Callable[[Contents], None]]:
    def add(apply: Callable[[Contents], None]) -> Callable[[Contents], None]:
        FAULTS.append(Fault(apply.__name__, finds, depth, apply, suits, source, replays))
        return apply

    return add


def is_quantized(c: Contents) -> bool:
    return bool(c.linears) and c.format.name != "fp8-block"


def tensor_fault(
    *finds: str,
    suits: Callable[[Contents], bool] = is_quantized,
    source: bool = False,
    replays: str = "",
) -> Any:
    return fault(*finds, depth="tensors", suits=suits, source=source, replays=replays)


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


def listed(c: Contents) -> list[str]:
    key = "ignore" if "ignore" in c.block else "modules_to_not_convert"
    return c.block[key] or []


def relist(c: Contents, entries: list[str]) -> None:
    key = "ignore" if "ignore" in c.block else "modules_to_not_convert"
    c.block[key] = entries
    if c.format.name == "modelopt" and "hf_quant_config.json" in c.files:
        side = c.json("hf_quant_config.json")
        side["quantization"]["exclude_modules"] = entries
        c.set_json("hf_quant_config.json", side)


def has_groups(c: Contents) -> bool:
    grid = c.format.grid(c.config, {}) if has_block(c) else None
    return isinstance(grid, IntGrid) and grid.group_size is not None


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


def of_format(*names: str) -> Callable[[Contents], bool]:
    return lambda c: is_quantized(c) and f"{c.format.name} {c.format.variant}".startswith(names)


def has_four_bits(c: Contents) -> bool:
    kinds = of_format(
        "awq", "gptq", "compressed-tensors pack", "compressed-tensors nvfp4", "modelopt"
    )
    return kinds(c) and getattr(next(iter(c.linears.values())).grid, "bits", 4) == 4


def arguments(c: Contents) -> dict[str, Any]:
    """Where the description has bits and zero points."""
    return c.block["config_groups"]["group_0"]["weights"] if "config_groups" in c.block else c.block
