"""Parameters of a model whose architecture quantkit does not know: enough to round it without
calibration.

What a linear is, transformers' modules tell (module_tree.py); it can be quantized where 32 divides
its inputs and 8 its outputs. Where there is no such tree, a weight is taken for one where 128
divides its inputs, unless a part of its name says that it is an embedding, a head, a router or a
norm. Everything else is copied. No scale can be folded, for nobody says what reads what.
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
"""Linears that engines cut along their inputs."""
_BLOCKS: dict[Block, re.Pattern[str]] = {
    "shared_expert": re.compile(r"\bshared_experts?\."),
    "attention": re.compile(r"\bself_attn\."),
    "mlp": re.compile(r"\bmlp\."),
}
"""The first that is found in a name."""


@dataclass(frozen=True)
class Config:
    """Nothing is known but the rows themselves."""


def parameters(
    shapes: Mapping[str, tuple[int, ...]], linears: Collection[str] | None = None
) -> list[Parameter]:
    """shapes: tensor name -> logical shape, of every tensor but the scales of packed ones. linears:
    the names of those that are; None where only names tell."""
    return [_parameter(name, shape, linears) for name, shape in shapes.items()]


def fits(shape: tuple[int, ...]) -> bool:
    """Whether a linear can be quantized, by its shape: 32 is the smallest group that engines have
    kernels for."""
    return len(shape) == 2 and shape[1] % 32 == 0 and shape[0] % 8 == 0


def role(module: str) -> Role:
    """What a quantized linear is: all but latent attention's up-projection, which is absorbed at
    decoding, may stay quantized."""
    return "kv_b" if module.endswith("kv_b_proj") else "linear"


def has_linear_suffix(name: str) -> bool:
    """Whether engines take an unquantized tensor for a linear: the linears of a decoder layer end
    in _proj; eh_proj is a plain one in every engine."""
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
    taken = linear and fits(shape) and (linears is not None or shape[1] % 128 == 0)
    role: Role = "linear" if taken else "head" if len(shape) == 2 else "norm"
    number = int(layer[1]) if layer else None
    split: Split = "row" if taken and _ROW.search(module) else "replicate"
    if layer and expert:
        return Parameter(
            name, shape, role, split, layer=number, expert=int(expert[1]), block="expert"
        )
    block = next((block for block, pattern in _BLOCKS.items() if pattern.search(name)), None)
    return Parameter(name, shape, role, split, layer=number, block=block)
