"""The attention sublayer of Kimi Delta Attention (arXiv 2510.26692), a gated delta rule with a
decay per key channel: its tensors, scale groups and forward.

Symbols: T tokens, H hidden_size, G heads, D head_dim.
"""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from quantkit_kernels import DeltaInputs, DeltaWeights, float32_linear
from torch import Tensor

from quantkit.models.config import check_count, refusal
from quantkit.models.context import Context
from quantkit.models.delta_rule import DeltaNet
from quantkit.models.table import Parameter, ScaleGroup, Split
from quantkit.models.weights import Weights

_SIDES = ("q", "k", "v")


def read_delta_sizes(config: dict[str, Any], defaults: Iterable[int | None]) -> list[int]:
    """Number of heads, their width, and the kernel of the convolution, in the words of a release
    (linear_attn_config) or of transformers."""
    own = config.get("linear_attn_config") or {}
    if not isinstance(own, dict):
        raise refusal("linear_attn_config", own, "an object")
    names = {
        "num_heads": "linear_num_heads",
        "head_dim": "linear_head_dim",
        "short_conv_kernel_size": "linear_conv_kernel_dim",
    }
    return [
        check_count(name, own.get(name, config.get(other, default)))
        for (name, other), default in zip(names.items(), defaults)
    ]


def delta_units(net: DeltaNet | None) -> dict[str, int]:
    """As of `ModelConfig.tp_units`."""
    return {"linear_attn_config.num_heads": net.key_heads} if net else {}


def delta_parameters(
    net: DeltaNet, prefix: str, hidden: int, layer: int, decay: tuple[int, ...]
) -> list[Parameter]:
    """Every tensor of one layer's linear attention at `prefix`. decay: shape of A_log."""
    heads, dim = net.value_heads, net.value_dim
    width = heads * dim

    def state(name: str, shape: tuple[int, ...], split: Split = "column") -> Parameter:
        return Parameter(f"{prefix}.{name}", shape, "state", split, layer, block="attention")

    reader = Parameter(
        "",
        (width, hidden),
        "linear",
        "column",
        layer,
        fused=f"{prefix}.qkv_proj",
        block="attention",
    )
    return [
        *(replace(reader, name=f"{prefix}.{side}_proj.weight") for side in _SIDES),
        *(state(f"{side}_conv1d.weight", (width, 1, net.kernel)) for side in _SIDES),
        state("A_log", decay),
        state("f_a_proj.weight", (dim, hidden), "replicate"),
        state("f_b_proj.weight", (width, dim)),
        state("dt_bias", (width,)),
        state("b_proj.weight", (heads, hidden)),
        state("g_a_proj.weight", (dim, hidden), "replicate"),
        state("g_b_proj.weight", (width, dim)),
        replace(state("o_norm.weight", (dim,), "replicate"), role="norm"),
        replace(
            reader,
            name=f"{prefix}.o_proj.weight",
            shape=(hidden, width),
            split="row",
            fused=None,
            projection="o",
        ),
    ]


def delta_scale_groups(prefix: str, norm: str) -> list[ScaleGroup]:
    """The norm before it to the linears that read it. The norm after it is shared by all heads, and
    its output is gated."""
    names = (*_SIDES, "f_a", "b", "g_a")
    readers = tuple(f"{prefix}.{name}_proj" for name in names)
    return [ScaleGroup(f"{prefix}.qkv", norm, True, readers, readers[0])]


class KimiDeltaAttention:
    """The linear-attention sublayer. A rank has its share of the heads."""

    def __init__(
        self, net: DeltaNet, layer: int, prefix: str, eps: float, weights: Weights
    ) -> None:
        def wide(name: str) -> Tensor:
            return weights.tensor(f"{prefix}.{name}").float()

        self.layer, self.dim = layer, net.value_dim
        self.qkv = weights.fused_linear(tuple(f"{prefix}.{side}_proj" for side in _SIDES))
        self.low = torch.cat([wide(f"{name}_proj.weight") for name in ("f_a", "g_a", "b")])
        self.decay, self.gate = wide("f_b_proj.weight"), wide("g_b_proj.weight")
        self.weights = DeltaWeights(
            torch.cat([wide(f"{side}_conv1d.weight")[:, 0] for side in _SIDES]),
            wide("A_log").flatten().exp(),
            wide("dt_bias").unflatten(0, (-1, net.key_dim)),
            weights.tensor(f"{prefix}.o_norm.weight"),
            eps,
            sigmoid=True,
            lower=net.lower,
        )
        self.out = weights.linear(f"{prefix}.o_proj")

    def __call__(self, x: Tensor, context: Context) -> Tensor:
        """x [T, H] -> [T, H], partial over ranks."""
        q, k, v = self.qkv(x).unflatten(1, (3, -1, self.dim)).unbind(1)
        low = float32_linear(x, self.low)
        forget, gate, rate = low.tensor_split((self.dim, 2 * self.dim), dim=1)
        heads = (-1, 1, self.dim)  # one value head for each key head
        inputs = DeltaInputs(
            q,
            k,
            v.unsqueeze(2),
            float32_linear(gate, self.gate).to(x.dtype).unflatten(1, heads),
            float32_linear(forget, self.decay).unflatten(1, heads),
            rate.unsqueeze(2),
        )
        return self.out(context.attend_delta(self.layer, inputs, self.weights))
