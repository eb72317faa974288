"""NVIDIA ModelOpt NVFP4, the layout of nvidia/DeepSeek-R1-FP4 and of chitu on Ascend.

    X.weight uint8 [N, K / 2], low bits the even input   X.weight_scale float8_e4m3fn [N, K / 16]   X.weight_scale_2 float32 []

weight_scale_2 is a MULTIPLIER. An input_scale (4-bit activations) is accepted and not used. The MTP layer stays in BF16: SGLang runs
it unquantized. The description stands in hf_quant_config.json and, flat, in config.json, as ModelOpt has written both since 0.31:
vLLM 0.22 to 0.32 takes W4A16_NVFP4 from config.json only ("Unknown ModelOpt quant algo" otherwise).
"""

import json
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor

from quantkit.checkpoint.formats.base import IgnoreSpelling, StoredPart, ignore_list, plain_linears
from quantkit.checkpoint.formats.nvfp4 import CODE_PAIRS, GROUP_SCALES, Nvfp4, code_shapes
from quantkit.checkpoint.header import TensorSpec
from quantkit.errors import QuantkitError
from quantkit.quant.packing import pack_pairs, unpack_pairs
from quantkit.quant.weights import FP4_GROUP, Fp4Weight, Weight
from quantkit.schemes import Fp4Grid, Grid

_MTP_HEAD = "shared_head.head"
_SIDE_FILE = "hf_quant_config.json"
_WRITTEN = "W4A16_NVFP4"
MIXED = "MIXED_PRECISION"
_ALGORITHMS = ("NVFP4", _WRITTEN)
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
    marker = ".weight"
    own_suffixes = (".weight_scale", ".weight_scale_2")

    def parts(self, module: str, shape: tuple[int, int], grid: Grid | None) -> tuple[StoredPart, ...]:
        codes, scales = code_shapes(module, shape)
        return (
            StoredPart(".weight", (torch.uint8,), codes, axes=CODE_PAIRS),
            # chitu declares the same bytes as uint8
            StoredPart(".weight_scale", (torch.float8_e4m3fn, torch.uint8), scales, axes=GROUP_SCALES),
            StoredPart(".weight_scale_2", (torch.float32,), ()),
            StoredPart(".input_scale", (torch.float32,), (), required=False),
        )

    def pack(self, module: str, weight: Weight) -> dict[str, Tensor]:
        assert isinstance(weight, Fp4Weight), type(weight)
        return {
            f"{module}.weight": pack_pairs(weight.codes),
            f"{module}.weight_scale": weight.scale,
            f"{module}.weight_scale_2": weight.global_scale,
        }

    def unpack(self, module: str, tensors: Mapping[str, Tensor]) -> Weight:
        return Fp4Weight(
            codes=unpack_pairs(tensors[f"{module}.weight"]),
            scale=tensors[f"{module}.weight_scale"].view(torch.float8_e4m3fn),
            global_scale=tensors[f"{module}.weight_scale_2"].reshape(()),
        )

    def detect(self, config: Mapping[str, Any], side: Mapping[str, Any]) -> bool:
        said = str(described(config, side).get("quant_algo")) if is_modelopt(config, side) else "FP8"
        return "FP8" not in said and said != MIXED  # fp8.py, modelopt_mixed.py

    def grid(self, config: Mapping[str, Any], side: Mapping[str, Any]) -> Grid | None:
        block = described(config, side)
        algorithm, size = block.get("quant_algo"), _group_size(block)
        if algorithm not in _ALGORITHMS or size != FP4_GROUP:
            said = f"quant_algo {algorithm}" + (f" and group_size {size}" if algorithm in _ALGORITHMS else "")
            known = f"{', '.join(_ALGORITHMS)} with group_size {FP4_GROUP}, FP8, FP8_PER_CHANNEL_PER_TOKEN, MXFP8 and mixtures of these"
            raise QuantkitError(f"the checkpoint is ModelOpt with {said}", f"quantkit reads {known}: export it so, or quantize its source")
        return Fp4Grid()

    def ignored(self, config: Mapping[str, Any], side: Mapping[str, Any]) -> Callable[[str], bool] | None:
        block = described(config, side)
        entries = block.get("exclude_modules", block.get("ignore"))
        return None if entries is None else lambda module: any(_SPELLING.matches(entry, module) for entry in entries)

    def config_block(self, grid: Grid | None, quantized: Mapping[str, Grid | None], plain: Sequence[TensorSpec]) -> dict[str, Any]:
        weights = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": FP4_GROUP}
        return {
            "quant_method": "modelopt",
            "quant_algo": _WRITTEN,
            "group_size": FP4_GROUP,
            "config_groups": {"group_0": {"weights": weights, "targets": ["Linear"]}},
            "ignore": _unquantized(quantized, plain),
            "producer": _PRODUCER,
        }

    def extra_files(self, grid: Grid | None, quantized: Mapping[str, Grid | None], plain: Sequence[TensorSpec]) -> dict[str, bytes]:
        quantization = {
            "quant_algo": _WRITTEN,
            "kv_cache_quant_algo": None,
            "group_size": FP4_GROUP,
            "exclude_modules": _unquantized(quantized, plain),
        }
        described = {"producer": _PRODUCER, "quantization": quantization}
        return {_SIDE_FILE: json.dumps(described, indent=2).encode() + b"\n"}

    def quantizes(self, module: str, role: str, *, mtp: bool = False) -> bool:
        return role == "linear" and not mtp


def _unquantized(quantized: Mapping[str, Grid | None], plain: Sequence[TensorSpec]) -> list[str]:
    """With the name that SGLang has for an MTP layer's head: no entry about the layer covers it."""
    entries = ignore_list(quantized, plain_linears(plain, quantized), _SPELLING)
    with_mtp_head = any(spec.name.endswith(f".{_MTP_HEAD}.weight") for spec in plain)
    return [*entries, f"model.{_MTP_HEAD}"] if with_mtp_head else entries


def is_modelopt(config: Mapping[str, Any], side: Mapping[str, Any]) -> bool:
    """Whether ModelOpt wrote it, in whatever numbers."""
    return _SIDE_FILE in side or str((config.get("quantization_config") or {}).get("quant_method")).startswith("modelopt")


def described(config: Mapping[str, Any], side: Mapping[str, Any]) -> Mapping[str, Any]:
    """The description, from config.json where it has one as engines do, else from hf_quant_config.json."""
    block = config.get("quantization_config") or side.get(_SIDE_FILE, {}).get("quantization")
    if not isinstance(block, dict):
        raise QuantkitError(f"{_SIDE_FILE} says nothing under quantization", "download that file again")
    return block


def _group_size(block: Mapping[str, Any]) -> Any:
    """At the top of the description, or with the weights of its groups, where ModelOpt's newer form has it alone."""
    groups = (block.get("config_groups") or {}).values()
    weights = [group["weights"] for group in groups if isinstance(group, dict) and isinstance(group.get("weights"), dict)]
    return block.get("group_size", next((one["group_size"] for one in weights if "group_size" in one), FP4_GROUP))


FORMAT = ModelOpt()
