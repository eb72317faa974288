"""Kimi-K3 (arXiv 2607.24653): Kimi-Linear's layers with attention over the residuals of earlier
blocks, a gate of full rank in linear attention and one in latent attention, experts in a latent
space, and SiTU.

Routed experts work in a latent space, narrower than the residual stream (LatentMoE): one linear
into it for all experts, one back from their sum, after a norm. The router and the shared expert
read the stream. Engines compute both linears in 16 bits.

The text model is computed; vision tower and projector are copied. Nothing is rotated. The release
stores A_log with more values than heads, of which the first are used; it has no MTP layer. Symbols:
T tokens, H hidden_size, L width of the space.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from quantkit_kernels import Gating, Routing, UnsummedPairs, rms_norm
from quantkit_kernels.gating import sigmoid
from torch import Tensor

from quantkit.models import deepseek_v3, kimi_linear
from quantkit.models.attention_residuals import (
    AttentionResidualLayer,
    AttentionResidualModel,
    AttentionResidualSizes,
    with_attention_residuals,
)
from quantkit.models.config import (
    check_at_most,
    check_count,
    check_flag,
    refusal,
    refuse_other_values,
)
from quantkit.models.kimi_delta import (
    attention_of,
    check_lower_bound,
    delta_parameters,
    delta_scale_groups,
)
from quantkit.models.mlp import MixtureNames, MoeMlp, moe_scale_groups
from quantkit.models.table import Parameter, ScaleGroup
from quantkit.models.text_submodel import RenamedWeights, rename_groups, rename_rows
from quantkit.models.weights import Weights

_INTO, _NORM, _BACK = "routed_expert_down_proj", "routed_expert_norm", "routed_expert_up_proj"


@dataclass(frozen=True)
class LatentSizes:
    """eps: of the norm of the experts' sum; None without that norm."""

    width: int
    hidden: int
    eps: float | None


def with_latent_experts(
    rows: Iterable[Parameter], sizes: LatentSizes, module: str
) -> list[Parameter]:
    """The rows of a stack whose experts, in a layer's `module`, read the stream, with experts in
    the latent space."""
    found: list[Parameter] = []
    for row in rows:
        if row.expert is not None:
            if row.expert == 0 and row.projection == "gate":
                found += _around(f"model.layers.{row.layer}.{module}", sizes, row)
            row = replace(row, shape=_narrowed(row, sizes.width))
        found.append(row)
    return found


def _narrowed(row: Parameter, width: int) -> tuple[int, ...]:
    outputs, inputs = row.shape
    return (width, inputs) if row.projection == "down" else (outputs, width)


def _around(prefix: str, sizes: LatentSizes, expert: Parameter) -> list[Parameter]:
    """What surrounds the experts of a layer."""
    into = Parameter(
        f"{prefix}.{_INTO}.weight",
        (sizes.width, sizes.hidden),
        "latent",
        layer=expert.layer,
        mtp=expert.mtp,
        block="router",
    )
    shape = (sizes.hidden, sizes.width)
    back = replace(into, name=f"{prefix}.{_BACK}.weight", shape=shape, after_experts=True)
    norm = replace(back, name=f"{prefix}.{_NORM}.weight", shape=shape[1:], role="norm")
    return [into, *([] if sizes.eps is None else [norm]), back]


def latent_scale_groups(
    prefix: str, norm: str, experts: int, names: MixtureNames
) -> list[ScaleGroup]:
    """As `moe_scale_groups`: the norm to its readers, the linear into the latent space to gate and
    up of all routed experts."""
    first, *others = moe_scale_groups(prefix, norm, experts, names)
    into = f"{prefix}.{_INTO}"
    routed = tuple(one for one in first.consumers if one.startswith(f"{prefix}.experts."))
    readers = tuple(one for one in first.consumers if one not in {*routed})
    outer = replace(first, consumers=(*readers, into), reaches_experts=False)
    inner = replace(
        first,
        name=f"{prefix}.latent",
        producer=into,
        producer_is_norm=False,
        consumers=routed,
        observe=routed[0],
    )
    return [outer, inner, *others]


class LatentMoe(MoeMlp):
    def __init__(
        self,
        routing: Routing,
        prefix: str,
        weights: Weights,
        names: MixtureNames,
        sizes: LatentSizes,
    ) -> None:
        super().__init__(routing, prefix, weights, names)
        self.sizes = sizes
        self.into, self.back = (weights.linear(f"{prefix}.{name}") for name in (_INTO, _BACK))
        self.gain = None if sizes.eps is None else weights.tensor(f"{prefix}.{_NORM}.weight")

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, H] -> [T, L + H], partial over ranks: the experts' sum in the latent space, and the
        shared expert's output."""
        topk_ids, topk_weights = self.choose(x)
        routed = self.experts(self.into(x), topk_ids, topk_weights)
        assert self.shared is not None, "a latent mixture has a shared expert of its own"
        return torch.cat((routed, self._shared_output(self.shared, x)), dim=-1)

    def unsummed(self, x: Tensor) -> Tensor | UnsummedPairs:
        return self(x)

    def finish(self, both: Tensor) -> Tensor:
        """What `__call__` returns, summed over the ranks, [T, L + H] -> [T, H]."""
        routed, shared = both.split((self.sizes.width, self.sizes.hidden), dim=-1)
        if self.gain is not None and self.sizes.eps is not None:
            routed = rms_norm(routed.contiguous(), self.gain, self.sizes.eps)
        return self.back(routed) + shared


_COMPUTED = {"hidden_act": "situ", "mla_use_output_gate": True}
_DEFAULTS = {"hidden_act": "silu", "mla_use_output_gate": False, "routed_scaling_factor": 1.0}
"""The release's code's."""
_PREFIX = "language_model."


def _rename(name: str) -> str:
    return f"{_PREFIX}{name}"


@dataclass(frozen=True)
class Config(kimi_linear.Config):
    """attn_res_block_size: layers of a block. routed_expert_hidden_size: width of the experts'
    space; latent_moe_use_norm: whether their sum is normed. activation_situ_beta and
    activation_situ_linear_beta: bounds of gate and up; 0 for an up without."""

    attn_res_block_size: int = 0
    routed_expert_hidden_size: int = 0
    latent_moe_use_norm: bool = False
    activation_situ_beta: float = 1.0
    activation_situ_linear_beta: float = 0.0

    @classmethod
    def from_dict(cls, config: dict[str, Any]) -> "Config":
        """From config.json. Raises QuantkitError where a required field is missing or a value is
        not computed by this file."""
        text = config.get("text_config")
        if not isinstance(text, dict):
            raise refusal("text_config", text, "an object")
        refuse_other_values(config, {"tie_word_embeddings": False}, "Kimi-K3", allow_null=True)
        text = _DEFAULTS | {key: value for key, value in text.items() if value is not None}
        refuse_other_values(text, _COMPUTED, "Kimi-K3")
        for name in ("attn_res_block_size", "routed_expert_hidden_size", "q_lora_rank"):
            check_count(name, text.get(name))
        made = cls.read(text, "Kimi-K3")
        assert isinstance(made, cls), made
        keys = text.get("num_key_value_heads", made.num_attention_heads)
        if keys != made.num_attention_heads:
            raise refusal("num_key_value_heads", keys, f"as many as heads: {keys}")
        if (net := made.recurrent) is None:
            return made
        own = text.get("linear_attn_config") or {}
        check_at_most("linear_attn_config.num_heads", net.key_heads, "head_dim", net.key_dim)
        lower = check_lower_bound("gate_lower_bound", own.get("gate_lower_bound"))
        full = check_flag(own, "use_full_rank_gate")
        return replace(made, recurrent=replace(net, lower=lower, full_gate=full))

    @property
    def streams(self) -> AttentionResidualSizes:
        block, layers = self.attn_res_block_size, self.num_hidden_layers
        return AttentionResidualSizes(block, layers, self.hidden_size, self.rms_norm_eps, _PREFIX)

    @property
    def latent(self) -> LatentSizes:
        eps = self.rms_norm_eps if self.latent_moe_use_norm else None
        return LatentSizes(self.routed_expert_hidden_size, self.hidden_size, eps)

    @property
    def mlp_output_width(self) -> int:
        return self.latent.width + self.hidden_size

    @property
    def gating(self) -> Gating:
        up_bound = self.activation_situ_linear_beta or None
        return Gating(bound=self.activation_situ_beta, up_bound=up_bound)

    @property
    def mixture(self) -> MixtureNames:
        return replace(super().mixture, gating=self.gating)

    @property
    def tp_units(self) -> dict[str, int]:
        net = self.recurrent
        return super().tp_units | ({"linear_attn_config.head_dim": net.key_dim} if net else {})

    @property
    def copied_prefixes(self) -> tuple[str, ...]:
        return "vision_tower.", "mm_projector."


def parameters(config: Config) -> list[Parameter]:
    """The text model's tensors, in the order of a forward pass."""

    def attention(layer: int) -> Iterable[Parameter]:
        a, hidden = f"model.layers.{layer}.self_attn", config.hidden_size
        if (net := config.delta(layer)) is not None:
            return delta_parameters(net, a, hidden, layer, (net.key_dim,))
        width = config.num_attention_heads * config.v_head_dim
        gate = Parameter(
            f"{a}.g_proj.weight", (width, hidden), "linear", "column", layer, block="attention"
        )
        return [*deepseek_v3.attention_parameters(config, layer), gate]

    rows = deepseek_v3.stack_parameters(config, attention)
    rows = with_latent_experts(rows, config.latent, config.mixture_module)
    return rename_rows(with_attention_residuals(rows, config.streams, config.is_moe), _rename)


def scale_groups(config: Config, layer: int) -> list[ScaleGroup]:
    """The foldable scales of one layer, producers before their consumers' own groups; no scale
    passes through SiTU."""
    p = f"model.layers.{layer}"
    a, norm = f"{p}.self_attn", f"{p}.post_attention_layernorm"
    if (net := config.delta(layer)) is not None:
        groups = delta_scale_groups(net, a, f"{p}.input_layernorm")
    else:
        groups = deepseek_v3.gated_scale_groups(config, layer, f"{a}.g_proj")
    if config.is_moe(layer):
        module, experts = f"{p}.{config.mixture_module}", config.n_routed_experts
        groups += latent_scale_groups(module, norm, experts, config.mixture)
    else:
        groups += deepseek_v3.feed_forward_scale_groups(config, layer)
    return rename_groups(groups, _rename)


class Attention(deepseek_v3.Attention):
    def __init__(self, config: Config, layer: int, weights: Weights) -> None:
        super().__init__(config, layer, weights)
        self.gate = weights.linear(f"model.layers.{layer}.self_attn.g_proj")

    def gated(self, attended: Tensor, x: Tensor) -> Tensor:
        return attended * sigmoid(self.gate(x))


class DecoderLayer(AttentionResidualLayer):
    def __init__(self, config: Config, layer: int, weights: Weights) -> None:
        weights, p = RenamedWeights(weights, _rename), f"model.layers.{layer}"
        attention = attention_of(Attention, config, layer, weights)
        self.latent: LatentMoe | None = None
        if config.is_moe(layer):
            module = f"{p}.{config.mixture_module}"
            self.latent = LatentMoe(config.routing, module, weights, config.mixture, config.latent)
        mlp = self.latent or deepseek_v3.mlp_of(config, layer, weights)
        super().__init__(layer, config.streams, weights, attention, mlp)

    def post_mlp(self, mlp_output: Tensor) -> Tensor:
        return mlp_output if self.latent is None else self.latent.finish(mlp_output)


class Model(AttentionResidualModel):
    layer_class = DecoderLayer

    def __init__(self, config: Config, weights: Weights) -> None:
        super().__init__(config, config.streams, weights)


MtpLayer = None
"""The release has no MTP layer."""
