"""Rounding methods of your own: registered by name, used by that name in a recipe's methods in
place of gptq (docs/python.md, "A method of your own")."""

from collections.abc import Callable
from typing import TYPE_CHECKING, get_args

from quantkit.common.errors import QuantkitError
from quantkit.grids.names import Method

if TYPE_CHECKING:
    from torch import Tensor

    from quantkit.grids.base import Quantizer, Scales
    from quantkit.quant.gptq import Curvature

Rounding = Callable[["Tensor", "Quantizer", "Curvature"], "tuple[Tensor, Scales]"]
"""From a linear's weight float32 [..., N, K], its grid and the curvature of its inputs (`diagonal`
[..., K]: mean square of each channel) to values on the grid [..., N, K] and their scales
[..., N, G]. Leading dimensions are experts."""

ROUNDINGS: dict[str, Rounding] = {}


def register_rounding(name: str, rounding: Rounding) -> None:
    """Let recipes name `rounding` among their methods; a second one of the name replaces the first.
    A resumed run knows it by its name alone. Raises QuantkitError for a name of quantkit's own."""
    if name in get_args(Method) or not name.isidentifier():
        raise QuantkitError(f"a method cannot be registered as {name!r}", "choose another name")
    ROUNDINGS[name] = rounding


def check_methods(methods: tuple[str, ...] | None) -> tuple[str, ...] | None:
    """Raises ValueError for a method that does not exist, or that rounds as another does."""
    known = [*get_args(Method), *ROUNDINGS]
    for name in methods or ():
        if name not in known:
            raise ValueError(f"{name!r} is not one of {', '.join(known)}")
    rounding = [name for name in methods or () if name in ROUNDINGS or name == "gptq"]
    if len(rounding) > 1:
        raise ValueError(f"{' and '.join(rounding)} both round: keep one")
    return methods
