"""The attention sublayer with a gated delta rule (delta_rule.py): its tensors, scale groups and
forward."""

import torch
from quantkit_kernels import DeltaInputs, DeltaWeights, float32_linear
from torch import Tensor

from quantkit.models.context import Context
from quantkit.models.delta_rule import DeltaNet
from quantkit.models.table import Parameter, ScaleGroup
from quantkit.models.weights import Weights


def delta_parameters(net: DeltaNet, prefix: str, hidden: int, layer: int) -> list[Parameter]:
    """Every tensor of one layer's linear attention at `prefix`."""
    keys, _, values = net.segments

    def row(name: str, shape: tuple[int, ...], segments: tuple[int, ...] = ()) -> Parameter:
        return Parameter(
            f"{prefix}.{name}",
            shape,
            "state",
            "column",
            layer,
            block="attention",
            segments=segments,
        )

    def linear(name: str, rows: int, segments: tuple[int, ...] = ()) -> Parameter:
        fused = None if net.joined else f"{prefix}.in_proj_qkvz"
        shape = (rows, hidden)
        return Parameter(
            f"{prefix}.{name}.weight",
            shape,
            "linear",
            "column",
            layer,
            fused=fused,
            block="attention",
            segments=segments,
        )

    if net.joined:
        readers = [
            linear("in_proj_qkvz", 2 * (keys + values)),
            row("in_proj_ba.weight", (2 * net.value_heads, hidden)),
        ]
    else:
        gates = [row(f"in_proj_{name}.weight", (net.value_heads, hidden)) for name in "ba"]
        readers = [
            linear("in_proj_qkv", sum(net.segments), net.segments),
            linear("in_proj_z", values),
            *gates,
        ]
    out = Parameter(
        f"{prefix}.out_proj.weight",
        (hidden, values),
        "linear",
        "row",
        layer,
        block="attention",
        projection="o",
    )
    return [
        *readers,
        row("conv1d.weight", (sum(net.segments), 1, net.kernel), segments=net.segments),
        row("dt_bias", (net.value_heads,)),
        row("A_log", (net.value_heads,)),
        Parameter(
            f"{prefix}.norm.weight", (net.value_dim,), "norm", layer=layer, block="attention"
        ),
        out,
    ]


def delta_scale_groups(net: DeltaNet, prefix: str, norm: str) -> list[ScaleGroup]:
    """The norm before it to the linears that read it. The norm after it is shared by all heads, and
    its output is gated."""
    names = ("qkvz", "ba") if net.joined else ("qkv", "z", "b", "a")
    readers = tuple(f"{prefix}.in_proj_{name}" for name in names)
    return [ScaleGroup(f"{prefix}.in_proj", norm, True, readers, readers[0])]


class GatedDeltaNet:
    """The linear-attention sublayer. A rank has its share of the key heads, and their value
    heads."""

    def __init__(
        self, net: DeltaNet, layer: int, prefix: str, eps: float, weights: Weights
    ) -> None:
        self.net, self.layer = net, layer
        first, second = (("qkvz",), ("ba",)) if net.joined else (("qkv", "z"), ("b", "a"))
        self.qkvz = weights.fused_linear(tuple(f"{prefix}.in_proj_{name}" for name in first))
        self.ba = torch.cat(
            [weights.tensor(f"{prefix}.in_proj_{name}.weight").float() for name in second]
        )
        self.weights = DeltaWeights(
            weights.tensor(f"{prefix}.conv1d.weight").float()[:, 0].contiguous(),
            weights.tensor(f"{prefix}.A_log").float().exp(),
            weights.tensor(f"{prefix}.dt_bias").float(),
            weights.tensor(f"{prefix}.norm.weight"),
            eps,
            sigmoid=net.sigmoid,
        )
        self.out = weights.linear(f"{prefix}.out_proj")

    def __call__(self, x: Tensor, context: Context) -> Tensor:
        """x [T, H] -> [T, H], partial over ranks."""
        inputs = self._inputs(self.qkvz(x), float32_linear(x, self.ba))
        return self.out(context.attend_delta(self.layer, inputs, self.weights))

    def _inputs(self, qkvz: Tensor, ba: Tensor) -> DeltaInputs:
        """Views of the outputs of the linears."""
        net, heads = self.net, len(self.weights.speed)
        shared = net.value_heads // net.key_heads
        groups, value = heads // shared, (shared, net.value_dim)
        widths = [net.key_dim, net.key_dim, shared * net.value_dim, shared * net.value_dim]
        if net.joined:
            q, k, v, z = qkvz.unflatten(1, (groups, -1)).split(widths, dim=2)
            rate, decay = ba.unflatten(1, (groups, 2, shared)).unbind(2)
        else:
            parts = qkvz.split([groups * width for width in widths], dim=1)
            q, k, v, z = (part.unflatten(1, (groups, -1)) for part in parts)
            rate, decay = ba.unflatten(1, (2, groups, shared)).unbind(1)
        return DeltaInputs(q, k, v.unflatten(2, value), z.unflatten(2, value), decay, rate)
