"""Linears with int4 or int8 weights and 16-bit activations (W4A16, W8A16) in vllm-ascend, which has
the first for routed experts only and the second for ModelSlim only, and AWQ, which it does not
read: a plugin of vLLM, loaded by its entry point `vllm.general_plugins`.

It takes checkpoints of compressed-tensors' format pack-quantized, in groups or per channel, with
or without zero points, whose experts get the group size that their config group has, and AutoAWQ's
"gemm" layout with its experts. kv_b_proj, which vllm-ascend's attention takes as a plain weight, is
dequantized. Written against vllm-ascend 0.23.0; never run on an NPU.
"""

from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

from quantkit_kernels.torch_npu.calls import weight_quant_matmul
from quantkit_kernels.torch_npu.layout import carry_int4, uncarry_int4

_METHOD = "compressed-tensors"
_WORD = 32
_AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
"""Where AutoAWQ has the codes of eight neighbouring outputs in a word, in fours of bits."""
_AWQ_NAMES = ("qweight", "qzeros", "scales")
_NAMES = ("weight", "weight_scale", "weight_offset")


def register() -> None:
    """Called by vLLM in each of its processes. Does nothing without vllm-ascend."""
    if find_spec("vllm_ascend") is None:
        return
    from vllm.model_executor.layers.fused_moe import FusedMoE, FusedMoeWeightScaleSupported
    from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
    from vllm.model_executor.layers.quantization import register_quantization_config
    from vllm.model_executor.layers.quantization.awq import AWQConfig, AWQLinearMethod
    from vllm.model_executor.layers.quantization.utils.quant_utils import is_layer_skipped
    from vllm_ascend.ops.fused_moe.fused_moe import AscendUnquantizedFusedMoEMethod
    from vllm_ascend.ops.linear import AscendUnquantizedLinearMethod
    from vllm_ascend.platform import NPUPlatform
    from vllm_ascend.quantization.compressed_tensors_config import AscendCompressedTensorsConfig
    from vllm_ascend.quantization.method_adapters import AscendFusedMoEMethod, AscendLinearMethod
    from vllm_ascend.quantization.methods.w4a16 import AscendW4A16FusedMoEMethod

    class Unquantized(AscendUnquantizedLinearMethod):  # type: ignore[misc]
        """Of a linear that is loaded as `stored` says, and dequantized."""

        def __init__(self, stored: Any) -> None:
            super().__init__()
            self.stored = stored

        def create_weights(self, layer: Any, *sizes: Any, **attributes: Any) -> None:
            self.stored.create_weights(layer, *sizes, **attributes)

        def process_weights_after_loading(self, layer: Any) -> None:
            self.stored.process_weights_after_loading(layer)
            _dequantize(layer)
            super().process_weights_after_loading(layer)

    class LinearMethod(AscendLinearMethod):  # type: ignore[misc]
        def create_weights(self, layer: Any, *sizes: Any, **attributes: Any) -> None:
            super().create_weights(layer, *sizes, **attributes)
            zero_points = getattr(layer, "weight_zero_point", None)
            if zero_points is not None:  # the adapter splits what is packed along rows only there
                zero_points.input_dim = 1

    @register_quantization_config(_METHOD)
    class Config(AscendCompressedTensorsConfig):  # type: ignore[misc]
        def get_quant_method(self, layer: Any, prefix: str, **tables: Any) -> Any:
            method = super().get_quant_method(layer, prefix, **tables)
            scheme = getattr(method, "quant_method", None)
            if not isinstance(scheme, WeightOnlyLinear):
                return method
            return (
                Unquantized(LinearMethod(scheme))
                if _is_unquantized(prefix)
                else LinearMethod(scheme)
            )

        def _create_scheme_for_layer_type(
            self, weight_quant: Any, input_quant: Any, format: str | None, layer_type: str
        ) -> Any:
            packed = (format or self.quant_format) == "pack-quantized" and input_quant is None
            if layer_type == "linear" and packed and weight_quant.num_bits in (4, 8):
                return WeightOnlyLinear(
                    weight_quant.num_bits, weight_quant.group_size or 0, weight_quant.symmetric
                )
            if layer_type == "moe" and packed:
                if not weight_quant.symmetric:
                    raise ValueError(
                        "experts with zero points: vllm-ascend computes them without; "
                        "quantize with --engine vllm-ascend"
                    )
                # Where vllm-ascend's experts look for it; 32 by default.
                self.quant_description.setdefault("group_size", weight_quant.group_size)
            return super()._create_scheme_for_layer_type(
                weight_quant, input_quant, format, layer_type
            )

    class AwqLinearMethod(AWQLinearMethod):  # type: ignore[misc]
        """vLLM's parameters; then those of WeightOnlyLinear, which multiplies by them."""

        def process_weights_after_loading(self, layer: Any) -> None:
            _hold(layer, awq_tensors(*_taken(layer, _AWQ_NAMES)))

        def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
            return _product(layer, x, bias)

    class AwqExperts(AscendW4A16FusedMoEMethod):  # type: ignore[misc]
        """vllm-ascend's own W4A16 experts, with the zero points as their offsets."""

        def get_weight(
            self, experts: int, inner: int, hidden: int, dtype: torch.dtype
        ) -> dict[str, Tensor]:
            return {}

        def get_dynamic_quant_param(
            self, experts: int, inner: int, hidden: int, dtype: torch.dtype
        ) -> dict[str, Tensor]:
            found = {}
            for side, inputs, outputs in (("w13", hidden, 2 * inner), ("w2", inner, hidden)):
                if inputs % self.group_size:
                    raise ValueError(
                        f"{inputs} inputs of an expert on a rank are not whole groups of "
                        f"{self.group_size}; use fewer ranks, or --enable-expert-parallel"
                    )
                groups, words = inputs // self.group_size, outputs // self.pack_factor
                for name, rows, columns, kind in (
                    ("qweight", inputs, words, torch.int32),
                    ("qzeros", groups, words, torch.int32),
                    ("scales", groups, outputs, dtype),
                ):
                    found[f"{side}_{name}"] = torch.empty(experts, rows, columns, dtype=kind)
            return found

        def process_weights_after_loading(self, layer: Any) -> None:
            for side in ("w13", "w2"):
                stored = _taken(layer, [f"{side}_{name}" for name in _AWQ_NAMES])
                names = [f"{side}_{name}" for name in ("weight_packed", *_NAMES[1:])]
                _hold(layer, awq_tensors(*stored), names)

    class AwqExpertsMethod(AscendFusedMoEMethod):  # type: ignore[misc]
        def create_weights(self, layer: Any, *sizes: Any, **attributes: Any) -> None:
            super().create_weights(layer, *sizes, **attributes)
            group = FusedMoeWeightScaleSupported.GROUP.value
            for parameter in layer.parameters(recurse=False):
                for name, value in (("is_transposed", True), ("quant_method", group)):
                    setattr(parameter, name, value)

    @register_quantization_config("awq")
    class AwqConfig(AWQConfig):  # type: ignore[misc]
        def __init__(self, *options: Any, **named: Any) -> None:
            super().__init__(*options, **named)
            # Where vllm-ascend looks for what a checkpoint says of itself.
            self.quant_description = {"quant_method": "awq", "group_size": self.group_size}

        def get_supported_act_dtypes(self) -> list[torch.dtype]:
            return [torch.float16, torch.bfloat16]

        def get_quant_method(self, layer: Any, prefix: str, tid2eid: Any = None) -> Any:
            skipped = is_layer_skipped(
                prefix,
                self.modules_to_not_convert,
                self.packed_modules_mapping,
                skip_with_substr=True,
            )
            if isinstance(layer, LinearBase):
                if skipped:
                    return UnquantizedLinearMethod()
                method = AwqLinearMethod(self)
                return Unquantized(method) if _is_unquantized(prefix) else method
            if isinstance(layer, FusedMoE):
                if skipped:
                    return AscendUnquantizedFusedMoEMethod(layer.moe_config)
                return AwqExpertsMethod(AwqExperts(), layer.moe_config, tid2eid)
            return None

    if "awq" not in NPUPlatform.supported_quantization:
        NPUPlatform.supported_quantization.append("awq")


def _is_unquantized(prefix: str) -> bool:
    return prefix.endswith(".kv_b_proj")


class WeightOnlyLinear:
    """A scheme of vllm-ascend (AscendLinearScheme of its quantization/methods/base.py). group_size:
    0 for one group per output channel.

    A layer has, while it loads, the checkpoint's tensors: weight_packed int32 [N, K bits / 32],
    weight_scale [N, G], weight_zero_point int32 [N bits / 32, G] if not symmetric, weight_shape;
    afterwards what `_hold` says.
    """

    def __init__(self, bits: int, group_size: int, symmetric: bool) -> None:
        self.bits, self.group_size, self.symmetric = bits, max(group_size, 0), symmetric
        self.per_word = _WORD // bits

    def _groups(self, inputs: int) -> int:
        return inputs // (self.group_size or inputs)

    def get_weight(self, inputs: int, outputs: int, dtype: torch.dtype) -> dict[str, Any]:
        return {
            "weight_packed": torch.empty(outputs, inputs // self.per_word, dtype=torch.int32),
            "weight_scale": torch.empty(outputs, self._groups(inputs), dtype=dtype),
        }

    def get_pergroup_param(
        self, inputs: int, outputs: int, dtype: torch.dtype, layer_type: str | None = None
    ) -> dict[str, Any]:
        if self.symmetric:
            return {}
        shape = (outputs // self.per_word, self._groups(inputs))
        packed = torch.empty(shape, dtype=torch.int32)
        return {"weight_zero_point": packed, "_packed_dim": 0, "_packed_factor": self.per_word}

    def get_perchannel_param(self, outputs: int, dtype: torch.dtype) -> dict[str, Any]:
        return {}

    def get_pertensor_param(self, dtype: torch.dtype, layer_type: str = "") -> dict[str, Any]:
        return {"weight_shape": torch.empty(2, dtype=torch.int64)}

    def process_weights_after_loading(self, layer: Any) -> None:
        codes = self._unpacked(layer.weight_packed).t()
        scale = layer.weight_scale.t().contiguous()
        offset = torch.zeros_like(scale)
        if not self.symmetric:
            offset = -self._unpacked(layer.weight_zero_point.t()).to(scale.dtype).contiguous()
            del layer.weight_zero_point
        del layer.weight_packed, layer.weight_scale, layer.weight_shape
        _hold(layer, (carry_int4(codes) if self.bits == 4 else codes.contiguous(), scale, offset))

    def apply(
        self, layer: Any, x: Tensor, bias: Tensor | None = None, tp_rank: int | None = 0
    ) -> Tensor:
        """x [..., K] -> [..., N]."""
        return _product(layer, x, bias)

    def _unpacked(self, words: Tensor) -> Tensor:
        """int32 [..., n] to int8 [..., n per_word], codes without their offset of half a range."""
        shifts = torch.arange(0, _WORD, self.bits, dtype=torch.int32, device=words.device)
        codes = (words.unsqueeze(-1) >> shifts) & (2**self.bits - 1)
        return (codes.flatten(-2) - 2 ** (self.bits - 1)).to(torch.int8)


def _taken(layer: Any, names: Sequence[str]) -> list[Tensor]:
    """Parameters that the layer then has no more."""
    return [layer._parameters.pop(name).data for name in names]


def _hold(layer: Any, tensors: Sequence[Tensor], names: Sequence[str] = _NAMES) -> None:
    """As what npu_weight_quant_batchmatmul takes: weight int32 [K, N/8] with eight int4, or int8
    [K, N]; scale and offset [G, N]."""
    for name, tensor in zip(names, tensors, strict=True):
        layer.register_parameter(name, nn.Parameter(tensor, requires_grad=False))


def _product(layer: Any, x: Tensor, bias: Tensor | None) -> Tensor:
    """x [..., K] -> [..., N], of a layer that `_hold` filled."""
    inputs, groups = layer.weight.shape[0], layer.weight_scale.shape[0]
    group = 0 if groups == 1 else inputs // groups
    out = weight_quant_matmul(
        x.flatten(0, -2), layer.weight, layer.weight_scale, layer.weight_offset, group
    )
    return (out if bias is None else out + bias).unflatten(0, x.shape[:-1])


def _dequantize(layer: Any) -> None:
    """A layer that `_hold` filled, to the plain weight [N, K] of its scale's dtype."""
    weight, scale, offset = _taken(layer, _NAMES)
    codes = uncarry_int4(weight) if weight.dtype == torch.int32 else weight
    grouped = codes.unflatten(0, (len(scale), -1)).float() + offset.float().unsqueeze(1)
    plain = (grouped * scale.float().unsqueeze(1)).flatten(0, 1).t().contiguous()
    _hold(layer, [plain.to(scale.dtype)], ["weight"])


def awq_tensors(qweight: Tensor, qzeros: Tensor, scales: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """What AutoAWQ stores of a weight, or of experts [E, ...], as the operators take it: qweight int32
    [K, N/8] and qzeros [G, N/8] of codes 0..15, scales [G, N] -> int32 [K, N/8] of codes -8..7 in
    order, scale and offset [G, N], w = (code + offset) * scale."""
    words = torch.zeros_like(qweight)
    for column, place in enumerate(_AWQ_PLACES):
        words |= ((qweight >> (4 * place)) & 15) << (4 * column)
    shifts = 4 * torch.tensor(_AWQ_PLACES, dtype=torch.int32, device=qzeros.device)
    points = ((qzeros.unsqueeze(-1) >> shifts) & 15).flatten(-2)
    return words ^ -0x77777778, scales, (8 - points).to(scales.dtype)
