"""Linears with int4 or int8 weights and 16-bit activations (W4A16, W8A16) in vllm-ascend, which has
the first for routed experts only and the second for ModelSlim only: a plugin of vLLM, loaded by its
entry point `vllm.general_plugins`.

It takes checkpoints of compressed-tensors' format pack-quantized, in groups or per channel, with
or without zero points; experts get the group size that their config group has. Written against vllm-ascend 0.23.0; never run on an NPU.
"""

from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

from quantkit_kernels.torch_npu.calls import weight_quant_matmul
from quantkit_kernels.torch_npu.layout import carry_int4

_METHOD = "compressed-tensors"
_WORD = 32


def register() -> None:
    """Called by vLLM in each of its processes. Does nothing without vllm-ascend."""
    if find_spec("vllm_ascend") is None:
        return
    from vllm.model_executor.layers.quantization import register_quantization_config
    from vllm_ascend.quantization.compressed_tensors_config import AscendCompressedTensorsConfig
    from vllm_ascend.quantization.method_adapters import AscendLinearMethod

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
            return LinearMethod(scheme) if isinstance(scheme, WeightOnlyLinear) else method

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


class WeightOnlyLinear:
    """A scheme of vllm-ascend (AscendLinearScheme of its quantization/methods/base.py). group_size:
    0 for one group per output channel.

    A layer has, while it loads, the checkpoint's tensors: weight_packed int32 [N, K bits / 32],
    weight_scale [N, G], weight_zero_point int32 [N bits / 32, G] if not symmetric, weight_shape;
    afterwards what npu_weight_quant_batchmatmul takes: weight int32 [K, N/8] with eight int4, or
    int8 [K, N]; weight_scale and weight_offset [G, N].
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
        weight = carry_int4(codes) if self.bits == 4 else codes.contiguous()
        for name, tensor in (
            ("weight", weight),
            ("weight_scale", scale),
            ("weight_offset", offset),
        ):
            layer.register_parameter(name, nn.Parameter(tensor, requires_grad=False))

    def apply(
        self, layer: Any, x: Tensor, bias: Tensor | None = None, tp_rank: int | None = 0
    ) -> Tensor:
        """x [..., K] -> [..., N]."""
        rows = x.flatten(0, -2)
        out = weight_quant_matmul(
            rows, layer.weight, layer.weight_scale, layer.weight_offset, self.group_size
        )
        return (out if bias is None else out + bias).unflatten(0, x.shape[:-1])

    def _unpacked(self, words: Tensor) -> Tensor:
        """int32 [..., n] to int8 [..., n per_word], codes without their offset of half a range."""
        shifts = torch.arange(0, _WORD, self.bits, dtype=torch.int32, device=words.device)
        codes = (words.unsqueeze(-1) >> shifts) & (2**self.bits - 1)
        return (codes.flatten(-2) - 2 ** (self.bits - 1)).to(torch.int8)
