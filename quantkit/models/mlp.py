"""The feed-forward halves that the architectures share, a gated MLP and a mixture of them: table rows, scale groups, forward."""

from dataclasses import dataclass

from quantkit_kernels import moe_gate, silu_and_mul
from torch import Tensor

from quantkit.models.table import Parameter, ScaleGroup
from quantkit.models.weights import Weights


def mlp_parameters(prefix: str, hidden: int, width: int, layer: int, expert: int | None = None, mtp: bool = False) -> list[Parameter]:
    """The three linears of one gated MLP, routed expert or shared."""
    fused = f"{prefix}.gate_up_proj"
    return [
        Parameter(f"{prefix}.gate_proj.weight", (width, hidden), "linear", "column", layer, expert, fused, mtp),
        Parameter(f"{prefix}.up_proj.weight", (width, hidden), "linear", "column", layer, expert, fused, mtp),
        Parameter(f"{prefix}.down_proj.weight", (hidden, width), "linear", "row", layer, expert, None, mtp),
    ]


def mlp_scale_groups(prefix: str, norm: str) -> list[ScaleGroup]:
    """norm to gate and up, up to down: of an MLP that alone reads `norm`."""
    readers = (f"{prefix}.gate_proj", f"{prefix}.up_proj")
    return [ScaleGroup(f"{prefix}.gate_up", norm, True, readers, readers[0]), up_down_group(prefix)]


def up_down_group(prefix: str, expert: int | None = None) -> ScaleGroup:
    """up_proj's rows to down_proj's columns: SiLU(gate) * up is linear in up."""
    return ScaleGroup(f"{prefix}.up_down", f"{prefix}.up_proj", False, (f"{prefix}.down_proj",), f"{prefix}.down_proj", expert)


class DenseMlp:
    """down(SiLU(gate(x)) * up(x))."""

    def __init__(self, prefix: str, weights: Weights) -> None:
        self.gate_up = weights.fused_linear((f"{prefix}.gate_proj", f"{prefix}.up_proj"))
        self.down = weights.linear(f"{prefix}.down_proj")

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, H] -> [T, H], partial over ranks."""
        return self.down(silu_and_mul(self.gate_up(x)))


@dataclass(frozen=True)
class Routing:
    """How experts are chosen; the names are DeepSeek's."""

    n_routed_experts: int
    num_experts_per_tok: int
    norm_topk_prob: bool
    scoring_func: str
    n_group: int = 1
    topk_group: int = 1
    routed_scaling_factor: float = 1.0


class MoeMlp:
    """Routed experts, and a shared one where `shared_prefix` names it. `bias_name` is the router's selection bias, if the model has one.

    The shared expert is asked for by every token with weight 1. Where the weights allow it, it is run as the last of the routed ones.
    """

    def __init__(self, routing: Routing, prefix: str, weights: Weights, *, bias_name: str | None, shared_prefix: str | None) -> None:
        self.routing = routing
        self.router = weights.tensor(f"{prefix}.gate.weight").float()
        self.bias = weights.tensor(bias_name).float() if bias_name else None
        names = (f"{prefix}.experts", routing.n_routed_experts)
        joined = weights.experts_with_shared(*names, shared_prefix) if shared_prefix else None
        self.num_joined = int(joined is not None)
        self.experts = weights.experts(*names) if joined is None else joined
        self.shared = DenseMlp(shared_prefix, weights) if shared_prefix and joined is None else None

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, H] -> [T, H], partial over ranks."""
        topk_ids, topk_weights = self.choose(x)
        routed = self.experts(x, topk_ids, topk_weights)
        return routed + self.shared(x) if self.shared else routed

    def choose(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The experts of each token and what they weigh, [T, k] each, a joined shared expert last."""
        r = self.routing
        return moe_gate(
            x,
            self.router,
            self.bias,
            top_k=r.num_experts_per_tok,
            n_group=r.n_group,
            topk_group=r.topk_group,
            scoring=r.scoring_func,
            norm_topk_prob=r.norm_topk_prob,
            routed_scaling_factor=r.routed_scaling_factor,
            num_shared=self.num_joined,
        )
