"""ModelOpt's MIXED_PRECISION: NVFP4 and FP8 linears in one checkpoint, each named with its own
quant_algo. Read only.

hf_quant_config.json has them under `quantized_layers`; config.json, which engines ask first, has
them there or as the targets of config_groups.
"""

from typing import Any

from quantkit.checkpoint.formats import fp8, modelopt
from quantkit.checkpoint.formats.base import Format, Json
from quantkit.checkpoint.formats.declared import DeclaredFormat, Description, Placed
from quantkit.common.errors import QuantkitError
from quantkit.grids.mx import MX_GROUP
from quantkit.grids.mxfp8 import Mxfp8Grid
from quantkit.grids.nvfp4 import FP4_GROUP, Nvfp4Grid

_NVFP4 = DeclaredFormat(modelopt.FORMAT, Nvfp4Grid())
_ALGORITHMS: dict[str, DeclaredFormat] = {
    "NVFP4": _NVFP4,
    "W4A16_NVFP4": _NVFP4,
    "FP8": DeclaredFormat(fp8.ModelOptFp8(fp8.TENSOR), None),
    "FP8_PER_CHANNEL_PER_TOKEN": DeclaredFormat(fp8.ModelOptFp8(fp8.CHANNEL), None),
    "MXFP8": DeclaredFormat(fp8.MODELOPT_MX_WEIGHTS, Mxfp8Grid()),
}


_OF_GROUPS: dict[tuple[Any, ...], str] = {
    (4, "float", FP4_GROUP): "NVFP4",
    (8, "float", None): "FP8",
    (8, "float", MX_GROUP): "MXFP8",
}
"""num_bits, type and group_size of a config group."""


class ModelOptMixed(Description):
    name = "modelopt"
    variant = modelopt.MIXED
    members: tuple[Format, ...] = tuple(dict.fromkeys(one.format for one in _ALGORITHMS.values()))  # type: ignore[misc]

    def detect(self, config: Json, side: Json) -> bool:
        return (
            modelopt.is_modelopt(config, side)
            and modelopt.described(config, side).get("quant_algo") == modelopt.MIXED
        )

    def placed(self, config: Json, side: Json) -> Placed:
        block = modelopt.described(config, side)
        layers = (
            block.get("quantized_layers")
            or _layers_of_groups(block)
            or modelopt.described({}, side).get("quantized_layers")
        )
        if not isinstance(layers, dict) or not layers:
            raise QuantkitError(
                f"the checkpoint is ModelOpt's {modelopt.MIXED} and names no layers",
                "download its description again",
            )
        found = {module: _placement(module, own) for module, own in layers.items()}
        return found.get


def _placement(module: str, own: Any) -> DeclaredFormat:
    algorithm = own.get("quant_algo") if isinstance(own, dict) else None
    placement = _ALGORITHMS.get(str(algorithm))
    if placement is None or (placement is _NVFP4 and own.get("group_size", FP4_GROUP) != FP4_GROUP):
        message = (
            f"{module} is ModelOpt's {algorithm} with group_size "
            f"{own.get('group_size') if isinstance(own, dict) else None}"
        )
        raise QuantkitError(message, f"in a mixture quantkit reads {', '.join(_ALGORITHMS)}")
    return placement


def _layers_of_groups(block: Json) -> dict[str, dict[str, Any]]:
    """quantized_layers, from the config groups that name modules."""
    layers: dict[str, dict[str, Any]] = {}
    for group in (block.get("config_groups") or {}).values():
        weights = group.get("weights") if isinstance(group, dict) else None
        if not isinstance(weights, dict):
            continue
        said = (weights.get("num_bits"), weights.get("type"), weights.get("group_size"))
        algorithm = _OF_GROUPS.get(said, str(said))
        layers |= {str(target): {"quant_algo": algorithm} for target in group.get("targets") or ()}
    return layers


FORMAT = ModelOptMixed()
