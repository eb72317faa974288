"""Parameters of a model whose architecture quantkit does not know: enough to round it without
calibration.

Linears are found by transformers' modules (module_tree.py). Without a module tree, a weight counts
as a linear if 32 divides its inputs and no part of its name suggests an embedding, a head, a router
or a norm. Everything else is copied. No scale can be folded, because the dataflow is unknown.
"""

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from quantkit.models.table import Block, Parameter, Role, ScaleGroup, Split

_NOT_LINEAR = re.compile(
    r"embed|wte|wpe|lm_head|head$|norm|\bln_|router|\bgate$|conv|rotary|position", re.IGNORECASE
)
_LAYER = re.compile(r"\b(?:layers|h|blocks|block|layer)\.(\d+)\.")
_EXPERT = re.compile(r"\bexperts\.(\d+)\.")
_ROW = re.compile(r"\b(?:down_proj|o_proj|w2)$")
"""Linears that engines split along their inputs."""
_BLOCKS: dict[Block, re.Pattern[str]] = {
    "shared_expert": re.compile(r"\bshared_experts?\."),
    "attention": re.compile(r"\bself_attn\."),
    "mlp": re.compile(r"\bmlp\."),
}
"""The first pattern found in a name decides."""


@dataclass(frozen=True)
class Config:
    """Nothing is known but the rows themselves."""


def parameters(
    shapes: Mapping[str, tuple[int, ...]], linears: Collection[str] | None = None
) -> list[Parameter]:
    """shapes: tensor name -> logical shape, of every tensor except the scales of packed ones.
    linears: names of the linears; None to decide by name."""
    return [_parameter(name, shape, linears) for name, shape in shapes.items()]


def role(module: str) -> Role:
    """Role of a quantized linear: all may stay quantized except latent attention's up-projection,
    which is absorbed at decode."""
    return "kv_b" if module.endswith("kv_b_proj") else "linear"


def has_linear_suffix(name: str) -> bool:
    """Whether engines treat an unquantized tensor of this name as a linear: linears of a decoder
    layer end in _proj; eh_proj is unquantized in every engine."""
    return name.endswith(("_proj.weight", "_proj_with_mqa.weight")) and not name.endswith(
        "eh_proj.weight"
    )


def scale_groups(config: Config, layer: int) -> list[ScaleGroup]:
    return []


def _parameter(name: str, shape: tuple[int, ...], linears: Collection[str] | None) -> Parameter:
    layer, expert = _LAYER.search(name), _EXPERT.search(name)
    module = name.removesuffix(".weight")
    linear = (
        name in linears
        if linears is not None
        else name.endswith(".weight") and not _NOT_LINEAR.search(module)
    )
    taken = linear and len(shape) == 2 and (linears is not None or shape[1] % 32 == 0)
    role: Role = "linear" if taken else "head" if len(shape) == 2 else "norm"
    number = int(layer[1]) if layer else None
    split: Split = "row" if taken and _ROW.search(module) else "replicate"
    if layer and expert:
        return Parameter(
            name, shape, role, split, layer=number, expert=int(expert[1]), block="expert"
        )
    block = next((block for block, pattern in _BLOCKS.items() if pattern.search(name)), None)
    return Parameter(name, shape, role, split, layer=number, block=block)
