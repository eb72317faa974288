"""How a stored value differs from what it was made of."""

from dataclasses import replace

import torch
from torch import Tensor

from quantkit.checkpoint.formats.base import Format
from quantkit.checkpoint.reader import check_finite
from quantkit.common.devices import dtype_name
from quantkit.common.errors import QuantkitError
from quantkit.grids.weights import (
    Fp4Weight,
    Fp8BlockWeight,
    IntWeight,
    Mxfp4Weight,
    Weight,
    dequantize,
)


def fit_scales(module: str, weight: Weight, target: Format) -> Weight:
    """The weight with scales rounded to what `target` stores; the same object where they already
    are."""
    if not isinstance(weight, IntWeight):
        return weight
    scale = weight.scale.to(target.scale_dtype).float()
    if not bool(torch.isfinite(scale).all()) or bool(((scale == 0) & (weight.scale != 0)).any()):
        raise QuantkitError(
            f"{module} has scales that {dtype_name(target.scale_dtype)} cannot hold",
            f"{target.name} is not for this model",
        )
    return replace(weight, scale=scale)


def stored_error(module: str, weight: Weight, stored: Weight) -> float:
    match weight, stored:
        case IntWeight(), IntWeight():
            assert torch.equal(weight.codes, stored.codes), module
            zero = torch.zeros_like(weight.scale, dtype=torch.int8)
            before, after = (
                zero if w.zero_point is None else w.zero_point for w in (weight, stored)
            )
            assert torch.equal(before, after), module
            return _relative(weight.scale, stored.scale)
        case Fp4Weight(), Fp4Weight():
            assert torch.equal(weight.codes, stored.codes), module
            assert torch.equal(weight.scale.view(torch.uint8), stored.scale.view(torch.uint8)), (
                module
            )
            if not bool(torch.isfinite(stored.global_scale)):
                raise QuantkitError(
                    f"the global scale of {module} has no reciprocal in FP32",
                    "the checkpoint is damaged: download it again",
                )
            return _relative(weight.global_scale, stored.global_scale)
        case Mxfp4Weight(), _:
            return _relative(dequantize(weight), dequantize(stored))
        case Fp8BlockWeight(), _:
            raise AssertionError("FP8 blocks convert to plain weights only")
    raise AssertionError(f"{type(weight)} became {type(stored)}")


def as_dtype(name: str, values: Tensor, dtype: torch.dtype) -> tuple[dict[str, Tensor], float]:
    """`values`, float32 of any shape, in another dtype under their name, and the largest relative
    error of that. Raises QuantkitError where a value is not finite, or `dtype` cannot hold it."""
    extremes = torch.stack(values.aminmax()) if values.numel() else values
    if not bool(torch.isfinite(extremes).all()):
        check_finite(name, values)
    if not bool(torch.isfinite(extremes.to(dtype)).all()):
        raise QuantkitError(
            f"{name} holds values that {dtype_name(dtype)} cannot", "use --dtype bf16"
        )
    cast = values.to(dtype)
    return {name: cast}, _relative(values, cast)


def _relative(before: Tensor, after: Tensor) -> float:
    """Largest |after / before - 1|, in few passes; where before is 0 after must be too, as casts keep it."""
    if not before.numel():
        return 0.0
    smallest, largest = torch.div(after.to(before.dtype), before).nan_to_num_(nan=1.0).aminmax()
    return max(float(largest) - 1, 1 - float(smallest))
