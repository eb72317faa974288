"""The half of a decoder layer that has linear attention with a state: its tensors, scale groups and forward. The rule: delta_rule.py."""

import torch
from quantkit_kernels import rms_norm
from torch import Tensor
from torch.nn import functional as F

from quantkit.models.context import Context
from quantkit.models.delta_rule import DeltaInputs, DeltaNet, DeltaWeights
from quantkit.models.table import Parameter, ScaleGroup
from quantkit.models.weights import Weights


def delta_parameters(net: DeltaNet, prefix: str, hidden: int, layer: int) -> list[Parameter]:
    """Every tensor of one layer's linear attention at `prefix`."""
    keys, _, values = net.segments

    def row(name: str, shape: tuple[int, ...], segments: tuple[int, ...] = ()) -> Parameter:
        return Parameter(f"{prefix}.{name}", shape, "state", "column", layer, block="attention", segments=segments)

    linear = Parameter(f"{prefix}.in_proj_qkvz.weight", (2 * (keys + values), hidden), "linear", "column", layer, block="attention")
    out = Parameter(f"{prefix}.out_proj.weight", (hidden, values), "linear", "row", layer, block="attention", projection="o")
    return [
        linear,
        row("in_proj_ba.weight", (2 * net.value_heads, hidden)),
        row("conv1d.weight", (sum(net.segments), 1, net.kernel), segments=net.segments),
        row("dt_bias", (net.value_heads,)),
        row("A_log", (net.value_heads,)),
        Parameter(f"{prefix}.norm.weight", (net.value_dim,), "norm", layer=layer, block="attention"),
        out,
    ]


def delta_scale_groups(prefix: str, norm: str) -> list[ScaleGroup]:
    """The norm before it to both linears that read it. The norm behind it is shared by all heads, and its output by a gate."""
    readers = (f"{prefix}.in_proj_qkvz", f"{prefix}.in_proj_ba")
    return [ScaleGroup(f"{prefix}.in_proj", norm, True, readers, readers[0])]


class GatedDeltaNet:
    """The attention half of a layer with a state. Of a rank: its share of the key heads, and their value heads."""

    def __init__(self, net: DeltaNet, layer: int, prefix: str, eps: float, weights: Weights) -> None:
        self.net, self.layer, self.eps = net, layer, eps
        self.qkvz = weights.linear(f"{prefix}.in_proj_qkvz")
        self.ba = weights.tensor(f"{prefix}.in_proj_ba.weight").float()
        self.weights = DeltaWeights(weights.tensor(f"{prefix}.conv1d.weight").float()[:, 0], net)
        self.dt_bias = weights.tensor(f"{prefix}.dt_bias").float()
        self.speed = weights.tensor(f"{prefix}.A_log").float().exp()
        self.norm = weights.tensor(f"{prefix}.norm.weight")
        self.out = weights.linear(f"{prefix}.out_proj")

    def __call__(self, x: Tensor, context: Context) -> Tensor:
        """x [T, H] -> [T, H], partial over ranks."""
        net, shared = self.net, self.net.value_heads // self.net.key_heads
        sizes = [net.key_dim, net.key_dim, shared * net.value_dim, shared * net.value_dim]
        q, k, v, z = self.qkvz(x).unflatten(-1, (-1, sum(sizes))).split(sizes, dim=-1)
        b, a = (side.flatten(1) for side in F.linear(x.float(), self.ba).unflatten(-1, (-1, 2, shared)).unbind(-2))
        mixed = torch.cat([side.flatten(1) for side in (q, k, v)], dim=-1)
        inputs = DeltaInputs(mixed, -self.speed * F.softplus(a + self.dt_bias), b.sigmoid())
        attended = context.attend_delta(self.layer, inputs, self.weights).to(x.dtype)
        gate = F.silu(z.reshape(attended.shape).float())
        return self.out((rms_norm(attended, self.norm, self.eps) * gate).to(x.dtype).flatten(1))
