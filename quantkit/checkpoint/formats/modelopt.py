"""NVIDIA ModelOpt NVFP4, the layout of nvidia/DeepSeek-R1-FP4 and of chitu on Ascend.

    X.weight uint8 [N, K / 2], low bits the even input   X.weight_scale float8_e4m3fn [N, K / 16]   X.weight_scale_2 float32 []

    X.input_scale float32 [], where inputs are described as 4-bit floats (W4A4)

weight_scale_2 and input_scale are MULTIPLIERS. That inputs are rounded is said by quant_algo NVFP4
and the input_activations of a config group together. With quant_algo alone, as in DeepSeek-R1-FP4,
an input_scale is accepted and not used, which is how engines run such files where a card has no FP4
units. The MTP layer stays in BF16: SGLang runs it unquantized. The description is in
hf_quant_config.json and, flat, in config.json, as ModelOpt has written both since 0.31: vLLM 0.22
to 0.32 takes W4A16_NVFP4 from config.json only ("Unknown ModelOpt quant algo" otherwise).
"""

import json
import re
from fnmatch import fnmatchcase
from typing import Any

import torch

from quantkit.checkpoint.formats.base import (
    Grids,
    Ignored,
    IgnoreSpelling,
    Json,
    Unquantized,
    ignore_list,
    unquantized_linears,
)
from quantkit.checkpoint.formats.nvfp4 import Nvfp4, is_fp4
from quantkit.common.errors import QuantkitError
from quantkit.grids.base import Grid
from quantkit.grids.nvfp4 import FP4_GROUP

_MTP_HEAD = "shared_head.head"
_METHOD = re.compile(r"modelopt(_\w+)?")
"""quant_method, as vLLM registers it: modelopt, modelopt_fp4 and others."""
_SIDE_FILE = "hf_quant_config.json"
_W4A4, _W4A16 = "NVFP4", "W4A16_NVFP4"
MIXED = "MIXED_PRECISION"
_ALGORITHMS = (_W4A4, _W4A16)
# Engines look for the producer's name, so it is ModelOpt's, with the version whose bytes these are.
_PRODUCER = {"name": "modelopt", "version": "0.47.0"}
_SPELLING = IgnoreSpelling(
    layer=lambda prefix: f"{prefix}.*",
    tails=lambda tail: (f"*.{tail}",),
    name=lambda module: module,
    matches=lambda entry, module: fnmatchcase(module, entry) or entry in module,
)


class ModelOpt(Nvfp4):
    name = "modelopt"
    variant = "NVFP4"
    outer = ("head",)
    own_suffixes = (".weight_scale", ".weight_scale_2")

    scalars = (".weight_scale_2", ".input_scale")
    divides = False
    scalar_shape = ()
    scale_dtypes = (torch.uint8,)  # chitu declares them so

    def detect(self, config: Json, side: Json) -> bool:
        block = described(config, side) if is_modelopt(config, side) else {"quant_algo": "FP8"}
        said = str(block.get("quant_algo"))
        return (
            "FP8" not in said and said != MIXED and _rounds_inputs(block) == self.rounds_inputs
        )  # fp8.py, modelopt_mixed.py

    def grid(self, config: Json, side: Json) -> Grid | None:
        block = described(config, side)
        algorithm, size = block.get("quant_algo"), _group_size(block)
        if algorithm not in _ALGORITHMS or size != FP4_GROUP:
            said = f"quant_algo {algorithm}" + (
                f" and group_size {size}" if algorithm in _ALGORITHMS else ""
            )
            known = (
                f"{', '.join(_ALGORITHMS)} with group_size {FP4_GROUP}, FP8, "
                "FP8_PER_CHANNEL_PER_TOKEN, MXFP8 and mixtures of these"
            )
            raise QuantkitError(
                f"the checkpoint is ModelOpt with {said}",
                f"quantkit reads {known}: export it so, or quantize its source",
            )
        return self.own_grid

    def ignored(self, config: Json, side: Json) -> Ignored:
        block = described(config, side)
        entries = block.get("exclude_modules", block.get("ignore"))
        return (
            None
            if entries is None
            else lambda module: any(_SPELLING.matches(entry, module) for entry in entries)
        )

    def config_block(
        self, grid: Grid | None, quantized: Grids, unquantized: Unquantized
    ) -> dict[str, Any]:
        dynamic = False if self.rounds_inputs else None
        return block(self._algorithm, 4, FP4_GROUP, quantized, unquantized, dynamic=dynamic)

    def extra_files(
        self, grid: Grid | None, quantized: Grids, unquantized: Unquantized
    ) -> dict[str, bytes]:
        return side_file(self._algorithm, FP4_GROUP, quantized, unquantized)

    def quantizes(self, module: str, role: str, *, mtp: bool = False) -> bool:
        return role == "linear" and not mtp

    @property
    def _algorithm(self) -> str:
        return _W4A4 if self.rounds_inputs else _W4A16


def block(
    algorithm: str,
    bits: int,
    group: int,
    quantized: Grids,
    unquantized: Unquantized,
    *,
    dynamic: bool | None,
) -> dict[str, Any]:
    """The description in config.json of floats in groups. dynamic: whether inputs have all their
    scales from the input itself; None where inputs are not quantized."""
    numbers = {"dynamic": False, "num_bits": bits, "type": "float", "group_size": group}
    read = {} if dynamic is None else {"input_activations": numbers | {"dynamic": dynamic}}
    return {
        "quant_method": "modelopt",
        "quant_algo": algorithm,
        "group_size": group,
        "config_groups": {"group_0": {**read, "weights": numbers, "targets": ["Linear"]}},
        "ignore": _unquantized(quantized, unquantized),
        "producer": _PRODUCER,
    }


def side_file(
    algorithm: str, group: int, quantized: Grids, unquantized: Unquantized
) -> dict[str, bytes]:
    """The same in hf_quant_config.json."""
    quantization = {
        "quant_algo": algorithm,
        "kv_cache_quant_algo": None,
        "group_size": group,
        "exclude_modules": _unquantized(quantized, unquantized),
    }
    described = {"producer": _PRODUCER, "quantization": quantization}
    return {_SIDE_FILE: json.dumps(described, indent=2).encode() + b"\n"}


def _rounds_inputs(block: Json) -> bool:
    """Whether the description says so of the inputs, and not by its quant_algo alone."""
    groups = (block.get("config_groups") or {}).values()
    return block.get("quant_algo") == _W4A4 and any(
        is_fp4(group.get("input_activations")) for group in groups if isinstance(group, dict)
    )


def _unquantized(quantized: Grids, unquantized: Unquantized) -> list[str]:
    """With the name that SGLang has for an MTP layer's head: no entry about the layer covers it."""
    entries = ignore_list(quantized, unquantized_linears(unquantized, quantized), _SPELLING)
    with_mtp_head = any(spec.name.endswith(f".{_MTP_HEAD}.weight") for spec in unquantized)
    return [*entries, f"model.{_MTP_HEAD}"] if with_mtp_head else entries


def is_modelopt(config: Json, side: Json) -> bool:
    """Whether ModelOpt wrote it, in whatever numbers."""
    return (
        _SIDE_FILE in side
        or _METHOD.fullmatch(str((config.get("quantization_config") or {}).get("quant_method")))
        is not None
    )


def described(config: Json, side: Json) -> Json:
    """The description, from config.json where it has one as engines do, else from
    hf_quant_config.json."""
    block = config.get("quantization_config") or side.get(_SIDE_FILE, {}).get("quantization")
    if not isinstance(block, dict):
        raise QuantkitError(
            f"{_SIDE_FILE} says nothing under quantization", "download that file again"
        )
    return block


def _group_size(block: Json) -> Any:
    """At the top of the description, or with the weights of its groups, where ModelOpt's newer form
    has it alone."""
    groups = (block.get("config_groups") or {}).values()
    weights = [
        group["weights"]
        for group in groups
        if isinstance(group, dict) and isinstance(group.get("weights"), dict)
    ]
    return block.get(
        "group_size", next((one["group_size"] for one in weights if "group_size" in one), FP4_GROUP)
    )


FORMAT = ModelOpt()
W4A4 = ModelOpt(4)
