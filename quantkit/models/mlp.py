"""Gated MLPs and mixtures of experts, shared by the architectures: table rows, scale groups,
forward."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from quantkit_kernels import (
    SILU,
    Gating,
    Linear,
    Routing,
    UnsummedPairs,
    float32_linear,
    gate_and_mul,
    gate_and_rotate,
    moe_gate,
    route,
)
from quantkit_kernels.gating import sigmoid
from torch import Tensor

from quantkit.models.config import MOST_EXPERTS, check_at_most, check_count, check_divides, refusal
from quantkit.models.table import Block, Parameter, ScaleGroup
from quantkit.models.weights import LinearOp, Weights


@dataclass(frozen=True)
class MlpNames:
    """An architecture's names of the three linears of a gated MLP."""

    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"

    def modules(self, prefix: str) -> tuple[str, str, str]:
        """gate, up and down of the MLP at `prefix`."""
        return f"{prefix}.{self.gate}", f"{prefix}.{self.up}", f"{prefix}.{self.down}"


PROJ_NAMES = MlpNames()


@dataclass(frozen=True)
class MixtureNames:
    """An architecture's names of the parts of a mixture of experts, relative to the mixture's
    module; None for a part that it lacks.

    bias: of the router, used for selection but not as a weight; logit_bias: added to the router's
    logits. shared_gate: linear [1, H] whose sigmoid scales the shared expert's output. linears: of
    the routed experts, and of the shared one without shared_linears. gating: their activation;
    other_gating: of the shared one and of dense layers, where it is another. expert_bias: whether
    routed experts have biases.
    """

    router: str = "gate"
    bias: str | None = None
    logit_bias: str | None = None
    shared: str | None = None
    shared_gate: str | None = None
    linears: MlpNames = PROJ_NAMES
    gating: Gating = SILU
    expert_bias: bool = False
    shared_linears: MlpNames | None = None
    other_gating: Gating | None = None

    @property
    def of_shared(self) -> MlpNames:
        """Names of the shared expert's linears."""
        return self.shared_linears or self.linears

    @property
    def dense_gating(self) -> Gating:
        """Activation of the shared expert and of dense layers."""
        return self.other_gating or self.gating


DEFAULT_MIXTURE = MixtureNames()


def read_routing(
    config: dict[str, Any], count: Sequence[str], norm_topk_prob: bool, scoring_func: str
) -> Routing:
    """How experts are routed. count: keys of config.json for the number of experts; the first one
    present is used.

    Raises QuantkitError where a number is missing, or more experts are selected than exist.
    """
    key = next((key for key in count if key in config), count[0])
    experts = check_count(key, config.get(key), most=MOST_EXPERTS)
    chosen = check_count("num_experts_per_tok", config.get("num_experts_per_tok"))
    check_at_most("num_experts_per_tok", chosen, key, experts)
    return Routing(experts, chosen, norm_topk_prob, scoring_func)


def check_groups(routing: Routing) -> None:
    """Raise QuantkitError where the number of experts does not fit group-limited routing."""
    check_divides("n_group", "n_routed_experts", routing)
    check_at_most("topk_group", routing.topk_group, "n_group", routing.n_group)
    share = routing.n_routed_experts // routing.n_group
    if (
        routing.topk_group < routing.n_group and share < 2
    ):  # a group is scored by its two best experts
        raise refusal(
            "n_group",
            routing.n_group,
            f"groups of at least two of the {routing.n_routed_experts} experts",
        )
    check_at_most(
        "num_experts_per_tok",
        routing.num_experts_per_tok,
        "the experts of topk_group groups",
        routing.topk_group * share,
    )


def mlp_parameters(
    prefix: str,
    hidden: int,
    width: int,
    layer: int,
    *,
    block: Block = "mlp",
    expert: int | None = None,
    mtp: bool = False,
    bias: bool = False,
    names: MlpNames = PROJ_NAMES,
) -> list[Parameter]:
    """The three linears of one gated MLP, and their biases."""
    gate, up, down = names.modules(prefix)
    row = Parameter(
        f"{gate}.weight",
        (width, hidden),
        "linear",
        "column",
        layer,
        expert,
        f"{prefix}.gate_up_proj",
        mtp,
        block=block,
        projection="gate",
    )
    rows = [
        row,
        replace(row, name=f"{up}.weight", projection="up"),
        replace(
            row,
            name=f"{down}.weight",
            shape=(hidden, width),
            split="row",
            fused=None,
            projection="down",
        ),
    ]
    return rows + [bias_of(row) for row in rows] if bias else rows


def bias_of(linear: Parameter) -> Parameter:
    """The bias of a linear, split like its outputs; for a row-parallel linear only one rank adds
    it."""
    return replace(
        linear, name=linear.bias, shape=linear.shape[:1], role="bias", fused=None, projection=None
    )


def moe_parameters(
    prefix: str,
    hidden: int,
    width: int,
    layer: int,
    experts: int,
    *,
    shared_width: int = 0,
    mtp: bool = False,
    names: MixtureNames = DEFAULT_MIXTURE,
) -> list[Parameter]:
    """A mixture of experts: its router, the routed experts `prefix`.experts.0 .. {experts-1}, the
    shared one."""
    router = Parameter(
        f"{prefix}.{names.router}.weight",
        (experts, hidden),
        "router",
        layer=layer,
        mtp=mtp,
        block="router",
    )
    rows = [router]
    biases = filter(None, (names.bias, names.logit_bias))
    rows += [
        replace(router, name=f"{prefix}.{bias}", shape=(experts,), role="router_bias")
        for bias in biases
    ]
    for expert in range(experts):
        one = f"{prefix}.experts.{expert}"
        bias, linears = names.expert_bias, names.linears
        rows += mlp_parameters(
            one,
            hidden,
            width,
            layer,
            block="expert",
            expert=expert,
            mtp=mtp,
            bias=bias,
            names=linears,
        )
    if names.shared:
        shared = f"{prefix}.{names.shared}"
        rows += mlp_parameters(
            shared,
            hidden,
            shared_width,
            layer,
            block="shared_expert",
            mtp=mtp,
            names=names.of_shared,
        )
    if names.shared_gate:
        rows.append(replace(router, name=f"{prefix}.{names.shared_gate}.weight", shape=(1, hidden)))
    return rows


def mlp_scale_groups(
    prefix: str,
    norm: str,
    names: MlpNames = PROJ_NAMES,
    *,
    bias: bool = False,
    gating: Gating = SILU,
) -> list[ScaleGroup]:
    """norm to gate and up, up to down, for an MLP that is the only reader of `norm`. A bias of up
    would have to be scaled too, and an activation may not be linear in up: no up-down group
    then."""
    gate, up, _ = names.modules(prefix)
    groups = [ScaleGroup(f"{prefix}.gate_up", norm, True, (gate, up), gate)]
    return (
        groups
        if bias or not gating.is_linear_in_up
        else [*groups, up_down_group(prefix, names=names)]
    )


def moe_scale_groups(
    prefix: str, norm: str, experts: int, names: MixtureNames = DEFAULT_MIXTURE
) -> list[ScaleGroup]:
    """norm to the router and to gate and up of the shared and all routed experts; up to down in
    each expert whose activation is linear in up."""
    shared = f"{prefix}.{names.shared}" if names.shared else None
    own = names.of_shared.modules(shared)[:2] if shared else ()
    gates = (f"{prefix}.{names.shared_gate}",) if names.shared_gate else ()
    prefixes = [f"{prefix}.experts.{expert}" for expert in range(experts)]
    routed = [module for one in prefixes for module in names.linears.modules(one)[:2]]
    readers = (f"{prefix}.{names.router}", *gates, *own, *routed)
    groups = [
        ScaleGroup(
            f"{prefix}.gate_up",
            norm,
            True,
            readers,
            own[0] if own else readers[0],
            reaches_experts=True,
        )
    ]
    if shared and names.dense_gating.is_linear_in_up:
        groups.append(up_down_group(shared, names=names.of_shared))
    if names.gating.is_linear_in_up and not names.expert_bias:
        groups += [up_down_group(one, expert, names.linears) for expert, one in enumerate(prefixes)]
    return groups


def up_down_group(
    prefix: str, expert: int | None = None, names: MlpNames = PROJ_NAMES
) -> ScaleGroup:
    """up's rows to down's columns: SiLU(gate) * up is linear in up."""
    _, up, down = names.modules(prefix)
    return ScaleGroup(f"{prefix}.up_down", up, False, (down,), down, expert)


class Mlp:
    """down(SiLU(gate(x)) * up(x)), or with another activation; with biases if `bias`; what down
    reads rotated where the checkpoint says so."""

    def __init__(
        self,
        prefix: str,
        weights: Weights,
        names: MlpNames = PROJ_NAMES,
        *,
        bias: bool = False,
        gating: Gating = SILU,
    ) -> None:
        gate, up, down = names.modules(prefix)
        self.gating = gating
        self.gate_up = weights.fused_linear((gate, up))
        self.down, self.rotation = weights.linear(down), weights.input_rotation(down)
        self.gate_up_bias = (
            torch.cat([weights.tensor(f"{one}.bias") for one in (gate, up)]) if bias else None
        )
        self.down_bias = weights.tensor(f"{down}.bias") if bias else None

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, H] -> [T, H], partial over ranks."""
        both = biased(self.gate_up, x, self.gate_up_bias)
        if self.is_plain and (down := fusing(len(x), self.down)):
            out = down[0].fused(both)
        elif self.rotation:
            out = self.down(gate_and_rotate(both, self.gating, self.rotation))
        else:
            out = self.down(gate_and_mul(both, self.gating))
        return add_bias(out, self.down_bias)

    @property
    def is_plain(self) -> bool:
        """Whether what down reads is silu(gate) * up."""
        return self.gating == SILU and not self.rotation


def fusing(rows: int, *operators: LinearOp) -> list[Linear]:
    """The operators, where each of them computes so many rows with what is around it in one launch
    (`Linear.fused`); else none."""
    found = [one for one in operators if isinstance(one, Linear) and one.fuses(rows)]
    return found if len(found) == len(operators) else []


def biased(linear: LinearOp, x: Tensor, bias: Tensor | None) -> Tensor:
    """x [T, K] -> [T, N], in one launch where the linear adds a bias itself."""
    if bias is not None and isinstance(linear, Linear):
        return linear.biased(x, bias)
    return add_bias(linear(x), bias)


def add_bias(x: Tensor, bias: Tensor | None) -> Tensor:
    return x if bias is None else x + bias


class MoeMlp:
    """A mixture of experts at `prefix`: routed ones, and a shared one if `names` has it.

    Every token uses the shared expert, with the weight of its gate, 1 without; it is run as an
    additional routed expert where the weights support it, its gate as a row of the router.
    """

    def __init__(
        self, routing: Routing, prefix: str, weights: Weights, names: MixtureNames = DEFAULT_MIXTURE
    ) -> None:
        self.router = weights.tensor(f"{prefix}.{names.router}.weight").float()
        self.bias = weights.tensor(f"{prefix}.{names.bias}").float() if names.bias else None
        self.logit_bias = (
            weights.tensor(f"{prefix}.{names.logit_bias}").float() if names.logit_bias else None
        )
        self.shared_gate = (
            weights.tensor(f"{prefix}.{names.shared_gate}.weight").float()
            if names.shared_gate
            else None
        )
        routed = (f"{prefix}.experts", routing.n_routed_experts)
        shared = f"{prefix}.{names.shared}" if names.shared else None
        joined = (
            weights.experts_with_shared(*routed, shared)
            if shared and names.gating == SILU and self.logit_bias is None
            else None
        )
        self.routing = routing
        if joined is not None:
            gated = self.shared_gate is not None
            self.routing = replace(routing, num_joined_experts=1, joined_gate=gated)
            if self.shared_gate is not None:
                self.router = torch.cat((self.router, self.shared_gate))
        self.experts = weights.experts(*routed, names.gating) if joined is None else joined
        self.shared = (
            Mlp(shared, weights, names.of_shared, gating=names.dense_gating)
            if shared and joined is None
            else None
        )

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, H] -> [T, H], partial over ranks."""
        topk_ids, topk_weights = self.choose(x)
        routed = self.experts(x, topk_ids, topk_weights)
        return routed + self._shared_output(self.shared, x) if self.shared else routed

    def unsummed(self, x: Tensor) -> Tensor | UnsummedPairs:
        """As `__call__`, or each token's expert outputs unsummed, where the experts leave the sum
        to the next operator and nothing else is added."""
        unsummed = getattr(self.experts, "unsummed", None)
        if unsummed is None or self.shared is not None:
            return self(x)
        return unsummed(x, *self.choose(x))

    def choose(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Expert ids and weights of each token, [T, k] each, a joined shared expert last."""
        if self.logit_bias is not None:
            logits = float32_linear(x, self.router) + self.logit_bias
            return route(logits, self.bias, self.routing)
        return moe_gate(x, self.router, self.bias, self.routing)

    def _shared_output(self, shared: Mlp, x: Tensor) -> Tensor:
        out = shared(x)
        return (
            out
            if self.shared_gate is None
            else out * sigmoid(float32_linear(x, self.shared_gate)).to(x.dtype)
        )
