"""The attention sublayer of Kimi Delta Attention (arXiv 2510.26692), a gated delta rule with a
decay per key channel: its tensors, scale groups and forward.

Symbols: T tokens, H hidden_size, G heads, D head_dim.
"""

from collections.abc import Callable, Iterable
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


def check_lower_bound(name: str, value: Any) -> float:
    """A lower bound of the decay as of `DeltaWeights`; null for none."""
    if value is not None and (type(value) not in (int, float) or not -1e6 <= value < 0):
        raise refusal(name, value, "a number below 0, or null")
    return float(value or 0.0)


def delta_units(net: DeltaNet | None) -> dict[str, int]:
    """As of `ModelConfig.tp_units`."""
    return {"linear_attn_config.num_heads": net.key_heads} if net else {}


def delta_parameters(
    net: DeltaNet, prefix: str, hidden: int, layer: int, decay: tuple[int, ...]
) -> list[Parameter]:
    """Every tensor of one layer's linear attention at `prefix`. decay: shape of A_log, whose values
    after those of the heads are not used."""
    heads, dim = net.value_heads, net.value_dim
    width, spare = heads * dim, max(decay) - heads

    def state(name: str, shape: tuple[int, ...], split: Split = "column") -> Parameter:
        return Parameter(f"{prefix}.{name}", shape, "state", split, layer, block="attention")

    reader = Parameter(
        "",
        (width, hidden),
        "linear",
        "column",
        layer,
        fused=f"{prefix}.{''.join(_sides(net))}_proj",
        block="attention",
    )
    gate = {} if net.full_gate else {"g_a": (dim, hidden), "g_b": (width, dim)}
    return [
        *(replace(reader, name=f"{prefix}.{side}_proj.weight") for side in _sides(net)),
        *(state(f"{side}_conv1d.weight", (width, 1, net.kernel)) for side in _SIDES),
        replace(state("A_log", decay), segments=(heads, spare) if spare else ()),
        state("f_a_proj.weight", (dim, hidden), "replicate"),
        state("f_b_proj.weight", (width, dim)),
        state("dt_bias", (width,)),
        state("b_proj.weight", (heads, hidden)),
        *(
            state(f"{name}_proj.weight", shape, "replicate" if name == "g_a" else "column")
            for name, shape in gate.items()
        ),
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


def _sides(net: DeltaNet) -> tuple[str, ...]:
    """Names of the linears of full width that read the sublayer's input."""
    return (*_SIDES, "g") if net.full_gate else _SIDES


def _narrow(net: DeltaNet) -> tuple[str, ...]:
    """Names of the others, kept in float32: to the decay, the gate, the rate of each head."""
    return ("f_a", "b") if net.full_gate else ("f_a", "g_a", "b")


def delta_scale_groups(net: DeltaNet, prefix: str, norm: str) -> list[ScaleGroup]:
    """The norm before it to the linears that read it. The norm after it is shared by all heads, and
    its output is gated."""
    names = (*_sides(net), *_narrow(net))
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
        self.wide = weights.fused_linear(tuple(f"{prefix}.{side}_proj" for side in _sides(net)))
        low = [wide(f"{name}_proj.weight") for name in _narrow(net)]
        self.low, self.parts = torch.cat(low), [len(one) for one in low]
        self.decay = wide("f_b_proj.weight")
        self.gate = None if net.full_gate else wide("g_b_proj.weight")
        self.weights = DeltaWeights(
            torch.cat([wide(f"{side}_conv1d.weight")[:, 0] for side in _SIDES]),
            wide("A_log").flatten()[: self.parts[-1]].exp(),
            wide("dt_bias").unflatten(0, (-1, net.key_dim)),
            weights.tensor(f"{prefix}.o_norm.weight"),
            eps,
            sigmoid=True,
            lower=net.lower,
        )
        self.out = weights.linear(f"{prefix}.o_proj")

    def __call__(self, x: Tensor, context: Context) -> Tensor:
        """x [T, H] -> [T, H], partial over ranks."""
        sides = 3 if self.gate is not None else 4
        q, k, v, *full = self.wide(x).unflatten(1, (sides, -1, self.dim)).unbind(1)
        forget, *narrow, rate = float32_linear(x, self.low).split(self.parts, dim=1)
        heads = (-1, 1, self.dim)  # one value head for each key head
        gate = (
            full[0].unsqueeze(2)
            if self.gate is None
            else float32_linear(narrow[0], self.gate).to(x.dtype).unflatten(1, heads)
        )
        inputs = DeltaInputs(
            q,
            k,
            v.unsqueeze(2),
            gate,
            float32_linear(forget, self.decay).unflatten(1, heads),
            rate.unsqueeze(2),
        )
        return self.out(context.attend_delta(self.layer, inputs, self.weights))


def attention_of(
    latent: Callable[[Any, int, Weights], Callable[[Tensor, Context], Tensor]],
    config: Any,
    layer: int,
    weights: Weights,
) -> Callable[[Tensor, Context], Tensor]:
    """A layer's attention: linear by its number, else `latent`."""
    if (net := config.delta(layer)) is None:
        return latent(config, layer, weights)
    prefix = f"model.layers.{layer}.self_attn"
    return KimiDeltaAttention(net, layer, prefix, config.rms_norm_eps, weights)
