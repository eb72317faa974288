"""The feed-forward halves that the architectures share, a gated MLP and a mixture of them: table rows, scale groups, forward."""

from dataclasses import dataclass, replace

from quantkit_kernels import Routing, moe_gate, silu_and_mul
from torch import Tensor

from quantkit.models.table import Block, Parameter, ScaleGroup
from quantkit.models.weights import Weights


@dataclass(frozen=True)
class MlpNames:
    """What an architecture calls the three linears of a gated MLP."""

    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"

    def modules(self, prefix: str) -> tuple[str, str, str]:
        """gate, up and down of the MLP at `prefix`."""
        return f"{prefix}.{self.gate}", f"{prefix}.{self.up}", f"{prefix}.{self.down}"


PROJ_NAMES = MlpNames()


def mlp_parameters(
    prefix: str,
    hidden: int,
    width: int,
    layer: int,
    *,
    block: Block = "mlp",
    expert: int | None = None,
    mtp: bool = False,
    names: MlpNames = PROJ_NAMES,
) -> list[Parameter]:
    """The three linears of one gated MLP."""
    gate, up, down = names.modules(prefix)
    fused = f"{prefix}.gate_up_proj"
    inner = Parameter(f"{gate}.weight", (width, hidden), "linear", "column", layer, expert, fused, mtp, block=block, projection="gate")
    outer = Parameter(f"{down}.weight", (hidden, width), "linear", "row", layer, expert, None, mtp, block=block, projection="down")
    return [inner, replace(inner, name=f"{up}.weight", projection="up"), outer]


def expert_parameters(
    prefix: str, hidden: int, width: int, layer: int, experts: int, mtp: bool = False, names: MlpNames = PROJ_NAMES
) -> list[Parameter]:
    """The linears of the routed experts `prefix`.0 .. `prefix`.{experts-1}."""
    rows = []
    for expert in range(experts):
        rows += mlp_parameters(f"{prefix}.{expert}", hidden, width, layer, block="expert", expert=expert, mtp=mtp, names=names)
    return rows


def mlp_scale_groups(prefix: str, norm: str, names: MlpNames = PROJ_NAMES) -> list[ScaleGroup]:
    """norm to gate and up, up to down: of an MLP that alone reads `norm`."""
    gate, up, _ = names.modules(prefix)
    return [ScaleGroup(f"{prefix}.gate_up", norm, True, (gate, up), gate), up_down_group(prefix, names=names)]


def moe_scale_groups(
    prefix: str, norm: str, experts: int, *, shared: str | None = None, router: str = "gate", names: MlpNames = PROJ_NAMES
) -> list[ScaleGroup]:
    """norm to the router, the shared expert's and every routed expert's gate and up; up to down in each expert.

    prefix: of the mixture, whose experts are `prefix`.experts.N; shared: prefix of the shared expert, where there is one.
    """
    own = names.modules(shared)[:2] if shared else ()
    prefixes = [f"{prefix}.experts.{expert}" for expert in range(experts)]
    routed = [module for one in prefixes for module in names.modules(one)[:2]]
    readers = (f"{prefix}.{router}", *own, *routed)
    return [
        ScaleGroup(f"{prefix}.gate_up", norm, True, readers, own[0] if own else readers[0], reaches_experts=True),
        *([up_down_group(shared, names=names)] if shared else []),
        *(up_down_group(one, expert, names) for expert, one in enumerate(prefixes)),
    ]


def up_down_group(prefix: str, expert: int | None = None, names: MlpNames = PROJ_NAMES) -> ScaleGroup:
    """up's rows to down's columns: SiLU(gate) * up is linear in up."""
    _, up, down = names.modules(prefix)
    return ScaleGroup(f"{prefix}.up_down", up, False, (down,), down, expert)


class Mlp:
    """down(SiLU(gate(x)) * up(x))."""

    def __init__(self, prefix: str, weights: Weights, names: MlpNames = PROJ_NAMES) -> None:
        gate, up, down = names.modules(prefix)
        self.gate_up = weights.fused_linear((gate, up))
        self.down = weights.linear(down)

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, H] -> [T, H], partial over ranks."""
        return self.down(silu_and_mul(self.gate_up(x)))


class MoeMlp:
    """Routed experts, and a shared one where `shared_prefix` names it. `bias_name` is the router's selection bias, if the model has one.

    The shared expert is asked for by every token with weight 1. Where the weights allow it, it is run as the last of the routed ones.
    """

    def __init__(
        self,
        routing: Routing,
        prefix: str,
        weights: Weights,
        *,
        bias_name: str | None,
        shared_prefix: str | None,
        names: MlpNames = PROJ_NAMES,
    ) -> None:
        self.router = weights.tensor(f"{prefix}.gate.weight").float()
        self.bias = weights.tensor(bias_name).float() if bias_name else None
        routed = (f"{prefix}.experts", routing.n_routed_experts)
        joined = weights.experts_with_shared(*routed, shared_prefix) if shared_prefix else None
        self.routing = routing if joined is None else replace(routing, num_joined_experts=1)
        self.experts = weights.experts(*routed) if joined is None else joined
        self.shared = Mlp(shared_prefix, weights, names) if shared_prefix and joined is None else None

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, H] -> [T, H], partial over ranks."""
        topk_ids, topk_weights = self.choose(x)
        routed = self.experts(x, topk_ids, topk_weights)
        return routed + self.shared(x) if self.shared else routed

    def choose(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The experts of each token and what they weigh, [T, k] each, a joined shared expert last."""
        return moe_gate(x, self.router, self.bias, self.routing)
